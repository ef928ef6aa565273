//! The generation number in the names of all Redis keys while PostgreSQL is the authority.
//!
//! A forget that cannot reach Redis raises the number in PostgreSQL. Entries of earlier generations in Redis are then
//! ignored.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use ibid::store::StoreError;
use parking_lot::Mutex;

use crate::{postgres::Postgres, redis::Redis, tiered::GenerationCounter};

pub(super) struct PostgresGeneration {
    front: Arc<Redis>,
    authority: Arc<Postgres>,
    /// The highest generation applied. Locked while one is applied, so that a lower one never follows it.
    highest_applied: Mutex<u64>,
}

impl PostgresGeneration {
    pub(super) fn new(front: Arc<Redis>, authority: Arc<Postgres>) -> Self {
        Self { front, authority, highest_applied: Mutex::new(0) }
    }
}

impl GenerationCounter for PostgresGeneration {
    fn read(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(self.authority.generation())
    }

    fn raise(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(self.authority.raise_generation())
    }

    fn apply(&self, generation: u64) {
        let mut applied = self.highest_applied.lock();
        if generation > *applied {
            *applied = generation;
            self.front.set_generation(generation);
        }
    }
}
