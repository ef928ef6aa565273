//! Routes calls to the server that owns their bucket, with script caching, redirects and replica waits.

use super::{connection::RedisCall, resp::Reply, server::Answered, *};

/// Maximum redirects of a call, all within its deadline.
const MAX_REDIRECTS: u32 = 16;
/// Delay before a retry while a slot is being moved.
const TRYAGAIN_DELAY: Duration = Duration::from_millis(20);

/// How a call must be built for one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attempt {
    pub(super) form: ScriptForm,
    /// The call goes to a node that is importing the slot. ASKING precedes it, and only one command may follow.
    pub(super) asking: bool,
}

impl RedisCore {
    /// Runs a script about a bucket.
    pub(super) async fn run_script(
        &self, script: &RedisScript, bucket: u8, keys: &[&[u8]], args: &[&[u8]],
    ) -> Result<Reply, StoreError> {
        let answered = self.run_on_owner(bucket, |_, attempt| (script.call(attempt.form, keys, args), ())).await?;
        Ok(answered.reply)
    }

    /// Runs a plain command about a bucket.
    pub(super) async fn run_command(&self, bucket: u8, args: &[&[u8]]) -> Result<Reply, StoreError> {
        Ok(self.run_on_owner(bucket, |_, _| (RedisCall::new(args), ())).await?.reply)
    }

    /// Runs a claim or completion by a script, and waits for the configured number of replicas if it changed something.
    pub(super) async fn run_replicated(
        &self, bucket: u8, call: impl Fn(ScriptForm) -> RedisCall, changed: impl Fn(&Reply) -> bool,
    ) -> Result<Reply, StoreError> {
        let build = |_: &RedisConnection, attempt: Attempt| (call(attempt.form), ());
        let answer = self.send_to_owner(bucket, self.wait_replicas, build).await?.reply;
        let missing = || corrupt_reply("no count of replicas came");
        let Reply::Array(both) = answer else { return Err(missing()) };
        let [answer, Reply::Int(reached)] = <[Reply; 2]>::try_from(both).map_err(|_| missing())? else {
            return Err(missing());
        };
        if changed(&answer) && reached < i64::from(self.wait_replicas) {
            let why = format!("{reached} of {} replicas have it within {:?}", self.wait_replicas, self.timeout());
            return Err(StoreError::new(ErrorKind::Ambiguous, STORE_NAME, why));
        }
        Ok(answer)
    }

    /// Runs a call at the bucket's owner. `build` is called for each attempt.
    pub(super) async fn run_on_owner<T>(
        &self, bucket: u8, build: impl Fn(&RedisConnection, Attempt) -> (RedisCall, T),
    ) -> Result<Answered<T>, RedisCallError> {
        self.send_to_owner(bucket, 0, build).await
    }

    /// Sends to the bucket's owner, and again where redirects and unknown scripts require it, within one deadline. With
    /// replicas, the reply also has the number that acknowledged the write.
    async fn send_to_owner<T>(
        &self, bucket: u8, replicas: u32, build: impl Fn(&RedisConnection, Attempt) -> (RedisCall, T),
    ) -> Result<Answered<T>, RedisCallError> {
        let deadline = Instant::now() + self.timeout();
        let (mut form, mut asking, mut hops) = (ScriptForm::Digest, None, 0);
        // Redirects are counted; retries during a slot migration are bounded by the deadline.
        loop {
            let server = match &asking {
                Some(host) => self.topology.server_at(host),
                None => match self.topology.server_for(bucket) {
                    Some(server) => server,
                    None => Box::pin(self.find_owner(bucket, deadline)).await?,
                },
            };
            let attempt = Attempt { form, asking: asking.is_some() };
            let build_attempt = |connection: &RedisConnection| {
                let (call, sent) = build(connection, attempt);
                (if attempt.asking { RedisCall::new(&[b"ASKING"]).then_call(&call) } else { call }, sent)
            };
            let trouble = match server.send(deadline, replicas, build_attempt).await {
                Ok(answer) => return Ok(answer),
                Err(trouble) => trouble,
            };
            let redirected = redirect_host(&trouble, &server).filter(|_| hops < MAX_REDIRECTS);
            hops += 1;
            match redirected {
                _ if trouble.has_code("NOSCRIPT") && form == ScriptForm::Digest => form = ScriptForm::Full,
                Some(to) if trouble.has_code("MOVED") => {
                    self.topology.set_owner(bucket, &to);
                    (asking, form) = (None, ScriptForm::Digest);
                }
                Some(to) if trouble.has_code("ASK") => (asking, form) = (Some(to), ScriptForm::Digest),
                _ if trouble.has_code("TRYAGAIN") => {
                    asking = None;
                    Box::pin(sleep(with_jitter(TRYAGAIN_DELAY))).await;
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

    /// Returns the owner of a bucket that is not known yet.
    async fn find_owner(&self, bucket: u8, deadline: Instant) -> Result<Arc<RedisServer>, RedisCallError> {
        let asked = timeout_at(deadline, self.topology.ensure_known()).await;
        self.topology.server_for(bucket).ok_or_else(|| {
            self.topology.refresh_in_background();
            let why = asked.ok().and_then(Result::err).unwrap_or_else(|| "no node is known to keep this bucket".into());
            RedisCallError::NotSent(why)
        })
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
