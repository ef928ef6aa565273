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
//! [`reader`] first reads the body in the hope that it is canonical; then it is hashed as it is. Otherwise it validates
//! the document, rewrites the innermost objects and records the positions of all other members, which this module then
//! writes in order. Objects with the names of an object before them take a shorter way ([`shape`]).

mod decimal;
mod document;
mod pointer;
mod reader;
mod scan;
mod shape;
mod sort;
mod splice;
mod text;

#[cfg(test)]
mod tests;

use std::borrow::Cow;

use document::{JsonBuffers, JsonDocument, JsonKind, JsonSpan, JsonValue};
pub use pointer::{JsonPointer, JsonPointerError};
use scan::BlockSink;
#[cfg(test)]
use scan::NoBlocks;
pub(crate) use splice::splice_member;

use super::stream::HashStream;

/// Which names of one object are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameEquality {
    /// Names that are written alike.
    Exact,
    /// Names that differ only in case, too: some servers (Go, .NET) treat them as equal and use the last. An object
    /// with such names has no canonical form, unless its members are already sorted.
    IgnoreCase,
}

/// Which numbers are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonNumbers {
    /// Numbers that are written alike: `1` and `1.0` differ.
    AsWritten,
    /// Numbers of the same value. They are compared exactly, however many digits they have.
    Decimal,
}

/// Hashes the canonical form of `body` without the values that `ignore` points at. Returns `false` and hashes nothing if
/// the raw bytes must be compared. The stream must be empty.
///
/// An ignored member counts as absent, and an ignored array element is removed; several pointers into one array count
/// positions in the array as sent. An ignored member still counts as a duplicate of another with its name.
///
/// If the last body of this thread was canonical, the body is hashed while it is read, in the hope that it is too: the
/// processor does some of both at once. If it turns out not to be, the hash starts again.
pub(crate) fn hash_canonical(
    body: &[u8], ignore: &[JsonPointer], names: NameEquality, numbers: JsonNumbers, stream: &mut HashStream,
) -> bool {
    debug_assert_eq!(stream.len(), 0);
    JsonBuffers::with(|buffers| {
        let needs_nodes = !ignore.is_empty() || numbers == JsonNumbers::Decimal;
        if !needs_nodes && buffers.expects_canonical {
            if reader::is_canonical(body, buffers, stream) {
                stream.bytes(&body[stream.len() as usize..]);
                return true;
            }
            *stream = HashStream::new();
        }
        let Some(document) = read_without(body, ignore, names, needs_nodes, buffers) else { return false };
        CanonicalWriter { document: &document, numbers, sink: stream }.value(document.root);
        document.buffers.expects_canonical = document.is_canonical();
        true
    })
}

/// The canonical form as text; see [`hash_canonical`].
#[cfg(test)]
fn canonical<'a>(body: &'a [u8], ignore: &[JsonPointer], names: NameEquality) -> Option<Cow<'a, [u8]>> {
    JsonBuffers::with(|buffers| {
        if ignore.is_empty() && reader::is_canonical(body, buffers, &mut NoBlocks) {
            return Some(Cow::Borrowed(body));
        }
        let document = read_without(body, ignore, names, !ignore.is_empty(), buffers)?;
        let mut out = Vec::new();
        let numbers = JsonNumbers::AsWritten;
        CanonicalWriter { document: &document, numbers, sink: &mut out }.value(document.root);
        Some(Cow::Owned(out))
    })
}

/// Hashes the canonical forms of the values at these pointers, and of nothing else. A zero byte ends each of them, also
/// one that is absent or ignored. Returns `false` and hashes nothing if the raw bytes must be compared.
pub(crate) fn hash_values(
    body: &[u8], ignore: &[JsonPointer], at: &[JsonPointer], names: NameEquality, numbers: JsonNumbers,
    stream: &mut HashStream,
) -> bool {
    JsonBuffers::with(|buffers| {
        let Some(mut document) = JsonDocument::read(body, true, names, buffers) else { return false };
        drop_values(&mut document, ignore);
        for pointer in at {
            if let Some(node) = document.find_node(pointer) {
                let value = document.buffers.closed[node].value;
                CanonicalWriter { document: &document, numbers, sink: &mut *stream }.value(value);
            }
            stream.byte(0);
        }
        true
    })
}

/// Hashes the canonical forms of the values at these pointers, each ended by a zero byte. Numbers of the same value are
/// equal. Returns `false` if one is absent or null, or the body has no canonical form; the hash is then useless.
pub(crate) fn hash_present_values(body: &[u8], at: &[JsonPointer], stream: &mut HashStream) -> bool {
    JsonBuffers::with(|buffers| {
        let Some(document) = JsonDocument::read(body, true, NameEquality::Exact, buffers) else { return false };
        at.iter().all(|pointer| {
            let Some(node) = document.find_node(pointer) else { return false };
            let value = document.buffers.closed[node].value;
            CanonicalWriter { document: &document, numbers: JsonNumbers::Decimal, sink: &mut *stream }.value(value);
            stream.byte(0);
            value.kind() != JsonKind::Text || document.bytes(value.span()) != b"null"
        })
    })
}

/// The canonical form of the value at a pointer. Returns `None` if there is none, or the body has no canonical form.
pub(crate) fn canonical_text(body: &[u8], at: &JsonPointer) -> Option<String> {
    JsonBuffers::with(|buffers| {
        let document = JsonDocument::read(body, true, NameEquality::Exact, buffers)?;
        let value = document.buffers.closed[document.find_node(at)?].value;
        let mut out = Vec::new();
        CanonicalWriter { document: &document, numbers: JsonNumbers::AsWritten, sink: &mut out }.value(value);
        String::from_utf8(out).ok()
    })
}

fn read_without<'d>(
    body: &'d [u8], ignore: &[JsonPointer], names: NameEquality, every_node: bool, buffers: &'d mut JsonBuffers,
) -> Option<JsonDocument<'d>> {
    let mut document = JsonDocument::read(body, every_node, names, buffers)?;
    drop_values(&mut document, ignore);
    Some(document)
}

/// Drops the values at these pointers. Only for a document with every node.
fn drop_values(document: &mut JsonDocument<'_>, ignore: &[JsonPointer]) {
    for pointer in ignore {
        if let Some(at) = document.find_node(pointer) {
            document.buffers.closed[at].value = JsonValue::DROPPED;
        }
    }
}

/// The result of [`find`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JsonLookup<'a> {
    /// A string with its escapes resolved.
    String(Cow<'a, str>),
    /// A number as written.
    Number(&'a str),
    /// The literal `true`.
    True,
    /// No value exists there.
    Absent,
    /// A value of any other type, or `false`.
    OtherType,
}

/// Looks up the string or number at a pointer. Returns `None` if the body has no canonical form, so that a key is never
/// read from an ambiguous document.
pub(crate) fn find<'a>(body: &'a [u8], at: &JsonPointer) -> Option<JsonLookup<'a>> {
    find_all(body, std::array::from_ref(at), NameEquality::Exact).map(|[found]| found)
}

/// Like [`find`], for several pointers.
pub(crate) fn find_all<'a, const N: usize>(
    body: &'a [u8], at: &[JsonPointer; N], names: NameEquality,
) -> Option<[JsonLookup<'a>; N]> {
    JsonBuffers::with(|buffers| {
        let document = JsonDocument::read(body, true, names, buffers)?;
        let mut found = [const { JsonLookup::Absent }; N];
        for (found, at) in found.iter_mut().zip(at) {
            *found = lookup(&document, body, at)?;
        }
        Some(found)
    })
}

fn lookup<'a>(document: &JsonDocument<'_>, body: &'a [u8], at: &JsonPointer) -> Option<JsonLookup<'a>> {
    let Some(node) = document.find_node(at) else {
        return Some(JsonLookup::Absent);
    };
    let value = document.buffers.closed[node].value;
    if value.kind() != JsonKind::Text {
        return Some(JsonLookup::OtherType);
    }
    let span = value.span();
    let borrowed = body.get(span.start as usize..span.end as usize).and_then(|text| str::from_utf8(text).ok());
    Some(match (document.bytes(span), borrowed) {
        ([b'"', inner @ .., b'"'], Some(text)) if !inner.contains(&b'\\') => {
            JsonLookup::String(Cow::Borrowed(&text[1..text.len() - 1]))
        }
        ([b'"', inner @ .., b'"'], _) => JsonLookup::String(Cow::Owned(text::unescape(inner)?)),
        ([b'-' | b'0'..=b'9', ..], Some(text)) => JsonLookup::Number(text),
        (b"true", _) => JsonLookup::True,
        _ => JsonLookup::OtherType,
    })
}

/// Receives the text of a canonical form in pieces.
trait TextSink {
    fn byte(&mut self, byte: u8);
    /// Appends the first `size` bytes of `from`.
    fn text(&mut self, from: &[u8], size: usize);
}

impl TextSink for HashStream {
    #[inline]
    fn byte(&mut self, byte: u8) {
        self.byte(byte);
    }

    #[inline]
    fn text(&mut self, from: &[u8], size: usize) {
        self.text(from, size);
    }
}

impl TextSink for Vec<u8> {
    fn byte(&mut self, byte: u8) {
        self.push(byte);
    }

    fn text(&mut self, from: &[u8], size: usize) {
        self.extend_from_slice(&from[..size]);
    }
}

impl BlockSink for HashStream {
    fn block(&mut self, block: &[u8; 64]) {
        self.block(block);
    }
}

struct CanonicalWriter<'d, 'a, S> {
    document: &'d JsonDocument<'a>,
    /// [`JsonNumbers::Decimal`] only for a document with every node.
    numbers: JsonNumbers,
    sink: &'d mut S,
}

impl<S: TextSink> CanonicalWriter<'_, '_, S> {
    fn value(&mut self, value: JsonValue) {
        match value.kind() {
            JsonKind::Text => self.scalar(value.span()),
            JsonKind::Object => self.members(value.span()),
            JsonKind::Array => self.items(value.span()),
            JsonKind::Dropped => {}
        }
    }

    fn members(&mut self, members: JsonSpan) {
        let mut before = b'{';
        for node in self.document.nodes(members) {
            let name = node.name;
            let JsonSpan { start, end } = node.value.span();
            match node.value.kind() {
                JsonKind::Dropped => continue,
                // The source already contains `"name":text`: one copy.
                JsonKind::Text if start == name.end + 1 && self.numbers == JsonNumbers::AsWritten => {
                    self.sink.byte(before);
                    self.write_span(JsonSpan { start: name.start, end });
                }
                _ => {
                    self.sink.byte(before);
                    self.write_span(name);
                    self.sink.byte(b':');
                    self.value(node.value);
                }
            }
            before = b',';
        }
        if before == b'{' {
            self.sink.byte(b'{');
        }
        self.sink.byte(b'}');
    }

    fn items(&mut self, items: JsonSpan) {
        let mut before = b'[';
        for node in self.document.nodes(items) {
            if node.value.kind() != JsonKind::Dropped {
                self.sink.byte(before);
                self.value(node.value);
                before = b',';
            }
        }
        if before == b'[' {
            self.sink.byte(b'[');
        }
        self.sink.byte(b']');
    }

    /// Writes a scalar, or any text that was already canonical.
    #[inline]
    fn scalar(&mut self, span: JsonSpan) {
        if self.numbers == JsonNumbers::Decimal
            && let text @ [b'-' | b'0'..=b'9', ..] = self.document.bytes(span)
            && let Some(number) = str::from_utf8(text).ok().and_then(decimal::normalize)
        {
            return self.sink.text(number.as_bytes(), number.len());
        }
        self.write_span(span);
    }

    #[inline]
    fn write_span(&mut self, span: JsonSpan) {
        self.sink.text(self.document.bytes_from(span), (span.end - span.start) as usize);
    }
}
