//! Calls on their way to whoever keeps their bucket: scripts by digest or in full, redirections, replicas.

use std::{sync::Arc, time::Duration};

use ibid::store::{ErrorKind, StoreError};
use redis::{Cmd, Value};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    Inner,
    link::{Link, Sent},
    place::Host,
    scripts::Call,
    trouble::{STORE, Trouble, checked, corrupt},
};
use crate::breaker::jittered;

/// How many redirections a call follows, all within its deadline.
const HOPS: u32 = 16;
/// Between two tries while a slot is being moved.
const TRY_AGAIN: Duration = Duration::from_millis(20);

impl Inner {
    pub(super) async fn run(&self, call: &Call) -> Result<Value, StoreError> {
        Ok(self.run_on_owner(call, 0).await?)
    }

    /// Runs a script at whoever keeps its bucket. With replicas, the answer is followed by how many have it.
    async fn run_on_owner(&self, call: &Call, replicas: u32) -> Result<Value, Trouble> {
        let deadline = Instant::now() + self.timeout();
        let (mut in_full, mut asking, mut hops) = (false, None, 0);
        // Redirections are counted; tries while a slot is on its way are bounded by the deadline.
        loop {
            let link = match &asking {
                Some(host) => self.nodes.at(host),
                None => self.owner(call.bucket, deadline).await?,
            };
            let command = if in_full { call.in_full() } else { call.by_digest() };
            let sent = Sent { command: &command, asking: asking.is_some(), replicas };
            let trouble = match link.send(sent, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            let redirected = redirected_to(&trouble, &link).filter(|_| hops < HOPS);
            hops += 1;
            match redirected {
                _ if trouble.is("NOSCRIPT") && !in_full => in_full = true,
                Some(to) if trouble.is("MOVED") => {
                    self.nodes.moved(call.bucket, to);
                    (asking, in_full) = (None, false);
                }
                Some(to) if trouble.is("ASK") => (asking, in_full) = (Some(to), false),
                _ if trouble.is("TRYAGAIN") => {
                    asking = None;
                    sleep(jittered(TRY_AGAIN)).await;
                    // A try that may run into the deadline would make an ambiguity of what is none.
                    if deadline.saturating_duration_since(Instant::now()) < self.timeout() / 3 {
                        return Err(trouble);
                    }
                }
                _ => {
                    if matches!(trouble, Trouble::NotSent(_) | Trouble::Unanswered(_)) || trouble.says_wrong_server() {
                        self.nodes.doubt();
                    }
                    return Err(trouble);
                }
            }
        }
    }

    /// Who keeps a bucket, asked for if that is not known yet.
    async fn owner(&self, bucket: u8, deadline: Instant) -> Result<Arc<Link>, Trouble> {
        if let Some(link) = self.nodes.of(bucket) {
            return Ok(link);
        }
        let asked = timeout_at(deadline, self.nodes.known()).await;
        self.nodes.of(bucket).ok_or_else(|| {
            self.nodes.doubt();
            let why = asked.ok().and_then(Result::err).unwrap_or_else(|| "no node is known to keep this bucket".into());
            Trouble::NotSent(why)
        })
    }

    /// A claim or a completion: answered once so many replicas have it as was asked for.
    pub(super) async fn run_replicated(
        &self, call: &Call, changed: impl Fn(&Value) -> bool,
    ) -> Result<Value, StoreError> {
        if self.wait_replicas == 0 {
            return self.run(call).await;
        }
        let answer = self.run_on_owner(call, self.wait_replicas).await?;
        let Value::Array(both) = answer else { return Err(corrupt("no count of replicas came")) };
        let Ok([answer, reached]) = <[Value; 2]>::try_from(both) else {
            return Err(corrupt("no count of replicas came"));
        };
        let reached = match checked(reached)? {
            Value::Int(reached) => reached,
            _ => return Err(corrupt("no count of replicas came")),
        };
        if changed(&answer) && reached < i64::from(self.wait_replicas) {
            let why = format!("{reached} of {} replicas have it within {:?}", self.wait_replicas, self.timeout());
            return Err(StoreError::new(ErrorKind::Ambiguous, STORE, why));
        }
        Ok(answer)
    }

    /// A plain command about a bucket, redirected if need be.
    pub(super) async fn plain(&self, bucket: u8, command: &Cmd) -> Result<Value, StoreError> {
        let deadline = Instant::now() + self.timeout();
        let mut asking = None;
        for _ in 0..HOPS {
            let link = match &asking {
                Some(host) => self.nodes.at(host),
                None => self.owner(bucket, deadline).await?,
            };
            let sent = Sent { command, asking: asking.is_some(), replicas: 0 };
            let trouble = match link.send(sent, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            match redirected_to(&trouble, &link) {
                Some(to) if trouble.is("MOVED") => {
                    self.nodes.moved(bucket, to);
                    asking = None;
                }
                Some(to) if trouble.is("ASK") => asking = Some(to),
                _ => {
                    self.nodes.doubt();
                    return Err(trouble.into());
                }
            }
        }
        Err(Trouble::NotSent("it was redirected too often".into()).into())
    }
}

/// Where a redirection points to. A node that names no host means its own.
fn redirected_to(trouble: &Trouble, from: &Link) -> Option<Host> {
    let (name, port) = trouble.target()?;
    if name.is_empty() {
        return from.host().map(|own| Host::new(&own.name, port));
    }
    Some(Host::new(name, port))
}
