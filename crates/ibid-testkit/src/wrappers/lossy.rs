use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence, Guarantees, Lease,
    ListCursor, SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};

use parking_lot::Mutex;

use super::{StoreAnswer, StoreCallKind, injected_error, store_around};

/// A store that loses calls and outcomes, chosen by a seed: some calls are applied and return
/// [`ErrorKind::Ambiguous`]; some are not applied and return that or [`ErrorKind::NotApplied`].
///
/// It never loses outcomes that a repeated call cannot return again: [`SettleOutcome::Restored`], and those of
/// operators' changes, which have no token (these calls are only ever not applied).
#[derive(Debug)]
pub struct LossyStore<S> {
    inner: S,
    one_in: u64,
    random: Mutex<LossRandom>,
}

#[derive(Debug)]
struct LossRandom {
    state: u64,
    lost_calls: u64,
}

enum CallFate {
    Answered,
    AppliedAnswerLost,
    CallLost,
    NotApplied,
}

impl<S> LossyStore<S> {
    /// Wraps `inner`; one call in `one_in` fails.
    pub fn new(inner: S, seed: u64, one_in: u32) -> Self {
        let dice = LossRandom { state: seed | 1, lost_calls: 0 };
        Self { inner, one_in: u64::from(one_in.max(1)), random: Mutex::new(dice) }
    }

    /// The number of failed calls so far.
    pub fn lost_calls(&self) -> u64 {
        self.random.lock().lost_calls
    }

    fn next_fate(&self) -> CallFate {
        let mut dice = self.random.lock();
        // xorshift64*: small, seeded, random enough to choose calls.
        dice.state ^= dice.state >> 12;
        dice.state ^= dice.state << 25;
        dice.state ^= dice.state >> 27;
        let roll = dice.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        if !roll.is_multiple_of(self.one_in) {
            return CallFate::Answered;
        }
        dice.lost_calls += 1;
        match (roll / self.one_in) % 4 {
            0 | 1 => CallFate::AppliedAnswerLost,
            2 => CallFate::CallLost,
            _ => CallFate::NotApplied,
        }
    }

    async fn around<'a, T: StoreAnswer>(
        &'a self, call: StoreCallKind, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        match (self.next_fate(), call) {
            (CallFate::Answered, _) => make().await,
            (CallFate::NotApplied, _) | (_, StoreCallKind::AdminChange) => {
                Err(injected_error(ErrorKind::NotApplied, "not sent, as told"))
            }
            (CallFate::CallLost, _) => Err(injected_error(ErrorKind::Ambiguous, "the call was lost, as told")),
            (CallFate::AppliedAnswerLost, _) => match make().await {
                Ok(answer) if answer.is_repeatable() => {
                    Err(injected_error(ErrorKind::Ambiguous, "the answer was lost, as told"))
                }
                spared => spared,
            },
        }
    }
}

store_around!(LossyStore);
