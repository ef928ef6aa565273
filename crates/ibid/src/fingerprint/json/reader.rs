//! Parses a JSON document without copying it: validates it and records its members.
//!
//! Invariant: the result is a valid [`JsonDocument`] or nothing. The reader makes one pass, in linear time except for
//! sorting names, up to a depth of [`MAX_JSON_DEPTH`].
//!
//! Example: of `{"b":[1,2],"a":0}`, the array is recorded as one text, because it is already canonical; the object gets
//! a node for each of its members.

use super::{
    NameEquality,
    document::{JsonBuffers, JsonDocument, JsonKind, JsonNode, JsonSpan, JsonValue, bytes, strip_quotes},
    scan::{BlockScanner, BlockSink, JsonCursor, NoBlocks, near_string_end},
    shape::MAX_SHAPE_MEMBERS,
    sort, text,
};

/// The maximum depth of a document with a canonical form. It bounds the recursion of the writer; real requests stay far
/// below.
pub(super) const MAX_JSON_DEPTH: usize = 128;
/// The maximum length of a body whose objects are rewritten as they are read. It keeps all spans in their 31 bits.
const MAX_FLATTENED_BYTES: usize = 64 << 20;

impl<'d> JsonDocument<'d> {
    /// Reads a document. With `every_node`, each member and element gets a node, for looking into it. `names` defines
    /// which names are equal.
    pub(super) fn read(
        source: &'d [u8], every_node: bool, names: NameEquality, buffers: &'d mut JsonBuffers,
    ) -> Option<Self> {
        let root = read::<true>(source, every_node, names, buffers, &mut NoBlocks)?;
        Some(JsonDocument { source, buffers, root })
    }
}

/// Whether a body is canonical. Its blocks go to `blocks` as they are read.
pub(super) fn is_canonical(body: &[u8], buffers: &mut JsonBuffers, blocks: &mut impl BlockSink) -> bool {
    read::<false>(body, false, NameEquality::Exact, buffers, blocks).is_some()
}

/// Reads a document. Without `NODES`, records nothing, and returns `None` also if the body is not canonical.
fn read<const NODES: bool>(
    body: &[u8], every_node: bool, names: NameEquality, buffers: &mut JsonBuffers, blocks: &mut impl BlockSink,
) -> Option<JsonValue> {
    // The ends of a span have 31 bits, and cover two buffers.
    if body.len() >= 1 << 30 {
        return None;
    }
    buffers.clear();
    let (scanner, at) = BlockScanner::new(body, blocks);
    let mut reader = JsonReader::<_, NODES> { body, at, scanner, buffers, top: 0, every_node, names };
    let root = reader.document()?;
    (reader.scanner.is_ascii || std::str::from_utf8(body).is_ok()).then_some(root)
}

struct JsonReader<'a, 'b, S, const NODES: bool> {
    body: &'a [u8],
    /// Functions copy it to a variable, and back before they call one that reads on.
    at: JsonCursor,
    scanner: BlockScanner<'a, 'b, S>,
    buffers: &'b mut JsonBuffers,
    /// How many of the open nodes are in use.
    top: usize,
    every_node: bool,
    names: NameEquality,
}

/// An array or object that is not closed yet.
struct JsonFrame {
    start: u32,
    /// The number of changes before it.
    changes: u32,
    /// The index of its first node.
    first: usize,
}

impl<S: BlockSink, const NODES: bool> JsonReader<'_, '_, S, NODES> {
    fn document(&mut self) -> Option<JsonValue> {
        let (body, mut at) = (self.body, self.at);
        skip_space::<NODES>(body, &mut at);
        let ahead = window(body, at.pos);
        let root = self.value(body, &mut at, ahead, 0)?;
        skip_space::<NODES>(body, &mut at);
        (at.pos as usize == body.len()).then_some(root)
    }

    /// Reads the value at the position, at this depth. It starts with the low bytes of `ahead`.
    #[inline(always)]
    fn value(&mut self, body: &[u8], at: &mut JsonCursor, ahead: u64, depth: usize) -> Option<JsonValue> {
        let start = at.pos;
        at.pos += match ahead as u8 {
            b'"' => return Some(JsonValue::new(JsonKind::Text, self.string(at)?)),
            b'0'..=b'9' => match short_integer(ahead) {
                Some(size) => size,
                None => long_number(body, start)?,
            },
            b'{' | b'[' => {
                if depth == MAX_JSON_DEPTH {
                    return None;
                }
                self.at = *at;
                let value = if ahead as u8 == b'{' { self.object(depth + 1)? } else { self.array(depth + 1)? };
                at.set(&self.at);
                return Some(value);
            }
            b't' if ahead as u32 == u32::from_le_bytes(*b"true") => 4,
            b'n' if ahead as u32 == u32::from_le_bytes(*b"null") => 4,
            b'f' if (ahead >> 8) as u32 == u32::from_le_bytes(*b"alse") => 5,
            b'-' => 1 + long_number(body, start + 1)?,
            _ => return None,
        };
        Some(JsonValue::new(JsonKind::Text, JsonSpan { start, end: at.pos }))
    }

    fn object(&mut self, depth: usize) -> Option<JsonValue> {
        match self.known_object(depth) {
            Some(value) => Some(value),
            None => self.other_object(depth),
        }
    }

    /// Reads an object of the shape that the last one of this depth had. Otherwise stays at its start. A canonical body
    /// is read faster without: its names need not be moved, and the processor hashes it meanwhile.
    #[inline]
    fn known_object(&mut self, depth: usize) -> Option<JsonValue> {
        let body = self.body;
        if !NODES || self.every_node || body.len() > MAX_FLATTENED_BYTES {
            return None;
        }
        let JsonBuffers { shapes, rewritten, .. } = &mut *self.buffers;
        let (start, shape) = (self.at.pos, shapes.get(depth));
        let (mut block, mut quotes) = self.at.block();
        let mut members = [JsonSpan { start: 0, end: 0 }; MAX_SHAPE_MEMBERS];
        let (mut pos, mut has_moved) = (start, false);
        for (name, member) in shape.names().iter().zip(&mut members) {
            let Some(value) = name.end_at(body, pos) else { break };
            member.start = pos + 1;
            pos = value;
            let ahead = window(body, pos);
            pos += match ahead as u8 {
                b'"' => match near_string_end(block, quotes, pos) {
                    Some(end) => end - pos,
                    None => {
                        has_moved = true;
                        let found = self.scanner.string_end(block, quotes, pos + 1);
                        (block, quotes) = (found.block, self.scanner.moved_quotes);
                        let Some(end) = found.end else { break };
                        end - pos
                    }
                },
                b'0'..=b'9' => match short_integer(ahead) {
                    Some(size) => size,
                    None => break,
                },
                b't' if ahead as u32 == u32::from_le_bytes(*b"true") => 4,
                b'n' if ahead as u32 == u32::from_le_bytes(*b"null") => 4,
                b'f' if (ahead >> 8) as u32 == u32::from_le_bytes(*b"alse") => 5,
                _ => break,
            };
            member.end = pos;
        }
        let is_whole = shape.names().len().checked_sub(1).is_some_and(|last| members[last].end == pos);
        if !is_whole || peek(body, pos) != Some(b'}') {
            if has_moved {
                self.at = self.scanner.rewind(self.at);
            }
            return None;
        }
        pos += 1;
        self.scanner.advance(&mut self.at, block, quotes, pos);
        if shape.is_sorted {
            return Some(JsonValue::new(JsonKind::Text, JsonSpan { start, end: pos }));
        }
        self.at.changes += 1;
        Some(rewritten.add_members(body, &members, shape.sorted(), (pos - start) as usize))
    }

    #[inline(never)]
    fn other_object(&mut self, depth: usize) -> Option<JsonValue> {
        let (body, mut at) = (self.body, self.at);
        let frame = JsonFrame { start: at.pos, changes: at.changes, first: self.top };
        let mut last = JsonSpan { start: 0, end: 0 };
        let (mut last_prefix, mut is_sorted, mut is_flat, mut has_only_scalars) = (0, true, true, true);
        at.pos += 1;
        skip_space::<NODES>(body, &mut at);
        if peek(body, at.pos)? == b'}' {
            at.pos += 1;
            return self.close_object(at, frame, true, true);
        }
        loop {
            if peek(body, at.pos)? != b'"' {
                return None;
            }
            loop {
                let name = self.string(&mut at)?;
                let prefix = match sort::prefix_in(body, name) {
                    Some(prefix) => prefix,
                    None => sort::prefix(body, self.buffers.rewritten.text(), name),
                };
                if prefix <= last_prefix && is_sorted && !self.sorts_after(last, last_prefix, prefix, name) {
                    if !NODES {
                        return None;
                    }
                    is_sorted = false;
                    at.changes += 1;
                }
                (last, last_prefix) = (name, prefix);
                let ahead = after_colon::<NODES>(body, &mut at)?;
                let value = self.value(body, &mut at, ahead, depth)?;
                has_only_scalars &= !matches!(ahead as u8, b'{' | b'[');
                if NODES {
                    if let b'{' | b'[' = ahead as u8 {
                        is_flat &= value.kind() == JsonKind::Text && (value.span().start as usize) < body.len();
                    }
                    self.push(JsonNode { prefix, name, value });
                }
                // The likely case first.
                if chunk(body, at.pos) != Some(*b",\"") {
                    break;
                }
                at.pos += 1;
            }
            if !has_more::<NODES>(body, &mut at, b'}')? {
                if NODES && has_only_scalars {
                    self.buffers.shapes.learn(depth, body, JsonSpan { start: frame.start, end: at.pos });
                }
                return self.close_object(at, frame, is_sorted, is_flat);
            }
        }
    }

    fn array(&mut self, depth: usize) -> Option<JsonValue> {
        let (body, mut at) = (self.body, self.at);
        let frame = JsonFrame { start: at.pos, changes: at.changes, first: self.top };
        at.pos += 1;
        skip_space::<NODES>(body, &mut at);
        if peek(body, at.pos)? == b']' {
            at.pos += 1;
            return self.close_array(at, frame);
        }
        loop {
            let ahead = window(body, at.pos);
            let value = self.value(body, &mut at, ahead, depth)?;
            if NODES {
                self.item(frame.first, value);
            }
            if !has_more::<NODES>(body, &mut at, b']')? {
                return self.close_array(at, frame);
            }
        }
    }

    #[inline(always)]
    fn push(&mut self, node: JsonNode) {
        if self.top == self.buffers.open.len() {
            self.buffers.grow();
        }
        self.buffers.open[self.top] = node;
        self.top += 1;
    }

    /// Whether a name sorts after the last one.
    #[inline(never)]
    fn sorts_after(&self, last: JsonSpan, last_prefix: u64, prefix: u64, name: JsonSpan) -> bool {
        let inner = |name| strip_quotes(bytes(self.body, self.buffers.rewritten.text(), name));
        last.end == 0 || prefix == last_prefix && inner(last) < inner(name)
    }

    /// Records an element. If only a comma separates it from its predecessor, one node covers both, which saves memory
    /// for long arrays of numbers.
    #[inline(always)]
    fn item(&mut self, first: usize, value: JsonValue) {
        if !self.every_node
            && self.top > first
            && value.kind() == JsonKind::Text
            && let last = &mut self.buffers.open[self.top - 1].value
            && last.kind() == JsonKind::Text
            && last.span().end + 1 == value.span().start
        {
            let JsonSpan { start, .. } = last.span();
            *last = JsonValue::new(JsonKind::Text, JsonSpan { start, end: value.span().end });
            return;
        }
        self.push(JsonNode { prefix: 0, name: JsonSpan { start: 0, end: 0 }, value });
    }

    #[inline(always)]
    fn close_array(&mut self, at: JsonCursor, frame: JsonFrame) -> Option<JsonValue> {
        self.at = at;
        if !NODES {
            return Some(JsonValue::DROPPED);
        }
        let first = std::mem::replace(&mut self.top, frame.first);
        if at.changes == frame.changes && !self.every_node {
            return Some(JsonValue::new(JsonKind::Text, JsonSpan { start: frame.start, end: at.pos }));
        }
        Some(self.buffers.close(JsonKind::Array, frame.first..first))
    }

    /// Closes the innermost object, which ends at the position. `is_flat` if its values are
    /// scalars and texts of the source. Returns `None`
    /// if two members have the same name.
    #[inline(always)]
    fn close_object(&mut self, at: JsonCursor, frame: JsonFrame, is_sorted: bool, is_flat: bool) -> Option<JsonValue> {
        self.at = at;
        if !NODES {
            return Some(JsonValue::DROPPED);
        }
        if at.changes == frame.changes && !self.every_node {
            self.top = frame.first;
            return Some(JsonValue::new(JsonKind::Text, JsonSpan { start: frame.start, end: at.pos }));
        }
        self.close_changed(frame, is_sorted, is_flat)
    }

    #[inline(never)]
    fn close_changed(&mut self, frame: JsonFrame, is_sorted: bool, is_flat: bool) -> Option<JsonValue> {
        let (body, members) = (self.body, frame.first..std::mem::replace(&mut self.top, frame.first));
        let is_flat = is_flat && !self.every_node && body.len() <= MAX_FLATTENED_BYTES;
        let flat_size = is_flat.then_some((self.at.pos - frame.start) as usize);
        if is_sorted {
            return Some(self.buffers.close_sorted(body, members, flat_size));
        }
        let is_plain = self.scanner.is_ascii && !self.buffers.rewritten.has_strings;
        self.buffers.close_unsorted(body, members, flat_size, self.names, is_plain)
    }

    /// Reads the string at the position and returns its canonical text with its quotes.
    #[inline(always)]
    fn string(&mut self, at: &mut JsonCursor) -> Option<JsonSpan> {
        let start = at.pos;
        if at.plain_string(&mut self.scanner) {
            return Some(JsonSpan { start, end: at.pos });
        }
        let (span, end) = self.string_with_escapes(at.pos)?;
        if span.start != start {
            if !NODES {
                return None;
            }
            at.changes += 1;
        }
        *at = self.scanner.seek(*at, end);
        Some(span)
    }

    /// The canonical text of a string, and its end in the source.
    #[cold]
    #[inline(never)]
    fn string_with_escapes(&mut self, pos: u32) -> Option<(JsonSpan, u32)> {
        let source = &self.body[pos as usize..];
        let JsonBuffers { string, rewritten, .. } = &mut *self.buffers;
        string.clear();
        let size = text::rewrite(source, string)?;
        let end = pos + size as u32;
        let is_same = *string == source[..size];
        let span = if is_same { JsonSpan { start: pos, end } } else { rewritten.add_string(self.body, string) };
        Some((span, end))
    }
}

#[inline(always)]
fn peek(body: &[u8], pos: u32) -> Option<u8> {
    body.get(pos as usize).copied()
}

/// Skips the comma (returns `true`) or the end (`false`) after a value, and the space around it.
#[inline(always)]
fn has_more<const SPACE: bool>(body: &[u8], at: &mut JsonCursor, end: u8) -> Option<bool> {
    skip_space::<SPACE>(body, at);
    let byte = peek(body, at.pos)?;
    at.pos += 1;
    if byte == b',' {
        skip_space::<SPACE>(body, at);
        return Some(true);
    }
    (byte == end).then_some(false)
}

#[inline(always)]
fn skip_space<const SPACE: bool>(body: &[u8], at: &mut JsonCursor) {
    if SPACE && let Some(byte @ 0..=b' ') = peek(body, at.pos) {
        at.changes += 1;
        at.pos += u32::from(byte == b' ');
        if let Some(0..=b' ') = peek(body, at.pos) {
            at.pos = after_space(body, at.pos);
        }
    }
}

#[inline(never)]
fn after_space(body: &[u8], mut pos: u32) -> u32 {
    while let Some(b' ' | b'\n' | b'\r' | b'\t') = peek(body, pos) {
        pos += 1;
    }
    pos
}

/// The next bytes, if there are so many.
#[inline(always)]
fn chunk<const N: usize>(body: &[u8], pos: u32) -> Option<[u8; N]> {
    body.get(pos as usize..pos as usize + N)?.try_into().ok()
}

/// The next eight bytes, as a number whose low byte is the first. Zeros follow the end.
#[inline(always)]
fn window(body: &[u8], pos: u32) -> u64 {
    match chunk(body, pos) {
        Some(eight) => u64::from_le_bytes(eight),
        None => last_window(body, pos),
    }
}

#[cold]
#[inline(never)]
fn last_window(body: &[u8], pos: u32) -> u64 {
    let rest = body.get(pos as usize..).unwrap_or_default();
    rest.iter().take(8).rev().fold(0, |window, byte| window << 8 | u64::from(*byte))
}

/// Skips the colon after a name, and the space around it. Returns the next bytes, at least five.
#[inline(always)]
fn after_colon<const SPACE: bool>(body: &[u8], at: &mut JsonCursor) -> Option<u64> {
    let mut ahead = window(body, at.pos);
    if ahead as u8 != b':' {
        skip_space::<SPACE>(body, at);
        ahead = window(body, at.pos);
        if !SPACE || ahead as u8 != b':' {
            return None;
        }
    }
    at.pos += 1;
    ahead >>= 8;
    if SPACE && ahead as u8 <= b' ' {
        at.changes += 1;
        if ahead as u8 == b' ' {
            at.pos += 1;
            ahead >>= 8;
        }
        if ahead as u8 <= b' ' {
            at.pos = after_space(body, at.pos);
            ahead = window(body, at.pos);
        }
    }
    Some(ahead)
}

/// The length of the integer at the start of `ahead`, if it is shorter than that and a delimiter follows.
#[inline(always)]
fn short_integer(ahead: u64) -> Option<u32> {
    const EACH: u64 = 0x0101_0101_0101_0101;
    // Digits become 0 to 9. Adding 0x76 carries all other values into the high bit, where those of non-ASCII are.
    let values = ahead ^ (EACH * 0x30);
    let others = (((values & (EACH * 0x7f)) + EACH * 0x76) | values) & (EACH * 0x80);
    let bits = others.trailing_zeros() & !7;
    let after = ahead.unbounded_shr(bits) as u8;
    let has_extra_zero = ahead as u8 == b'0' && bits > 8;
    (matches!(after, b',' | b'}' | b']') && !has_extra_zero).then_some(bits / 8)
}

/// The length of a number without its sign.
#[inline(never)]
fn long_number(body: &[u8], start: u32) -> Option<u32> {
    let mut pos = after_digits(body, start)?;
    if peek(body, start) == Some(b'0') && pos > start + 1 {
        return None;
    }
    if peek(body, pos) == Some(b'.') {
        pos = after_digits(body, pos + 1)?;
    }
    if let Some(b'e' | b'E') = peek(body, pos) {
        let is_signed = matches!(peek(body, pos + 1), Some(b'+' | b'-'));
        pos = after_digits(body, pos + 1 + u32::from(is_signed))?;
    }
    Some(pos - start)
}

/// The end of one or more digits.
fn after_digits(body: &[u8], start: u32) -> Option<u32> {
    let mut pos = start;
    while let Some(b'0'..=b'9') = peek(body, pos) {
        pos += 1;
    }
    (pos > start).then_some(pos)
}
