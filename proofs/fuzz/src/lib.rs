//! What the fuzzer calls: one module per target, whose `check` takes any bytes and panics if something is wrong with what the
//! product makes of them.
//!
//! `corpora/TARGET` has inputs that the fuzzer found, which the tests run again; `libfuzzer` is the fuzzer.

pub mod config;
pub mod exchange_api;
pub mod form;
pub mod json;
pub mod json_rpc;
pub mod key;
pub mod multipart;
pub mod record;
pub mod recovery;
pub mod resp;
pub mod routes;
pub mod upstream_reply;

/// A target: what it does with an input.
pub type FuzzCheck = fn(&[u8]);

/// The targets by name.
pub const TARGETS: [(&str, FuzzCheck); 12] = [
    ("config", config::check),
    ("exchange_api", exchange_api::check),
    ("form", form::check),
    ("json", json::check),
    ("json_rpc", json_rpc::check),
    ("key", key::check),
    ("multipart", multipart::check),
    ("record", record::check),
    ("recovery", recovery::check),
    ("resp", resp::check),
    ("routes", routes::check),
    ("upstream_reply", upstream_reply::check),
];

/// The target of that name.
///
/// # Errors
///
/// If there is none; says which there are.
pub fn find_target(name: &str) -> Result<FuzzCheck, String> {
    let names = || TARGETS.map(|(name, _)| name).join(", ");
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    found.map(|(_, check)| *check).ok_or_else(|| format!("expected one of {}, got {name:?}", names()))
}
