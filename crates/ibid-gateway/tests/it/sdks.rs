//! The SDKs under `clients/`, each in an app of its own language, run the scenarios that the gateway runs.

mod go;
mod node;
mod php;
pub(crate) mod python;
