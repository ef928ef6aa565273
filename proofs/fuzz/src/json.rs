//! Canonical JSON, through the fingerprint of a request: a body that has a canonical form is JSON, and keeps its
//! fingerprint when it is spaced otherwise; one that has none is compared byte by byte.

use http::{HeaderMap, HeaderValue, Method, Uri, header};
use ibid::{Policy, store::Fingerprint};
use serde::{Deserialize, de::IgnoredAny};

const SPACES: [&[u8]; 5] = [b"", b" ", b"\n", b"\t\r", b"  \n "];

/// See the module.
pub fn check(body: &[u8]) {
    let print = fingerprint(body);
    assert_eq!(print, fingerprint(body));
    // Spacing behind it does not count for JSON, and does for anything else.
    let is_canonical = fingerprint(&[body, b" "].concat()) == print;
    let mut reader = serde_json::Deserializer::from_slice(body);
    reader.disable_recursion_limit();
    // What nests deeper is refused, or this would run out of stack.
    let deep = body.iter().filter(|byte| matches!(byte, b'[' | b'{')).count() > 2000;
    if !deep {
        let is_json = IgnoredAny::deserialize(&mut reader).is_ok() && reader.end().is_ok();
        assert!(!is_canonical || is_json, "it has a canonical form, and is no JSON");
    }
    for seed in 0..3 {
        let respaced = respaced(body, seed);
        assert!(!is_canonical || fingerprint(&respaced) == print, "{:?}", String::from_utf8_lossy(&respaced));
    }
    if is_canonical && !deep {
        let document = Node::parse(body).expect("what has a canonical form is JSON");
        let mut reordered = Vec::new();
        document.write(&mut reordered, &mut None);
        assert_eq!(fingerprint(&reordered), print, "reordered: {:?}", String::from_utf8_lossy(&reordered));
        let (mut changed, mut addition) = (Vec::new(), Some(b'x'));
        document.write(&mut changed, &mut addition);
        assert!(addition.is_some() || fingerprint(&changed) != print, "{:?}", String::from_utf8_lossy(&changed));
    }
}

/// A document, read as slowly and simply as possible. Numbers, strings and names are kept as written.
enum Node<'a> {
    Scalar(&'a [u8]),
    Array(Vec<Node<'a>>),
    Object(Vec<(&'a [u8], Node<'a>)>),
}

impl<'a> Node<'a> {
    fn parse(body: &'a [u8]) -> Option<Self> {
        Self::read(&mut skip_space(body))
    }

    /// Removes a value and the space behind it from the start of `rest`.
    fn read(rest: &mut &'a [u8]) -> Option<Self> {
        let node = match rest.first()? {
            b'[' => {
                let mut items = Vec::new();
                *rest = skip_space(&rest[1..]);
                while *rest.first()? != b']' {
                    items.push(Self::read(rest)?);
                    skip_comma(rest);
                }
                *rest = &rest[1..];
                Node::Array(items)
            }
            b'{' => {
                let mut members = Vec::new();
                *rest = skip_space(&rest[1..]);
                while *rest.first()? != b'}' {
                    let name = take_string(rest)?;
                    *rest = skip_space(skip_space(rest).strip_prefix(b":")?);
                    members.push((name, Self::read(rest)?));
                    skip_comma(rest);
                }
                *rest = &rest[1..];
                Node::Object(members)
            }
            b'"' => Node::Scalar(take_string(rest)?),
            _ => {
                let end = rest.iter().position(|byte| b",]} \t\r\n".contains(byte)).unwrap_or(rest.len());
                let (text, left) = rest.split_at(end);
                *rest = left;
                Node::Scalar(text)
            }
        };
        *rest = skip_space(rest);
        Some(node)
    }

    /// Writes the document with the members of every object in reverse, unless two of their names differ only in case: the
    /// order of those counts. The first string that is no name takes the addition.
    fn write(&self, out: &mut Vec<u8>, addition: &mut Option<u8>) {
        match self {
            Node::Scalar(text) => match text.strip_suffix(b"\"").filter(|_| addition.is_some()) {
                Some(open) => {
                    out.extend_from_slice(open);
                    out.extend(addition.take());
                    out.push(b'"');
                }
                None => out.extend_from_slice(text),
            },
            Node::Array(items) => {
                out.push(b'[');
                for (nth, item) in items.iter().enumerate() {
                    out.extend((nth > 0).then_some(b','));
                    item.write(out, addition);
                }
                out.push(b']');
            }
            Node::Object(members) => {
                out.push(b'{');
                let mut members: Vec<_> = members.iter().collect();
                if !differ_only_in_case(&members) {
                    members.reverse();
                }
                for (nth, (name, value)) in members.into_iter().enumerate() {
                    out.extend((nth > 0).then_some(b','));
                    out.extend_from_slice(name);
                    out.push(b':');
                    value.write(out, addition);
                }
                out.push(b'}');
            }
        }
    }
}

/// Whether two names of an object are the same without regard to case.
fn differ_only_in_case(members: &[&(&[u8], Node<'_>)]) -> bool {
    let fold = |name: &[u8]| match serde_json::from_slice::<String>(name) {
        Ok(name) => name.to_uppercase().to_lowercase(),
        // Half of a surrogate pair, which has no case.
        Err(_) => String::from_utf8_lossy(name).to_lowercase(),
    };
    let mut names: Vec<_> = members.iter().map(|(name, _)| fold(name)).collect();
    names.sort_unstable();
    names.windows(2).any(|two| two[0] == two[1])
}

fn skip_space(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t' | b'\r' | b'\n', rest @ ..] = text {
        text = rest;
    }
    text
}

fn skip_comma(rest: &mut &[u8]) {
    *rest = skip_space(rest.strip_prefix(b",").unwrap_or(rest));
}

fn take_string<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let mut at = 1;
    while *rest.get(at)? != b'"' {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    let (string, left) = rest.split_at(at + 1);
    *rest = left;
    Some(string)
}

fn fingerprint(body: &[u8]) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Fingerprint::of(&Policy::ietf(), &Method::POST, &Uri::from_static("/p"), &headers, body)
}

/// The same tokens with other white space between them.
fn respaced(body: &[u8], seed: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() * 2);
    let (mut quoted, mut escaped, mut turn) = (false, false, seed);
    for byte in body {
        if quoted {
            out.push(*byte);
            (escaped, quoted) = (*byte == b'\\' && !escaped, *byte != b'"' || escaped);
        } else if !b" \t\r\n".contains(byte) {
            let structural = b"{}[]:,".contains(byte);
            let space = if structural { SPACES[turn % SPACES.len()] } else { b"" };
            turn = turn.wrapping_mul(31).wrapping_add(usize::from(*byte) + 7);
            out.extend_from_slice(space);
            out.push(*byte);
            if structural {
                out.extend_from_slice(SPACES[turn % SPACES.len()]);
            }
            quoted = *byte == b'"';
        }
    }
    out
}
