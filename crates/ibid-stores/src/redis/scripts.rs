//! The Lua scripts, for operations that no native command does. The server runs each atomically, in one round trip.

use std::sync::LazyLock;

use super::{connection::RedisCall, resp::decimal};

/// A script and its SHA-1 digest, which EVALSHA uses.
#[derive(Debug)]
pub(super) struct RedisScript {
    body: &'static str,
    digest: LazyLock<String>,
}

macro_rules! scripts {
    ($($(#[$doc:meta])* $name:ident = $($file:literal)+;)*) => {$(
        $(#[$doc])*
        pub(super) static $name: RedisScript = {
            const BODY: &str = concat!($(include_str!(concat!("lua/", $file))),+);
            RedisScript { body: BODY, digest: LazyLock::new(|| sha1_smol::Sha1::from(BODY).digest().to_string()) }
        };
    )*};
}

scripts! {
    CLAIM = "state.lua" "entry.lua" "claim.lua";
    EXTEND = "state.lua" "entry.lua" "lease.lua" "extend.lua";
    SETTLE = "settle_done.lua" "state.lua" "entry.lua" "lease.lua" "settle.lua";
    RESOLVE = "state.lua" "entry.lua" "resolve.lua";
    FORGET = "state.lua" "entry.lua" "forget.lua";
    REPLACE = "state.lua" "entry.lua" "replace.lua";
    LOOK = "state.lua" "look.lua";
    SWEEP = "state.lua" "sweep.lua";
    COUNTS = "state.lua" "counts.lua";
    INDEX = "state.lua" "index.lua";
    UNLOCK = "unlock.lua";
    RESERVE = "reserve.lua";
}

impl RedisScript {
    /// Runs the script in full, after which the server caches it, or by its digest.
    pub(super) fn call(&self, form: ScriptForm, keys: &[&[u8]], args: &[&[u8]]) -> RedisCall {
        let (verb, script) = match form {
            ScriptForm::Digest => (&b"EVALSHA"[..], self.digest.as_bytes()),
            ScriptForm::Full => (&b"EVAL"[..], self.body.as_bytes()),
        };
        let mut digits = [0; 20];
        let mut all = Vec::with_capacity(3 + keys.len() + args.len());
        all.extend([verb, script, decimal(keys.len() as u64, &mut digits)]);
        all.extend_from_slice(keys);
        all.extend_from_slice(args);
        RedisCall::new(&all)
    }
}

/// How a script is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScriptForm {
    Digest,
    Full,
}
