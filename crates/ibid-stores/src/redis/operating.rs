//! Listings, counts and sweeps.
//!
//! What is in flight or unknown is found by an index. Finished entries are not indexed: to list them, the keyspace is
//! scanned, a bounded part of what was found is read, in the order of addresses, and the page may come short. That is for
//! people who ask for it; nothing on a request's path does it.

use std::{collections::BTreeSet, sync::Arc};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, future::join_all, stream};
use ibid::store::{Address, Counts, Cursor, ErrorKind, Filter, Listed, Page, State, StoreError, Swept, Token};
use redis::Value;

use super::{
    Inner,
    answers::{self, Parts},
    link::{Link, Sent, patient},
    nodes::BUCKETS,
    scripts::{self, Call},
    trouble::{Trouble, checked},
};

/// Scripts under way at the same time, so that a walk over all buckets does not hold up others.
const SIDE_BY_SIDE: usize = 16;
/// Entries read by one script.
const READ: usize = 64;
/// Addresses that one page of a scan looks at, at most.
const WINDOW: usize = 4096;
/// Keys looked at by one step of a scan.
const STEP: usize = 1000;
/// Entries counted or swept by one script: a script holds up the whole server.
const BATCH: usize = 500;
/// Steps of a scan that counts make, at most; beyond that they are estimated.
const SAMPLED_STEPS: usize = 20;
/// Keys whose state and size counts look at, at most.
const SAMPLED_KEYS: usize = 500;
/// How long a sweeper that died keeps others from sweeping.
const SWEEPER_MS: usize = 30_000;
/// Bytes of an entry beside its record: fields, names and the server's own.
const ENTRY_BYTES: u64 = 1200;

impl Inner {
    pub(super) async fn sweep(&self, at_most: u32) -> Result<Swept, StoreError> {
        let me: String = Token::mint().0.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut lock = redis::cmd("SET");
        lock.arg(self.names.sweeper()).arg(&me).arg("NX").arg("PX").arg(SWEEPER_MS);
        match self.plain(0, &lock).await? {
            Value::Okay => {}
            _ => return Ok(Swept::default()),
        }
        let swept = self.sweep_all(at_most).await;
        let unlock =
            Call { script: &scripts::UNLOCK, bucket: 0, keys: vec![self.names.sweeper()], args: vec![me.into()] };
        // If that fails, it lapses.
        let _ = self.run(&unlock).await;
        swept
    }

    /// A shard that cannot be swept does not keep the others from it.
    async fn sweep_all(&self, at_most: u32) -> Result<Swept, StoreError> {
        let mut swept = Swept::default();
        let (mut due, mut failed) = (Vec::new(), Vec::new());
        // A first look at all buckets removes nothing: few have anything to do.
        let looks = (0..=u8::MAX).map(|bucket| async move { (bucket, self.sweep_bucket(bucket, 0).await) });
        let mut looks = stream::iter(looks).buffered(SIDE_BY_SIDE);
        while let Some((bucket, looked)) = looks.next().await {
            match looked {
                Ok((_, lapsed, more)) => {
                    swept.lapsed = swept.lapsed.saturating_add(lapsed);
                    due.extend(more.then_some(bucket));
                }
                Err(error) => failed.push(error),
            }
        }
        if failed.len() == BUCKETS
            && let Some(error) = failed.pop()
        {
            return Err(error);
        }
        for bucket in due {
            let mut more = true;
            while more {
                if swept.removed == at_most {
                    swept.more = true;
                    return Ok(swept);
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

    /// Removed, lapsed, and whether more is due.
    async fn sweep_bucket(&self, bucket: u8, at_most: u32) -> Result<(u32, u32, bool), StoreError> {
        let args = vec![self.names.entries(bucket).into(), number(u64::from(at_most)), number(BATCH as u64)];
        let call = Call { script: &scripts::SWEEP, bucket, keys: vec![self.names.index(bucket)], args };
        let mut parts = Parts::of(self.run(&call).await?)?;
        Ok((parts.number()? as u32, parts.number()? as u32, parts.number()? == 1))
    }

    pub(super) async fn list(&self, filter: &Filter, from: Cursor, at_most: u32) -> Result<Page, StoreError> {
        let at_most = at_most as usize;
        if at_most == 0 {
            return Ok(Page::default());
        }
        if let Some(at) = filter.address {
            let wanted = from.0.is_none_or(|from| at > from);
            let found = if wanted { self.look(&[at]).await? } else { Vec::new() };
            return Ok(Page {
                entries: found.into_iter().filter(|listed| filter.matches(listed)).collect(),
                next: None,
            });
        }
        if matches!(filter.state, Some(State::Processing | State::Unknown)) {
            return self.list_indexed(filter, from, at_most).await;
        }
        let (window, more) = self.window(from).await?;
        let mut entries = Vec::new();
        for some in window.chunks(READ) {
            entries.extend(self.look(some).await?.into_iter().filter(|listed| filter.matches(listed)));
            if entries.len() > at_most {
                entries.truncate(at_most);
                let next = entries.last().map(|last| Cursor(Some(last.address)));
                return Ok(Page { entries, next });
            }
        }
        let next = window.last().filter(|_| more).map(|last| Cursor(Some(*last)));
        Ok(Page { entries, next })
    }

    async fn list_indexed(&self, filter: &Filter, from: Cursor, at_most: usize) -> Result<Page, StoreError> {
        let first = from.0.map_or(0, |from| from.0[0]);
        let buckets = stream::iter((first..=u8::MAX).map(|bucket| self.indexed(bucket, from.0)));
        let mut buckets = buckets.buffered(SIDE_BY_SIDE);
        let mut entries = Vec::new();
        while let Some(addresses) = buckets.try_next().await? {
            for some in addresses.chunks(READ) {
                entries.extend(self.look(some).await?.into_iter().filter(|listed| filter.matches(listed)));
                if entries.len() > at_most {
                    entries.truncate(at_most);
                    let next = entries.last().map(|last| Cursor(Some(last.address)));
                    return Ok(Page { entries, next });
                }
            }
        }
        Ok(Page { entries, next: None })
    }

    /// What a bucket's index holds, in order, behind `from`.
    async fn indexed(&self, bucket: u8, from: Option<Address>) -> Result<Vec<Address>, StoreError> {
        let mut range = redis::cmd("ZRANGE");
        range.arg(self.names.index(bucket)).arg(0).arg(-1);
        let mut parts = Parts::of(self.plain(bucket, &range).await?)?;
        let mut found = Vec::new();
        while let Some(member) = parts.value() {
            let Value::BulkString(hex) = member else { continue };
            let at = std::str::from_utf8(&hex).ok().and_then(Address::from_hex);
            found.extend(at.filter(|at| from.is_none_or(|from| *at > from)));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Reads entries, those of one bucket together.
    async fn look(&self, at: &[Address]) -> Result<Vec<Listed>, StoreError> {
        let some: Vec<Vec<Address>> = at.chunk_by(|a, b| a.0[0] == b.0[0]).map(<[Address]>::to_vec).collect();
        let calls = stream::iter(some.into_iter().map(|some| self.look_into(some)));
        let found: Vec<Vec<Listed>> = calls.buffered(SIDE_BY_SIDE).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Reads entries of one bucket, of which there is at least one.
    async fn look_into(&self, some: Vec<Address>) -> Result<Vec<Listed>, StoreError> {
        let keys = some.iter().map(|at| self.names.entry(at)).collect();
        let call = Call { script: &scripts::LOOK, bucket: some[0].0[0], keys, args: Vec::new() };
        let mut rows = Parts::of(self.run(&call).await?)?;
        let mut found = Vec::new();
        for at in some {
            found.extend(answers::listed(rows.value().unwrap_or(Value::Nil), at)?);
        }
        Ok(found)
    }

    /// The first addresses behind `from` that a scan finds, and whether there are more.
    async fn window(&self, from: Cursor) -> Result<(Vec<Address>, bool), StoreError> {
        let mut window = BTreeSet::new();
        let mut more = false;
        for link in self.known_nodes().await? {
            let mut cursor = Bytes::from_static(b"0");
            loop {
                let (next, keys) = self.scan(&link, &cursor).await?;
                for key in keys {
                    let Some(at) = self.names.address_in(&key) else { continue };
                    if from.0.is_none_or(|from| at > from) {
                        window.insert(at);
                    }
                    if window.len() > WINDOW {
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

    async fn scan(&self, link: &Link, cursor: &Bytes) -> Result<(Bytes, Vec<Bytes>), StoreError> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(&cursor[..]).arg("MATCH").arg(self.names.pattern()).arg("COUNT").arg(STEP);
        let answer = link.send(Sent::plain(&scan), patient(self.timeout())).await?;
        let mut parts = Parts::of(answer)?;
        let next = parts.bytes()?;
        let mut keys = Parts::of(parts.value().unwrap_or(Value::Nil))?;
        let mut found = Vec::new();
        while let Ok(key) = keys.bytes() {
            found.push(key);
        }
        Ok((next, found))
    }

    pub(super) async fn counts(&self) -> Result<Counts, StoreError> {
        let mut counts = Counts::default();
        let buckets = stream::iter((0..BUCKETS).map(|bucket| self.count_bucket(bucket as u8)));
        let buckets: Vec<(u64, u64)> = buckets.buffered(SIDE_BY_SIDE).try_collect().await?;
        for (processing, unknown) in buckets {
            counts.processing += processing;
            counts.unknown += unknown;
        }
        let nodes = self.known_nodes().await?;
        for estimate in join_all(nodes.iter().map(|link| self.estimate(link))).await {
            let (finished, bytes) = estimate?;
            counts.finished += finished;
            counts.bytes += bytes;
        }
        Ok(counts)
    }

    async fn count_bucket(&self, bucket: u8) -> Result<(u64, u64), StoreError> {
        let (mut processing, mut unknown, mut from) = (0, 0, 0);
        loop {
            let args = vec![self.names.entries(bucket).into(), number(from), number(BATCH as u64)];
            let call = Call { script: &scripts::COUNTS, bucket, keys: vec![self.names.index(bucket)], args };
            let mut parts = Parts::of(self.run(&call).await?)?;
            processing += parts.number()?;
            unknown += parts.number()?;
            let seen = parts.number()?;
            if seen < BATCH as u64 {
                return Ok((processing, unknown));
            }
            from += seen;
        }
    }

    /// Finished entries at one server and the bytes of all: exact while few, sampled when many.
    async fn estimate(&self, link: &Link) -> Result<(u64, u64), StoreError> {
        let mut size = Parts::of(Value::Array(vec![
            link.send(Sent::plain(&redis::cmd("DBSIZE")), patient(self.timeout())).await?,
        ]))?;
        let all_keys = size.number()?;
        let (mut entries, mut sample, mut cursor) = (0_u64, Vec::new(), Bytes::from_static(b"0"));
        let mut looked_at = all_keys;
        for step in 1..=SAMPLED_STEPS {
            let (next, keys) = self.scan(link, &cursor).await?;
            let keys: Vec<Bytes> = keys.into_iter().filter(|key| self.names.address_in(key).is_some()).collect();
            entries += keys.len() as u64;
            sample.extend(keys.into_iter().take(SAMPLED_KEYS - sample.len()));
            if next == b"0"[..] {
                break;
            }
            cursor = next;
            if step == SAMPLED_STEPS {
                looked_at = (STEP * step) as u64;
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
        let mut answers = link.send_all(&ask, patient(self.timeout())).await?.into_iter();
        let mut time = Parts::of(answers.next().unwrap_or(Value::Nil))?;
        let now = time.number()? * 1_000_000 + time.number()?;
        let (mut finished, mut bytes) = (0_u64, 0_u64);
        while let (Some(fields), Some(length)) = (answers.next(), answers.next()) {
            // One whose slot is on its way to another node is not looked at.
            let (Ok(fields), Ok(Value::Int(length))) = (checked(fields), checked(length)) else { continue };
            let mut fields = Parts::of(fields)?;
            let phase = fields.bytes().unwrap_or_default();
            let times = fields.bytes().unwrap_or_default();
            // As entry.lua writes them: the second is when it expires.
            let expires = std::str::from_utf8(&times).ok().and_then(|times| times.split(' ').nth(1)?.parse().ok());
            if phase == b"d"[..] && expires.is_some_and(|expires: u64| now < expires) {
                finished += 1;
            }
            bytes += ENTRY_BYTES + length.unsigned_abs();
        }
        let scale = |of_sample: u64| {
            let of_scanned = u128::from(of_sample) * u128::from(entries) / sample.len() as u128;
            (of_scanned * u128::from(all_keys.max(looked_at)) / u128::from(looked_at.max(1))) as u64
        };
        Ok((scale(finished), scale(bytes)))
    }

    async fn known_nodes(&self) -> Result<Vec<Arc<Link>>, StoreError> {
        self.nodes.known().await.map_err(|why| StoreError::from(Trouble::NotSent(why)))?;
        let nodes = self.nodes.all();
        if nodes.is_empty() {
            return Err(StoreError::new(ErrorKind::NotApplied, super::trouble::STORE, "no node is known"));
        }
        Ok(nodes)
    }
}

pub(super) fn number(number: u64) -> Bytes {
    number.to_string().into()
}
