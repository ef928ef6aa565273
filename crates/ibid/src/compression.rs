//! Compresses records with raw DEFLATE at its fastest level. For this project's stores; the API may change.

use std::cell::RefCell;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// Inputs below this size are not compressed.
const MIN_INPUT_BYTES: usize = 128;

thread_local! {
    // The state is larger than most records, so it is allocated once per thread.
    static COMPRESSOR: RefCell<Compress> = RefCell::new(Compress::new(Compression::fast(), false));
    static DECOMPRESSOR: RefCell<Decompress> = RefCell::new(Decompress::new(false));
}

/// Compresses `plain`. Returns `None` if the result would not be smaller.
pub fn compress(plain: &[u8]) -> Option<Vec<u8>> {
    if plain.len() < MIN_INPUT_BYTES {
        return None;
    }
    // Limits the output: compression fails unless it saves at least one byte.
    let mut out = Vec::with_capacity(plain.len() - 1);
    COMPRESSOR.with_borrow_mut(|squeezing| {
        squeezing.reset();
        let ended = squeezing.compress_vec(plain, &mut out, FlushCompress::Finish);
        (matches!(ended, Ok(Status::StreamEnd)) && out.len() < plain.len()).then_some(out)
    })
}

/// Decompresses the result of [`compress`], whose input had this length.
pub fn decompress(squeezed: &[u8], length: usize) -> Option<Vec<u8>> {
    // One byte more, to detect output that is too long.
    let mut out = Vec::with_capacity(length + 1);
    DECOMPRESSOR.with_borrow_mut(|spreading| {
        spreading.reset(false);
        let ended = spreading.decompress_vec(squeezed, &mut out, FlushDecompress::Finish);
        (matches!(ended, Ok(Status::StreamEnd)) && out.len() == length && spreading.total_in() == squeezed.len() as u64)
            .then_some(out)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_smaller_is_and_comes_back() {
        for length in [128, 1000, 1 << 20] {
            let plain: Vec<u8> = b"{\"id\":17,\"paid\":true}".iter().copied().cycle().take(length).collect();
            let small = compress(&plain).unwrap();
            assert!(small.len() < plain.len() / 2, "{length}: {}", small.len());
            assert_eq!(decompress(&small, length).unwrap(), plain);
            assert_eq!(decompress(&small, length - 1), None);
            assert_eq!(decompress(&small, length + 1), None);
            assert_eq!(decompress(&small[..small.len() - 1], length), None);
        }
    }

    #[test]
    fn what_cannot_is_left_alone() {
        let mut noise = vec![0; 4096];
        getrandom::fill(&mut noise).unwrap();
        assert_eq!(compress(&noise), None);
        assert_eq!(compress(&[0; 100]), None);
        assert_eq!(decompress(&noise, 4096).map(|_| ()), None);
    }
}
