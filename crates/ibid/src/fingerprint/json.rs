//! Canonical JSON: one spelling for all documents with the same meaning.
//!
//! A retry may serialize its request again: members in another order, other spacing, `\u0041` for `A`. Such a retry is
//! the same request and must get the same fingerprint. Documents that a server could tell apart must not.
//!
//! Invariant: two bodies have equal canonical forms exactly when they are the same JSON document, where objects are
//! unordered, strings are equal by code points and **numbers are equal only when written alike** (`1` is not `1.0`:
//! deciding otherwise would need a number type, and every number type loses something). A body that servers may read in
//! different ways (duplicate members, lone surrogates, invalid JSON) has no canonical form; its raw bytes are compared.
//!
//! ```text
//! { "b": 1.0, "\u0061": [true, "\/"] }   =>   {"a":[true,"/"],"b":1.0}
//! ```
//!
//! [`reader`] validates the document and records the positions of its members, without copying; this module then writes
//! them in order. A body that is already canonical is returned as it is.

mod document;
mod pointer;
mod reader;
mod sort;
mod text;

#[cfg(test)]
mod tests;

use std::borrow::Cow;

use document::{JsonDocument, JsonKind, JsonSpan, JsonValue};
pub use pointer::{JsonPointer, JsonPointerError};

/// Which names of one object are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameEquality {
    /// Names that are written alike.
    Exact,
    /// Names that differ only in case, too: some servers (Go, .NET) treat them as equal and use the last. An object
    /// with such names has no canonical form, unless its members are already sorted.
    IgnoreCase,
}

/// Returns the canonical form of `body` without the values that `ignore` points at, or `None` if the raw bytes must be
/// compared.
///
/// An ignored member counts as absent, and an ignored array element is removed; several pointers into one array count
/// positions in the array as sent. An ignored member still counts as a duplicate of another with its name.
pub(crate) fn canonical<'a>(body: &'a [u8], ignore: &[JsonPointer], names: NameEquality) -> Option<Cow<'a, [u8]>> {
    let mut document = JsonDocument::read(body, !ignore.is_empty(), names)?;
    for pointer in ignore {
        if let Some(at) = document.find_node(pointer) {
            document.nodes[at].value = JsonValue::DROPPED;
        }
    }
    let span = document.root.span();
    let end = span.end as usize;
    if document.root.kind() == JsonKind::Text && end <= body.len() {
        return Some(Cow::Borrowed(&body[span.start as usize..end]));
    }
    Some(Cow::Owned(CanonicalWriter::write(&document)))
}

/// The result of [`find`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JsonLookup<'a> {
    /// A string with its escapes resolved.
    String(Cow<'a, str>),
    /// A number as written.
    Number(&'a str),
    /// No value exists there.
    Absent,
    /// A value that is neither a string nor a number.
    OtherType,
}

/// Looks up the string or number at a pointer. Returns `None` if the body has no canonical form, so that a key is never
/// read from an ambiguous document.
pub(crate) fn find<'a>(body: &'a [u8], at: &JsonPointer) -> Option<JsonLookup<'a>> {
    let document = JsonDocument::read(body, true, NameEquality::Exact)?;
    let Some(node) = document.find_node(at) else {
        return Some(JsonLookup::Absent);
    };
    let value = document.nodes[node].value;
    if value.kind() != JsonKind::Text {
        return Some(JsonLookup::OtherType);
    }
    let span = value.span();
    let borrowed = document.source.get(span.start as usize..span.end as usize);
    Some(match (document.bytes(span), borrowed) {
        ([b'"', inner @ .., b'"'], Some(text)) if !inner.contains(&b'\\') => {
            JsonLookup::String(Cow::Borrowed(&text[1..text.len() - 1]))
        }
        ([b'"', inner @ .., b'"'], _) => JsonLookup::String(Cow::Owned(text::unescape(inner)?)),
        ([b'-' | b'0'..=b'9', ..], Some(text)) => JsonLookup::Number(text),
        _ => JsonLookup::OtherType,
    })
}

/// Sets the top-level member `name` of an object to the JSON `value`.
///
/// An existing member keeps its position; a new one is added after the last member. No other byte changes. Returns
/// `None` if the body is not a JSON object with a canonical form, or `value` is not JSON.
pub(crate) fn splice_member(body: &[u8], name: &str, value: &[u8]) -> Option<Vec<u8>> {
    JsonDocument::read(value, false, NameEquality::Exact)?;
    let place = reader::find_member(body, &text::quoted(name))?;
    let mut out = Vec::with_capacity(body.len() + name.len() + value.len() + 8);
    match place {
        reader::MemberPosition::Present(span) => {
            out.extend_from_slice(&body[..span.start as usize]);
            out.extend_from_slice(value);
            out.extend_from_slice(&body[span.end as usize..]);
        }
        reader::MemberPosition::Absent { at, first } => {
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

struct CanonicalWriter<'d, 'a> {
    document: &'d JsonDocument<'a>,
    /// Allocated for the whole output and one block more; see [`write_span`](Self::write_span).
    out: Vec<u8>,
    len: usize,
}

/// How many bytes [`write_span`](CanonicalWriter::write_span) copies at once; most members are shorter.
const COPY_BLOCK_BYTES: usize = 32;

impl<'d, 'a> CanonicalWriter<'d, 'a> {
    fn write(document: &'d JsonDocument<'a>) -> Vec<u8> {
        // No canonical spelling is longer than its source, so the length of the body always suffices.
        let out = vec![0; document.source.len() + COPY_BLOCK_BYTES];
        let mut writer = CanonicalWriter { document, out, len: 0 };
        writer.value(document.root);
        writer.out.truncate(writer.len);
        writer.out
    }

    fn value(&mut self, value: JsonValue) {
        match value.kind() {
            JsonKind::Text => self.write_span(value.span()),
            JsonKind::Object => self.members(value.span()),
            JsonKind::Array => self.items(value.span()),
            JsonKind::Dropped => {}
        }
    }

    fn members(&mut self, members: JsonSpan) {
        let mut before = b'{';
        for node in &self.document.nodes[members.start as usize..members.end as usize] {
            let name = node.name;
            let JsonSpan { start, end } = node.value.span();
            match node.value.kind() {
                JsonKind::Dropped => continue,
                // The source already contains `"name":text`: one copy.
                JsonKind::Text if start == name.end + 1 => {
                    self.byte(before);
                    self.write_span(JsonSpan { start: name.start, end });
                }
                _ => {
                    self.byte(before);
                    self.write_span(name);
                    self.byte(b':');
                    self.value(node.value);
                }
            }
            before = b',';
        }
        if before == b'{' {
            self.byte(b'{');
        }
        self.byte(b'}');
    }

    fn items(&mut self, items: JsonSpan) {
        let mut before = b'[';
        for node in &self.document.nodes[items.start as usize..items.end as usize] {
            if node.value.kind() != JsonKind::Dropped {
                self.byte(before);
                self.value(node.value);
                before = b',';
            }
        }
        if before == b'[' {
            self.byte(b'[');
        }
        self.byte(b']');
    }

    #[inline]
    fn byte(&mut self, byte: u8) {
        self.out[self.len] = byte;
        self.len += 1;
    }

    /// Appends the text of a span.
    ///
    /// Short texts are copied as one block of fixed size, which takes a few instructions instead of a call. The next
    /// text overwrites the surplus, or it is cut off at the end.
    #[inline]
    fn write_span(&mut self, span: JsonSpan) {
        let from = self.document.bytes_from(span);
        let size = (span.end - span.start) as usize;
        let to = &mut self.out[self.len..];
        match (from.first_chunk::<COPY_BLOCK_BYTES>(), to.first_chunk_mut::<COPY_BLOCK_BYTES>()) {
            (Some(from), Some(to)) if size <= COPY_BLOCK_BYTES => *to = *from,
            _ => to[..size].copy_from_slice(&from[..size]),
        }
        self.len += size;
    }
}
