//! Claims, settlements and reads of one entry: by a native command where one does it, otherwise by a script.
//!
//! A claim is `SET … NX GET`: nothing there means granted, and a value that tells all by itself is the answer. A completion
//! is `SET … IFEQ` with the bytes that the claim wrote, where the server has it: if it was not applied, that proves
//! nothing (the entry is absent, was completed before, or remembers a spent token), so the script decides. Everything
//! else goes to the script at once.

use super::{
    connection::RedisCall,
    entry::{
        Completion, EntryView, FENCE_MEMORY_MS, completed_value, encode_running, encode_summary, holder_id,
        life_millis, millis, reply_number, running_length, running_value,
    },
    resp::{Reply, decimal, encode_arg, encode_arg_length},
    routing::Attempt,
    server::Answered,
    *,
};

/// How a claim was sent.
enum ClaimForm {
    /// As a native command, with the fence that it writes.
    Native {
        fence: Fence,
        is_tracked: bool,
    },
    Script {
        is_tracked: bool,
    },
}

impl RedisCore {
    pub(super) fn timeout(&self) -> Duration {
        self.topology.connector.timeout
    }

    pub(super) async fn claim(&self, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        let at = &ask.address;
        if self.wait_replicas > 0 {
            let call = |form| self.claim_script(ask, form).claiming(*at);
            let answer = Box::pin(self.run_replicated(at.0[0], call, |answer| has_tag(answer, b"G"))).await?;
            self.forget_cached(at);
            return parse_claim(&answer, ask);
        }
        // The key of a short-lived entry stays for longer than it lives, which the script arranges.
        let life = life_millis(ask.lease) + millis(ask.ttl);
        let is_plain = ask.take_over.is_none() && life >= FENCE_MEMORY_MS;
        let key = self.key_names.entry_key(at);
        let build = |connection: &RedisConnection, attempt: Attempt| {
            let is_tracked = connection.features.tracking && !attempt.asking;
            match connection.server_time().filter(|_| is_plain) {
                Some(now) => {
                    let fence = Fence(now);
                    let call = native_claim(&key, ask, fence, life, is_tracked);
                    (call.claiming(*at), ClaimForm::Native { fence, is_tracked })
                }
                None => {
                    let call = tracked(self.claim_script(ask, attempt.form), is_tracked);
                    (call.claiming(*at), ClaimForm::Script { is_tracked })
                }
            }
        };
        let answered = match self.run_on_owner(at.0[0], build).await {
            Ok(answered) => answered,
            // A full or read-only server refuses this command even where it would only read. The script reads first.
            Err(trouble) if is_plain && trouble.refuses_writes() => return Box::pin(self.claim_by_script(ask)).await,
            Err(trouble) => return Err(trouble.into()),
        };
        let Answered { reply, sent, connection } = answered;
        let found = match sent {
            ClaimForm::Script { is_tracked } => self.cacheable(at, is_tracked, parse_claim(&reply, ask)?),
            ClaimForm::Native { fence, is_tracked } => match parse_native_claim(reply, ask, fence, is_tracked)? {
                Some(found) => self.cacheable(at, is_tracked, found),
                None => Box::pin(self.claim_by_script(ask)).await?,
            },
        };
        if !matches!(&found, ClaimOutcome::Granted(_)) {
            connection.with_claim_log(|claims| claims.remove(at));
        }
        Ok(found)
    }

    async fn claim_by_script(&self, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        let build = |connection: &RedisConnection, attempt: Attempt| {
            let is_tracked = connection.features.tracking && !attempt.asking;
            (tracked(self.claim_script(ask, attempt.form), is_tracked), is_tracked)
        };
        let answered = self.run_on_owner(ask.address.0[0], build).await?;
        Ok(self.cacheable(&ask.address, answered.sent, parse_claim(&answered.reply, ask)?))
    }

    fn claim_script(&self, ask: &ClaimRequest, form: ScriptForm) -> RedisCall {
        let over = ask.take_over.map(|fence| fence.0.to_be_bytes());
        let value = running_value(ask, Fence::UNSEEN, 0);
        let args = [&value[..], over.as_ref().map_or(&b""[..], |fence| fence), self.replicated_flag()];
        scripts::CLAIM.call(form, &[&self.key_names.entry_key(&ask.address)], &args)
    }

    /// Runs a script that changes one entry.
    async fn run_entry_script(
        &self, script: &RedisScript, at: &Address, args: &[&[u8]],
    ) -> Result<Answered<()>, StoreError> {
        let key = self.key_names.entry_key(at);
        let build = |_: &RedisConnection, attempt: Attempt| (script.call(attempt.form, &[&key], args), ());
        Ok(self.run_on_owner(at.0[0], build).await?)
    }

    fn replicated_flag(&self) -> &'static [u8] {
        if self.wait_replicas > 0 { b"1" } else { b"0" }
    }

    pub(super) async fn extend(&self, lease: &Lease, hold: Duration) -> Result<SettleOutcome, StoreError> {
        check_fence(lease)?;
        let (hold, value) = (life_millis(hold).to_string(), running_value(&lease.request, lease.fence, lease.attempt));
        let at = &lease.request.address;
        let answered = self.run_entry_script(&scripts::EXTEND, at, &[&value, hold.as_bytes()]).await?;
        let outcome = parse_settle(&answered.reply)?;
        if outcome == SettleOutcome::Restored {
            answered.connection.with_claim_log(|claims| claims.add_written(*at));
        }
        Ok(outcome)
    }

    pub(super) async fn settle(&self, lease: &Lease, end: &Settlement) -> Result<SettleOutcome, StoreError> {
        check_fence(lease)?;
        let at = &lease.request.address;
        let completion = completion_of(end);
        // Releasing a takeover restores the unknown outcome.
        let leaves_unfinished = match end {
            Settlement::Complete { .. } => false,
            Settlement::Park { .. } => true,
            Settlement::Release => lease.request.take_over.is_some(),
        };
        let is_native = completion.is_some() && lease.fence != Fence::UNSEEN && lease.request.take_over.is_none();
        if self.wait_replicas > 0 && completion.is_some() {
            let call = |form| self.settle_script(lease, end, form, None, false);
            let changed = |answer: &Reply| has_tag(answer, b"H") || has_tag(answer, b"R");
            let answer = Box::pin(self.run_replicated(at.0[0], call, changed)).await?;
            self.forget_cached(at);
            return parse_settle(&answer);
        }
        let build = |connection: &RedisConnection, attempt: Attempt| {
            let is_tracked = connection.features.tracking && !attempt.asking;
            let now = connection.server_time();
            match &completion {
                Some(completion) if is_native && connection.features.compare_and_set => {
                    let call = self.native_complete(lease, completion, now, is_tracked);
                    (call, (is_tracked, true))
                }
                _ => {
                    let call = tracked(self.settle_script(lease, end, attempt.form, now, is_tracked), is_tracked);
                    (if leaves_unfinished { call.claiming(*at) } else { call }, (is_tracked, false))
                }
            }
        };
        let answered = match self.run_on_owner(at.0[0], build).await {
            // A full server refuses the native command, but lets the script pass.
            Err(trouble) if is_native && trouble.refuses_writes() => None,
            answered => Some(answered?),
        };
        let applied = match &answered {
            Some(Answered { reply, sent: (is_tracked, false), .. }) => Some((parse_settle(reply)?, *is_tracked)),
            Some(Answered { reply, sent: (is_tracked, true), .. }) if is_native_applied(reply) => {
                Some((SettleOutcome::Applied, *is_tracked))
            }
            _ => None,
        };
        let (outcome, is_tracked) = match applied {
            Some(applied) => applied,
            None => Box::pin(self.settle_by_script(lease, end)).await?,
        };
        if !is_tracked {
            self.forget_cached(at);
        }
        if let Some(Answered { connection, .. }) = answered.filter(|_| !leaves_unfinished) {
            connection.with_claim_log(|claims| claims.remove(at));
        }
        Ok(outcome)
    }

    async fn settle_by_script(&self, lease: &Lease, end: &Settlement) -> Result<(SettleOutcome, bool), StoreError> {
        let build = |connection: &RedisConnection, attempt: Attempt| {
            let is_tracked = connection.features.tracking && !attempt.asking;
            let call = self.settle_script(lease, end, attempt.form, connection.server_time(), is_tracked);
            (tracked(call, is_tracked), is_tracked)
        };
        let answered = self.run_on_owner(lease.request.address.0[0], build).await?;
        Ok((parse_settle(&answered.reply)?, answered.sent))
    }

    /// `SET … IFEQ` with the bytes that the claim wrote.
    fn native_complete(
        &self, lease: &Lease, completion: &Completion<'_>, now: Option<u64>, is_tracked: bool,
    ) -> RedisCall {
        let key = self.key_names.entry_key(&lease.request.address);
        let before = running_value(&lease.request, lease.fence, lease.attempt);
        let (value, stays) = completed_value(lease, completion, now);
        let mut digits = [0; 20];
        let set: [&[u8]; 7] = [b"SET", &key, &value, b"IFEQ", &before, b"PX", decimal(stays, &mut digits)];
        if is_tracked { tracked_transaction(&set, &[b"EXISTS", &key]) } else { RedisCall::new(&set) }
    }

    fn settle_script(
        &self, lease: &Lease, end: &Settlement, form: ScriptForm, now: Option<u64>, is_tracked: bool,
    ) -> RedisCall {
        let holder = holder_id(lease.fence, &lease.request.token);
        let (value, stays) = match completion_of(end) {
            Some(completion) => completed_value(lease, &completion, now),
            None => (running_value(&lease.request, lease.fence, lease.attempt), 0),
        };
        let (kind, life, retry_in) = settlement_args(end);
        let mut digits = [[0; 20]; 3];
        let [stays_digits, life_digits, retry_digits] = &mut digits;
        let track: &[u8] = if is_tracked { b"1" } else { b"0" };
        let args = [
            &value[..],
            &holder,
            kind,
            decimal(stays, stays_digits),
            track,
            decimal(life, life_digits),
            decimal(retry_in, retry_digits),
            self.replicated_flag(),
        ];
        scripts::SETTLE.call(form, &[&self.key_names.entry_key(&lease.request.address)], &args)
    }

    pub(super) async fn get(&self, at: &Address) -> Result<Option<ClaimOutcome>, StoreError> {
        let key = self.key_names.entry_key(at);
        let build = |connection: &RedisConnection, attempt: Attempt| {
            let is_tracked = connection.features.tracking && !attempt.asking;
            (tracked(scripts::LOOK.call(attempt.form, &[&key], &[b"1"]), is_tracked), is_tracked)
        };
        let answered = self.run_on_owner(at.0[0], build).await?;
        let Reply::Array(rows) = &answered.reply else { return Err(corrupt_reply("no row came")) };
        let Some(Reply::Array(parts)) = rows.first() else { return Ok(None) };
        let view = EntryView::from_parts(parts)?;
        let found = view.entry_info(*at)?.map(|_| view.into_claim_outcome());
        Ok(found.map(|found| self.cacheable(at, answered.sent, found)))
    }

    pub(super) async fn resolve(
        &self, at: &Address, seen: Fence, end: &Settlement,
    ) -> Result<SettleOutcome, StoreError> {
        let fence = seen.0.to_be_bytes();
        let (kind, life, retry_in) = settlement_args(end);
        let [life, retry_in] = [life, retry_in].map(|number| number.to_string());
        let (record, failed) = match completion_of(end) {
            Some(completion) => {
                let record = [&encode_summary(completion.summary)[..], completion.record].concat();
                (record, completion.failed)
            }
            None => (Vec::new(), false),
        };
        let failed: &[u8] = if failed { b"1" } else { b"0" };
        let args: [&[u8]; 6] = [&fence, kind, &record, failed, life.as_bytes(), retry_in.as_bytes()];
        let reply = if self.wait_replicas > 0 && completion_of(end).is_some() {
            let key = self.key_names.entry_key(at);
            let call = |form| scripts::RESOLVE.call(form, &[&key], &args);
            self.run_replicated(at.0[0], call, |answer| has_tag(answer, b"H")).await
        } else {
            self.run_entry_script(&scripts::RESOLVE, at, &args).await.map(|answered| answered.reply)
        };
        self.forget_cached(at);
        parse_settle(&reply?)
    }

    pub(super) async fn forget(&self, at: &Address, seen: Fence) -> Result<SettleOutcome, StoreError> {
        let answered = self.run_entry_script(&scripts::FORGET, at, &[&seen.0.to_be_bytes()]).await;
        self.forget_cached(at);
        parse_settle(&answered?.reply)
    }

    pub(super) async fn replace_record(
        &self, at: &Address, seen: Fence, record: Bytes,
    ) -> Result<SettleOutcome, StoreError> {
        let answered = self.run_entry_script(&scripts::REPLACE, at, &[&seen.0.to_be_bytes(), &record]).await;
        self.forget_cached(at);
        parse_settle(&answered?.reply)
    }

    pub(super) async fn reserve(&self, who: &Address, n: u64, window: Duration) -> Result<CounterUsage, StoreError> {
        let millis = window.as_millis().clamp(1, u128::from(MAX_DURATION_US / 1000)) as u64;
        let (key, n, millis) = (self.key_names.quota_key(who), n.min(MAX_FENCE).to_string(), millis.to_string());
        let args = [n.as_bytes(), millis.as_bytes()];
        match self.run_script(&scripts::RESERVE, who.0[0], &[key.as_bytes()], &args).await? {
            Reply::Array(parts) if parts.len() == 2 => {
                let (total, left) = (reply_number(&parts[0])?, reply_number(&parts[1])?.max(1));
                Ok(CounterUsage { total, resets_in: Duration::from_millis(left) })
            }
            _ => Err(corrupt_reply("a count is missing")),
        }
    }

    /// Returns what was found, and makes sure that an answer whose changes are not reported is not cached.
    fn cacheable(&self, at: &Address, is_tracked: bool, found: ClaimOutcome) -> ClaimOutcome {
        if !is_tracked && matches!(found, ClaimOutcome::Completed(_)) {
            self.forget_cached(at);
        }
        found
    }

    fn forget_cached(&self, at: &Address) {
        if let Some(answers) = &self.topology.connector.answer_cache {
            answers.forget(at);
        }
    }
}

/// `SET … NX GET`. With tracking in a transaction, because the server does not track what this command reads.
fn native_claim(key: &[u8], ask: &ClaimRequest, fence: Fence, life: u64, is_tracked: bool) -> RedisCall {
    // The value goes straight into the call: most requests claim, and their values are the longest arguments.
    let value_length = running_length(ask);
    let set = |buffer: &mut Vec<u8>| {
        buffer.reserve(key.len() + value_length + 96);
        buffer.extend_from_slice(b"*7\r\n$3\r\nSET\r\n");
        encode_arg(buffer, key);
        encode_arg_length(buffer, value_length);
        encode_running(buffer, ask, fence, 1);
        buffer.extend_from_slice(b"\r\n$2\r\nNX\r\n$3\r\nGET\r\n$2\r\nPX\r\n");
        encode_arg(buffer, decimal(life, &mut [0; 20]));
    };
    if is_tracked {
        start_transaction().then_encoded(set).then(&[b"PTTL", key]).then(&[b"EXEC"])
    } else {
        RedisCall::default().then_encoded(set)
    }
}

fn tracked_transaction(write: &[&[u8]], read: &[&[u8]]) -> RedisCall {
    start_transaction().then(write).then(read).then(&[b"EXEC"])
}

fn start_transaction() -> RedisCall {
    RedisCall::new(&[b"CLIENT", b"CACHING", b"YES"]).then(&[b"MULTI"])
}

fn tracked(call: RedisCall, is_tracked: bool) -> RedisCall {
    if is_tracked { RedisCall::new(&[b"CLIENT", b"CACHING", b"YES"]).then_call(&call) } else { call }
}

/// Reads the reply of a native claim. `None` if only the script can tell.
fn parse_native_claim(
    reply: Reply, ask: &Arc<ClaimRequest>, fence: Fence, is_tracked: bool,
) -> Result<Option<ClaimOutcome>, StoreError> {
    let (value, pttl) = match reply {
        Reply::Array(parts) if is_tracked => {
            let [value, pttl] = <[Reply; 2]>::try_from(parts).map_err(|_| corrupt_reply("a transaction's parts"))?;
            (value.ok()?, Some(pttl.ok()?))
        }
        value => (value, None),
    };
    let granted =
        |fence, attempt| ClaimOutcome::Granted(Lease { request: ask.clone(), fence, attempt, front_only: false });
    let value = match value {
        Reply::Nil => return Ok(Some(granted(fence, 1))),
        Reply::Bytes(value) => value,
        _ => return Err(corrupt_reply("no value came")),
    };
    // The fence is the server's time.
    let Some(view) = EntryView::from_value(value, fence.0)? else { return Ok(None) };
    match (view.phase(), pttl) {
        (b'r', _) if view.has_token(&ask.token) => Ok(Some(granted(view.fence(), view.attempt()))),
        (b'd', Some(Reply::Int(pttl))) => Ok(Some(view.with_pttl(pttl)?.into_claim_outcome())),
        (b'd', None) => Ok(Some(view.into_claim_outcome())),
        _ => Ok(None),
    }
}

fn is_native_applied(reply: &Reply) -> bool {
    match reply {
        Reply::Array(parts) => parts.first() == Some(&Reply::Ok),
        reply => *reply == Reply::Ok,
    }
}

fn parse_claim(reply: &Reply, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
    match tagged(reply)? {
        (b"G", [fence, attempt]) => Ok(ClaimOutcome::Granted(Lease {
            request: ask.clone(),
            fence: Fence(reply_number(fence)?),
            attempt: u32::try_from(reply_number(attempt)?).map_err(|_| corrupt_reply("an attempt is too high"))?,
            front_only: false,
        })),
        (b"S", []) => Ok(ClaimOutcome::TokenSpent),
        (b"V", parts) => Ok(EntryView::from_parts(parts)?.into_claim_outcome()),
        _ => Err(corrupt_reply("its kind is not known")),
    }
}

fn parse_settle(reply: &Reply) -> Result<SettleOutcome, StoreError> {
    match tagged(reply)? {
        (b"H", _) => Ok(SettleOutcome::Applied),
        (b"R", _) => Ok(SettleOutcome::Restored),
        (b"L", []) => Ok(SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent))),
        (b"L", [seen]) => match tagged(seen)? {
            (b"V", parts) => Ok(SettleOutcome::ClaimLost(Box::new(EntryView::from_parts(parts)?.into_claim_outcome()))),
            _ => Err(corrupt_reply("its kind is not known")),
        },
        _ => Err(corrupt_reply("its kind is not known")),
    }
}

/// Splits what a script returned into its tag and the rest.
fn tagged(reply: &Reply) -> Result<(&[u8], &[Reply]), StoreError> {
    match reply {
        Reply::Array(parts) => match parts.split_first() {
            Some((Reply::Bytes(tag), rest)) => Ok((tag, rest)),
            _ => Err(corrupt_reply("its kind is missing")),
        },
        _ => Err(corrupt_reply("it is no list")),
    }
}

fn has_tag(reply: &Reply, tag: &[u8]) -> bool {
    tagged(reply).is_ok_and(|(found, _)| found == tag)
}

fn completion_of(end: &Settlement) -> Option<Completion<'_>> {
    match end {
        Settlement::Complete { failed, record, summary, ttl } => {
            Some(Completion { failed: *failed, record, summary, ttl: *ttl })
        }
        Settlement::Release | Settlement::Park { .. } => None,
    }
}

/// Returns how the entry ends, how long it lives and when it may be taken over, in milliseconds.
fn settlement_args(end: &Settlement) -> (&'static [u8], u64, u64) {
    match end {
        Settlement::Complete { ttl, .. } => (b"c", life_millis(*ttl), 0),
        Settlement::Release => (b"r", 0, 0),
        Settlement::Park { ttl, retry_in } => (b"p", life_millis(*ttl), millis(*retry_in)),
    }
}

fn check_fence(lease: &Lease) -> Result<(), StoreError> {
    if lease.fence.0 <= MAX_FENCE {
        return Ok(());
    }
    let why = format!("fence {} is beyond all that this store gives ({MAX_FENCE})", lease.fence);
    Err(StoreError::new(ErrorKind::Rejected, STORE_NAME, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_corrupt() {
        let bulk = |text: &'static str| Reply::Bytes(text.into());
        for reply in [
            Reply::Nil,
            Reply::Array(vec![]),
            Reply::Array(vec![bulk("X")]),
            Reply::Array(vec![bulk("L"), bulk("X")]),
            Reply::Array(vec![bulk("V"), bulk("an entry"), Reply::Int(1), Reply::Int(1)]),
            Reply::Array(vec![
                bulk("L"),
                Reply::Array(vec![bulk("V"), bulk("an entry"), Reply::Int(1), Reply::Int(1)]),
            ]),
        ] {
            assert_eq!(parse_settle(&reply).unwrap_err().kind, ErrorKind::Corrupt, "{reply:?}");
        }
    }
}
