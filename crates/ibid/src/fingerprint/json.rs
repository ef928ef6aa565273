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
//! [`reader`] validates the body and makes its canonical text, which it leaves in the body where it already is canonical.
//! Everything else works on text that is known to be valid: [`walk`] finds values in it.

mod decimal;
mod output;
mod pointer;
mod reader;
mod shape;
mod sort;
mod splice;
mod text;
mod token;
mod walk;

#[cfg(test)]
mod tests;

use std::{borrow::Cow, cell::RefCell, ops::Range};

use output::CanonicalText;
pub use pointer::{JsonPointer, JsonPointerError};
use reader::ReaderBuffers;
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
    if !ignore.is_empty() || numbers == JsonNumbers::Decimal {
        return with_text(body, names, |text| stream.bytes(&value_text(text, 0..text.len(), ignore, numbers)))
            .is_some();
    }
    JsonBuffers::with(|JsonBuffers { reader, expects_canonical }| {
        let blocks = expects_canonical.then_some(&mut *stream);
        let canonical = reader::read(body, names, reader, blocks);
        let source = canonical.as_ref().and_then(CanonicalText::as_source);
        *expects_canonical = source.is_some();
        if let Some(source) = source {
            stream.bytes(&source[stream.len() as usize..]);
            return true;
        }
        if stream.len() > 0 {
            *stream = HashStream::new();
        }
        canonical.is_some_and(|text| {
            text.write(stream);
            true
        })
    })
}

/// Calls `use_text` with the canonical text of a body. Returns `None` if it has none.
fn with_text<R>(body: &[u8], names: NameEquality, use_text: impl FnOnce(&[u8]) -> R) -> Option<R> {
    JsonBuffers::with(|buffers| {
        let canonical = reader::read(body, names, &mut buffers.reader, None)?;
        Some(match canonical.as_one() {
            Some(text) => use_text(text),
            None => {
                let mut text = Vec::with_capacity(body.len());
                canonical.write(&mut text);
                use_text(&text)
            }
        })
    })
}

/// Whether a body has a canonical form.
fn is_json(body: &[u8], names: NameEquality) -> bool {
    JsonBuffers::with(|buffers| reader::read(body, names, &mut buffers.reader, None).is_some())
}

/// The canonical form of a value in a canonical text.
fn value_text<'t>(text: &'t [u8], value: Range<usize>, ignore: &[JsonPointer], numbers: JsonNumbers) -> Cow<'t, [u8]> {
    let text = match ignore {
        [] => Cow::Borrowed(&text[value]),
        _ => Cow::Owned(walk::without(text, value, ignore)),
    };
    match numbers {
        JsonNumbers::AsWritten => text,
        JsonNumbers::Decimal => Cow::Owned(walk::normalize_numbers(&text)),
    }
}

/// The canonical form as text; see [`hash_canonical`].
#[cfg(test)]
fn canonical<'a>(body: &'a [u8], ignore: &[JsonPointer], names: NameEquality) -> Option<Cow<'a, [u8]>> {
    let canonical = with_text(body, names, |text| {
        let is_source = ignore.is_empty() && text.as_ptr() == body.as_ptr() && text.len() == body.len();
        (!is_source).then(|| value_text(text, 0..text.len(), ignore, JsonNumbers::AsWritten).into_owned())
    })?;
    Some(canonical.map_or(Cow::Borrowed(body), Cow::Owned))
}

/// Hashes the canonical forms of the values at these pointers, and of nothing else. A zero byte ends each of them, also
/// one that is absent or ignored. Returns `false` and hashes nothing if the raw bytes must be compared.
pub(crate) fn hash_values(
    body: &[u8], ignore: &[JsonPointer], at: &[JsonPointer], names: NameEquality, numbers: JsonNumbers,
    stream: &mut HashStream,
) -> bool {
    let hash = |text: &[u8]| {
        for pointer in at {
            if let Some(found) = walk::find(text, pointer) {
                stream.bytes(&value_text(text, found.value, ignore, numbers));
            }
            stream.byte(0);
        }
    };
    with_text(body, names, hash).is_some()
}

/// Hashes the canonical forms of the values at these pointers, each ended by a zero byte. Numbers of the same value are
/// equal. Returns `false` if one is absent or null, or the body has no canonical form; the hash is then useless.
pub(crate) fn hash_present_values(body: &[u8], at: &[JsonPointer], stream: &mut HashStream) -> bool {
    let hash = |text: &[u8]| {
        at.iter().all(|pointer| {
            let Some(found) = walk::find(text, pointer) else { return false };
            let value = value_text(text, found.value, &[], JsonNumbers::Decimal);
            stream.bytes(&value);
            stream.byte(0);
            *value != *b"null"
        })
    };
    with_text(body, NameEquality::Exact, hash) == Some(true)
}

/// The canonical form of the value at a pointer. Returns `None` if there is none, or the body has no canonical form.
pub(crate) fn canonical_text(body: &[u8], at: &JsonPointer) -> Option<String> {
    with_text(body, NameEquality::Exact, |text| {
        let found = walk::find(text, at)?;
        String::from_utf8(text[found.value].to_vec()).ok()
    })?
}

/// The memory of this thread, which is used again for the next document.
struct JsonBuffers {
    reader: ReaderBuffers,
    /// Whether the last document was canonical. The requests of one client mostly are alike.
    expects_canonical: bool,
}

impl JsonBuffers {
    fn with<R>(use_buffers: impl FnOnce(&mut Self) -> R) -> R {
        /// Larger buffers are given back. Those of a body of the usual maximum length are not, because clearing new memory
        /// takes as long as hashing it.
        const MAX_KEPT_BYTES: usize = 3 << 20;
        thread_local! {
            static BUFFERS: RefCell<JsonBuffers> =
                const { RefCell::new(JsonBuffers { reader: ReaderBuffers::new(), expects_canonical: true }) };
        }
        BUFFERS.with_borrow_mut(|buffers| {
            let result = use_buffers(buffers);
            if buffers.reader.bytes() > MAX_KEPT_BYTES {
                buffers.reader = ReaderBuffers::new();
            }
            result
        })
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
    if !is_json(body, names) {
        return None;
    }
    let mut found = [const { JsonLookup::Absent }; N];
    for (found, at) in found.iter_mut().zip(at) {
        *found = lookup(body, at)?;
    }
    Some(found)
}

/// Looks up a value in a valid body.
fn lookup<'a>(body: &'a [u8], at: &JsonPointer) -> Option<JsonLookup<'a>> {
    let Some(found) = walk::find(body, at) else {
        return Some(JsonLookup::Absent);
    };
    let text = str::from_utf8(&body[found.value]).ok()?;
    Some(match text.as_bytes() {
        [b'"', inner @ .., b'"'] if !inner.contains(&b'\\') => {
            JsonLookup::String(Cow::Borrowed(&text[1..text.len() - 1]))
        }
        [b'"', inner @ .., b'"'] => JsonLookup::String(Cow::Owned(text::unescape(inner)?)),
        [b'-' | b'0'..=b'9', ..] => JsonLookup::Number(text),
        b"true" => JsonLookup::True,
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
