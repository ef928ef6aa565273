//! The configuration in force, and how another takes its place without dropping a request.
//!
//! A request takes one [`Snapshot`] and keeps it to its end. A changed file is read again, checked, and swapped in;
//! one that is wrong, or that would forget what is remembered, is refused and said so.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Uri, Version, request::Parts};
use ibid::{
    Mode, Quota, Reason, Refusal, Refusals, grpc,
    http::{Protocol, Routed, Routing, carries_key, key_headers, uncovered},
};
use parking_lot::Mutex;

use crate::{
    admin::auth::Tokens,
    config::{ConfigError, Env, Seal, ServeArgs, Settings},
    contract_page,
    jwt::Verifier,
    openapi_document::Document,
    proxy::Body,
    routes::{Named, Route},
    tls,
    trace::Collecting,
    upstream::{self, Target, Upstream},
};

/// How often the file is looked at. Its content is compared, so any way of replacing it is seen.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Everything that a request is decided by.
pub struct Snapshot {
    /// As configured.
    pub settings: Settings,
    /// By URL.
    upstreams: HashMap<String, Arc<Upstream<Body>>>,
    default: Arc<Upstream<Body>>,
    /// The same upstreams for gRPC calls, by the same URLs: over HTTP/2 in any case.
    for_calls: HashMap<String, Arc<Upstream<Body>>>,
    /// How the listener speaks TLS, if it does.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// How the admin port does.
    pub admin_tls: Option<Arc<rustls::ServerConfig>>,
    /// Verifies callers' tokens.
    jwt: Option<Arc<Verifier>>,
    /// Who takes traces, if anybody does.
    pub(crate) collector: Option<Arc<Collecting>>,
    /// Who may use the admin port.
    pub tokens: Tokens,
    /// The app's own OpenAPI documents, which are annotated.
    documents: Vec<Arc<Document>>,
    /// The published contract.
    pub page: Page,
}

/// The published contract, rendered.
#[derive(Debug)]
pub struct Page {
    /// For people.
    pub html: String,
    /// For programs.
    pub json: String,
}

/// The upstream that a request goes to, in its extensions.
#[derive(Clone)]
pub struct Chosen {
    /// Where to.
    pub upstream: Arc<Upstream<Body>>,
    /// How refusals are written where no policy covers the request.
    pub refusals: Refusals,
    routed: Routed,
}

/// What of a request decides which route it is under, and how that route handles it.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// As sent.
    pub method: &'a Method,
    /// As sent.
    pub uri: &'a Uri,
    /// Of HTTP.
    pub version: Version,
    /// All of them.
    pub headers: &'a HeaderMap,
}

impl Head<'_> {
    /// Whether it is a gRPC call.
    fn is_call(&self) -> bool {
        grpc::is_call(self.version, self.headers) && self.method.as_str().eq_ignore_ascii_case("POST")
    }
}

/// The snapshot in force.
pub struct Live {
    now: ArcSwap<Snapshot>,
    /// What the process started with: what is only read at start-up is as it is here.
    started: Settings,
    /// Held from reading the file to putting it in force, so that no reload puts an older file in the place of a newer one.
    reloading: Mutex<()>,
    args: ServeArgs,
    /// What tenants may begin: counted on while its limits change.
    quota: Arc<Quota>,
}

/// What became of a changed file.
#[derive(Debug)]
pub enum Reload {
    /// It says the same as before.
    Unchanged,
    /// It is in force. What it cannot change without a restart is listed.
    Taken(Vec<&'static str>),
    /// It is wrong; the old one stays.
    Wrong(String),
    /// It would forget what is remembered; the old one stays.
    Forgets(Vec<String>),
}

impl Chosen {
    /// The one upstream that there is, with nothing covered.
    pub fn only(upstream: Arc<Upstream<Body>>) -> Self {
        Self { upstream, refusals: Refusals::Problem, routed: Routed::Pass }
    }
}

impl Snapshot {
    /// Connects nothing yet; upstreams of `before` keep their connections.
    ///
    /// # Errors
    /// If an upstream or its certificates make no sense.
    pub fn new(settings: Settings, before: Option<&Self>) -> Result<Self, String> {
        let (mut upstreams, mut for_calls) = (HashMap::new(), HashMap::new());
        let routes = settings.routes.iter().filter_map(|route| route.upstream.as_ref());
        for url in routes.chain([&settings.upstream]) {
            let known = before.filter(|before| before.reuses_upstreams_for(&settings));
            for (protocol, all) in [(Protocol::Http, &mut upstreams), (Protocol::Grpc, &mut for_calls)] {
                let upstream = match known.and_then(|before| before.upstreams(protocol).get(url)) {
                    Some(known) => known.clone(),
                    None => connectable(url, protocol, &settings)?,
                };
                all.insert(url.clone(), upstream);
            }
        }
        let default = upstreams[&settings.upstream].clone();
        let page = Page {
            html: contract_page::html(&settings.routes),
            json: format!("{:#}\n", contract_page::json(&settings.routes)),
        };
        // TLS is not turned off without a restart: until then, the last certificate goes on serving.
        let tls = match &settings.tls {
            Some(tls) => Some(tls::for_listener(tls)?),
            None => before.and_then(|before| before.tls.clone()),
        };
        let admin_tls = match settings.admin.as_ref().and_then(|admin| admin.tls.as_ref()) {
            Some(tls) => Some(tls::for_admin(tls)?),
            None => before.and_then(|before| before.admin_tls.clone()),
        };
        let jwt = match &settings.jwt {
            None => None,
            Some(jwt) => Some(match before.and_then(|before| before.jwt.as_ref()).filter(|known| known.is_for(jwt)) {
                Some(known) => known.clone(),
                None => Arc::new(Verifier::new(jwt)?),
            }),
        };
        // Whoever traces at the start does so to the end; only where to may change.
        let collector = match &settings.trace {
            None => before.and_then(|before| before.collector.clone()),
            Some(trace) => match before.filter(|before| before.settings.trace.as_ref() == Some(trace)) {
                Some(before) => before.collector.clone(),
                None => Some(Arc::new(Collecting::new(trace)?)),
            },
        };
        let tokens = Tokens::new(settings.admin.as_ref().map_or(&[], |admin| &admin.tokens));
        let documents = settings.openapi.iter();
        let documents = documents.map(|path| Document::new(path.clone(), settings.routes.clone())).collect();
        Ok(Self { settings, upstreams, default, for_calls, tls, admin_tls, jwt, collector, tokens, documents, page })
    }

    /// Who verifies the token of a request, and the claims that its route asks for. `None` if it asks for none.
    pub(crate) fn verifier(&self, chosen: &Chosen) -> Option<(Arc<Verifier>, HashSet<String>)> {
        let Routed::Covered { route, also } = &chosen.routed else { return None };
        let routes = std::iter::once(route).chain(also);
        let wanted: HashSet<_> = routes.flat_map(|route| route.policy.claims()).map(str::to_owned).collect();
        self.jwt.clone().filter(|_| !wanted.is_empty()).map(|verifier| (verifier, wanted))
    }

    pub(crate) fn upstreams(&self, protocol: Protocol) -> &HashMap<String, Arc<Upstream<Body>>> {
        match protocol {
            Protocol::Http => &self.upstreams,
            Protocol::Grpc => &self.for_calls,
        }
    }

    /// Where the requests of a route go, or those of none.
    fn upstream(&self, protocol: Protocol, route: Option<&Route>) -> Arc<Upstream<Body>> {
        let own = route.and_then(|route| route.upstream.as_ref()).and_then(|url| self.upstreams(protocol).get(url));
        match (own, protocol) {
            (Some(own), _) => own.clone(),
            (None, Protocol::Http) => self.default.clone(),
            (None, Protocol::Grpc) => self.for_calls[&self.settings.upstream].clone(),
        }
    }

    fn reuses_upstreams_for(&self, settings: &Settings) -> bool {
        self.settings.max_upstream == settings.max_upstream
            && self.settings.upstream_idle == settings.upstream_idle
            && self.settings.upstream_ca == settings.upstream_ca
            && self.settings.upstream_identity == settings.upstream_identity
    }

    /// Finds the route of a request, and where the request goes.
    pub fn choose(&self, head: Head<'_>) -> Chosen {
        let path = head.uri.path();
        let named = self.settings.routes.named(head.method, path);
        let protocol = if head.is_call() { Protocol::Grpc } else { Protocol::Http };
        // Where its path leads to, whether or not anything covers it.
        let upstream = self.upstream(protocol, named.first);
        Chosen { upstream, refusals: self.settings.routes.refusals(path), routed: self.routed(head, &named) }
    }

    /// The OpenAPI document that a request asks for, if no route covers it.
    pub(crate) fn document(&self, head: Head<'_>) -> Option<Arc<Document>> {
        let document = self.documents.iter().find(|document| document.is_at(head.uri.path()))?;
        // The app is asked with GET for both.
        let is_read = matches!(*head.method, Method::GET | Method::HEAD);
        let passes = |method| matches!(self.choose(Head { method, ..head }).routed, Routed::Pass | Routed::Uncovered);
        (is_read && passes(head.method) && passes(&Method::GET)).then(|| document.clone())
    }

    /// Method and path alone decide what covers a request; media type and version only decide how it is handled.
    fn routed(&self, head: Head<'_>, named: &Named<'_>) -> Routed {
        let routes = &self.settings.routes;
        let covering = || {
            let all = named.first.iter().chain(&named.also).copied();
            all.filter(|route| route.policy.covers(head.method))
        };
        let passed = || uncovered(head.method, routes.carries_key(head.headers));
        if named.has_dots {
            let is_protected = |route: &Route| {
                let policy = &route.policy;
                let has_key = || carries_key(policy, head.uri, head.headers);
                policy.mode == Mode::Enforce && (policy.key.required || has_key())
            };
            return if covering().any(is_protected) { Routed::Refused(dot_segments()) } else { passed() };
        }
        let is_call = head.is_call();
        let Some(first) = covering().next().filter(|first| !(is_call && first.is_unnamed())) else {
            let path = head.uri.path();
            return match routes.unknown_calls() {
                Some(guard) if is_call && !routes.unary().knows(path) => Routed::UnknownCall(guard.clone()),
                _ if is_call && routes.unary().knows(path) && !routes.unary().streams(path) => Routed::Pass,
                _ => passed(),
            };
        };
        let wants_call = first.protocol == Protocol::Grpc && grpc::is_grpc(head.headers);
        if wants_call && !is_call && first.policy.mode == Mode::Enforce {
            return Routed::Refused(no_call());
        }
        let also = covering().skip(1).map(|route| route.guard(is_call).clone()).collect();
        Routed::Covered { route: first.guard(is_call).clone(), also }
    }
}

fn dot_segments() -> Refusal {
    let detail = "the path has dot segments, which the app may resolve to another path; send the path it resolves to";
    Refusal::new(Reason::RequestAmbiguous, detail)
}

fn no_call() -> Refusal {
    let detail = "the media type is that of gRPC, and there is no gRPC without HTTP/2; send it over HTTP/2";
    Refusal::new(Reason::RequestAmbiguous, detail)
}

fn connectable(url: &str, protocol: Protocol, settings: &Settings) -> Result<Arc<Upstream<Body>>, String> {
    let is_call = protocol == Protocol::Grpc;
    let url = match url.strip_prefix("http://") {
        Some(place) if is_call => format!("h2c://{place}"),
        _ => url.to_owned(),
    };
    let target: Target = url.parse().map_err(|why| format!("upstream {url:?}: {why}"))?;
    let settings = upstream::Settings {
        max_connections: settings.max_upstream,
        pool_timeout: settings.limits.pool_timeout,
        idle_timeout: settings.upstream_idle,
        tls: tls::towards("upstream_", settings.upstream_ca.as_ref(), settings.upstream_identity.as_ref())?,
        for_calls: is_call,
        ..upstream::Settings::default()
    };
    Upstream::new(target, settings).map_err(|why| format!("upstream {url:?}: {why}"))
}

impl Live {
    /// Puts a snapshot in force.
    pub fn new(snapshot: Snapshot, args: ServeArgs) -> Arc<Self> {
        snapshot.jwt.iter().for_each(Verifier::keep_fresh);
        let limits = snapshot.settings.quota;
        let quota = Arc::new(Quota::new(limits.new_keys, limits.rate));
        quota.set_bytes(limits.new_bytes);
        let started = snapshot.settings.clone();
        Arc::new(Self { now: ArcSwap::from_pointee(snapshot), started, reloading: Mutex::default(), args, quota })
    }

    /// What tenants may begin, as the settings in force say.
    pub fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// The snapshot in force.
    pub fn now(&self) -> arc_swap::Guard<Arc<Snapshot>> {
        self.now.load()
    }

    /// Reads the file again. One reload at a time; others wait.
    pub fn reload(&self, env: &Env<'_>) -> Reload {
        let _alone = self.reloading.lock();
        self.read_again(env, self.now().settings.reflected.clone())
    }

    /// The same, with what the upstreams of `asked` say of themselves now. Nothing is done if another snapshot has taken its
    /// place since: its upstreams may be others.
    pub fn reload_knowing(&self, env: &Env<'_>, asked: &Arc<Snapshot>, reflected: Bytes) -> Reload {
        let _alone = self.reloading.lock();
        if !Arc::ptr_eq(&self.now(), asked) {
            return Reload::Unchanged;
        }
        self.read_again(env, Some(reflected))
    }

    fn read_again(&self, env: &Env<'_>, reflected: Option<Bytes>) -> Reload {
        let mut settings = match Settings::load_knowing(&self.args, env, reflected) {
            Ok(settings) if settings.reflects() && settings.reflected.is_none() => {
                return Reload::Wrong("descriptors: \"reflection\" is asked for at the start only; restart".into());
            }
            Ok(settings) => settings,
            Err(why) => return Reload::Wrong(ConfigError::to_string(&why)),
        };
        let before = self.now.load();
        if settings == before.settings {
            return Reload::Unchanged;
        }
        // The store is the one of the start, whatever files have said since.
        let mut in_force = before.settings.clone();
        in_force.store = self.started.store.clone();
        let forgotten = settings.forgets(&in_force);
        if !forgotten.is_empty() && !settings.accept_forgetting {
            return Reload::Forgets(forgotten);
        }
        let fixed = settings.needs_restart_from(&self.started);
        if let (Some(seal), Some(before)) = (&mut settings.seal, &before.settings.seal) {
            seal.adopt(before);
        }
        match Snapshot::new(settings, Some(&before)) {
            Ok(snapshot) => {
                // Before the first request under the new settings.
                snapshot.settings.seal.iter().for_each(Seal::apply);
                let known = before.jwt.as_ref();
                let new = snapshot.jwt.iter().filter(|jwt| known.is_none_or(|known| !Arc::ptr_eq(known, jwt)));
                new.for_each(Verifier::keep_fresh);
                let limits = snapshot.settings.quota;
                if limits != before.settings.quota {
                    self.quota.set(limits.new_keys, limits.rate);
                    self.quota.set_bytes(limits.new_bytes);
                }
                self.now.store(Arc::new(snapshot));
                Reload::Taken(fixed)
            }
            Err(why) => Reload::Wrong(why),
        }
    }

    /// Looks at the file, and at those that its values are read from, every second, and at once when `nudged`.
    pub async fn watch(self: Arc<Self>, mut nudged: tokio::sync::mpsc::Receiver<()>) {
        let Some(path) = self.now().settings.file.clone() else { return };
        // Nothing at first, because the file may have changed since it was loaded.
        let mut last = None;
        loop {
            let told_to = tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => false,
                Some(()) = nudged.recv() => true,
            };
            let content = Some(contents(&path, &self.now().settings.files.clone()).await);
            if content == last && !told_to {
                continue;
            }
            last = content;
            self.say(self.reload(&Env::process()));
        }
    }

    /// Says what became of a reload.
    pub(crate) fn say(&self, reload: Reload) {
        let file = self.now().settings.file.clone().unwrap_or_default();
        let shown = file.display();
        match reload {
            Reload::Unchanged => {}
            Reload::Taken(fixed) if fixed.is_empty() => tracing::info!(file = %shown, "configuration taken up"),
            Reload::Taken(fixed) => {
                tracing::warn!(file = %shown, needs_restart = fixed.join(", "), "configuration taken up in part");
            }
            Reload::Wrong(why) => tracing::error!("{why}; the configuration in force stays"),
            Reload::Forgets(what) => tracing::error!(
                file = %shown,
                "the changed configuration would forget what is remembered, so the one in force stays; \
                 set accept_forgetting = true to take it all the same: {}",
                what.join("; ")
            ),
        }
    }
}

async fn contents(file: &Path, files: &[std::path::PathBuf]) -> Vec<Option<Vec<u8>>> {
    let mut found = Vec::with_capacity(1 + files.len());
    for path in files.iter().map(std::path::PathBuf::as_path).chain([file]) {
        found.push(tokio::fs::read(path).await.ok());
    }
    found
}

/// Reads what [`Snapshot::choose`] found from the request's extensions.
pub struct ByChoice(pub Arc<Live>);

impl Routing for ByChoice {
    fn route(&self, request: &Parts) -> Routed {
        request.extensions.get::<Chosen>().map_or(Routed::Pass, |chosen| chosen.routed.clone())
    }

    fn key_headers(&self, method: &Method, request: &Parts) -> Option<Vec<HeaderName>> {
        let Parts { uri, version, headers, .. } = request;
        match self.0.now().choose(Head { method, uri, version: *version, headers }).routed {
            Routed::Covered { route, also } => {
                let all = std::iter::once(&route).chain(&also);
                Some(all.flat_map(|route| key_headers(&route.policy)).collect())
            }
            Routed::Pass | Routed::Uncovered | Routed::UnknownCall(_) | Routed::Refused(_) => None,
        }
    }

    fn refusals(&self, request: &Parts) -> Refusals {
        request.extensions.get::<Chosen>().map(|chosen| chosen.refusals).unwrap_or_default()
    }
}
