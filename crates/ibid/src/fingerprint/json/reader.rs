//! Parses a JSON document without copying it: validates it and records its members.
//!
//! Invariant: the result is a valid [`JsonDocument`] or nothing. The reader makes one pass, in linear time except for
//! sorting names, with recursion limited by [`MAX_JSON_DEPTH`].
//!
//! Example: of `{"b":[1,2],"a":0}`, the array is recorded as one text, because it is already canonical; the object gets
//! a node for each of its members.

use super::NameEquality;
use super::document::{JsonDocument, JsonKind, JsonNode, JsonSpan, JsonValue, bytes};
use super::sort;
use super::text::{self, SpecialBytes};

/// The maximum depth of a document with a canonical form. It bounds the recursion here and in the writer; real requests
/// stay far below.
pub(super) const MAX_JSON_DEPTH: usize = 128;

impl<'a> JsonDocument<'a> {
    /// Reads a document. With `every_node`, each member and element gets a node, for looking into it. `names` defines
    /// which names are equal.
    pub(super) fn read(body: &'a [u8], every_node: bool, names: NameEquality) -> Option<Self> {
        JsonReader::new(body, every_node, names)?.document()
    }
}

/// The position of a member of the top-level object.
pub(super) enum MemberPosition {
    /// The span of the member's value.
    Present(JsonSpan),
    /// The member does not exist; a new one can be inserted here. `first` if the object is empty.
    Absent { at: usize, first: bool },
}

/// Finds a member of an object by the canonical text of its name.
pub(super) fn find_member(body: &[u8], name: &[u8]) -> Option<MemberPosition> {
    // Ensures everything that the steps below rely on.
    JsonDocument::read(body, false, NameEquality::Exact)?;
    let mut reader = JsonReader::new(body, false, NameEquality::Exact)?;
    reader.skip_space();
    reader.expect(b'{')?;
    let mut place = MemberPosition::Absent { at: reader.pos, first: true };
    reader.skip_space();
    while reader.peek()? != b'}' {
        let found = reader.string()?;
        let found = bytes(reader.body, &reader.rewritten, found) == name;
        reader.colon()?;
        let start = reader.pos as u32;
        reader.value(1)?;
        if found {
            return Some(MemberPosition::Present(JsonSpan { start, end: reader.pos as u32 }));
        }
        place = MemberPosition::Absent { at: reader.pos, first: false };
        reader.skip_space();
        if reader.peek()? == b',' {
            reader.pos += 1;
            reader.skip_space();
        }
    }
    Some(place)
}

struct JsonReader<'a> {
    source: &'a str,
    body: &'a [u8],
    pos: usize,
    specials: SpecialBytes<'a>,
    rewritten: Vec<u8>,
    /// The nodes of all arrays and objects that are not closed yet.
    open: Vec<JsonNode>,
    /// The nodes of closed arrays and objects, grouped.
    closed: Vec<JsonNode>,
    /// The number of non-canonical places so far. If it does not change while a value is read, the value's source is
    /// canonical.
    noncanonical_count: usize,
    every_node: bool,
    names: NameEquality,
}

impl<'a> JsonReader<'a> {
    fn new(body: &'a [u8], every_node: bool, names: NameEquality) -> Option<Self> {
        // The ends of a span have 31 bits, and cover two buffers.
        if body.len() >= 1 << 30 {
            return None;
        }
        Some(JsonReader {
            source: std::str::from_utf8(body).ok()?,
            body,
            pos: 0,
            specials: SpecialBytes::new(body),
            rewritten: Vec::new(),
            open: Vec::with_capacity(32),
            closed: Vec::with_capacity(body.len() / 8),
            noncanonical_count: 0,
            every_node,
            names,
        })
    }

    fn document(mut self) -> Option<JsonDocument<'a>> {
        self.skip_space();
        let root = self.value(0)?;
        self.skip_space();
        (self.pos == self.body.len()).then_some(JsonDocument {
            source: self.source,
            rewritten: self.rewritten,
            nodes: self.closed,
            root,
        })
    }

    /// Reads the value at the current position, at this depth.
    #[inline(always)]
    fn value(&mut self, depth: usize) -> Option<JsonValue> {
        match self.peek()? {
            b'"' => self.string().map(|text| JsonValue::new(JsonKind::Text, text)),
            b'{' if depth < MAX_JSON_DEPTH => self.object(depth + 1),
            b'[' if depth < MAX_JSON_DEPTH => self.array(depth + 1),
            other => self.read_bare(other),
        }
    }

    /// Reads a scalar that is not a string.
    fn read_bare(&mut self, first: u8) -> Option<JsonValue> {
        match first {
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.literal(b"true"),
            b'f' => self.literal(b"false"),
            b'n' => self.literal(b"null"),
            _ => None,
        }
    }

    fn object(&mut self, depth: usize) -> Option<JsonValue> {
        let (start, first, changes) = (self.pos, self.open.len(), self.noncanonical_count);
        let mut sorted = true;
        self.pos += 1;
        self.skip_space();
        if self.peek()? == b'}' {
            self.pos += 1;
            return Some(self.close(start, first, changes, JsonKind::Object));
        }
        loop {
            let name = self.string()?;
            let prefix = sort::prefix(self.body, &self.rewritten, name);
            self.colon()?;
            let value = self.value(depth)?;
            let last = self.open[first..].last();
            sorted = sorted && sort::sorts_after(self.body, &self.rewritten, last, prefix, name);
            self.open.push(JsonNode { prefix, name, value });
            if !self.has_more(b'}')? {
                break;
            }
        }
        if sorted {
            return Some(self.close(start, first, changes, JsonKind::Object));
        }
        self.noncanonical_count += 1;
        self.close_sorted(first)
    }

    /// Closes the innermost object, whose members are not sorted. Returns `None` if two have the same name.
    fn close_sorted(&mut self, first: usize) -> Option<JsonValue> {
        let start = self.closed.len() as u32;
        let members = &mut self.open[first..];
        if self.names == NameEquality::IgnoreCase
            && sort::has_case_insensitive_duplicates(self.body, &self.rewritten, members)
        {
            return None;
        }
        sort::append_sorted(self.body, &self.rewritten, members, &mut self.closed)?;
        self.open.truncate(first);
        let end = self.closed.len() as u32;
        Some(JsonValue::new(JsonKind::Object, JsonSpan { start, end }))
    }

    fn array(&mut self, depth: usize) -> Option<JsonValue> {
        let (start, first, changes) = (self.pos, self.open.len(), self.noncanonical_count);
        self.pos += 1;
        self.skip_space();
        if self.peek()? == b']' {
            self.pos += 1;
            return Some(self.close(start, first, changes, JsonKind::Array));
        }
        loop {
            let value = self.value(depth)?;
            self.item(first, value);
            if !self.has_more(b']')? {
                break;
            }
        }
        Some(self.close(start, first, changes, JsonKind::Array))
    }

    /// Records an element. If only a comma separates it from its predecessor, one node covers both, which saves memory
    /// for long arrays of numbers.
    fn item(&mut self, first: usize, value: JsonValue) {
        if !self.every_node
            && value.kind() == JsonKind::Text
            && let Some(last) = self.open[first..].last_mut()
            && last.value.kind() == JsonKind::Text
            && last.value.span().end + 1 == value.span().start
            && (value.span().start as usize) < self.body.len()
        {
            let JsonSpan { start, .. } = last.value.span();
            last.value = JsonValue::new(JsonKind::Text, JsonSpan { start, end: value.span().end });
            return;
        }
        self.open.push(JsonNode { prefix: 0, name: JsonSpan { start: 0, end: 0 }, value });
    }

    /// Closes the innermost array or object, which started at `start`.
    fn close(&mut self, start: usize, first: usize, changes: usize, kind: JsonKind) -> JsonValue {
        if self.noncanonical_count == changes && !self.every_node {
            self.open.truncate(first);
            return self.text(start);
        }
        let from = self.closed.len() as u32;
        self.closed.extend_from_slice(&self.open[first..]);
        self.open.truncate(first);
        JsonValue::new(kind, JsonSpan { start: from, end: self.closed.len() as u32 })
    }

    /// Reads a string and returns its canonical text with its quotes.
    #[inline(always)]
    fn string(&mut self) -> Option<JsonSpan> {
        if self.peek()? != b'"' {
            return None;
        }
        self.specials.next(self.pos);
        let end = self.specials.next(self.pos + 1);
        if *self.body.get(end)? == b'"' {
            let start = self.pos as u32;
            self.pos = end + 1;
            return Some(JsonSpan { start, end: end as u32 + 1 });
        }
        self.string_with_escapes()
    }

    #[cold]
    fn string_with_escapes(&mut self) -> Option<JsonSpan> {
        let source = &self.body[self.pos..];
        let before = self.rewritten.len();
        let size = text::rewrite(source, &mut self.rewritten)?;
        let (start, end) = if self.rewritten[before..] == source[..size] {
            self.rewritten.truncate(before);
            (self.pos, self.pos + size)
        } else {
            self.noncanonical_count += 1;
            let offset = self.body.len();
            (offset + before, offset + self.rewritten.len())
        };
        self.pos += size;
        Some(JsonSpan { start: start as u32, end: end as u32 })
    }

    fn number(&mut self) -> Option<JsonValue> {
        let start = self.pos;
        if self.peek()? == b'-' {
            self.pos += 1;
        }
        if self.peek()? == b'0' {
            self.pos += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.pos += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.pos += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.pos += 1;
            }
            self.digits()?;
        }
        Some(self.text(start))
    }

    /// Skips one or more digits.
    fn digits(&mut self) -> Option<()> {
        let start = self.pos;
        while let Some(b'0'..=b'9') = self.peek() {
            self.pos += 1;
        }
        (self.pos > start).then_some(())
    }

    #[inline(always)]
    fn literal(&mut self, literal: &[u8]) -> Option<JsonValue> {
        let start = self.pos;
        self.pos += literal.len();
        (self.body.get(start..self.pos)? == literal).then(|| self.text(start))
    }

    /// Skips the colon after a name, and the space around it.
    #[inline(always)]
    fn colon(&mut self) -> Option<()> {
        // Testing for the likely case first saves the test for space.
        if self.peek()? != b':' {
            self.skip_space();
        }
        self.expect(b':')?;
        self.skip_space();
        Some(())
    }

    /// Skips the comma (returns `true`) or the end (`false`) after a member, and the space around it.
    #[inline(always)]
    fn has_more(&mut self, end: u8) -> Option<bool> {
        let mut byte = self.peek()?;
        if byte <= b' ' {
            self.skip_space();
            byte = self.peek()?;
        }
        self.pos += 1;
        if byte == b',' {
            self.skip_space();
            return Some(true);
        }
        (byte == end).then_some(false)
    }

    #[inline(always)]
    fn skip_space(&mut self) {
        if let Some(0..=b' ') = self.peek() {
            self.skip_some_space();
        }
    }

    fn skip_some_space(&mut self) {
        self.noncanonical_count += 1;
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.pos += 1;
        }
    }

    #[inline(always)]
    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.pos += 1)
    }

    #[inline(always)]
    fn peek(&self) -> Option<u8> {
        self.body.get(self.pos).copied()
    }

    /// The text from `start` to the current position.
    #[inline(always)]
    fn text(&self, start: usize) -> JsonValue {
        JsonValue::new(JsonKind::Text, JsonSpan { start: start as u32, end: self.pos as u32 })
    }
}
