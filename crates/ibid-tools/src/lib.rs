//! The tools beside the gateway: [`conform`] checks any server with idempotency keys, [`openapi`] annotates an OpenAPI
//! document. Both describe a policy to people, as the gateway does; [`describe`] and [`mod@format`] are that text.

#![allow(missing_docs, reason = "a part of the binary: its items are documented where the name does not say enough")]

use std::io;

use ibid::store::{ErrorKind, StoreError};

pub mod conform;
pub mod describe;
pub mod format;
pub mod openapi;

/// Why a command failed. `Display` is the line that it prints.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// Something is missing or has another state. Nothing was changed.
    #[error("ibid: {0}")]
    Conflict(String),
    #[error("{0}")]
    Failed(String),
    #[error("ibid: {0}")]
    Usage(String),
    /// A setting is invalid. The line names it.
    #[error("{0}")]
    Config(String),
    /// A store or a server cannot be used.
    #[error("ibid: {0}")]
    Unavailable(String),
    #[error("ibid: cannot print: {0}")]
    Output(#[from] io::Error),
}

impl CommandError {
    /// The exit code, from sysexits where it defines one.
    pub fn code(&self) -> u8 {
        match self {
            // The reader closed the pipe, which is not a failure.
            Self::Output(why) if why.kind() == io::ErrorKind::BrokenPipe => 0,
            Self::Conflict(_) | Self::Failed(_) | Self::Output(_) => 1,
            Self::Usage(_) | Self::Config(_) => 64,
            Self::Unavailable(_) => 69,
        }
    }
}

impl From<StoreError> for CommandError {
    fn from(error: StoreError) -> Self {
        let then = if error.kind == ErrorKind::Ambiguous { "; look before you try again" } else { "" };
        Self::Unavailable(format!("{error}{then}"))
    }
}
