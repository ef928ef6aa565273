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
    /// Takes the block at a position, unless it was taken before.
    fn block(&mut self, start: u32, block: &[u8; 64]);
}

/// Ignores blocks.
pub(super) struct NoBlocks;

impl BlockSink for NoBlocks {
    fn block(&mut self, _: u32, _: &[u8; 64]) {}
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
}

impl<'a, 'b, S: BlockSink> BlockScanner<'a, 'b, S> {
    /// Starts at the first block.
    pub(super) fn new(body: &'a [u8], sink: &'b mut S) -> (Self, JsonCursor) {
        let mut scanner = Self { body, sink, is_ascii: true, interruptions: 0, interrupted_quotes: 0 };
        let mut at = JsonCursor { pos: 0, changes: 0, block: 0, quotes: 0 };
        scanner.scan(&mut at);
        (scanner, at)
    }

    #[inline(always)]
    fn next_block(&mut self, at: &mut JsonCursor) -> u64 {
        if at.changes == 0
            && let Some(block) = self.body.get(at.block as usize..).and_then(|rest| rest.first_chunk())
        {
            self.sink.block(at.block, block);
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
    /// It is not really cold, but the reader's registers are kept free of what is needed only here.
    #[cold]
    #[inline(never)]
    fn find_end(&mut self, mut at: JsonCursor) -> (bool, JsonCursor) {
        let mut quotes = self.take_unread(&mut at);
        while quotes == 0 {
            quotes = self.next_block(&mut at);
        }
        // Interruptions before the string do not count.
        self.interruptions &= !(quotes ^ (quotes - 1));
        quotes &= quotes - 1;
        while quotes == 0 {
            if self.interruptions != 0 || at.block as usize >= self.body.len() {
                return (false, at);
            }
            quotes = self.next_block(&mut at);
        }
        let is_plain = self.interruptions & (quotes ^ (quotes - 1)) == 0;
        if is_plain {
            at.pos = at.block + quotes.trailing_zeros() + 1;
            quotes &= quotes - 1;
        }
        self.set_unread(&mut at, quotes);
        (is_plain, at)
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

    /// Finds the end of a string of which everything up to `pos` was read, in the current block or after it. Returns
    /// `None` if the string has escapes or is invalid; [`rewind`](Self::rewind) must follow.
    #[cold]
    #[inline(never)]
    pub(super) fn string_end(&mut self, mut at: JsonCursor, pos: u32) -> Option<(u32, JsonCursor)> {
        let mut quotes = self.take_unread(&mut at);
        while pos >= at.block + 64 {
            quotes = self.next_block(&mut at);
        }
        let ahead = u64::MAX << pos.saturating_sub(at.block);
        quotes &= ahead;
        self.interruptions &= ahead;
        while quotes == 0 {
            if self.interruptions != 0 || at.block as usize >= self.body.len() {
                return None;
            }
            quotes = self.next_block(&mut at);
        }
        let end = at.block + quotes.trailing_zeros() + 1;
        let is_plain = self.interruptions & (quotes ^ (quotes - 1)) == 0;
        self.set_unread(&mut at, quotes);
        is_plain.then_some((end, at))
    }

    /// Moves back to a position.
    #[cold]
    #[inline(never)]
    pub(super) fn rewind(&mut self, mut at: JsonCursor, pos: u32) -> JsonCursor {
        self.take_unread(&mut at);
        at.block = pos & !63;
        self.scan(&mut at);
        self.seek(at, pos)
    }

    /// Moves to a position after texts that were compared as a whole.
    #[inline(always)]
    pub(super) fn advance(&mut self, at: &mut JsonCursor, pos: u32) {
        if self.interruptions != 0 || pos >= at.block + 64 {
            *at = self.seek(*at, pos);
        } else {
            at.quotes &= u64::MAX << (pos - at.block);
            at.pos = pos;
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
    /// The end of the string whose opening quote is at a position, if it has no escapes and both quotes are in the
    /// current block.
    #[inline(always)]
    pub(super) fn near_string_end(&self, pos: u32) -> Option<u32> {
        let ahead = self.quotes & u64::MAX.unbounded_shl(pos + 1 - self.block);
        (ahead != 0).then(|| self.block + ahead.trailing_zeros() + 1)
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
        let is_plain;
        (is_plain, *self) = scanner.find_end(*self);
        is_plain
    }
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
