//! Random numbers that follow from a seed.

use std::time::Duration;

use parking_lot::Mutex;

/// Shared by all parts of a world. The generator is SplitMix64.
#[derive(Debug)]
pub struct SeededRandom(Mutex<u64>);

impl SeededRandom {
    /// Creates the generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }

    /// A number below `end`.
    pub fn below(&self, end: u64) -> u64 {
        let mut state = self.0.lock();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = *state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end.max(1)
    }

    /// Whether something happens that does so this often in a thousand times.
    pub fn happens(&self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// A duration of up to so many milliseconds, in microseconds.
    pub fn millis(&self, most: u64) -> Duration {
        Duration::from_micros(self.below(most * 1000))
    }
}
