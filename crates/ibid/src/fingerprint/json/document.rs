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

use super::pointer::{Pointer, Step};

/// A range: of text, see [`Document::bytes`], or of [`Document::nodes`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) start: u32,
    pub(super) end: u32,
}

/// What a [`Value`] is, and so what its span is a range of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
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
pub(super) struct Value(u64);

impl Value {
    pub(super) const DROPPED: Value = Value::new(Kind::Dropped, Span { start: 0, end: 0 });

    #[inline(always)]
    pub(super) const fn new(kind: Kind, span: Span) -> Self {
        Value((kind as u64) << 62 | (span.start as u64) << 31 | span.end as u64)
    }

    #[inline(always)]
    pub(super) fn kind(self) -> Kind {
        match self.0 >> 62 {
            0 => Kind::Text,
            1 => Kind::Object,
            2 => Kind::Array,
            _ => Kind::Dropped,
        }
    }

    #[inline(always)]
    pub(super) fn span(self) -> Span {
        const LOW: u64 = u64::MAX >> 33;
        Span { start: (self.0 >> 31 & LOW) as u32, end: (self.0 & LOW) as u32 }
    }
}

/// A member of an object, or an element of an array (which has no name).
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    /// The first bytes of the name: enough to sort most members without a look
    /// at their text.
    pub(super) prefix: u64,
    /// The text of the name with its quotes.
    pub(super) name: Span,
    pub(super) value: Value,
}

/// A document that was read.
#[derive(Debug)]
pub(super) struct Document<'a> {
    pub(super) source: &'a str,
    /// Strings whose spelling had to change. Spans count on from the end of the
    /// source into this.
    pub(super) rewritten: Vec<u8>,
    pub(super) nodes: Vec<Node>,
    pub(super) root: Value,
}

impl Document<'_> {
    /// The text of a span.
    pub(super) fn bytes(&self, span: Span) -> &[u8] {
        bytes(self.source.as_bytes(), &self.rewritten, span)
    }

    /// The text of a span, and whatever happens to follow it.
    #[inline]
    pub(super) fn bytes_from(&self, span: Span) -> &[u8] {
        match (span.start as usize).checked_sub(self.source.len()) {
            None => &self.source.as_bytes()[span.start as usize..],
            Some(start) => &self.rewritten[start..],
        }
    }

    /// The number of the node at a pointer, if there is something. For a
    /// document with every node only.
    pub(super) fn locate(&self, at: &Pointer) -> Option<usize> {
        let mut value = self.root;
        let mut found = None;
        for step in &at.steps {
            let node = self.step(value, step)?;
            value = self.nodes[node].value;
            found = Some(node);
        }
        found
    }

    fn step(&self, from: Value, step: &Step) -> Option<usize> {
        let span = from.span();
        match from.kind() {
            Kind::Object => {
                let members = &self.nodes[span.start as usize..span.end as usize];
                let wanted = inner(&step.name);
                let at = members.binary_search_by(|node| inner(self.bytes(node.name)).cmp(wanted));
                Some(span.start as usize + at.ok()?)
            }
            Kind::Array => {
                let at = span.start.checked_add(step.index?)?;
                (at < span.end).then_some(at as usize)
            }
            Kind::Text | Kind::Dropped => None,
        }
    }
}

/// The text of a span, see [`Document::rewritten`].
pub(super) fn bytes<'t>(body: &'t [u8], rewritten: &'t [u8], span: Span) -> &'t [u8] {
    let (start, end) = (span.start as usize, span.end as usize);
    match start.checked_sub(body.len()) {
        None => &body[start..end],
        Some(start) => &rewritten[start..end - body.len()],
    }
}

/// A text without its quotes.
pub(super) fn inner(text: &[u8]) -> &[u8] {
    &text[1..text.len() - 1]
}
