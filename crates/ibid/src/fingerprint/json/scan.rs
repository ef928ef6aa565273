//! Finds the quotes of a JSON text, 64 bytes at a time.
//!
//! Invariant: all quotes before the reader's position were taken out of the masks, so the first one in them is at or
//! after it.

/// The reader's position, and what is known of the text ahead. Functions that take a reference to it are inlined, so
/// that its fields stay in registers: reading takes twice the time if they do not.
#[derive(Clone, Copy)]
pub(super) struct JsonCursor {
    pub(super) pos: u32,
    /// The number of places so far that are not canonical. If it does not change while a value is read, the value's
    /// source is canonical.
    pub(super) changes: u32,
    /// The start of the current block.
    block: u32,
    /// The quotes of the current block that were not read yet, one bit for each byte. Zero if interruptions are left.
    quotes: u64,
}

/// Receives the blocks of a body as they are read, for as long as it is canonical.
pub(super) trait BlockSink {
    fn block(&mut self, block: &[u8; 64]);
}

/// Ignores blocks.
pub(super) struct NoBlocks;

impl BlockSink for NoBlocks {
    fn block(&mut self, _: &[u8; 64]) {}
}

/// Scans a body block by block.
pub(super) struct BlockScanner<'a, 'b, S> {
    body: &'a [u8],
    sink: &'b mut S,
    /// Whether everything so far is ASCII.
    pub(super) is_ascii: bool,
    /// The backslashes and control characters of the current block that are left, one bit for each byte.
    interruptions: u64,
    /// The quotes of the current block that were not read yet, if interruptions are left.
    interrupted_quotes: u64,
    /// What [`JsonCursor::quotes`] becomes after a move to another block.
    pub(super) moved_quotes: u64,
}

impl<'a, 'b, S: BlockSink> BlockScanner<'a, 'b, S> {
    /// Starts at the first block.
    pub(super) fn new(body: &'a [u8], sink: &'b mut S) -> (Self, JsonCursor) {
        let mut scanner = Self { body, sink, is_ascii: true, interruptions: 0, interrupted_quotes: 0, moved_quotes: 0 };
        let mut at = JsonCursor { pos: 0, changes: 0, block: 0, quotes: 0 };
        scanner.scan(&mut at);
        (scanner, at)
    }

    #[inline(always)]
    fn next_block(&mut self, at: &mut JsonCursor) -> u64 {
        if at.changes == 0
            && let Some(block) = self.body.get(at.block as usize..).and_then(|rest| rest.first_chunk())
        {
            self.sink.block(block);
        }
        at.block += 64;
        self.scan(at);
        self.take_unread(at)
    }

    #[inline(always)]
    fn scan(&mut self, at: &mut JsonCursor) {
        let rest = self.body.get(at.block as usize..).unwrap_or_default();
        let mut padded;
        let block = match rest.first_chunk() {
            Some(block) => block,
            None => {
                padded = [b' '; 64];
                padded[..rest.len()].copy_from_slice(rest);
                &padded
            }
        };
        self.interruptions = 0;
        if !is_plain(block) {
            self.interruptions = interruptions(block);
            self.is_ascii &= block.is_ascii();
        }
        self.set_unread(at, quotes(block));
    }

    /// Does the work of [`JsonCursor::plain_string`] in all other cases: the string ends in another block, or the block
    /// has interruptions.
    ///
    /// It is not really cold, but the reader's registers are kept free of what is needed only here. The cursor's parts
    /// are passed in registers: one that is written in parts and read as a whole would stall the processor.
    #[cold]
    #[inline(never)]
    fn find_end(&mut self, changes: u32, block: u32, quotes: u64) -> StringEnd {
        let mut at = JsonCursor { pos: 0, changes, block, quotes };
        let mut quotes = self.take_unread(&mut at);
        while quotes == 0 {
            quotes = self.next_block(&mut at);
        }
        // Interruptions before the string do not count.
        self.interruptions &= !(quotes ^ (quotes - 1));
        quotes &= quotes - 1;
        while quotes == 0 && self.interruptions == 0 && (at.block as usize) < self.body.len() {
            quotes = self.next_block(&mut at);
        }
        let is_plain = quotes != 0 && self.interruptions & (quotes ^ (quotes - 1)) == 0;
        let end = if is_plain { Some(at.block + quotes.trailing_zeros() + 1) } else { None };
        self.set_unread(&mut at, if is_plain { quotes & (quotes - 1) } else { quotes });
        self.moved_quotes = at.quotes;
        StringEnd { end, block: at.block }
    }

    fn take_unread(&mut self, at: &mut JsonCursor) -> u64 {
        // One of them is zero.
        std::mem::take(&mut at.quotes) | std::mem::take(&mut self.interrupted_quotes)
    }

    fn set_unread(&mut self, at: &mut JsonCursor, quotes: u64) {
        if self.interruptions == 0 {
            at.quotes = quotes;
        } else {
            self.interrupted_quotes = quotes;
        }
    }

    /// Finds the end of a string of which everything up to `pos` was read, in the current block or after it. If the
    /// string has escapes or is invalid, [`rewind`](Self::rewind) must follow.
    #[cold]
    #[inline(never)]
    pub(super) fn string_end(&mut self, block: u32, quotes: u64, pos: u32) -> StringEnd {
        let mut at = JsonCursor { pos, changes: 0, block, quotes };
        let mut quotes = self.take_unread(&mut at);
        while pos >= at.block + 64 {
            quotes = self.next_block(&mut at);
        }
        let ahead = u64::MAX << pos.saturating_sub(at.block);
        quotes &= ahead;
        self.interruptions &= ahead;
        while quotes == 0 && self.interruptions == 0 && (at.block as usize) < self.body.len() {
            quotes = self.next_block(&mut at);
        }
        let is_plain = quotes != 0 && self.interruptions & (quotes ^ (quotes - 1)) == 0;
        let end = if is_plain { Some(at.block + quotes.trailing_zeros() + 1) } else { None };
        self.set_unread(&mut at, quotes);
        self.moved_quotes = at.quotes;
        StringEnd { end, block: at.block }
    }

    /// Moves back to a position, which all quotes that were read are after.
    #[cold]
    #[inline(never)]
    pub(super) fn rewind(&mut self, mut at: JsonCursor) -> JsonCursor {
        self.take_unread(&mut at);
        at.block = at.pos & !63;
        self.scan(&mut at);
        self.seek(at, at.pos)
    }

    /// Moves to a position after texts that were compared as a whole. `block` and `quotes` are those of the last string.
    #[inline(always)]
    pub(super) fn advance(&mut self, at: &mut JsonCursor, block: u32, quotes: u64, pos: u32) {
        if self.interruptions != 0 || pos >= block + 64 {
            *at = self.seek(JsonCursor { pos, changes: at.changes, block, quotes }, pos);
        } else {
            (at.pos, at.block, at.quotes) = (pos, block, quotes & u64::MAX << (pos - block));
        }
    }

    /// Moves to a position after a string with escapes.
    #[cold]
    #[inline(never)]
    pub(super) fn seek(&mut self, mut at: JsonCursor, pos: u32) -> JsonCursor {
        at.pos = pos;
        let mut quotes = self.take_unread(&mut at);
        while pos >= at.block + 64 {
            quotes = self.next_block(&mut at);
        }
        let ahead = u64::MAX << pos.saturating_sub(at.block);
        self.interruptions &= ahead;
        self.set_unread(&mut at, quotes & ahead);
        at
    }
}

impl JsonCursor {
    /// The current block, and its quotes that were not read yet.
    #[inline(always)]
    pub(super) fn block(&self) -> (u32, u64) {
        (self.block, self.quotes)
    }

    /// Copies the parts one by one, see [`BlockScanner::string_end`].
    #[inline(always)]
    pub(super) fn set(&mut self, to: &Self) {
        (self.pos, self.changes, self.block, self.quotes) = (to.pos, to.changes, to.block, to.quotes);
    }

    /// Reads a string from its opening quote, which is at the position, and returns whether it has no escapes and is
    /// valid. If not, [`seek`](BlockScanner::seek) must follow.
    #[inline(always)]
    pub(super) fn plain_string(&mut self, scanner: &mut BlockScanner<'_, '_, impl BlockSink>) -> bool {
        // The first quote is the opening one.
        let closing = self.quotes & self.quotes.wrapping_sub(1);
        if closing != 0 {
            self.quotes = closing & (closing - 1);
            self.pos = self.block + closing.trailing_zeros() + 1;
            return true;
        }
        let found = scanner.find_end(self.changes, self.block, self.quotes);
        (self.block, self.quotes) = (found.block, scanner.moved_quotes);
        if let Some(end) = found.end {
            self.pos = end;
        }
        found.end.is_some()
    }
}

/// The end of a string without escapes, and the block that it is in.
pub(super) struct StringEnd {
    pub(super) end: Option<u32>,
    pub(super) block: u32,
}

/// The end of the string whose opening quote is at a position, if both quotes are in this block.
#[inline(always)]
pub(super) fn near_string_end(block: u32, quotes: u64, pos: u32) -> Option<u32> {
    let ahead = quotes & u64::MAX.unbounded_shl(pos + 1 - block);
    (ahead != 0).then(|| block + ahead.trailing_zeros() + 1)
}

// These are not inlined, because the compiler then vectorizes them less well.

#[inline(never)]
fn quotes(block: &[u8; 64]) -> u64 {
    mask(block, |byte| byte == b'"')
}

#[inline(never)]
fn interruptions(block: &[u8; 64]) -> u64 {
    mask(block, |byte| (byte == b'\\') | (byte < 0x20))
}

/// Whether a block has only ASCII, and no interruptions.
#[inline(never)]
fn is_plain(block: &[u8; 64]) -> bool {
    let mut found = [0; 16];
    let (lanes, _) = block.as_chunks::<16>();
    for lane in lanes {
        for (found, &byte) in found.iter_mut().zip(lane) {
            *found |= if (byte == b'\\') | !(0x20..0x80).contains(&byte) { 0xff } else { 0 };
        }
    }
    found.iter().fold(0, |all, found| all | found) == 0
}

/// One bit for each byte. Each byte that is found contributes its bit, and the sum of eight is a byte of the result.
#[inline(always)]
fn mask(block: &[u8; 64], is_found: impl Fn(u8) -> bool) -> u64 {
    let mut bits = [0; 64];
    for (i, bit) in bits.iter_mut().enumerate() {
        *bit = if is_found(block[i]) { 1 << (i % 8) } else { 0 };
    }
    let (eights, _) = bits.as_chunks::<8>();
    let sum = |eight: &[u8; 8]| u64::from_le_bytes(*eight).wrapping_mul(0x0101_0101_0101_0101) >> 56;
    eights.iter().enumerate().fold(0, |mask, (i, eight)| mask | sum(eight) << (8 * i))
}
