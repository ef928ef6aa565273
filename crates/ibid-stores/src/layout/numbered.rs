//! The number under which a Redis keeps everything while a PostgreSQL beside it decides.
//!
//! A forget that cannot reach Redis raises it in PostgreSQL: whatever Redis holds under the old number is then no
//! longer looked at.

use std::{fmt, sync::Arc};

use futures_util::future::BoxFuture;
use ibid::store::StoreError;
use parking_lot::Mutex;

use crate::{postgres::Postgres, redis::Redis, tiered::Generations};

pub(super) struct Numbered {
    first: Arc<Redis>,
    last: Arc<Postgres>,
    /// The highest that was applied. Locked while one is applied, so that a lower one never comes after it.
    applied: Mutex<u64>,
}

impl Numbered {
    pub(super) fn new(first: Arc<Redis>, last: Arc<Postgres>) -> Self {
        Self { first, last, applied: Mutex::new(0) }
    }
}

impl Generations for Numbered {
    fn read(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(self.last.generation())
    }

    fn raise(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(self.last.raise_generation())
    }

    fn apply(&self, generation: u64) {
        let mut applied = self.applied.lock();
        if generation > *applied {
            *applied = generation;
            self.first.set_generation(generation);
        }
    }
}

impl fmt::Debug for Numbered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numbered").field("applied", &*self.applied.lock()).finish_non_exhaustive()
    }
}
