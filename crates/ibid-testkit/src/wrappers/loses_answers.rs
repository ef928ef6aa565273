use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, Counts, Cursor, End, ErrorKind, Fence, Filter, Held, Lease, Operators, Page, Promise,
    StoreError, StoreFuture, Swept,
};

use parking_lot::Mutex;

use super::{Answer, Call, failure, store_around};

/// A store whose answers get lost, chosen by a seed: some calls are applied and answered with
/// [`ErrorKind::Ambiguous`], some are not applied and answered with that or with [`ErrorKind::NotApplied`].
///
/// Spared are the answers that a repeated call cannot give again: [`Held::Restored`], and those of operators' changes,
/// which carry no token (these are only ever not applied).
#[derive(Debug)]
pub struct LosesAnswers<S> {
    inner: S,
    one_in: u64,
    dice: Mutex<Dice>,
}

#[derive(Debug)]
struct Dice {
    state: u64,
    lost: u64,
}

enum Fate {
    Answered,
    AppliedAndLost,
    Lost,
    NotApplied,
}

impl<S> LosesAnswers<S> {
    /// Around `inner`; one call in `one_in` goes wrong.
    pub fn new(inner: S, seed: u64, one_in: u32) -> Self {
        let dice = Dice { state: seed | 1, lost: 0 };
        Self { inner, one_in: u64::from(one_in.max(1)), dice: Mutex::new(dice) }
    }

    /// How many calls went wrong so far.
    pub fn lost(&self) -> u64 {
        self.dice.lock().lost
    }

    fn fate(&self) -> Fate {
        let mut dice = self.dice.lock();
        // xorshift64*: small, seeded, good enough to choose victims.
        dice.state ^= dice.state >> 12;
        dice.state ^= dice.state << 25;
        dice.state ^= dice.state >> 27;
        let roll = dice.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        if !roll.is_multiple_of(self.one_in) {
            return Fate::Answered;
        }
        dice.lost += 1;
        match (roll / self.one_in) % 4 {
            0 | 1 => Fate::AppliedAndLost,
            2 => Fate::Lost,
            _ => Fate::NotApplied,
        }
    }

    async fn around<'a, T: Answer>(
        &'a self, call: Call, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        match (self.fate(), call) {
            (Fate::Answered, _) => make().await,
            (Fate::NotApplied, _) | (_, Call::Change) => Err(failure(ErrorKind::NotApplied, "not sent, as told")),
            (Fate::Lost, _) => Err(failure(ErrorKind::Ambiguous, "the call was lost, as told")),
            (Fate::AppliedAndLost, _) => match make().await {
                Ok(answer) if answer.is_repeatable() => {
                    Err(failure(ErrorKind::Ambiguous, "the answer was lost, as told"))
                }
                spared => spared,
            },
        }
    }
}

store_around!(LosesAnswers);
