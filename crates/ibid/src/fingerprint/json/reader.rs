//! Reads a JSON document: validates it and makes its canonical text.
//!
//! Invariant: a body has a canonical text only if it is strict RFC 8259 JSON in UTF-8, without duplicate members or lone
//! surrogates, up to a depth of [`MAX_JSON_DEPTH`]. The reader makes one pass, in linear time except for sorting names.
//!
//! The reader does nothing for text that is already canonical: it stays in the source. Only at a change (space, an escape
//! that has a shorter spelling, members out of order) is the text before it appended to the output. Positions are those
//! in the output, as if everything read so far were there already.

use super::{
    NameEquality,
    output::{CanonicalText, JsonOutput, TextRange},
    shape::ObjectShapes,
    sort::{self, JsonMember, MAX_FEW},
    text,
    token::{ChunkedText, TextEdges, digits, literal, number, plain_end, specials},
};
use crate::fingerprint::stream::HashStream;

/// The maximum depth of a document with a canonical form. It bounds the recursion of the writer; real requests stay far
/// below.
pub(super) const MAX_JSON_DEPTH: usize = 128;

/// An array or object that is not closed yet.
#[derive(Clone, Copy)]
struct JsonFrame {
    /// The prefix of the last name.
    last: u64,
    /// Its position in the source.
    source: u32,
    /// Its position in the output.
    start: u32,
    /// The index of its first member.
    first: u32,
    /// The byte that closes it.
    close: u8,
    is_sorted: bool,
    /// Whether its values are scalars.
    is_flat: bool,
}

impl JsonFrame {
    /// The document, which no byte closes.
    const ROOT: Self = Self { last: 0, source: 0, start: 0, first: 0, close: 0, is_sorted: true, is_flat: false };
}

/// The memory of a reader, which is used again for the next document.
pub(super) struct ReaderBuffers {
    /// The document, and the arrays and objects that are not closed yet.
    frames: [JsonFrame; MAX_JSON_DEPTH + 1],
    /// The members of all objects that are not closed yet. Longer than what is used.
    members: Vec<JsonMember>,
    /// For one string.
    string: Vec<u8>,
    output: JsonOutput,
    shapes: ObjectShapes,
}

impl ReaderBuffers {
    pub(super) const fn new() -> Self {
        Self {
            frames: [JsonFrame::ROOT; MAX_JSON_DEPTH + 1],
            members: Vec::new(),
            string: Vec::new(),
            output: JsonOutput::new(),
            shapes: ObjectShapes::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.members.capacity() * size_of::<JsonMember>() + self.string.capacity() + self.output.bytes()
    }
}

/// Reads a document. Its blocks go to `blocks` as they are read, for as long as it is canonical.
pub(super) fn read<'d>(
    body: &'d [u8], names: NameEquality, buffers: &'d mut ReaderBuffers, blocks: Option<&mut HashStream>,
) -> Option<CanonicalText<'d>> {
    // Positions have 32 bits.
    if body.len() >= 1 << 31 {
        return None;
    }
    buffers.output.clear();
    buffers.shapes.raise_credit();
    let hash_at = if blocks.is_some() { 64 } else { usize::MAX };
    let edges = TextEdges::of(body);
    let source = ChunkedText::new(body, &edges);
    let mut reader = JsonReader { body, source, buffers, names, blocks, hash_at, members: 0, is_ascii: true };
    let end = reader.document()?;
    let is_utf8 = reader.is_ascii || std::str::from_utf8(body).is_ok();
    is_utf8.then(|| buffers.output.finish(body, end as usize))
}

struct JsonReader<'a, 'b> {
    body: &'a [u8],
    source: ChunkedText<'a>,
    buffers: &'b mut ReaderBuffers,
    names: NameEquality,
    blocks: Option<&'b mut HashStream>,
    /// The end of the next block that is hashed.
    hash_at: usize,
    /// The number of members in use.
    members: usize,
    /// Whether all strings so far are ASCII.
    is_ascii: bool,
}

impl<'a> JsonReader<'a, '_> {
    /// Returns the end of the document's value.
    #[inline(never)]
    fn document(&mut self) -> Option<u32> {
        let source = self.source;
        let (mut depth, mut close, mut last) = (0, 0, 0);
        // A value follows the byte at this position.
        let mut pos = u32::MAX;
        let mut text = source.chunk(pos);
        loop {
            let start = pos.wrapping_add(1);
            let mut end = start;
            end += match text[1] {
                b'"' => match plain_end(text) {
                    end if text.get(end) == Some(&b'"') => end as u32,
                    _ => self.long_string(start)?,
                },
                b'1'..=b'9' => digits(text),
                b'{' if let Some(size) = self.known_object(start, depth) => size,
                byte @ (b'{' | b'[') => {
                    (self.buffers.frames[depth].last, self.buffers.frames[depth].is_flat) = (last, false);
                    depth += 1;
                    // In ASCII, each closing bracket is two after its opening one.
                    (close, last) = (byte + 2, 0);
                    let (at, first) = (self.buffers.output.position(start), self.members as u32);
                    *self.buffers.frames.get_mut(depth)? =
                        JsonFrame { last, source: start, start: at, first, close, is_sorted: true, is_flat: true };
                    pos = start;
                    text = source.chunk(pos);
                    if text[1] <= b' ' {
                        pos = self.skip_space(pos + 1) - 1;
                        text = source.chunk(pos);
                    }
                    if text[1] != close {
                        if byte == b'{' {
                            (pos, text) = self.name(source, pos, text, depth, &mut last)?;
                        }
                        continue;
                    }
                    pos + 1 - start
                }
                b't' | b'f' | b'n' => literal(text)?,
                b'-' | b'0' => number(self.body, start)?,
                _ => {
                    pos = self.skip_space(start).wrapping_sub(1);
                    if pos.wrapping_add(1) == start {
                        return None;
                    }
                    text = source.chunk(pos);
                    continue;
                }
            };
            loop {
                text = source.chunk(end);
                if text[0] == b',' {
                    if end as usize >= self.hash_at {
                        self.hash_blocks(end as usize);
                    }
                    pos = end;
                    if close == b'}' {
                        (pos, text) = self.name(source, pos, text, depth, &mut last)?;
                    } else if close == 0 {
                        return None;
                    }
                    break;
                }
                if text[0] == close && depth > 0 {
                    end += 1;
                    let JsonFrame { first, is_sorted, is_flat, .. } = self.buffers.frames[depth];
                    if !is_sorted || is_flat && close == b'}' {
                        self.close_object(depth, end)?;
                    }
                    self.members = first as usize;
                    depth -= 1;
                    JsonFrame { close, last, .. } = self.buffers.frames[depth];
                } else {
                    let value = end;
                    end = self.after_value(start, value)?;
                    if end == value {
                        return (depth == 0).then_some(end);
                    }
                }
            }
        }
    }

    /// Reads on after a value that neither a comma nor a closing bracket follows. Returns its end if nothing follows.
    #[inline(never)]
    fn after_value(&mut self, start: u32, end: u32) -> Option<u32> {
        if end as usize == self.body.len() || self.source.after_space(end) as usize == self.body.len() {
            return Some(end);
        }
        let next = self.skip_space(end);
        if next > end {
            return Some(next);
        }
        // A number of which only the first digits were read.
        let number = start + number(self.body, start)?;
        (number > end).then_some(number)
    }

    /// Reads the name after the byte at a position, and the colon, and records the member. Returns the position of the
    /// colon and the chunk there.
    #[inline(always)]
    fn name(
        &mut self, source: ChunkedText<'a>, mut pos: u32, mut text: &'a [u8; 16], depth: usize, last: &mut u64,
    ) -> Option<(u32, &'a [u8; 16])> {
        if text[1] != b'"' {
            pos = self.skip_space(pos + 1) - 1;
            text = source.chunk(pos);
            if text[1] != b'"' {
                return None;
            }
        }
        let start = self.buffers.output.position(pos + 1);
        let [_, _, first @ .., _, _, _, _, _, _] = *text;
        let first = u64::from_le_bytes(first);
        let (mut size, prefix);
        let mut end = plain_end(text);
        if text.get(end) == Some(&b'"') {
            size = end as u32;
            prefix = sort::prefix(first, end);
            end += pos as usize + 1;
        } else {
            size = self.long_string(pos + 1)?;
            end = (pos + 1 + size) as usize;
            if self.buffers.output.ends_at(end as u32) {
                // The name was rewritten.
                JsonMember { prefix, size, .. } = self.buffers.output.last_name(start);
            } else {
                prefix = sort::prefix(first, size as usize);
            }
        }
        if prefix <= *last && (prefix < *last || !self.sorts_last(depth, prefix, start, size)) {
            self.buffers.frames[depth].is_sorted = false;
            self.hash_at = usize::MAX;
        }
        *last = prefix;
        if self.members >= self.buffers.members.len() {
            self.grow();
        }
        if let Some(member) = self.buffers.members.get_mut(self.members) {
            (member.prefix, member.start, member.size) = (prefix, start, size);
        }
        self.members += 1;
        let mut end = end as u32;
        text = source.chunk(end);
        if text[0] != b':' {
            end = self.skip_space(end);
            text = source.chunk(end);
            if text[0] != b':' {
                return None;
            }
        }
        Some((end, text))
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let members = &mut self.buffers.members;
        members.resize(2 * members.len() + 32, JsonMember { prefix: 0, start: 0, size: 0 });
    }

    /// Whether a member whose prefix is not greater sorts after the last one of its object.
    #[cold]
    #[inline(never)]
    fn sorts_last(&self, depth: usize, prefix: u64, start: u32, size: u32) -> bool {
        let first = self.buffers.frames[depth].first as usize;
        let Some(last) = self.buffers.members[first..self.members].last() else { return true };
        let name = |member: &JsonMember| self.buffers.output.text_at(self.body, member.start, member.size);
        sort::compare(last, &JsonMember { prefix, start, size }, name).is_lt()
    }

    /// Reads the object at a position, if it has a known shape.
    #[inline(always)]
    fn known_object(&mut self, pos: u32, depth: usize) -> Option<u32> {
        if depth == MAX_JSON_DEPTH {
            return None;
        }
        let ReaderBuffers { shapes, output, .. } = &mut *self.buffers;
        let shape = shapes.probable(self.source.chunk(pos));
        let mut values = [TextRange { start: 0, end: 0 }; MAX_FEW];
        let end = shape.read(self.source, pos, &mut values)?;
        if !shape.is_compact {
            output.write_object(self.body, pos, end, shape.order().map(|i| (&shape.names[i], values[i])));
        } else if !shape.is_sorted {
            self.hash_at = usize::MAX;
            let member =
                |i: usize| TextRange { start: values[i].start - shape.names[i].size - pos, end: values[i].end - pos };
            output.reorder(self.body, output.position(pos), end, shape.order().map(member));
        }
        shapes.raise_credit();
        Some(end - pos)
    }

    /// Puts the members of an object in order if they are not. Learns its shape only if that succeeded: whether an object
    /// has a canonical form must not depend on what was read before.
    #[inline(never)]
    fn close_object(&mut self, depth: usize, end: u32) -> Option<()> {
        let ReaderBuffers { frames, members, output, shapes, .. } = &mut *self.buffers;
        let JsonFrame { source, start, first, is_flat, is_sorted, .. } = frames[depth];
        if !is_sorted {
            output.sort(self.body, start, &members[first as usize..self.members], end, self.names)?;
        }
        if is_flat {
            shapes.learn(self.body, source as usize..end as usize);
        }
        Some(())
    }

    /// Hashes the blocks before a position.
    #[inline(never)]
    fn hash_blocks(&mut self, pos: usize) {
        let Some(stream) = self.blocks.as_mut().filter(|_| !self.buffers.output.has_changes()) else {
            self.hash_at = usize::MAX;
            return;
        };
        while let Some(block) = self.body[..pos].get(self.hash_at - 64..).and_then(|rest| rest.first_chunk()) {
            stream.block(block);
            self.hash_at += 64;
        }
    }

    #[inline(never)]
    fn skip_space(&mut self, pos: u32) -> u32 {
        let end = self.source.after_space(pos);
        if end > pos {
            self.buffers.output.skip(self.body, pos as usize, end as usize);
        }
        end
    }

    /// The length of a string that is long, or has escapes or bytes that are not ASCII.
    #[inline(never)]
    fn long_string(&mut self, pos: u32) -> Option<u32> {
        let mut end = pos + 1;
        while (end as usize) < self.body.len() {
            let chunk = self.source.chunk(end);
            let specials = specials(chunk);
            if specials == 0 {
                end += 16;
                continue;
            }
            end += specials.trailing_zeros();
            match *self.body.get(end as usize)? {
                b'"' => return Some(end + 1 - pos),
                0x80.. => {
                    self.is_ascii = false;
                    end += 1;
                }
                _ => return self.rewrite_string(pos),
            }
        }
        None
    }

    /// Reads a string with escapes.
    #[cold]
    #[inline(never)]
    fn rewrite_string(&mut self, pos: u32) -> Option<u32> {
        let ReaderBuffers { string, output, .. } = &mut *self.buffers;
        string.clear();
        let pos = pos as usize;
        let source = &self.body[pos..];
        let size = text::rewrite(source, string)?;
        self.is_ascii = false;
        if *string != source[..size] {
            output.replace(self.body, pos, pos + size, string);
        }
        Some(size as u32)
    }
}
