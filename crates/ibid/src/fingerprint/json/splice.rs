//! Sets a member of a JSON object without changing any other byte.

use super::{
    NameEquality, is_json, text,
    token::after_space,
    walk::{JsonChildren, is_name},
};

/// Sets the top-level member `name` of an object to the JSON `value`.
///
/// An existing member keeps its position; a new one is added after the last member. No other byte changes. Returns
/// `None` if the body is not a JSON object with a canonical form, or `value` is not JSON.
pub(crate) fn splice_member(body: &[u8], name: &str, value: &[u8]) -> Option<Vec<u8>> {
    if !is_json(value, NameEquality::Exact) || !is_json(body, NameEquality::Exact) {
        return None;
    }
    let object = after_space(body, 0);
    let mut members = JsonChildren::of(body, object).filter(|_| body[object] == b'{')?;
    let name = text::quoted(name);
    let found = members.find(|member| is_name(&body[member.start..], &name));
    let mut out = Vec::with_capacity(body.len() + name.len() + value.len() + 8);
    let end = match found {
        Some(member) => {
            out.extend_from_slice(&body[..member.value.start]);
            member.value.end
        }
        None => {
            out.extend_from_slice(&body[..members.pos]);
            if members.pos > object + 1 {
                out.push(b',');
            }
            out.extend_from_slice(&name);
            out.push(b':');
            members.pos
        }
    };
    out.extend_from_slice(value);
    out.extend_from_slice(&body[end..]);
    Some(out)
}
