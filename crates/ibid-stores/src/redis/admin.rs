//! Listings, counts and sweeps.
//!
//! Entries in progress or with unknown outcome are indexed. Completed entries are not: a listing scans the keyspace and
//! reads a bounded number of entries in address order, so a page may return fewer than requested. Only administrative
//! calls do that, never a request.

use std::collections::BTreeSet;

use futures_util::{TryStreamExt, stream};
use ibid::store::ClaimToken;

use super::*;

/// Maximum number of concurrent scripts, so that a walk over all buckets does not delay other calls.
const MAX_CONCURRENT_SCRIPTS: usize = 16;
/// Number of entries read by one script.
const ENTRIES_PER_READ: usize = 64;
/// Maximum number of addresses considered for one page of a scan.
const MAX_SCAN_ADDRESSES: usize = 4096;
/// Number of keys visited by one SCAN call.
const SCAN_COUNT: usize = 1000;
/// Number of entries counted or swept by one script. A script blocks the whole server.
const ENTRIES_PER_SCRIPT: usize = 500;
/// Maximum number of SCAN calls for counts; beyond it they are estimated.
const MAX_SAMPLE_SCANS: usize = 20;
/// Maximum number of keys whose state and size are read for counts.
const MAX_SAMPLED_KEYS: usize = 500;
/// Milliseconds for which a crashed sweeper blocks other sweepers.
const SWEEPER_LOCK_MS: usize = 30_000;
/// Approximate bytes of an entry beside its record: fields, key name and server overhead.
const ENTRY_OVERHEAD_BYTES: u64 = 1200;

impl Redis {
    pub(super) async fn sweep_locked(&self, at_most: u32) -> Result<SweepResult, StoreError> {
        let me = u128::from_le_bytes(ClaimToken::mint().0).to_string();
        let mut lock = redis::cmd("SET");
        lock.arg(self.key_names.sweeper_key()).arg(&me).arg("NX").arg("PX").arg(SWEEPER_LOCK_MS);
        if self.run_command(0, &lock).await? != Value::Okay {
            return Ok(SweepResult::default());
        }
        let swept = self.sweep_all(at_most).await;
        let unlock = ScriptCall {
            script: &scripts::UNLOCK,
            bucket: 0,
            keys: vec![self.key_names.sweeper_key()],
            args: vec![me.into()],
        };
        // If unlocking fails, the lock expires.
        let _ = self.run(&unlock).await;
        swept
    }

    /// Sweeps all buckets. A shard that fails does not stop the others.
    async fn sweep_all(&self, at_most: u32) -> Result<SweepResult, StoreError> {
        let mut swept = SweepResult::default();
        let (mut due, mut failed) = (Vec::new(), Vec::new());
        // The first pass over all buckets removes nothing: few have work.
        let looks = (0..=u8::MAX).map(|bucket| async move { (bucket, self.sweep_bucket(bucket, 0).await) });
        let mut looks = stream::iter(looks).buffered(MAX_CONCURRENT_SCRIPTS);
        while let Some((bucket, looked)) = looks.next().await {
            match looked {
                Ok((_, lapsed, more)) => {
                    swept.lapsed = swept.lapsed.saturating_add(lapsed);
                    due.extend(more.then_some(bucket));
                }
                Err(error) => failed.push(error),
            }
        }
        if failed.len() == BUCKET_COUNT
            && let Some(error) = failed.pop()
        {
            return Err(error);
        }
        for bucket in due {
            let mut more = true;
            while more {
                if swept.removed == at_most {
                    return Ok(SweepResult { more: true, ..swept });
                }
                let Ok((removed, lapsed, left)) = self.sweep_bucket(bucket, at_most - swept.removed).await else {
                    break;
                };
                swept.removed += removed;
                swept.lapsed = swept.lapsed.saturating_add(lapsed);
                more = left;
            }
        }
        Ok(swept)
    }

    /// Returns the number removed, the number lapsed, and whether more are due.
    async fn sweep_bucket(&self, bucket: u8, at_most: u32) -> Result<(u32, u32, bool), StoreError> {
        let mut parts = self.run_on_index(&scripts::SWEEP, bucket, at_most.into()).await?;
        Ok((parts.number()? as u32, parts.number()? as u32, parts.number()? == 1))
    }

    /// Runs a script about at most [`ENTRIES_PER_SCRIPT`] entries of a bucket's index.
    async fn run_on_index(
        &self, script: &'static RedisScript, bucket: u8, argument: u64,
    ) -> Result<ReplyParts, StoreError> {
        let prefix = self.key_names.entry_prefix(bucket).into();
        let args = vec![prefix, number_arg(argument), number_arg(ENTRIES_PER_SCRIPT as u64)];
        let call = ScriptCall { script, bucket, keys: vec![self.key_names.index_key(bucket)], args };
        ReplyParts::from_value(self.run(&call).await?)
    }

    pub(super) async fn list_page(
        &self, filter: &EntryFilter, from: ListCursor, at_most: u32,
    ) -> Result<EntryPage, StoreError> {
        let at_most = at_most as usize;
        if at_most == 0 {
            return Ok(EntryPage::default());
        }
        if let Some(at) = filter.address {
            let wanted = from.0.is_none_or(|from| at > from);
            let found = if wanted { self.read_entries(&[at]).await? } else { Vec::new() };
            let entries = found.into_iter().filter(|listed| filter.matches(listed)).collect();
            return Ok(EntryPage { entries, next: None });
        }
        if matches!(filter.state, Some(EntryState::Processing | EntryState::Unknown)) {
            return self.list_indexed(filter, from, at_most).await;
        }
        let (window, more) = self.scan_window(from).await?;
        let mut entries = Vec::new();
        if self.read_matching(&window, filter, at_most, &mut entries).await? {
            return Ok(EntryPage::truncated(entries, at_most));
        }
        let next = window.last().filter(|_| more).map(|last| ListCursor(Some(*last)));
        Ok(EntryPage { entries, next })
    }

    async fn list_indexed(
        &self, filter: &EntryFilter, from: ListCursor, at_most: usize,
    ) -> Result<EntryPage, StoreError> {
        let first = from.0.map_or(0, |from| from.0[0]);
        let buckets = stream::iter((first..=u8::MAX).map(|bucket| self.indexed_addresses(bucket, from.0)));
        let mut buckets = buckets.buffered(MAX_CONCURRENT_SCRIPTS);
        let mut entries = Vec::new();
        while let Some(addresses) = buckets.try_next().await? {
            if self.read_matching(&addresses, filter, at_most, &mut entries).await? {
                break;
            }
        }
        Ok(EntryPage::truncated(entries, at_most))
    }

    /// Reads matching entries until there are more than `at_most`. Returns whether there are.
    async fn read_matching(
        &self, at: &[Address], filter: &EntryFilter, at_most: usize, entries: &mut Vec<EntryInfo>,
    ) -> Result<bool, StoreError> {
        for some in at.chunks(ENTRIES_PER_READ) {
            entries.extend(self.read_entries(some).await?.into_iter().filter(|listed| filter.matches(listed)));
            if entries.len() > at_most {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the addresses in a bucket's index after `from`, in order.
    async fn indexed_addresses(&self, bucket: u8, from: Option<Address>) -> Result<Vec<Address>, StoreError> {
        let mut range = redis::cmd("ZRANGE");
        range.arg(self.key_names.index_key(bucket)).arg(0).arg(-1);
        let mut parts = ReplyParts::from_value(self.run_command(bucket, &range).await?)?;
        let mut found = Vec::new();
        while let Some(member) = parts.value() {
            let Value::BulkString(hex) = member else { continue };
            let at = std::str::from_utf8(&hex).ok().and_then(Address::from_hex);
            found.extend(at.filter(|at| from.is_none_or(|from| *at > from)));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Reads entries, those of one bucket in one call.
    async fn read_entries(&self, at: &[Address]) -> Result<Vec<EntryInfo>, StoreError> {
        let some: Vec<Vec<Address>> = at.chunk_by(|a, b| a.0[0] == b.0[0]).map(<[Address]>::to_vec).collect();
        let calls = stream::iter(some.into_iter().map(|some| self.read_bucket_entries(some)));
        let found: Vec<Vec<EntryInfo>> = calls.buffered(MAX_CONCURRENT_SCRIPTS).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Reads entries of one bucket. `some` must not be empty.
    async fn read_bucket_entries(&self, some: Vec<Address>) -> Result<Vec<EntryInfo>, StoreError> {
        let keys = some.iter().map(|at| self.key_names.entry_key(at)).collect();
        let call = ScriptCall { script: &scripts::LOOK, bucket: some[0].0[0], keys, args: Vec::new() };
        let mut rows = ReplyParts::from_value(self.run(&call).await?)?;
        let mut found = Vec::new();
        for at in some {
            found.extend(replies::parse_entry_info(rows.value().unwrap_or(Value::Nil), at)?);
        }
        Ok(found)
    }

    /// Returns the first addresses after `from` that a scan finds, and whether there are more.
    async fn scan_window(&self, from: ListCursor) -> Result<(Vec<Address>, bool), StoreError> {
        let mut window = BTreeSet::new();
        let mut more = false;
        for server in self.known_servers().await? {
            let mut cursor = Bytes::from_static(b"0");
            loop {
                let (next, keys) = self.scan(&server, &cursor).await?;
                for key in keys {
                    let Some(at) = self.key_names.parse_address(&key) else { continue };
                    if from.0.is_none_or(|from| at > from) {
                        window.insert(at);
                    }
                    if window.len() > MAX_SCAN_ADDRESSES {
                        window.pop_last();
                        more = true;
                    }
                }
                if next == b"0"[..] {
                    break;
                }
                cursor = next;
            }
        }
        Ok((window.into_iter().collect(), more))
    }

    async fn scan(&self, server: &RedisServer, cursor: &Bytes) -> Result<(Bytes, Vec<Bytes>), StoreError> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(&cursor[..]).arg("MATCH").arg(self.key_names.scan_pattern()).arg("COUNT").arg(SCAN_COUNT);
        let answer = server.send(RedisCommand::plain(&scan), background_deadline(self.timeout())).await?;
        let mut parts = ReplyParts::from_value(answer)?;
        let next = parts.bytes()?;
        let mut keys = ReplyParts::from_value(parts.value().unwrap_or(Value::Nil))?;
        let mut found = Vec::new();
        while let Ok(key) = keys.bytes() {
            found.push(key);
        }
        Ok((next, found))
    }

    pub(super) async fn count_entries(&self) -> Result<EntryCounts, StoreError> {
        let mut counts = EntryCounts::default();
        let buckets = stream::iter((0..=u8::MAX).map(|bucket| self.count_bucket(bucket)));
        let buckets: Vec<(u64, u64)> = buckets.buffered(MAX_CONCURRENT_SCRIPTS).try_collect().await?;
        for (processing, unknown) in buckets {
            counts.processing += processing;
            counts.unknown += unknown;
        }
        let nodes = self.known_servers().await?;
        for estimate in join_all(nodes.iter().map(|server| self.estimate(server))).await {
            let (finished, bytes) = estimate?;
            counts.finished += finished;
            counts.bytes += bytes;
        }
        Ok(counts)
    }

    async fn count_bucket(&self, bucket: u8) -> Result<(u64, u64), StoreError> {
        let (mut processing, mut unknown, mut from) = (0, 0, 0);
        loop {
            let mut parts = self.run_on_index(&scripts::COUNTS, bucket, from).await?;
            processing += parts.number()?;
            unknown += parts.number()?;
            let seen = parts.number()?;
            if seen < ENTRIES_PER_SCRIPT as u64 {
                return Ok((processing, unknown));
            }
            from += seen;
        }
    }

    /// Returns the number of completed entries at one server and the bytes of all: exact if few, sampled if many.
    async fn estimate(&self, server: &RedisServer) -> Result<(u64, u64), StoreError> {
        let mut size = ReplyParts::from_value(Value::Array(vec![
            server.send(RedisCommand::plain(&redis::cmd("DBSIZE")), background_deadline(self.timeout())).await?,
        ]))?;
        let all_keys = size.number()?;
        let (mut entries, mut sample, mut cursor) = (0_u64, Vec::new(), Bytes::from_static(b"0"));
        let mut looked_at = all_keys;
        for step in 1..=MAX_SAMPLE_SCANS {
            let (next, keys) = self.scan(server, &cursor).await?;
            let keys: Vec<Bytes> = keys.into_iter().filter(|key| self.key_names.parse_address(key).is_some()).collect();
            entries += keys.len() as u64;
            sample.extend(keys.into_iter().take(MAX_SAMPLED_KEYS - sample.len()));
            if next == b"0"[..] {
                break;
            }
            cursor = next;
            if step == MAX_SAMPLE_SCANS {
                looked_at = (SCAN_COUNT * step) as u64;
            }
        }
        if sample.is_empty() {
            return Ok((0, 0));
        }
        let mut ask = redis::pipe();
        ask.cmd("TIME");
        for key in &sample {
            ask.cmd("HMGET").arg(&key[..]).arg("p").arg("v");
            ask.cmd("HSTRLEN").arg(&key[..]).arg("r");
        }
        let mut answers = server.send_all(&ask, background_deadline(self.timeout())).await?.into_iter();
        let mut time = ReplyParts::from_value(answers.next().unwrap_or(Value::Nil))?;
        let now = time.number()? * 1_000_000 + time.number()?;
        let (mut finished, mut bytes) = (0_u64, 0_u64);
        while let (Some(fields), Some(length)) = (answers.next(), answers.next()) {
            // Skip keys whose slot is being moved to another node.
            let (Ok(fields), Ok(Value::Int(length))) = (check_reply(fields), check_reply(length)) else { continue };
            let mut fields = ReplyParts::from_value(fields)?;
            let phase = fields.bytes().unwrap_or_default();
            let times = fields.bytes().unwrap_or_default();
            // As `entry.lua` writes them: the second value is the expiry.
            let expires = std::str::from_utf8(&times).ok().and_then(|times| times.split(' ').nth(1)?.parse().ok());
            if phase == b"d"[..] && expires.is_some_and(|expires: u64| now < expires) {
                finished += 1;
            }
            bytes += ENTRY_OVERHEAD_BYTES + length.unsigned_abs();
        }
        let scale = |of_sample: u64| {
            let of_scanned = u128::from(of_sample) * u128::from(entries) / sample.len() as u128;
            (of_scanned * u128::from(all_keys.max(looked_at)) / u128::from(looked_at.max(1))) as u64
        };
        Ok((scale(finished), scale(bytes)))
    }

    async fn known_servers(&self) -> Result<Vec<Arc<RedisServer>>, StoreError> {
        self.topology.ensure_known().await.map_err(|why| StoreError::from(RedisCallError::NotSent(why)))?;
        let nodes = self.topology.all();
        if nodes.is_empty() {
            return Err(StoreError::new(ErrorKind::NotApplied, super::error::STORE_NAME, "no node is known"));
        }
        Ok(nodes)
    }
}

pub(super) fn number_arg(number: u64) -> Bytes {
    number.to_string().into()
}
