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

use std::{cell::RefCell, ops::Range};

use super::{
    NameEquality,
    pointer::{JsonPointer, PointerStep},
    shape::ObjectShapes,
    sort::{self, MemberOrders},
};

/// A range of text, see [`JsonDocument::bytes`], or of nodes, see [`JsonDocument::nodes`].
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

    /// The span of a text.
    #[inline(always)]
    pub(super) fn text_span(self) -> JsonSpan {
        debug_assert_eq!(self.kind(), JsonKind::Text);
        JsonSpan { start: (self.0 >> 31) as u32, end: self.0 as u32 & u32::MAX >> 1 }
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

/// The memory of a document, which is used again for the next one.
pub(super) struct JsonBuffers {
    /// Span offsets beyond the end of the source refer to this.
    pub(super) rewritten: RewrittenTexts,
    /// The nodes of closed arrays and objects, grouped.
    pub(super) closed: Vec<JsonNode>,
    /// The nodes of arrays and objects that are not closed yet. Its length is that of the memory, not of what is used.
    pub(super) open: Vec<JsonNode>,
    orders: MemberOrders,
    pub(super) shapes: ObjectShapes,
    /// Whether the last document was canonical. The requests of one client mostly are alike.
    pub(super) expects_canonical: bool,
    /// For one string.
    pub(super) string: Vec<u8>,
}

impl JsonBuffers {
    /// Calls `use_buffers` with buffers that were used before on this thread.
    pub(super) fn with<R>(use_buffers: impl FnOnce(&mut Self) -> R) -> R {
        /// Larger buffers are given back.
        const MAX_KEPT_BYTES: usize = 128 << 10;
        thread_local! {
            static BUFFERS: RefCell<JsonBuffers> = const { RefCell::new(JsonBuffers::new()) };
        }
        BUFFERS.with_borrow_mut(|buffers| {
            let result = use_buffers(buffers);
            let nodes = buffers.closed.capacity() + buffers.open.capacity();
            let bytes = buffers.rewritten.bytes.len() + buffers.string.capacity();
            if nodes * size_of::<JsonNode>() + bytes > MAX_KEPT_BYTES {
                *buffers = JsonBuffers::new();
            }
            result
        })
    }

    const fn new() -> Self {
        let rewritten = RewrittenTexts { bytes: Vec::new(), len: 0, has_strings: false };
        Self {
            rewritten,
            closed: Vec::new(),
            open: Vec::new(),
            orders: MemberOrders::new(),
            shapes: ObjectShapes::new(),
            expects_canonical: true,
            string: Vec::new(),
        }
    }

    pub(super) fn clear(&mut self) {
        (self.rewritten.len, self.rewritten.has_strings) = (0, false);
        self.closed.clear();
        self.shapes.start_document();
    }

    /// Makes room for more open nodes.
    #[cold]
    #[inline(never)]
    pub(super) fn grow(&mut self) {
        let empty = JsonNode { prefix: 0, name: JsonSpan { start: 0, end: 0 }, value: JsonValue::DROPPED };
        self.open.resize(2 * self.open.len() + 32, empty);
    }

    /// Closes an array or object with these open nodes.
    pub(super) fn close(&mut self, kind: JsonKind, nodes: Range<usize>) -> JsonValue {
        let start = self.closed.len() as u32;
        self.closed.extend_from_slice(&self.open[nodes]);
        JsonValue::new(kind, JsonSpan { start, end: self.closed.len() as u32 })
    }

    /// Closes an object with these open nodes. `is_plain` if all names are ASCII of the source. Returns `None` if two
    /// names are equal.
    pub(super) fn close_unsorted(
        &mut self, body: &[u8], nodes: Range<usize>, flat_size: Option<usize>, names: NameEquality, is_plain: bool,
    ) -> Option<JsonValue> {
        let members = &mut self.open[nodes.clone()];
        if is_plain && let Some(sorted) = self.orders.of(members) {
            if let Some(size) = flat_size {
                let members = sorted.iter().filter_map(|i| members.get(*i as usize));
                return Some(self.rewritten.add_object(body, members, size));
            }
            let start = self.closed.len() as u32;
            self.closed.extend(sorted.iter().map(|i| members[*i as usize]));
            return Some(JsonValue::new(JsonKind::Object, JsonSpan { start, end: self.closed.len() as u32 }));
        }
        sort::sort(body, self.rewritten.text(), members, names)?;
        Some(self.close_sorted(body, nodes, flat_size))
    }

    /// Closes an object with these open nodes, which are sorted.
    pub(super) fn close_sorted(&mut self, body: &[u8], nodes: Range<usize>, flat_size: Option<usize>) -> JsonValue {
        match flat_size {
            Some(size) => self.rewritten.add_object(body, self.open[nodes].iter(), size),
            None => self.close(JsonKind::Object, nodes),
        }
    }
}

/// Texts that were changed, with a comma after each: objects next to each other in an array are then one text.
pub(super) struct RewrittenTexts {
    /// Longer than what is used.
    bytes: Vec<u8>,
    len: usize,
    /// Whether there are strings among them, apart from those in objects.
    pub(super) has_strings: bool,
}

/// How many bytes are copied at once; most members are shorter.
const COPY_BYTES: usize = 32;

/// Copies the text of a span, and returns its length. A copy of fixed size is faster than one of the right size; what is
/// written next overwrites the surplus.
#[inline(always)]
fn copy(body: &[u8], rewritten: &[u8], span: JsonSpan, to: &mut [u8]) -> usize {
    let size = (span.end - span.start) as usize;
    let from = body.get(span.start as usize..).and_then(|from| from.first_chunk::<COPY_BYTES>());
    match (from, to.first_chunk_mut::<COPY_BYTES>()) {
        (Some(from), Some(to)) if size <= COPY_BYTES => *to = *from,
        _ => to[..size].copy_from_slice(bytes(body, rewritten, span)),
    }
    size
}

impl RewrittenTexts {
    pub(super) fn text(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Makes room for a text, two bytes after it and the surplus of a copy.
    #[inline]
    fn reserve(&mut self, size: usize) {
        let needed = self.len + size + 2 + COPY_BYTES;
        if self.bytes.len() < needed {
            self.bytes.resize(needed.max(2 * self.bytes.len()).max(1024), 0);
        }
    }

    /// Adds the text of an object whose text is not longer than `max_size`.
    #[inline]
    fn add_object<'n>(
        &mut self, body: &[u8], members: impl Iterator<Item = &'n JsonNode>, max_size: usize,
    ) -> JsonValue {
        self.reserve(max_size);
        let (old, out) = self.bytes.split_at_mut(self.len);
        out[0] = b'{';
        let mut len = 1;
        for JsonNode { name, value, .. } in members {
            let mut value = value.text_span();
            if value.start == name.end + 1 {
                // The source already contains `"name":text`: one copy.
                value.start = name.start;
            } else {
                len += copy(body, old, *name, &mut out[len..]);
                out[len] = b':';
                len += 1;
            }
            len += copy(body, old, value, &mut out[len..]);
            out[len] = b',';
            len += 1;
        }
        len = len.max(2);
        out[len - 1] = b'}';
        let start = self.len;
        self.len += len;
        JsonValue::new(JsonKind::Text, self.end_text(body, start))
    }

    /// Adds the text of an object of these members of the source, in this order. Its text is not longer than `max_size`.
    #[inline(always)]
    pub(super) fn add_members(
        &mut self, body: &[u8], members: &[JsonSpan], order: &[u8], max_size: usize,
    ) -> JsonValue {
        self.reserve(max_size);
        let out = &mut self.bytes[self.len..];
        out[0] = b'{';
        let mut len = 1;
        for i in order {
            len += copy(body, &[], members[usize::from(*i)], &mut out[len..]);
            out[len] = b',';
            len += 1;
        }
        out[len - 1] = b'}';
        let start = self.len;
        self.len += len;
        JsonValue::new(JsonKind::Text, self.end_text(body, start))
    }

    /// The span of the text from `start`.
    #[inline]
    fn end_text(&mut self, body: &[u8], start: usize) -> JsonSpan {
        let span = JsonSpan { start: (body.len() + start) as u32, end: (body.len() + self.len) as u32 };
        self.bytes[self.len] = b',';
        self.len += 1;
        span
    }

    /// Adds the text of a string.
    pub(super) fn add_string(&mut self, body: &[u8], text: &[u8]) -> JsonSpan {
        self.reserve(text.len());
        let start = self.len;
        self.bytes[start..start + text.len()].copy_from_slice(text);
        self.len += text.len();
        self.has_strings = true;
        let span = self.end_text(body, start);
        // Two texts have a colon between them only in the source.
        self.bytes[self.len] = b' ';
        self.len += 1;
        span
    }
}

pub(super) struct JsonDocument<'d> {
    pub(super) source: &'d [u8],
    pub(super) buffers: &'d mut JsonBuffers,
    pub(super) root: JsonValue,
}

impl JsonDocument<'_> {
    /// Whether the source itself is the canonical form.
    pub(super) fn is_canonical(&self) -> bool {
        self.root.kind() == JsonKind::Text && self.root.span().end as usize == self.source.len()
    }

    /// The text of a span.
    pub(super) fn bytes(&self, span: JsonSpan) -> &[u8] {
        bytes(self.source, self.buffers.rewritten.text(), span)
    }

    /// The text of a span, and everything after it.
    #[inline]
    pub(super) fn bytes_from(&self, span: JsonSpan) -> &[u8] {
        match (span.start as usize).checked_sub(self.source.len()) {
            None => &self.source[span.start as usize..],
            Some(start) => &self.buffers.rewritten.text()[start..],
        }
    }

    pub(super) fn nodes(&self, span: JsonSpan) -> &[JsonNode] {
        &self.buffers.closed[span.start as usize..span.end as usize]
    }

    /// The index of the node at a pointer. Only for a document with every node.
    pub(super) fn find_node(&self, at: &JsonPointer) -> Option<usize> {
        let mut value = self.root;
        let mut found = None;
        for step in &at.steps {
            let node = self.find_child(value, step)?;
            value = self.buffers.closed[node].value;
            found = Some(node);
        }
        found
    }

    fn find_child(&self, from: JsonValue, step: &PointerStep) -> Option<usize> {
        let span = from.span();
        match from.kind() {
            JsonKind::Object => {
                let members = self.nodes(span);
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

/// The text of a span, see [`JsonBuffers::rewritten`].
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
