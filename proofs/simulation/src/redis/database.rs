//! The keys of a simulated Redis, and the commands on them that the client and its scripts use.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::resp::ServerReply;

/// Keys by name. A copy is a replica.
#[derive(Debug, Clone, Default)]
pub struct RedisDatabase {
    keys: BTreeMap<Bytes, StoredKey>,
}

#[derive(Debug, Clone)]
struct StoredKey {
    value: StoredValue,
    /// In milliseconds of the server's clock.
    expires_at: Option<u64>,
}

#[derive(Debug, Clone)]
enum StoredValue {
    Text(Bytes),
    List(Vec<Bytes>),
    Scores(BTreeMap<Bytes, f64>),
}

/// What a command needs to know of its server, and what it leaves behind.
#[derive(Debug, Clone, Default)]
pub struct CommandContext {
    /// The server's clock, in microseconds.
    pub now: u64,
    /// Whether the server has no memory left: commands that need some are refused.
    pub is_full: bool,
    /// Whether the server is a replica.
    pub is_read_only: bool,
    /// A rule that the server breaks, for worlds that must be rejected.
    pub broken: Option<BrokenRule>,
    /// The keys that were read and written, in order.
    pub accesses: Vec<KeyAccess>,
}

/// What a command did with a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyAccess {
    /// It read the key.
    Read(Bytes),
    /// It changed the key.
    Written(Bytes),
}

/// What a broken server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokenRule {
    /// `SET … NX` overwrites.
    IgnoresNx,
    /// `SET … IFEQ` writes nothing, and says that it did.
    DropsIfeq,
    /// No key lasts for longer than a few seconds.
    ForgetsEarly,
}

const OOM: &str = "OOM command not allowed when used memory > 'maxmemory'.";
const READ_ONLY: &str = "READONLY You can't write against a read only replica.";
const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
/// How long a broken server remembers what it was asked to remember for longer, in milliseconds.
const EARLY_MS: u64 = 5_000;

/// Whether a command changes something, and whether a full server refuses it.
pub fn write_flags(name: &str) -> (bool, bool) {
    match name {
        "SET" | "RPUSH" | "ZADD" | "INCRBY" => (true, true),
        "PEXPIRE" | "DEL" | "ZREM" => (true, false),
        _ => (false, false),
    }
}

impl RedisDatabase {
    /// Runs a command. Returns `None` if the simulation does not know it.
    pub fn run(&mut self, context: &mut CommandContext, args: &[Bytes]) -> Option<ServerReply> {
        let name = command_name(args);
        let (is_write, needs_memory) = write_flags(&name);
        if is_write && context.is_read_only {
            return Some(ServerReply::Error(READ_ONLY.into()));
        }
        if needs_memory && context.is_full {
            return Some(ServerReply::Error(OOM.into()));
        }
        if name == "TIME" {
            let parts = [context.now / 1_000_000, context.now % 1_000_000];
            return Some(ServerReply::Array(parts.map(|part| ServerReply::text(part.to_string())).into()));
        }
        let key = args.get(1)?.clone();
        self.expire(context, &key);
        if !is_write {
            context.accesses.push(KeyAccess::Read(key.clone()));
        }
        let reply = match name.as_str() {
            "SET" => return Some(self.set(context, &key, &args[2..])),
            "GET" | "GETRANGE" | "PTTL" | "EXISTS" | "LRANGE" | "ZRANGE" | "ZRANGEBYSCORE" => {
                self.read(context, &name, &key, &args[2..])
            }
            "DEL" => ServerReply::Int(i64::from(self.keys.remove(&key).is_some())),
            "PEXPIRE" => self.set_expiry(context, &key, number(&args[2]).max(0) as u64),
            "RPUSH" => self.push(&key, &args[2..]),
            "INCRBY" => self.add(&key, number(&args[2])),
            "ZADD" => self.add_scores(&key, &args[2..]),
            "ZREM" => self.remove_scores(&key, &args[2..]),
            _ => return None,
        };
        if is_write && !matches!(reply, ServerReply::Error(_)) {
            context.accesses.push(KeyAccess::Written(key));
        }
        Some(reply)
    }

    /// Removes a key that has expired. Who has read it is told.
    fn expire(&mut self, context: &mut CommandContext, key: &Bytes) {
        let is_due = |stored: &StoredKey| stored.expires_at.is_some_and(|at| at <= context.now / 1000);
        if self.keys.get(key).is_some_and(is_due) {
            self.keys.remove(key);
            context.accesses.push(KeyAccess::Written(key.clone()));
        }
    }

    fn read(&self, context: &CommandContext, name: &str, key: &Bytes, args: &[Bytes]) -> ServerReply {
        let stored = self.keys.get(key);
        let value = stored.map(|stored| &stored.value);
        match (name, value) {
            ("PTTL", None) => ServerReply::Int(-2),
            ("PTTL", Some(_)) => {
                let left = |at: u64| at.saturating_sub(context.now / 1000) as i64;
                ServerReply::Int(stored.and_then(|stored| stored.expires_at).map_or(-1, left))
            }
            ("EXISTS", value) => ServerReply::Int(i64::from(value.is_some())),
            ("GET", None) => ServerReply::Nil,
            ("GET", Some(StoredValue::Text(text))) => ServerReply::Bytes(text.clone()),
            ("GETRANGE", None) => ServerReply::text(""),
            ("GETRANGE", Some(StoredValue::Text(text))) => ServerReply::Bytes(text.slice(range(args, text.len()))),
            ("LRANGE" | "ZRANGE" | "ZRANGEBYSCORE", None) => ServerReply::Array(Vec::new()),
            ("LRANGE", Some(StoredValue::List(list))) => strings(&list[range(args, list.len())]),
            ("ZRANGE", Some(StoredValue::Scores(scores))) => {
                let sorted = sorted(scores, f64::INFINITY);
                strings(&sorted[range(args, sorted.len())])
            }
            ("ZRANGEBYSCORE", Some(StoredValue::Scores(scores))) => {
                assert_eq!(args[0], "-inf", "only this start is simulated");
                let mut sorted =
                    sorted(scores, if args[1] == "+inf" { f64::INFINITY } else { number(&args[1]) as f64 });
                sorted.truncate(args.get(4).map_or(usize::MAX, |most| number(most) as usize));
                strings(&sorted)
            }
            _ => ServerReply::Error(WRONG_TYPE.into()),
        }
    }

    /// `SET key value [NX] [GET] [PX ms] [KEEPTTL] [IFEQ value]`.
    fn set(&mut self, context: &mut CommandContext, key: &Bytes, args: &[Bytes]) -> ServerReply {
        let option = |name: &str| args[1..].iter().position(|arg| arg == name).map(|at| at + 1);
        let before = self.keys.get(key);
        let text = match before.map(|stored| &stored.value) {
            None => None,
            Some(StoredValue::Text(text)) => Some(text.clone()),
            Some(_) => return ServerReply::Error(WRONG_TYPE.into()),
        };
        let is_refused = match (option("NX"), option("IFEQ")) {
            (Some(_), _) => text.is_some() && context.broken != Some(BrokenRule::IgnoresNx),
            (_, Some(_)) if context.broken == Some(BrokenRule::DropsIfeq) => return ServerReply::OK,
            (_, Some(at)) => text.as_ref() != Some(&args[at + 1]),
            _ => false,
        };
        let is_get = option("GET").is_some();
        if !is_refused {
            let lasts = option("PX").map(|at| number(&args[at + 1]) as u64);
            let lasts = lasts.map(|lasts| match context.broken {
                Some(BrokenRule::ForgetsEarly) => lasts.min(EARLY_MS),
                _ => lasts,
            });
            let kept = before.and_then(|stored| stored.expires_at).filter(|_| option("KEEPTTL").is_some());
            let expires_at = lasts.map(|lasts| context.now / 1000 + lasts).or(kept);
            self.keys.insert(key.clone(), StoredKey { value: StoredValue::Text(args[0].clone()), expires_at });
            context.accesses.push(KeyAccess::Written(key.clone()));
        }
        match text {
            // A broken server that overwrites says that nothing was there.
            Some(_) if is_get && !is_refused => ServerReply::Nil,
            Some(text) if is_get => ServerReply::Bytes(text),
            None if is_get => ServerReply::Nil,
            _ if is_refused => ServerReply::Nil,
            _ => ServerReply::OK,
        }
    }

    fn set_expiry(&mut self, context: &CommandContext, key: &Bytes, lasts: u64) -> ServerReply {
        let Some(stored) = self.keys.get_mut(key) else { return ServerReply::Int(0) };
        stored.expires_at = Some(context.now / 1000 + lasts);
        ServerReply::Int(1)
    }

    fn push(&mut self, key: &Bytes, items: &[Bytes]) -> ServerReply {
        match self.value_or(key, StoredValue::List(Vec::new())) {
            StoredValue::List(list) => {
                list.extend_from_slice(items);
                ServerReply::Int(list.len() as i64)
            }
            _ => ServerReply::Error(WRONG_TYPE.into()),
        }
    }

    fn add(&mut self, key: &Bytes, by: i64) -> ServerReply {
        match self.value_or(key, StoredValue::Text("0".into())) {
            StoredValue::Text(text) => {
                let total = number(text) + by;
                *text = total.to_string().into();
                ServerReply::Int(total)
            }
            _ => ServerReply::Error(WRONG_TYPE.into()),
        }
    }

    /// `ZADD key [NX] score member`.
    fn add_scores(&mut self, key: &Bytes, args: &[Bytes]) -> ServerReply {
        let only_new = args[0] == "NX";
        let [score, member] = &args[usize::from(only_new)..] else { panic!("one member at a time is simulated") };
        let StoredValue::Scores(scores) = self.value_or(key, StoredValue::Scores(BTreeMap::new())) else {
            return ServerReply::Error(WRONG_TYPE.into());
        };
        let is_new = !scores.contains_key(member);
        if is_new || !only_new {
            scores.insert(member.clone(), number(score) as f64);
        }
        ServerReply::Int(i64::from(is_new))
    }

    fn remove_scores(&mut self, key: &Bytes, members: &[Bytes]) -> ServerReply {
        let Some(StoredKey { value: StoredValue::Scores(scores), .. }) = self.keys.get_mut(key) else {
            return ServerReply::Int(0);
        };
        let removed = members.iter().filter(|member| scores.remove(*member).is_some()).count();
        if scores.is_empty() {
            self.keys.remove(key);
        }
        ServerReply::Int(removed as i64)
    }

    fn value_or(&mut self, key: &Bytes, empty: StoredValue) -> &mut StoredValue {
        let new = || StoredKey { value: empty, expires_at: None };
        &mut self.keys.entry(key.clone()).or_insert_with(new).value
    }
}

/// The command's name in capitals.
pub fn command_name(args: &[Bytes]) -> String {
    String::from_utf8_lossy(&args[0]).to_ascii_uppercase()
}

/// A number in decimal.
///
/// # Panics
/// If it is none.
pub fn number(text: &Bytes) -> i64 {
    let text = std::str::from_utf8(text).expect("a number");
    text.parse().unwrap_or_else(|_| panic!("{text:?} is no number"))
}

fn strings(items: &[Bytes]) -> ServerReply {
    ServerReply::Array(items.iter().cloned().map(ServerReply::Bytes).collect())
}

/// The members up to a score, by score.
fn sorted(scores: &BTreeMap<Bytes, f64>, until: f64) -> Vec<Bytes> {
    let mut found: Vec<_> = scores.iter().filter(|(_, score)| **score <= until).collect();
    found.sort_by(|one, other| one.1.total_cmp(other.1));
    found.into_iter().map(|(member, _)| member.clone()).collect()
}

/// From the first to the last index, both included.
fn range(args: &[Bytes], length: usize) -> std::ops::Range<usize> {
    let end = (number(&args[1]) as usize).saturating_add(1).min(length);
    (number(&args[0]) as usize).min(end)..end
}
