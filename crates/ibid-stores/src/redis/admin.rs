//! Listings, counts and sweeps.
//!
//! Entries in progress or with unknown outcome are indexed. Completed entries are not: a listing scans the keyspace and
//! reads a bounded number of entries in address order, so a page may return fewer than requested. Only administrative
//! calls do that, never a request.

use std::collections::BTreeSet;

use futures_util::{TryStreamExt, stream};
use ibid::store::ClaimToken;

use super::{
    connection::RedisCall,
    entry::{EntryView, HEADER_LEN, has_completed, reply_number},
    maintenance::byte_strings,
    resp::Reply,
    *,
};

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
const SWEEPER_LOCK_MS: &[u8] = b"30000";
/// Approximate bytes of an entry beside its value: key name and server overhead.
const ENTRY_OVERHEAD_BYTES: u64 = 250;

impl RedisCore {
    pub(super) async fn sweep_locked(&self, at_most: u32) -> Result<SweepResult, StoreError> {
        let me = u128::from_le_bytes(ClaimToken::mint().0).to_string();
        let key = self.key_names.sweeper_key();
        let lock: &[&[u8]] = &[b"SET", key.as_bytes(), me.as_bytes(), b"NX", b"PX", SWEEPER_LOCK_MS];
        if self.run_command(0, lock).await? != Reply::Ok {
            return Ok(SweepResult::default());
        }
        let swept = self.sweep_all(at_most).await;
        // If unlocking fails, the lock expires.
        let _ = self.run_script(&scripts::UNLOCK, 0, &[key.as_bytes()], &[me.as_bytes()]).await;
        swept
    }

    /// The time since the Unix epoch, by the server of the first bucket.
    pub(super) async fn server_time(&self) -> Result<Duration, StoreError> {
        match &self.run_command(0, &[b"TIME"]).await? {
            Reply::Array(time) => match &time[..] {
                [seconds, micros] => {
                    Ok(Duration::from_secs(reply_number(seconds)?) + Duration::from_micros(reply_number(micros)?))
                }
                _ => Err(corrupt_reply("no time came")),
            },
            _ => Err(corrupt_reply("no time came")),
        }
    }

    /// Sweeps all buckets. A shard that fails does not stop the others.
    async fn sweep_all(&self, at_most: u32) -> Result<SweepResult, StoreError> {
        let mut swept = SweepResult::default();
        let (mut due, mut failed) = (Vec::new(), Vec::new());
        let now_ms = self.server_time().await?.as_secs() * 1000;
        let indexed = self.index_own_claims(0).await;
        // The first pass over all buckets removes nothing: few have work.
        let looks = (0..=u8::MAX).map(|bucket| async move {
            let indexed = self.index_listed_claims(bucket, Some(now_ms)).await;
            (bucket, indexed.and(self.sweep_bucket(bucket, 0).await))
        });
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
        match indexed {
            // A server that is down is asked again later; missing rights are not.
            Err(error) if error.kind != ErrorKind::NotApplied => Err(error),
            _ => Ok(swept),
        }
    }

    /// Returns the number removed, the number lapsed, and whether more are due.
    async fn sweep_bucket(&self, bucket: u8, at_most: u32) -> Result<(u32, u32, bool), StoreError> {
        let [removed, lapsed, more] = self.run_on_index(&scripts::SWEEP, bucket, at_most.into()).await?;
        Ok((removed as u32, lapsed as u32, more == 1))
    }

    /// Runs a script about at most [`ENTRIES_PER_SCRIPT`] entries of a bucket's index. It returns three numbers.
    async fn run_on_index(&self, script: &RedisScript, bucket: u8, argument: u64) -> Result<[u64; 3], StoreError> {
        let (index, prefix) = (self.key_names.index_key(bucket), self.key_names.entry_prefix(bucket));
        let (argument, at_most) = (argument.to_string(), ENTRIES_PER_SCRIPT.to_string());
        let args = [prefix.as_bytes(), argument.as_bytes(), at_most.as_bytes()];
        match self.run_script(script, bucket, &[index.as_bytes()], &args).await? {
            Reply::Array(parts) if parts.len() == 3 => {
                Ok([reply_number(&parts[0])?, reply_number(&parts[1])?, reply_number(&parts[2])?])
            }
            _ => Err(corrupt_reply("three numbers were expected")),
        }
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
        self.index_all_claims().await?;
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

    /// Indexes all claims that are only listed, of any bucket in any list.
    async fn index_all_claims(&self) -> Result<(), StoreError> {
        let lists = stream::iter((0..=u8::MAX).map(|bucket| self.index_listed_claims(bucket, None)));
        lists.buffered(MAX_CONCURRENT_SCRIPTS).try_collect().await
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
        let index = self.key_names.index_key(bucket);
        let members = self.run_command(bucket, &[b"ZRANGE", index.as_bytes(), b"0", b"-1"]).await?;
        let addresses =
            byte_strings(members)?.into_iter().filter_map(|hex| Address::from_hex(std::str::from_utf8(&hex).ok()?));
        let mut found: Vec<Address> = addresses.filter(|at| from.is_none_or(|from| *at > from)).collect();
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

    /// Reads entries of one bucket, without records. `some` must not be empty.
    async fn read_bucket_entries(&self, some: Vec<Address>) -> Result<Vec<EntryInfo>, StoreError> {
        let keys: Vec<Vec<u8>> = some.iter().map(|at| self.key_names.entry_key(at)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let rows = self.run_script(&scripts::LOOK, some[0].0[0], &keys, &[b"0"]).await?;
        let Reply::Array(rows) = rows else { return Err(corrupt_reply("rows are missing")) };
        let mut found = Vec::new();
        for (at, row) in some.into_iter().zip(rows) {
            if let Reply::Array(parts) = row {
                found.extend(EntryView::from_parts(&parts)?.entry_info(at)?);
            }
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
        let (pattern, count) = (self.key_names.scan_pattern(), SCAN_COUNT.to_string());
        let scan = RedisCall::new(&[b"SCAN", cursor, b"MATCH", pattern.as_bytes(), b"COUNT", count.as_bytes()]);
        match server.send_plain(scan, background_deadline(self.timeout())).await? {
            Reply::Array(parts) if matches!(&parts[..], [Reply::Bytes(_), Reply::Array(_)]) => {
                let [next, keys] = <[Reply; 2]>::try_from(parts).expect("there are two parts");
                Ok((next.as_bytes().cloned().unwrap_or_default(), byte_strings(keys)?))
            }
            _ => Err(corrupt_reply("no cursor came")),
        }
    }

    pub(super) async fn count_entries(&self) -> Result<EntryCounts, StoreError> {
        self.index_all_claims().await?;
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
            let [running, lapsed, seen] = self.run_on_index(&scripts::COUNTS, bucket, from).await?;
            processing += running;
            unknown += lapsed;
            if seen < ENTRIES_PER_SCRIPT as u64 {
                return Ok((processing, unknown));
            }
            from += seen;
        }
    }

    /// Returns the number of completed entries at one server and the bytes of all: exact if few, sampled if many.
    async fn estimate(&self, server: &RedisServer) -> Result<(u64, u64), StoreError> {
        let size = server.send_plain(RedisCall::new(&[b"DBSIZE"]), background_deadline(self.timeout())).await?;
        let all_keys = reply_number(&size)?;
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
        let last = (HEADER_LEN - 1).to_string();
        let read = sample.iter().fold(RedisCall::default(), |call, key| {
            let call = call.then(&[b"GETRANGE", key, b"0", last.as_bytes()]);
            call.then(&[b"PTTL", key]).then(&[b"STRLEN", key])
        });
        let answers = server.send_plain(read.keep_all(), background_deadline(self.timeout())).await?;
        let Reply::Array(answers) = answers else { return Err(corrupt_reply("a sample is missing")) };
        let (mut finished, mut bytes) = (0_u64, 0_u64);
        for parts in answers.chunks_exact(3) {
            // Skip keys whose slot is being moved to another node.
            let [Reply::Bytes(header), Reply::Int(pttl), Reply::Int(length)] = parts else { continue };
            finished += u64::from(has_completed(header, *pttl));
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
            return Err(StoreError::new(ErrorKind::NotApplied, STORE_NAME, "no node is known"));
        }
        Ok(nodes)
    }
}
