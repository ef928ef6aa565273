//! Background work of a store: indexes claims that stay open, and checks the connections that report changes.

use super::{claim_log::ClaimList, resp::Reply, *};

const TICK: Duration = Duration::from_secs(1);
/// Ticks between two pings of a connection that reports changes.
const TICKS_PER_PING: u32 = 5;
/// Age from which an open claim is indexed, in microseconds. Most claims are settled by then.
const INDEX_AGE_MICROS: u64 = 2_000_000;
/// Age from which a list belongs to a process that is gone, in milliseconds.
const ORPHAN_AGE_MS: u64 = 30_000;
/// Number of addresses per script, and of list elements per read.
const ADDRESSES_PER_CALL: usize = 500;

/// Runs until the store is dropped.
pub(super) async fn run(core: Weak<RedisCore>) {
    let (mut tick, mut idle_ticks) = (0_u32, 0_u32);
    loop {
        sleep(with_jitter(TICK)).await;
        let Some(core) = core.upgrade() else { return };
        tick = tick.wrapping_add(1);
        // What cannot be indexed now is indexed later.
        let _ = core.index_own_claims(INDEX_AGE_MICROS).await;
        let servers = core.topology.all();
        if tick.is_multiple_of(TICKS_PER_PING) {
            join_all(servers.iter().map(|server| server.ping_tracking_connections())).await;
        }
        idle_ticks = if core.waiters.is_empty() { idle_ticks + 1 } else { 0 };
        if idle_ticks == 2 {
            join_all(servers.iter().map(|server| server.close_waiters_connection())).await;
        }
    }
}

impl RedisCore {
    /// Indexes the claims of this process that are older than `age` and not settled, and deletes their lists.
    pub(super) async fn index_own_claims(&self, age_micros: u64) -> Result<(), StoreError> {
        for server in self.topology.all() {
            for connection in server.connections() {
                let (claims, lists) = connection.with_claim_log(|log| log.take_older(age_micros));
                if let Err(error) = self.index_and_delete(&claims, &lists).await {
                    connection.with_claim_log(|log| log.put_back(claims, lists));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    async fn index_and_delete(&self, claims: &[Address], lists: &[ClaimList]) -> Result<(), StoreError> {
        self.index_addresses(claims).await?;
        for list in lists {
            self.delete_list(list.bucket, &list.key, &list.registry, &list.name).await?;
        }
        Ok(())
    }

    async fn delete_list(&self, bucket: u8, key: &str, registry: &str, name: &str) -> Result<(), StoreError> {
        self.run_command(bucket, &[b"DEL", key.as_bytes()]).await?;
        self.run_command(bucket, &[b"ZREM", registry.as_bytes(), name.as_bytes()]).await.map(drop)
    }

    /// Adds unfinished entries to their buckets' indexes.
    async fn index_addresses(&self, addresses: &[Address]) -> Result<(), StoreError> {
        let mut sorted = addresses.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        for same_bucket in sorted.chunk_by(|a, b| a.0[0] == b.0[0]) {
            for some in same_bucket.chunks(ADDRESSES_PER_CALL) {
                let bucket = some[0].0[0];
                let (index, prefix) = (self.key_names.index_key(bucket), self.key_names.entry_prefix(bucket));
                let hex: Vec<String> = some.iter().map(Address::to_string).collect();
                let mut args = vec![prefix.as_bytes()];
                args.extend(hex.iter().map(String::as_bytes));
                self.run_script(&scripts::INDEX, bucket, &[index.as_bytes()], &args).await?;
            }
        }
        Ok(())
    }

    /// Indexes the claims of a bucket's registered lists: of all, so that a listing is complete; or, given the server's
    /// time in milliseconds, of those whose process is gone, which are deleted then.
    pub(super) async fn index_listed_claims(&self, bucket: u8, orphans_at: Option<u64>) -> Result<(), StoreError> {
        let registry = self.key_names.claim_lists_key(bucket);
        let until = orphans_at.map_or("+inf".to_owned(), |now| now.saturating_sub(ORPHAN_AGE_MS).to_string());
        let names =
            self.run_command(bucket, &[b"ZRANGEBYSCORE", registry.as_bytes(), b"-inf", until.as_bytes()]).await?;
        for name in byte_strings(names)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            let key = self.key_names.claim_list_key(bucket, &name);
            let mut from = 0;
            loop {
                let (first, last) = (from.to_string(), (from + ADDRESSES_PER_CALL - 1).to_string());
                let range: &[&[u8]] = &[b"LRANGE", key.as_bytes(), first.as_bytes(), last.as_bytes()];
                let listed = byte_strings(self.run_command(bucket, range).await?)?;
                from += listed.len();
                let listed_addresses: Vec<Address> =
                    listed.iter().filter_map(|at| Some(Address((&at[..]).try_into().ok()?))).collect();
                self.index_addresses(&listed_addresses).await?;
                if listed.len() < ADDRESSES_PER_CALL {
                    break;
                }
            }
            if orphans_at.is_some() {
                self.delete_list(bucket, &key, &registry, &name).await?;
            }
        }
        Ok(())
    }
}

pub(super) fn byte_strings(reply: Reply) -> Result<Vec<Bytes>, StoreError> {
    let Reply::Array(parts) = reply else { return Err(corrupt_reply("it is no list")) };
    Ok(parts.into_iter().filter_map(|part| part.as_bytes().cloned()).collect())
}
