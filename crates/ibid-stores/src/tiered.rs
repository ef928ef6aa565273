//! Stand-in with the agreed signatures: two stores as one. Replaced by the real one.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use ibid::{
    Observer,
    store::{Store, StoreError},
};

/// What happens while the store that decides is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Nothing is granted.
    Strict,
    /// The first one decides alone.
    Loose,
}

/// The number under which the first store keeps everything.
pub trait Generations: Send + Sync + 'static {
    /// Reads it from the last.
    fn read(&self) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Raises it in the last. Returns what it is now.
    fn raise(&self) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// From now on the first is used under this number. It only goes up: a lower one is ignored.
    fn apply(&self, generation: u64);
}

/// Two stores as one.
pub struct Tiered;

impl Tiered {
    /// `last` decides.
    #[allow(clippy::new_ret_no_self, reason = "a stand-in")]
    pub fn new(
        _first: Arc<dyn Store>, last: Arc<dyn Store>, _mode: Mode, _observer: Arc<dyn Observer>,
        _generations: Option<Arc<dyn Generations>>,
    ) -> Arc<dyn Store> {
        last
    }
}
