//! Makes the checksums of a damaged file fit, so that what lies behind them is reached.
//!
//! Follows the docs of the store's modules `format` and `snapshot`; their code is private.

const SECTOR: usize = 512;
const FIRST_BATCH: usize = 4096;
const SHARDS: usize = 1024;
const SLOT: usize = 48;

/// By its name.
pub(super) fn file(name: &str, bytes: &mut [u8]) {
    if name.ends_with(".seg") {
        segment(bytes);
    } else if name == "index.snap" {
        snapshot(bytes);
    }
}

fn segment(bytes: &mut [u8]) {
    if bytes.len() < FIRST_BATCH {
        return;
    }
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(&bytes[..80]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    let salt: [u8; 8] = bytes[48..56].try_into().expect("eight");
    let mut at = FIRST_BATCH;
    while at + 48 <= bytes.len() {
        let length = number(bytes, at + 8);
        if &bytes[at..at + 4] != b"iBat" || at + 48 + length > bytes.len() {
            at += SECTOR;
            continue;
        }
        let (mut from, end) = (at + 48, at + 48 + length);
        while from + 180 <= end {
            let length = number(bytes, from);
            if length < 180 || from + length > end {
                break;
            }
            put(bytes, from + 4, salted(salt, &bytes[from + 8..from + length]));
            from += length;
        }
        put(bytes, at + 4, salted(salt, &bytes[at + 8..end]));
        at += (48 + length).next_multiple_of(SECTOR);
    }
}

fn snapshot(bytes: &mut [u8]) {
    let Some(end) = bytes.len().checked_sub(8) else { return };
    let trailer = number(bytes, end + 4);
    let Some(begin) = end.checked_sub(trailer) else { return };
    let counts = begin + 48;
    if counts + SHARDS * 4 > end {
        return;
    }
    let mut at = 0;
    for shard in 0..SHARDS {
        let block = number(bytes, counts + shard * 4) * SLOT;
        if at + block + 4 > begin {
            break;
        }
        let crc = crc32c::crc32c(&bytes[at..at + block]);
        put(bytes, at + block, crc);
        at += block + 4;
    }
    put(bytes, end, crc32c::crc32c(&bytes[begin..end]));
}

fn number(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four")) as usize
}

fn put(bytes: &mut [u8], at: usize, crc: u32) {
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

fn salted(salt: [u8; 8], bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&salt), bytes)
}
