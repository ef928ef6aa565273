//! Finds values in text that is valid JSON, see [`super::reader`].

use std::ops::Range;

use super::{
    decimal,
    pointer::{JsonPointer, PointerStep},
    text,
    token::{after_space, peek},
};

/// A value in a text.
#[derive(Clone, Debug)]
pub(super) struct FoundValue {
    pub(super) value: Range<usize>,
    /// The start of the member or element: of its name, or of the value.
    pub(super) start: usize,
}

/// Finds the value at a pointer.
pub(super) fn find(text: &[u8], at: &JsonPointer) -> Option<FoundValue> {
    let mut pos = after_space(text, 0);
    let (last, steps) = at.steps.split_last()?;
    for step in steps {
        pos = find_child(text, pos, step)?.value.start;
    }
    find_child(text, pos, last)
}

fn find_child(text: &[u8], parent: usize, step: &PointerStep) -> Option<FoundValue> {
    let mut children = JsonChildren::of(text, parent)?;
    match text[parent] {
        b'{' => children.find(|child| is_name(&text[child.start..], &step.name)),
        _ => children.nth(step.index? as usize),
    }
}

/// Whether the string at the start of a text has this canonical spelling.
pub(super) fn is_name(text: &[u8], name: &[u8]) -> bool {
    let string = &text[..after_string(text, 0)];
    if !string.contains(&b'\\') {
        return string == name;
    }
    let mut canonical = Vec::with_capacity(string.len());
    text::rewrite(string, &mut canonical).is_some() && canonical == name
}

/// The members or elements of an object or array.
pub(super) struct JsonChildren<'t> {
    text: &'t [u8],
    /// After the last child, or the opening bracket.
    pub(super) pos: usize,
    is_object: bool,
}

impl<'t> JsonChildren<'t> {
    /// Returns `None` if the value at a position is a scalar.
    pub(super) fn of(text: &'t [u8], pos: usize) -> Option<Self> {
        let is_object = peek(text, pos) == Some(b'{');
        (is_object || peek(text, pos) == Some(b'[')).then_some(Self { text, pos: pos + 1, is_object })
    }
}

impl Iterator for JsonChildren<'_> {
    type Item = FoundValue;

    fn next(&mut self) -> Option<FoundValue> {
        let text = self.text;
        let mut start = after_space(text, self.pos);
        if text[start] == b',' {
            start = after_space(text, start + 1);
        }
        if let b'}' | b']' = text[start] {
            return None;
        }
        let mut value = start;
        if self.is_object {
            let colon = after_space(text, after_string(text, start));
            value = after_space(text, colon + 1);
        }
        self.pos = after_value(text, value);
        Some(FoundValue { value: value..self.pos, start })
    }
}

/// The end of the value at a position.
fn after_value(text: &[u8], mut pos: usize) -> usize {
    let mut depth = 0;
    loop {
        match text[pos] {
            b'"' => pos = after_string(text, pos),
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
            _ => return pos + text[pos..].iter().take_while(|byte| !b",}] \n\r\t".contains(byte)).count(),
        }
        if depth == 0 {
            return pos;
        }
    }
}

fn after_string(text: &[u8], mut pos: usize) -> usize {
    pos += 1;
    loop {
        pos += text[pos..].iter().take_while(|byte| !matches!(byte, b'"' | b'\\')).count();
        if text[pos] == b'"' {
            return pos + 1;
        }
        pos += 2;
    }
}

/// Removes the values at these pointers from a canonical text, of which `of` is a value.
pub(super) fn without(text: &[u8], of: Range<usize>, ignore: &[JsonPointer]) -> Vec<u8> {
    let mut ignored: Vec<_> = ignore.iter().filter_map(|pointer| find(text, pointer)).collect();
    ignored.sort_unstable_by_key(|found| found.start);
    let (mut out, mut pos) = (Vec::with_capacity(of.len()), of.start);
    for FoundValue { value, start } in ignored {
        if value.start <= of.start && of.end <= value.end {
            return Vec::new();
        }
        if start < pos || value.end > of.end {
            continue;
        }
        out.extend_from_slice(&text[pos..start]);
        pos = value.end;
        if text[pos] == b',' {
            pos += 1;
        } else if out.last() == Some(&b',') {
            out.pop();
        }
    }
    out.extend_from_slice(&text[pos..of.end]);
    out
}

/// Gives all numbers of the same value in a canonical text one spelling.
pub(super) fn normalize_numbers(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut pos = 0;
    while let Some(byte) = peek(text, pos) {
        let end = match byte {
            b'"' => after_string(text, pos),
            b'-' | b'0'..=b'9' => after_value(text, pos),
            _ => pos + 1,
        };
        let token = &text[pos..end];
        match byte {
            b'-' | b'0'..=b'9' => match str::from_utf8(token).ok().and_then(decimal::normalize) {
                Some(number) => out.extend_from_slice(number.as_bytes()),
                None => out.extend_from_slice(token),
            },
            _ => out.extend_from_slice(token),
        }
        pos = end;
    }
    out
}
