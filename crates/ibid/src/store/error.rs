use std::{error::Error, fmt};

/// A store call that failed. Its [kind](ErrorKind) says what the caller may do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct StoreError {
    /// What the caller may do.
    pub kind: ErrorKind,
    /// Which store it was.
    pub store: &'static str,
    /// Why.
    pub source: Box<dyn Error + Send + Sync>,
}

/// What a caller may do after a failed store call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Nothing was changed: may be tried elsewhere.
    NotApplied,
    /// May or may not have been applied: ask the same store again, with the same token.
    Ambiguous,
    /// What is stored cannot be read. Never answered from.
    Corrupt,
    /// The store is there and refuses: full, read-only, wrong version.
    Rejected,
}

impl StoreError {
    /// A failure of `store`.
    pub fn new(kind: ErrorKind, store: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind, store, source: source.into() }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            ErrorKind::NotApplied => "did not apply the call",
            ErrorKind::Ambiguous => "gave no answer: the call may have been applied",
            ErrorKind::Corrupt => "holds something unreadable",
            ErrorKind::Rejected => "refused the call",
        };
        write!(f, "the {} store {what}: {}", self.store, self.source)
    }
}
