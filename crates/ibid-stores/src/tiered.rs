//! Stand-in with the agreed signatures: two stores as one. Replaced by the real one.

use std::sync::Arc;

use ibid::{Observer, store::Store};

/// What happens while the store that decides is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Nothing is granted.
    Strict,
    /// The first one decides alone.
    Loose,
}

/// Tells apart what the first store held before and after a forget that it missed.
pub trait Generations: Send + Sync {}

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
