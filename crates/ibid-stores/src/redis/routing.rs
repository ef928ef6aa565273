//! Routes calls to the server that owns their bucket, with script caching, redirects and replica waits.

use std::{sync::Arc, time::Duration};

use ibid::store::{ErrorKind, StoreError};
use redis::{Cmd, Value};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    RedisInner,
    error::{RedisCallError, STORE_NAME, check_reply, corrupt_reply},
    scripts::ScriptCall,
    server::{RedisCommand, RedisServer},
    url::RedisHost,
};
use crate::breaker::with_jitter;

/// Maximum redirects of a call, all within its deadline.
const MAX_REDIRECTS: u32 = 16;
/// Delay before a retry while a slot is being moved.
const TRYAGAIN_DELAY: Duration = Duration::from_millis(20);

impl RedisInner {
    pub(super) async fn run(&self, call: &ScriptCall) -> Result<Value, StoreError> {
        Ok(self.run_on_owner(call, 0).await?)
    }

    /// Runs a script at the bucket's owner. With replicas, the reply also has the number that acknowledged the write.
    async fn run_on_owner(&self, call: &ScriptCall, replicas: u32) -> Result<Value, RedisCallError> {
        let deadline = Instant::now() + self.timeout();
        let (mut in_full, mut asking, mut hops) = (false, None, 0);
        // Redirects are counted; retries during a slot migration are bounded by the deadline.
        loop {
            let link = match &asking {
                Some(host) => self.topology.server_at(host),
                None => self.owner_of(call.bucket, deadline).await?,
            };
            let command = if in_full { call.eval_command() } else { call.evalsha_command() };
            let sent = RedisCommand { command: &command, asking: asking.is_some(), replicas };
            let trouble = match link.send(sent, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            let redirected = redirect_host(&trouble, &link).filter(|_| hops < MAX_REDIRECTS);
            hops += 1;
            match redirected {
                _ if trouble.has_code("NOSCRIPT") && !in_full => in_full = true,
                Some(to) if trouble.has_code("MOVED") => {
                    self.topology.set_owner(call.bucket, to);
                    (asking, in_full) = (None, false);
                }
                Some(to) if trouble.has_code("ASK") => (asking, in_full) = (Some(to), false),
                _ if trouble.has_code("TRYAGAIN") => {
                    asking = None;
                    sleep(with_jitter(TRYAGAIN_DELAY)).await;
                    // A retry that may hit the deadline would turn a known failure into an ambiguous one.
                    if deadline.saturating_duration_since(Instant::now()) < self.timeout() / 3 {
                        return Err(trouble);
                    }
                }
                _ => {
                    if matches!(trouble, RedisCallError::NotSent(_) | RedisCallError::Unanswered(_))
                        || trouble.says_wrong_server()
                    {
                        self.topology.refresh_in_background();
                    }
                    return Err(trouble);
                }
            }
        }
    }

    /// Returns the owner of a bucket, loading the topology if needed.
    async fn owner_of(&self, bucket: u8, deadline: Instant) -> Result<Arc<RedisServer>, RedisCallError> {
        if let Some(link) = self.topology.server_for(bucket) {
            return Ok(link);
        }
        let asked = timeout_at(deadline, self.topology.ensure_known()).await;
        self.topology.server_for(bucket).ok_or_else(|| {
            self.topology.refresh_in_background();
            let why = asked.ok().and_then(Result::err).unwrap_or_else(|| "no node is known to keep this bucket".into());
            RedisCallError::NotSent(why)
        })
    }

    /// Runs a claim or completion, and waits for the configured number of replicas if it changed something.
    pub(super) async fn run_replicated(
        &self, call: &ScriptCall, changed: impl Fn(&Value) -> bool,
    ) -> Result<Value, StoreError> {
        if self.wait_replicas == 0 {
            return self.run(call).await;
        }
        let answer = self.run_on_owner(call, self.wait_replicas).await?;
        let Value::Array(both) = answer else { return Err(corrupt_reply("no count of replicas came")) };
        let Ok([answer, reached]) = <[Value; 2]>::try_from(both) else {
            return Err(corrupt_reply("no count of replicas came"));
        };
        let reached = match check_reply(reached)? {
            Value::Int(reached) => reached,
            _ => return Err(corrupt_reply("no count of replicas came")),
        };
        if changed(&answer) && reached < i64::from(self.wait_replicas) {
            let why = format!("{reached} of {} replicas have it within {:?}", self.wait_replicas, self.timeout());
            return Err(StoreError::new(ErrorKind::Ambiguous, STORE_NAME, why));
        }
        Ok(answer)
    }

    /// Runs a plain command about a bucket, following redirects.
    pub(super) async fn run_command(&self, bucket: u8, command: &Cmd) -> Result<Value, StoreError> {
        let deadline = Instant::now() + self.timeout();
        let mut asking = None;
        for _ in 0..MAX_REDIRECTS {
            let link = match &asking {
                Some(host) => self.topology.server_at(host),
                None => self.owner_of(bucket, deadline).await?,
            };
            let sent = RedisCommand { command, asking: asking.is_some(), replicas: 0 };
            let trouble = match link.send(sent, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            match redirect_host(&trouble, &link) {
                Some(to) if trouble.has_code("MOVED") => {
                    self.topology.set_owner(bucket, to);
                    asking = None;
                }
                Some(to) if trouble.has_code("ASK") => asking = Some(to),
                _ => {
                    self.topology.refresh_in_background();
                    return Err(trouble.into());
                }
            }
        }
        Err(RedisCallError::NotSent("it was redirected too often".into()).into())
    }
}

/// Returns the target of a redirect. A node that names no host means its own.
fn redirect_host(trouble: &RedisCallError, from: &RedisServer) -> Option<RedisHost> {
    let (name, port) = trouble.redirect_target()?;
    if name.is_empty() {
        return from.host().map(|own| RedisHost::new(&own.name, port));
    }
    Some(RedisHost::new(name, port))
}
