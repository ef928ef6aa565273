//! Calls on their way to whoever keeps their bucket: scripts by digest or in full, redirections, replicas.

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

/// How many redirections a call follows, all within its deadline.
const MAX_REDIRECTS: u32 = 16;
/// Between two tries while a slot is being moved.
const TRYAGAIN_DELAY: Duration = Duration::from_millis(20);

impl RedisInner {
    pub(super) async fn run(&self, call: &ScriptCall) -> Result<Value, StoreError> {
        Ok(self.run_on_owner(call, 0).await?)
    }

    /// Runs a script at whoever keeps its bucket. With replicas, the answer is followed by how many have it.
    async fn run_on_owner(&self, call: &ScriptCall, replicas: u32) -> Result<Value, RedisCallError> {
        let deadline = Instant::now() + self.timeout();
        let (mut in_full, mut asking, mut hops) = (false, None, 0);
        // Redirections are counted; tries while a slot is on its way are bounded by the deadline.
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
                    // A try that may run into the deadline would make an ambiguity of what is none.
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

    /// Who keeps a bucket, asked for if that is not known yet.
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

    /// A claim or a completion: answered once so many replicas have it as was asked for.
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

    /// A plain command about a bucket, redirected if need be.
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

/// Where a redirection points to. A node that names no host means its own.
fn redirect_host(trouble: &RedisCallError, from: &RedisServer) -> Option<RedisHost> {
    let (name, port) = trouble.redirect_target()?;
    if name.is_empty() {
        return from.host().map(|own| RedisHost::new(&own.name, port));
    }
    Some(RedisHost::new(name, port))
}
