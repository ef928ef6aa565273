//! The claims of one connection that are in no index yet.
//!
//! No call about an entry writes to the index of unfinished entries. Instead every write that claims begins with one
//! `RPUSH` of the addresses to a list of its connection and second, which a registry names. A background task indexes
//! the claims that are still open after two seconds and deletes the lists. If the process crashes, its lists stay, and
//! sweeps index what they name. So a crash leaves no claim unindexed, unless the server refused the list but not the
//! claim (a slot on the move, missing rights), or the entry was restored by a heartbeat within the last two seconds.

use std::{collections::HashMap, sync::atomic::Ordering::Relaxed};

use ibid::store::{Address, AddressHashBuilder, ClaimToken};

use super::{
    connection::boot_micros,
    key_names::KeyNames,
    resp::{decimal, encode_arg, encode_command, encode_header},
};

/// Milliseconds after which a list that nobody deleted, and a registry that nobody uses, expire.
const LIST_TTL_MS: &[u8] = b"86400000";

pub(super) struct ClaimLog {
    writer: String,
    /// Addresses of the next write.
    next: Vec<Address>,
    /// Claims that are not known to be settled, and when they were sent, by [`boot_micros`].
    open: HashMap<Address, u64, AddressHashBuilder>,
    lists: Vec<ClaimList>,
}

/// A list of addresses at the server.
#[derive(Debug)]
pub(super) struct ClaimList {
    pub(super) bucket: u8,
    pub(super) name: String,
    pub(super) key: String,
    /// The key of the registry that names it.
    pub(super) registry: String,
    generation: u64,
    second: u64,
    began_at: u64,
}

impl Default for ClaimLog {
    fn default() -> Self {
        let writer = ClaimToken::mint().0[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { writer, next: Vec::new(), open: HashMap::default(), lists: Vec::new() }
    }
}

impl ClaimLog {
    /// Adds a claim that the next write contains.
    pub(super) fn add(&mut self, at: Address) {
        self.next.push(at);
        self.open.insert(at, boot_micros());
    }

    /// Adds an unfinished entry that was written already.
    pub(super) fn add_written(&mut self, at: Address) {
        self.open.insert(at, boot_micros());
    }

    /// Removes a claim that was not granted, or is settled.
    pub(super) fn remove(&mut self, at: &Address) {
        self.open.remove(at);
    }

    /// Appends the commands that list the claims of the next write. Returns their number.
    pub(super) fn encode(&mut self, names: &KeyNames, server_time: u64, buffer: &mut Vec<u8>) -> u32 {
        let Some(first) = self.next.first() else { return 0 };
        let (second, generation) = (server_time / 1_000_000, names.generation.load(Relaxed));
        let is_current = |list: &ClaimList| list.second == second && list.generation == generation;
        let is_new = !self.lists.last().is_some_and(is_current);
        if is_new {
            let (bucket, name) = (first.0[0], format!("{}:{second}", self.writer));
            let (key, registry) = (names.claim_list_key(bucket, &name), names.claim_lists_key(bucket));
            self.lists.push(ClaimList { bucket, name, key, registry, generation, second, began_at: boot_micros() });
        }
        let list = &self.lists[self.lists.len() - 1];
        if is_new {
            let mut digits = [0; 20];
            let score = decimal(server_time / 1000, &mut digits);
            encode_command(buffer, &[b"ZADD", list.registry.as_bytes(), score, list.name.as_bytes()]);
        }
        encode_header(buffer, 2 + self.next.len());
        encode_arg(buffer, b"RPUSH");
        encode_arg(buffer, list.key.as_bytes());
        self.next.drain(..).for_each(|at| encode_arg(buffer, &at.0));
        if is_new {
            encode_command(buffer, &[b"PEXPIRE", list.key.as_bytes(), LIST_TTL_MS]);
            encode_command(buffer, &[b"PEXPIRE", list.registry.as_bytes(), LIST_TTL_MS]);
        }
        if is_new { 4 } else { 1 }
    }

    /// Takes the open claims that are older than `age`, and the lists of which all claims are. They are either indexed,
    /// or given back with [`Self::put_back`].
    pub(super) fn take_older(&mut self, age_micros: u64) -> (Vec<Address>, Vec<ClaimList>) {
        let before = boot_micros().saturating_sub(age_micros);
        let due: Vec<Address> = self.open.iter().filter(|(_, since)| **since <= before).map(|(at, _)| *at).collect();
        for at in &due {
            self.open.remove(at);
        }
        // A list is written to for one second.
        let is_due = |list: &mut ClaimList| list.began_at.saturating_add(1_500_000) <= before;
        (due, self.lists.extract_if(.., is_due).collect())
    }

    pub(super) fn put_back(&mut self, claims: Vec<Address>, lists: Vec<ClaimList>) {
        self.open.extend(claims.into_iter().map(|at| (at, 0)));
        self.lists.splice(0..0, lists);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.lists.is_empty()
    }
}
