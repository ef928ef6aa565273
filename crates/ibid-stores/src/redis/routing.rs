//! Routes calls to the server that owns their bucket, with script caching, redirects and replica waits.

use super::*;

/// Maximum redirects of a call, all within its deadline.
const MAX_REDIRECTS: u32 = 16;
/// Delay before a retry while a slot is being moved.
const TRYAGAIN_DELAY: Duration = Duration::from_millis(20);

impl Redis {
    pub(super) async fn run(&self, call: &ScriptCall) -> Result<Value, StoreError> {
        Ok(self.run_on_owner(call.bucket, 0, |in_full| call.command(in_full)).await?)
    }

    /// Runs a plain command about a bucket.
    pub(super) async fn run_command(&self, bucket: u8, command: &Cmd) -> Result<Value, StoreError> {
        Ok(self.run_on_owner(bucket, 0, |_| command.clone()).await?)
    }

    /// Runs a command at the bucket's owner. `command` returns it with the digest of its script, or with the script in
    /// full. With replicas, the reply also has the number that acknowledged the write.
    async fn run_on_owner(
        &self, bucket: u8, replicas: u32, command: impl Fn(bool) -> Cmd,
    ) -> Result<Value, RedisCallError> {
        let deadline = Instant::now() + self.timeout();
        let (mut in_full, mut asking, mut hops) = (false, None, 0);
        // Redirects are counted; retries during a slot migration are bounded by the deadline.
        loop {
            let server = match &asking {
                Some(host) => self.topology.server_at(host),
                None => self.owner_of(bucket, deadline).await?,
            };
            let sent = RedisCommand { command: &command(in_full), asking: asking.is_some(), replicas };
            let trouble = match server.send(sent, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            let redirected = redirect_host(&trouble, &server).filter(|_| hops < MAX_REDIRECTS);
            hops += 1;
            match redirected {
                _ if trouble.has_code("NOSCRIPT") && !in_full => in_full = true,
                Some(to) if trouble.has_code("MOVED") => {
                    self.topology.set_owner(bucket, to);
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
                    if !matches!(trouble, RedisCallError::Refused { .. }) || trouble.says_wrong_server() {
                        self.topology.refresh_in_background();
                    }
                    return Err(trouble);
                }
            }
        }
    }

    /// Returns the owner of a bucket, loading the topology if needed.
    async fn owner_of(&self, bucket: u8, deadline: Instant) -> Result<Arc<RedisServer>, RedisCallError> {
        if let Some(server) = self.topology.server_for(bucket) {
            return Ok(server);
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
        let answer = self.run_on_owner(call.bucket, self.wait_replicas, |in_full| call.command(in_full)).await?;
        let missing = || corrupt_reply("no count of replicas came");
        let Value::Array(both) = answer else { return Err(missing()) };
        let [answer, reached] = <[Value; 2]>::try_from(both).map_err(|_| missing())?;
        let Value::Int(reached) = check_reply(reached)? else { return Err(missing()) };
        if changed(&answer) && reached < i64::from(self.wait_replicas) {
            let why = format!("{reached} of {} replicas have it within {:?}", self.wait_replicas, self.timeout());
            return Err(StoreError::new(ErrorKind::Ambiguous, STORE_NAME, why));
        }
        Ok(answer)
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
