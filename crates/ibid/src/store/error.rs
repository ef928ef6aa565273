use std::{error::Error, fmt};

/// A failed store call. Its [kind](ErrorKind) tells how the caller may proceed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub struct StoreError {
    /// How the caller may proceed.
    pub kind: ErrorKind,
    /// The name of the store.
    pub store: &'static str,
    /// The underlying error.
    pub source: Box<dyn Error + Send + Sync>,
}

/// How a caller may proceed after a failed store call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Nothing was changed; another store may be tried.
    NotApplied,
    /// The call may have been applied. Repeat it at the same store with the same token.
    Ambiguous,
    /// The stored data cannot be read and must not be used for an answer.
    Corrupt,
    /// The store is reachable and refuses the call: it is full, read-only or of the wrong version.
    Rejected,
}

impl StoreError {
    /// Creates an error of `store`.
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
