//! Sets a member of a JSON object without changing any other byte.

use std::ops::Range;

use super::{
    NameEquality,
    document::{JsonBuffers, JsonDocument},
    text,
};

/// Sets the top-level member `name` of an object to the JSON `value`.
///
/// An existing member keeps its position; a new one is added after the last member. No other byte changes. Returns
/// `None` if the body is not a JSON object with a canonical form, or `value` is not JSON.
pub(crate) fn splice_member(body: &[u8], name: &str, value: &[u8]) -> Option<Vec<u8>> {
    JsonBuffers::with(|buffers| {
        JsonDocument::read(value, false, NameEquality::Exact, buffers)?;
        JsonDocument::read(body, false, NameEquality::Exact, buffers).map(drop)
    })?;
    let place = find_member(body, &text::quoted(name))?;
    let mut out = Vec::with_capacity(body.len() + name.len() + value.len() + 8);
    match place {
        MemberPosition::Present(span) => {
            out.extend_from_slice(&body[..span.start]);
            out.extend_from_slice(value);
            out.extend_from_slice(&body[span.end..]);
        }
        MemberPosition::Absent { at, first } => {
            out.extend_from_slice(&body[..at]);
            if !first {
                out.push(b',');
            }
            out.extend_from_slice(&text::quoted(name));
            out.push(b':');
            out.extend_from_slice(value);
            out.extend_from_slice(&body[at..]);
        }
    }
    Some(out)
}

/// The position of a member of the top-level object.
enum MemberPosition {
    /// The range of the member's value.
    Present(Range<usize>),
    /// The member does not exist; a new one can be inserted here. `first` if the object is empty.
    Absent { at: usize, first: bool },
}

/// Finds a member of a valid document by the canonical text of its name. Returns `None` if the document is no object.
fn find_member(body: &[u8], name: &[u8]) -> Option<MemberPosition> {
    let mut pos = after_space(body, 0);
    if body[pos] != b'{' {
        return None;
    }
    pos += 1;
    let mut place = MemberPosition::Absent { at: pos, first: true };
    pos = after_space(body, pos);
    while body[pos] != b'}' {
        let mut found = Vec::new();
        pos += text::rewrite(&body[pos..], &mut found)?;
        // The colon.
        pos = after_space(body, after_space(body, pos) + 1);
        let end = after_value(body, pos)?;
        if found == name {
            return Some(MemberPosition::Present(pos..end));
        }
        place = MemberPosition::Absent { at: end, first: false };
        pos = after_space(body, end);
        if body[pos] == b',' {
            pos = after_space(body, pos + 1);
        }
    }
    Some(place)
}

/// The end of the value at a position.
fn after_value(body: &[u8], mut pos: usize) -> Option<usize> {
    let mut depth = 0;
    loop {
        match body[pos] {
            b'"' => pos += text::rewrite(&body[pos..], &mut Vec::new())?,
            b'{' | b'[' => {
                depth += 1;
                pos += 1;
            }
            b'}' | b']' => {
                depth -= 1;
                pos += 1;
            }
            _ if depth > 0 => {
                pos += 1;
                continue;
            }
            _ => return Some(pos + body[pos..].iter().take_while(|byte| !b",}] \n\r\t".contains(byte)).count()),
        }
        if depth == 0 {
            return Some(pos);
        }
    }
}

fn after_space(body: &[u8], pos: usize) -> usize {
    pos + body[pos..].iter().take_while(|byte| b" \n\r\t".contains(byte)).count()
}
