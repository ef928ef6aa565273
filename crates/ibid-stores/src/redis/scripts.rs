//! The Lua scripts: one per operation. The server runs each atomically, in one round trip.

use std::sync::LazyLock;

use bytes::Bytes;
use redis::Cmd;

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
            RedisScript { body: BODY, digest: LazyLock::new(|| redis::Script::new(BODY).get_hash().to_owned()) }
        };
    )*};
}

scripts! {
    CLAIM = "entry.lua" "index.lua" "claim_new.lua" "common.lua" "claim.lua";
    EXTEND = "entry.lua" "index.lua" "common.lua" "lease.lua" "extend.lua";
    SETTLE = "entry.lua" "index.lua" "settle_done.lua" "common.lua" "lease.lua" "settle.lua";
    WAIT = "entry.lua" "index.lua" "common.lua" "wait.lua";
    GET = "entry.lua" "index.lua" "common.lua" "get.lua";
    RESOLVE = "entry.lua" "index.lua" "common.lua" "resolve.lua";
    FORGET = "entry.lua" "index.lua" "common.lua" "forget.lua";
    REPLACE = "entry.lua" "index.lua" "common.lua" "replace.lua";
    SWEEP = "entry.lua" "sweep.lua";
    COUNTS = "entry.lua" "counts.lua";
    LOOK = "entry.lua" "look.lua";
    UNLOCK = "unlock.lua";
    RESERVE = "reserve.lua";
}

/// A script with its keys and arguments.
#[derive(Debug)]
pub(super) struct ScriptCall {
    pub(super) script: &'static RedisScript,
    pub(super) bucket: u8,
    pub(super) keys: Vec<String>,
    pub(super) args: Vec<Bytes>,
}

impl ScriptCall {
    /// Runs the script in full, after which the server caches it, or by its digest.
    pub(super) fn command(&self, in_full: bool) -> Cmd {
        let (verb, script) = if in_full { ("EVAL", self.script.body) } else { ("EVALSHA", &**self.script.digest) };
        let mut command = redis::cmd(verb);
        command.arg(script).arg(self.keys.len());
        for key in &self.keys {
            command.arg(key);
        }
        for arg in &self.args {
            command.arg(&arg[..]);
        }
        command
    }
}
