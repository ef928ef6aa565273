//! A parsed JSON document: the positions of its members and elements.
//!
//! Invariant: a [`JsonDocument`] exists only for a body that is strict RFC 8259 JSON in UTF-8, without duplicate
//! members or lone surrogates, and of limited depth. Its objects are sorted by canonical name. Any [`JsonSpan`] of text
//! in it is canonical text.
//!
//! The design avoids work for text that is already canonical. A scalar is a span of the source. A whole array or object
//! whose source is canonical is a span of the source too, without nodes.
//!
//! Example: `{"b":[1,2],"a":0}` is an object with two nodes, `"a"` (text `0`) and `"b"` (text `[1,2]`).

use super::pointer::{JsonPointer, PointerStep};

/// A range of text, see [`JsonDocument::bytes`], or of [`JsonDocument::nodes`].
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonSpan {
    pub(super) start: u32,
    pub(super) end: u32,
}

/// The kind of a [`JsonValue`], which determines what its span refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonKind {
    /// Canonical text of a scalar, or of any value that was already canonical.
    Text,
    /// The nodes of the members, sorted.
    Object,
    /// The nodes of the elements.
    Array,
    /// An ignored value, which is omitted.
    Dropped,
}

/// A kind and a span in one word, which stays in a register. Passing them through memory separately made reading slower
/// by about a third.
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonValue(u64);

impl JsonValue {
    pub(super) const DROPPED: JsonValue = JsonValue::new(JsonKind::Dropped, JsonSpan { start: 0, end: 0 });

    #[inline(always)]
    pub(super) const fn new(kind: JsonKind, span: JsonSpan) -> Self {
        JsonValue((kind as u64) << 62 | (span.start as u64) << 31 | span.end as u64)
    }

    #[inline(always)]
    pub(super) fn kind(self) -> JsonKind {
        match self.0 >> 62 {
            0 => JsonKind::Text,
            1 => JsonKind::Object,
            2 => JsonKind::Array,
            _ => JsonKind::Dropped,
        }
    }

    #[inline(always)]
    pub(super) fn span(self) -> JsonSpan {
        const LOW: u64 = u64::MAX >> 33;
        JsonSpan { start: (self.0 >> 31 & LOW) as u32, end: (self.0 & LOW) as u32 }
    }
}

/// A member of an object, or an element of an array (which has no name).
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonNode {
    /// The first bytes of the name, which suffice to sort most members.
    pub(super) prefix: u64,
    /// The text of the name with its quotes.
    pub(super) name: JsonSpan,
    pub(super) value: JsonValue,
}

#[derive(Debug)]
pub(super) struct JsonDocument<'a> {
    pub(super) source: &'a str,
    /// Strings whose spelling was changed. Span offsets beyond the end of the source refer to this.
    pub(super) rewritten: Vec<u8>,
    pub(super) nodes: Vec<JsonNode>,
    pub(super) root: JsonValue,
}

impl JsonDocument<'_> {
    /// The text of a span.
    pub(super) fn bytes(&self, span: JsonSpan) -> &[u8] {
        bytes(self.source.as_bytes(), &self.rewritten, span)
    }

    /// The text of a span, and everything after it.
    #[inline]
    pub(super) fn bytes_from(&self, span: JsonSpan) -> &[u8] {
        match (span.start as usize).checked_sub(self.source.len()) {
            None => &self.source.as_bytes()[span.start as usize..],
            Some(start) => &self.rewritten[start..],
        }
    }

    /// The index of the node at a pointer. Only for a document with every node.
    pub(super) fn find_node(&self, at: &JsonPointer) -> Option<usize> {
        let mut value = self.root;
        let mut found = None;
        for step in &at.steps {
            let node = self.find_child(value, step)?;
            value = self.nodes[node].value;
            found = Some(node);
        }
        found
    }

    fn find_child(&self, from: JsonValue, step: &PointerStep) -> Option<usize> {
        let span = from.span();
        match from.kind() {
            JsonKind::Object => {
                let members = &self.nodes[span.start as usize..span.end as usize];
                let wanted = strip_quotes(&step.name);
                let at = members.binary_search_by(|node| strip_quotes(self.bytes(node.name)).cmp(wanted));
                Some(span.start as usize + at.ok()?)
            }
            JsonKind::Array => {
                let at = span.start.checked_add(step.index?)?;
                (at < span.end).then_some(at as usize)
            }
            JsonKind::Text | JsonKind::Dropped => None,
        }
    }
}

/// The text of a span, see [`JsonDocument::rewritten`].
pub(super) fn bytes<'t>(body: &'t [u8], rewritten: &'t [u8], span: JsonSpan) -> &'t [u8] {
    let (start, end) = (span.start as usize, span.end as usize);
    match start.checked_sub(body.len()) {
        None => &body[start..end],
        Some(start) => &rewritten[start..end - body.len()],
    }
}

pub(super) fn strip_quotes(text: &[u8]) -> &[u8] {
    &text[1..text.len() - 1]
}
