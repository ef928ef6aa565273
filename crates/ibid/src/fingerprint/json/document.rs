//! A JSON document after reading: where its members and elements are.
//!
//! Invariant: a [`Document`] exists only for a body that is strict RFC 8259
//! JSON in UTF-8, without duplicate members or lone surrogates, and of limited
//! depth. Its objects are sorted by canonical name. Any [`Span`] of text in it
//! is canonical text.
//!
//! The point of the design is to do nothing for what is canonical already. A
//! scalar is a span of the source. A whole array or object whose source is
//! canonical is a span of the source too, without nodes.
//!
//! Example: `{"b":[1,2],"a":0}` is an object of the two nodes `"a"` (text `0`)
//! and `"b"` (text `[1,2]`).

use super::pointer::{JsonPointer, PointerStep};

/// A range: of text, see [`Document::bytes`], or of [`Document::nodes`].
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonSpan {
    pub(super) start: u32,
    pub(super) end: u32,
}

/// What a [`Value`] is, and so what its span is a range of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonKind {
    /// Canonical text; of a scalar, or of anything that was canonical already.
    Text,
    /// The nodes of the members, sorted.
    Object,
    /// The nodes of the elements.
    Array,
    /// To be left out.
    Dropped,
}

/// A kind and a span in one word. Values are returned and stored all the time,
/// and a word stays in a register: passing them through memory in pieces made
/// reading slower by about a third.
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
    /// The first bytes of the name: enough to sort most members without a look
    /// at their text.
    pub(super) prefix: u64,
    /// The text of the name with its quotes.
    pub(super) name: JsonSpan,
    pub(super) value: JsonValue,
}

/// A document that was read.
#[derive(Debug)]
pub(super) struct JsonDocument<'a> {
    pub(super) source: &'a str,
    /// Strings whose spelling had to change. Spans count on from the end of the
    /// source into this.
    pub(super) rewritten: Vec<u8>,
    pub(super) nodes: Vec<JsonNode>,
    pub(super) root: JsonValue,
}

impl JsonDocument<'_> {
    /// The text of a span.
    pub(super) fn bytes(&self, span: JsonSpan) -> &[u8] {
        bytes(self.source.as_bytes(), &self.rewritten, span)
    }

    /// The text of a span, and whatever happens to follow it.
    #[inline]
    pub(super) fn bytes_from(&self, span: JsonSpan) -> &[u8] {
        match (span.start as usize).checked_sub(self.source.len()) {
            None => &self.source.as_bytes()[span.start as usize..],
            Some(start) => &self.rewritten[start..],
        }
    }

    /// The number of the node at a pointer, if there is something. For a
    /// document with every node only.
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

/// The text of a span, see [`Document::rewritten`].
pub(super) fn bytes<'t>(body: &'t [u8], rewritten: &'t [u8], span: JsonSpan) -> &'t [u8] {
    let (start, end) = (span.start as usize, span.end as usize);
    match start.checked_sub(body.len()) {
        None => &body[start..end],
        Some(start) => &rewritten[start..end - body.len()],
    }
}

/// A text without its quotes.
pub(super) fn strip_quotes(text: &[u8]) -> &[u8] {
    &text[1..text.len() - 1]
}
