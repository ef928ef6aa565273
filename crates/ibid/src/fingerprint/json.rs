//! Canonical JSON: one spelling for every document that means the same.
//!
//! A client that retries may serialise its request afresh: members in another
//! order, other spacing, `\u0041` for `A`. Such a retry is the same request and
//! must get the same fingerprint, while anything a server could tell apart must
//! not.
//!
//! Invariant: two bodies have equal canonical forms exactly when they are the
//! same JSON document, where objects are unordered, strings are equal by code
//! points and **numbers are equal only when written alike** (`1` is not `1.0`:
//! deciding otherwise would need a number type, and every number type loses
//! something). A body which servers may read in different ways (duplicate
//! members, lone surrogates, not JSON at all) has no canonical form; its caller
//! compares the raw bytes.
//!
//! ```text
//! { "b": 1.0, "\u0061": [true, "\/"] }   =>   {"a":[true,"/"],"b":1.0}
//! ```
//!
//! The work is split in two: [`reader`] checks the document and notes where its
//! members are, without copying; this module then writes them in order. A body
//! that is canonical already is handed back as it is.

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

/// Which names of one object are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameEquality {
    /// Those that are written alike.
    Exact,
    /// Those that differ in case only are the same to some servers (Go, .NET), for which then the last one counts. An
    /// object with such names has no canonical form, unless its members are sorted already.
    IgnoreCase,
}

/// The canonical form of `body` without what `ignore` points at, or `None` when
/// the body has to be compared byte by byte.
///
/// A member that is ignored is as good as absent, and an ignored array element
/// is dropped; several pointers into one array all count positions in the array
/// as it was sent. An ignored member still counts as a duplicate of its twin.
pub(crate) fn canonical<'a>(body: &'a [u8], ignore: &[JsonPointer], names: NameEquality) -> Option<Cow<'a, [u8]>> {
    let mut document = JsonDocument::read_for(body, !ignore.is_empty(), names)?;
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

/// What [`find`] saw at the place it was told to look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JsonLookup<'a> {
    /// A string, with its escapes resolved.
    String(Cow<'a, str>),
    /// A number, as it was written.
    Number(&'a str),
    /// Nothing is there.
    Absent,
    /// Something is there, but neither a string nor a number.
    OtherType,
}

/// Looks up the string or number at a pointer; `None` when the body has no
/// canonical form (so that a key is never read out of a document that two
/// parsers could read in two ways).
pub(crate) fn find<'a>(body: &'a [u8], at: &JsonPointer) -> Option<JsonLookup<'a>> {
    let document = JsonDocument::read_every_node(body)?;
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

/// The same object with its top-level member `name` set to the JSON `value`.
///
/// An existing member keeps its place and only its value is replaced; a new one
/// goes right after the last member. No other byte changes. `None` when the
/// body is not a JSON object with a canonical form, or `value` is not JSON.
pub(crate) fn splice_member(body: &[u8], name: &str, value: &[u8]) -> Option<Vec<u8>> {
    JsonDocument::read(value)?;
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

/// Writes the canonical form of a document that was read.
struct CanonicalWriter<'d, 'a> {
    document: &'d JsonDocument<'a>,
    /// Allocated for the whole output and a little more; see [`Writer::put`].
    out: Vec<u8>,
    len: usize,
}

/// How much [`Writer::put`] copies at once; most members are shorter.
const COPY_BLOCK_BYTES: usize = 32;

impl<'d, 'a> CanonicalWriter<'d, 'a> {
    fn write(document: &'d JsonDocument<'a>) -> Vec<u8> {
        // No canonical spelling is longer than what it stands for, so that the
        // length of the body is always enough.
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
                // `"name":text` stands in the source like that: one copy.
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
    /// Short texts are copied as one block of fixed size, which is a few
    /// instructions where a copy of any size is a call. What is copied too much
    /// is overwritten by the next text or cut off at the end.
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
