//! Canonical form of `multipart/form-data` bodies.
//!
//! Most clients choose a random boundary for each request, so the raw bytes of a retry always differ. Only the parts
//! count.
//!
//! Invariant: two bodies have equal canonical forms exactly when they have the same parts in the same order: name, file
//! name, content type, other headers and bytes. Each piece is preceded by its length, and absent differs from empty. A
//! body that servers could split differently has no canonical form; [`strict`] rejects more of those.
//!
//! ```text
//! --XyZ                                              name  "a"
//! Content-Disposition: form-data; name="a"     =>    file  none, type none
//!                                                    bytes "1"
//! 1
//! --XyZ--
//! ```

pub(super) use self::strict::parse_strict;
use super::{frame, put_length};

mod strict;

/// The maximum number of parts of a body with a canonical form.
const MAX_PARTS: usize = 1024;

/// Appends the canonical form of a body to `out`. Returns `false` and appends nothing if the raw bytes must be
/// compared.
pub(crate) fn canonical(content_type: &str, body: &[u8], out: &mut Vec<u8>) -> bool {
    let before = out.len();
    let written = boundary(content_type).and_then(|boundary| write_parts(&boundary, body, out));
    if written.is_none() {
        out.truncate(before);
    }
    written.is_some()
}

/// The boundary in a content type of `multipart/form-data`.
fn boundary(content_type: &str) -> Option<Vec<u8>> {
    let mut found = None;
    for (name, value) in parameters(content_type.as_bytes(), b"multipart/form-data")? {
        if name.eq_ignore_ascii_case(b"boundary") && found.replace(value).is_some() {
            return None;
        }
    }
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(byte);
    found.filter(|b| (1..=70).contains(&b.len()) && b.iter().all(allowed) && !b.ends_with(b" "))
}

fn write_parts(boundary: &[u8], body: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let delimiter = [b"\r\n--", boundary].concat();
    // The line end before a boundary belongs to it, except for a boundary at the start of the body.
    let mut rest = match body.strip_prefix(&delimiter[2..]) {
        Some(rest) => rest,
        None => split_at_delimiter(body, &delimiter)?.1,
    };
    for _ in 0..=MAX_PARTS {
        if let Some(epilogue) = rest.strip_prefix(b"--") {
            let epilogue = trim_start(epilogue);
            return (epilogue.is_empty() || epilogue.starts_with(b"\r\n")).then_some(());
        }
        // Some parsers read other text after the boundary as a longer boundary, and some ignore it.
        let content = trim_start(rest).strip_prefix(b"\r\n")?;
        let (part, after) = split_at_delimiter(content, &delimiter)?;
        write_part(part, out)?;
        rest = after;
    }
    None
}

/// Splits at the first delimiter.
///
/// Linear: a carriage return can only be the first byte of the delimiter, so no byte is compared for more than one
/// candidate.
fn split_at_delimiter<'a>(bytes: &'a [u8], delimiter: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = find_sequence(bytes, delimiter)?;
    Some((&bytes[..at], &bytes[at + delimiter.len()..]))
}

fn find_sequence(bytes: &[u8], sequence: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + find(&bytes[from..], sequence[0])?;
        if bytes[at..].starts_with(sequence) {
            return Some(at);
        }
        from = at + 1;
    }
}

/// The position of the first such byte.
fn find(bytes: &[u8], wanted: u8) -> Option<usize> {
    // Files are long and contain few of them: check blocks first, where one test covers many bytes.
    let (blocks, _) = bytes.as_chunks::<32>();
    let free = |block: &&[u8; 32]| block.iter().fold(true, |free, &byte| free & (byte != wanted));
    let skip = 32 * blocks.iter().take_while(free).count();
    Some(skip + bytes[skip..].iter().position(|&byte| byte == wanted)?)
}

fn write_part(part: &[u8], out: &mut Vec<u8>) -> Option<()> {
    // A part without headers starts with the empty line, and has no name.
    let end = part.windows(4).position(|four| four == b"\r\n\r\n")?;
    let (headers, content) = (&part[..end], &part[end + 4..]);
    let mut disposition = None;
    let mut content_type = None;
    let mut others = Vec::new();
    for line in split_lines(headers)? {
        let colon = line.iter().position(|&byte| byte == b':')?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.is_empty() || !name.iter().all(is_token) {
            return None;
        }
        let twice = if name.eq_ignore_ascii_case(b"content-disposition") {
            disposition.replace(value).is_some()
        } else if name.eq_ignore_ascii_case(b"content-type") {
            content_type.replace(value).is_some()
        } else {
            others.push((name.to_ascii_lowercase(), value));
            false
        };
        if twice {
            return None;
        }
    }
    let (name, file_name) = disposition_names(disposition?)?;
    frame(&name, out);
    frame_option(file_name.as_deref(), out);
    frame_option(content_type, out);
    // Rare, but they may change the meaning of the bytes (an encoding, say).
    put_length(others.len(), |byte| out.push(byte));
    for (name, value) in others {
        frame(&name, out);
        frame(value, out);
    }
    frame(content, out);
    Some(())
}

/// Splits a header block into lines. Returns `None` if a line is folded or contains a stray `\r` or `\n`, where parsers
/// disagree.
fn split_lines(headers: &[u8]) -> Option<Vec<&[u8]>> {
    let mut lines = Vec::new();
    let mut rest = headers;
    loop {
        let end = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')).unwrap_or(rest.len());
        let (line, after) = rest.split_at(end);
        if line.starts_with(b" ") || line.starts_with(b"\t") {
            return None;
        }
        lines.push(line);
        if after.is_empty() {
            return Some(lines);
        }
        rest = after.strip_prefix(b"\r\n")?;
    }
}

/// The name and the file name in a content disposition.
fn disposition_names(disposition: &[u8]) -> Option<(Vec<u8>, Option<Vec<u8>>)> {
    let (mut name, mut file_name) = (None, None);
    for (parameter, value) in parameters(disposition, b"form-data")? {
        // Other parameters, such as `filename*`, would change what only some servers see.
        let slot = match parameter {
            p if p.eq_ignore_ascii_case(b"name") => &mut name,
            p if p.eq_ignore_ascii_case(b"filename") => &mut file_name,
            _ => return None,
        };
        if slot.replace(value).is_some() {
            return None;
        }
    }
    Some((name?, file_name))
}

type HeaderParameters<'a> = Vec<(&'a [u8], Vec<u8>)>;

/// The parameters of a header such as `form-data; name="a"`, if its main value is the expected one.
fn parameters<'a>(header: &'a [u8], expected: &[u8]) -> Option<HeaderParameters<'a>> {
    let end = header.iter().position(|&byte| byte == b';').unwrap_or(header.len());
    let (main, mut rest) = header.split_at(end);
    if !main.trim_ascii().eq_ignore_ascii_case(expected) {
        return None;
    }
    let mut parameters = Vec::new();
    while let Some(parameter) = rest.strip_prefix(b";") {
        let parameter = trim_start(parameter);
        if parameter.is_empty() {
            // A trailing semicolon is common and harmless.
            return Some(parameters);
        }
        let equals = parameter.iter().position(|&byte| byte == b'=')?;
        let (name, value) = (&parameter[..equals], &parameter[equals + 1..]);
        if name.is_empty() || !name.iter().all(is_token) {
            return None;
        }
        let (value, after) = match value.strip_prefix(b"\"") {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = value.iter().position(|&byte| byte == b';').unwrap_or(value.len());
                let bare = value[..end].trim_ascii();
                if bare.is_empty() || bare.iter().any(|byte| b"\" \t".contains(byte)) {
                    return None;
                }
                (bare.to_vec(), &value[end..])
            }
        };
        parameters.push((name, value));
        rest = trim_start(after);
    }
    rest.is_empty().then_some(parameters)
}

/// Reads a quoted string after its opening quote; also returns the rest.
///
/// Only `\"` and `\\` are escapes. Browsers write a backslash in a file name as it is, so `a\b` must differ from `ab`.
fn unquote(quoted: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut plain = Vec::new();
    let mut at = 0;
    loop {
        match (*quoted.get(at)?, quoted.get(at + 1)) {
            (b'"', _) => return Some((plain, &quoted[at + 1..])),
            (b'\\', Some(&escaped @ (b'"' | b'\\'))) => {
                plain.push(escaped);
                at += 2;
            }
            (byte, _) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
}

fn trim_start(mut bytes: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = bytes {
        bytes = rest;
    }
    bytes
}

fn is_token(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte)
}

fn frame_option(bytes: Option<&[u8]>, out: &mut Vec<u8>) {
    out.push(u8::from(bytes.is_some()));
    if let Some(bytes) = bytes {
        frame(bytes, out);
    }
}

#[cfg(test)]
mod tests;
