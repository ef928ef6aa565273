//! The canonical text of a document, while it is read and afterwards.
//!
//! Invariant: the output and the part of the source that is not in it yet are canonical text, apart from the objects that
//! are listed as unsorted.
//!
//! A small object is put in order when it closes. A large one is only listed, with the order of its members: each byte is
//! copied a limited number of times, however deep the document is.

use super::{
    NameEquality, TextSink,
    shape::ShapeText,
    sort::{self, JsonMember},
};

/// How many bytes are copied at once; most members are shorter.
const COPY_BYTES: usize = 32;
/// The maximum length of an object that is put in order when it closes.
const MAX_SMALL_OBJECT: u32 = 512;

/// A range of positions in the text.
#[derive(Clone, Copy)]
pub(super) struct TextRange {
    pub(super) start: u32,
    pub(super) end: u32,
}

/// An object whose members are not in order in the text.
struct UnsortedObject {
    range: TextRange,
    /// The indexes of its members, which are in order.
    members: TextRange,
}

pub(super) struct JsonOutput {
    /// Longer than what is used.
    text: Vec<u8>,
    /// The start of the part of the source that is not in the output yet.
    pending: usize,
    /// The difference between positions in the source and in the output, from there on.
    shift: usize,
    unsorted: Vec<UnsortedObject>,
    members: Vec<TextRange>,
    /// The text of one small object.
    object: Vec<u8>,
}

impl JsonOutput {
    pub(super) const fn new() -> Self {
        Self { text: Vec::new(), pending: 0, shift: 0, unsorted: Vec::new(), members: Vec::new(), object: Vec::new() }
    }

    pub(super) fn clear(&mut self) {
        (self.pending, self.shift) = (0, 0);
        self.unsorted.clear();
        self.members.clear();
    }

    pub(super) fn bytes(&self) -> usize {
        self.text.len()
            + self.unsorted.capacity() * size_of::<UnsortedObject>()
            + self.members.capacity() * size_of::<TextRange>()
    }

    /// Whether the source up to here is not the canonical text.
    pub(super) fn has_changes(&self) -> bool {
        self.pending != 0 || !self.unsorted.is_empty()
    }

    /// The position in the output of a position in the source.
    #[inline(always)]
    pub(super) fn position(&self, pos: u32) -> u32 {
        pos.wrapping_sub(self.shift as u32)
    }

    /// Whether everything before a position in the source is in the output.
    #[inline(always)]
    pub(super) fn ends_at(&self, pos: u32) -> bool {
        self.pending == pos as usize
    }

    fn len(&self) -> usize {
        self.pending.wrapping_sub(self.shift)
    }

    /// Makes room for a text of this size, and for the surplus of a copy.
    #[inline]
    fn reserve(&mut self, size: usize) {
        let needed = size + COPY_BYTES + 1;
        if self.text.len() < needed {
            self.text.resize(needed.max(2 * self.text.len()).max(1024), 0);
        }
    }

    /// Appends the source up to `end`, and leaves out what follows up to `next`.
    #[inline]
    pub(super) fn skip(&mut self, body: &[u8], end: usize, next: usize) {
        let (len, size) = (self.len(), end - self.pending);
        self.reserve(len + size);
        copy(body, self.pending as u32, size as u32, &mut self.text, len as u32);
        self.continue_at(next, len + size);
    }

    /// Replaces the source from `start` to `end`.
    pub(super) fn replace(&mut self, body: &[u8], start: usize, end: usize, by: &[u8]) {
        self.skip(body, start, end);
        let len = self.len();
        self.reserve(len + by.len());
        self.text[len..len + by.len()].copy_from_slice(by);
        self.continue_at(end, len + by.len());
    }

    fn continue_at(&mut self, pending: usize, len: usize) {
        self.pending = pending;
        self.shift = pending.wrapping_sub(len);
    }

    /// The member whose name is at the end of the output.
    #[cold]
    pub(super) fn last_name(&self, start: u32) -> JsonMember {
        let name = &self.text[start as usize..self.len()];
        let mut first = [0; 8];
        let size = (name.len() - 2).min(8);
        first[..size].copy_from_slice(&name[1..=size]);
        let prefix = sort::prefix(u64::from_le_bytes(first), name.len());
        JsonMember { prefix, start, size: name.len() as u32 }
    }

    /// A text that is in the output or in the source.
    pub(super) fn text_at<'t>(&'t self, body: &'t [u8], start: u32, size: u32) -> &'t [u8] {
        let (start, size) = (start as usize, size as usize);
        if start < self.len() { &self.text[start..start + size] } else { &body[start + self.shift..][..size] }
    }

    /// Sorts the members of an object, which ends at a position in the source. Returns `None` if two have equal names.
    pub(super) fn sort(
        &mut self, body: &[u8], start: u32, members: &[JsonMember], end: u32, names: NameEquality,
    ) -> Option<()> {
        let close = self.position(end) - 1;
        let range = |i: usize| {
            let next = members.get(i + 1).map_or(close, |next| next.start - 1);
            TextRange { start: members[i].start - start, end: next - start }
        };
        if let Some(order) = sort::order_few(members) {
            self.reorder(body, start, end, order[..members.len()].iter().map(|i| range(usize::from(*i))));
        } else {
            let order = sort::order_many(members, names, |member| self.text_at(body, member.start, member.size))?;
            self.reorder(body, start, end, order.iter().map(|i| range(*i as usize)));
        }
        Some(())
    }

    /// Puts the members of an object in this order. The object ends at a position in the source; its members are relative
    /// to its start.
    #[inline(always)]
    pub(super) fn reorder(&mut self, body: &[u8], start: u32, end: u32, members: impl Iterator<Item = TextRange>) {
        let (size, len) = (self.position(end) - start, self.len());
        if size > MAX_SMALL_OBJECT {
            let first = self.members.len() as u32;
            self.members
                .extend(members.map(|member| TextRange { start: start + member.start, end: start + member.end }));
            let members = TextRange { start: first, end: self.members.len() as u32 };
            self.unsorted.push(UnsortedObject { range: TextRange { start, end: start + size }, members });
            return;
        }
        let object = start as usize;
        self.reserve(object + size as usize);
        let from = if object >= len {
            let before = object - len;
            copy(body, self.pending as u32, before as u32, &mut self.text, len as u32);
            &body[self.pending + before..]
        } else {
            self.object.clear();
            self.object.extend_from_slice(&self.text[object..len]);
            self.object.extend_from_slice(&body[self.pending..end as usize]);
            &self.object
        };
        let out = &mut self.text[object..];
        out[0] = b'{';
        let mut at = 1;
        for TextRange { start, end } in members {
            copy(from, start, end - start, out, at);
            at += end - start;
            if let Some(after) = out.get_mut(at as usize) {
                *after = b',';
            }
            at += 1;
        }
        out[size as usize - 1] = b'}';
        self.continue_at(end as usize, object + size as usize);
    }

    /// Writes an object from `start` to `end` in the source, with these names and values of the source.
    #[inline(always)]
    pub(super) fn write_object<'n>(
        &mut self, body: &[u8], start: u32, end: u32, members: impl Iterator<Item = (&'n ShapeText, TextRange)>,
    ) {
        self.skip(body, start as usize, start as usize);
        let len = self.len();
        self.reserve(len + (end - start) as usize);
        let out = &mut self.text[len..];
        out[0] = b'{';
        let mut at = 1;
        for (name, value) in members {
            if let Some(to) = out.get_mut(at as usize..at as usize + name.bytes.len()) {
                to.copy_from_slice(&name.bytes);
            }
            at += name.size;
            copy(body, value.start, value.end - value.start, out, at);
            at += value.end - value.start + 1;
            if let Some(after) = out.get_mut(at as usize - 1) {
                *after = b',';
            }
        }
        out[at as usize - 1] = b'}';
        self.continue_at(end as usize, len + at as usize);
    }

    /// The canonical text of a document that ends at a position in the source.
    pub(super) fn finish<'d>(&'d mut self, body: &'d [u8], end: usize) -> CanonicalText<'d> {
        self.unsorted.sort_unstable_by_key(|object| object.range.start);
        let is_source = self.len() == 0;
        let start = self.pending;
        if !is_source {
            self.skip(body, end, end);
        }
        let text = if is_source { &body[start..end] } else { &self.text[..self.len()] };
        let is_source = self.pending == 0 && self.unsorted.is_empty();
        CanonicalText { text, is_source, unsorted: &self.unsorted, members: &self.members }
    }
}

/// Copies a part of a text. A copy of fixed size is faster than one of the right size; what is written next overwrites the
/// surplus.
#[inline(always)]
fn copy(from: &[u8], start: u32, size: u32, to: &mut [u8], at: u32) {
    let (start, size, at) = (start as usize, size as usize, at as usize);
    match (from.get(start..start + COPY_BYTES), to.get_mut(at..at + COPY_BYTES)) {
        (Some(from), Some(to)) if size <= COPY_BYTES => to.copy_from_slice(from),
        _ => copy_exactly(&from[start..start + size], &mut to[at..at + size]),
    }
}

/// Not inlined, because the compiler would make one copy of variable size of both.
#[inline(never)]
fn copy_exactly(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

/// The canonical text of a document, in pieces.
pub(super) struct CanonicalText<'d> {
    text: &'d [u8],
    is_source: bool,
    /// By their starts.
    unsorted: &'d [UnsortedObject],
    members: &'d [TextRange],
}

impl CanonicalText<'_> {
    /// The text, if the source starts with it, and only space follows.
    pub(super) fn as_source(&self) -> Option<&[u8]> {
        self.is_source.then_some(self.text)
    }

    /// The text, if it is in one piece.
    pub(super) fn as_one(&self) -> Option<&[u8]> {
        self.unsorted.is_empty().then_some(self.text)
    }

    pub(super) fn write(&self, sink: &mut impl TextSink) {
        self.write_range(TextRange { start: 0, end: self.text.len() as u32 }, self.unsorted, sink);
    }

    /// Writes a part of the text, in which `unsorted` are.
    fn write_range(&self, range: TextRange, mut unsorted: &[UnsortedObject], sink: &mut impl TextSink) {
        let mut start = range.start;
        while let Some((object, others)) = unsorted.split_first() {
            self.write_text(start, object.range.start + 1, sink);
            let (inner, outer) = others.split_at(others.partition_point(|other| other.range.start < object.range.end));
            for (i, member) in
                self.members[object.members.start as usize..object.members.end as usize].iter().enumerate()
            {
                if i > 0 {
                    sink.byte(b',');
                }
                let from = inner.partition_point(|other| other.range.start < member.start);
                let to = inner.partition_point(|other| other.range.start < member.end);
                self.write_range(*member, &inner[from..to], sink);
            }
            start = object.range.end - 1;
            unsorted = outer;
        }
        self.write_text(start, range.end, sink);
    }

    fn write_text(&self, start: u32, end: u32, sink: &mut impl TextSink) {
        sink.text(&self.text[start as usize..], (end - start) as usize);
    }
}
