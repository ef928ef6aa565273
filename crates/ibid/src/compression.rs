//! Compression of what is remembered: raw DEFLATE, at its fastest. For the stores of this project; may change.

use std::cell::RefCell;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// Not worth it below.
const MIN_INPUT_BYTES: usize = 128;

thread_local! {
    // Their tables are larger than most records: made once per thread.
    static COMPRESSOR: RefCell<Compress> = RefCell::new(Compress::new(Compression::fast(), false));
    static DECOMPRESSOR: RefCell<Decompress> = RefCell::new(Decompress::new(false));
}

/// The same in fewer bytes, if that can be.
pub fn compress(plain: &[u8]) -> Option<Vec<u8>> {
    if plain.len() < MIN_INPUT_BYTES {
        return None;
    }
    // Where it would not become smaller there is no room for it.
    let mut out = Vec::with_capacity(plain.len() - 1);
    COMPRESSOR.with_borrow_mut(|squeezing| {
        squeezing.reset();
        let ended = squeezing.compress_vec(plain, &mut out, FlushCompress::Finish);
        (matches!(ended, Ok(Status::StreamEnd)) && out.len() < plain.len()).then_some(out)
    })
}

/// What [`compress`] was given, which had this length.
pub fn decompress(squeezed: &[u8], length: usize) -> Option<Vec<u8>> {
    // One more, so that what is too long is noticed.
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
