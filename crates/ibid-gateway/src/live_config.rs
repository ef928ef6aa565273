//! The configuration in force, and how another takes its place without dropping a request.
//!
//! A request takes one [`ConfigSnapshot`] and keeps it to its end. A changed file is read again, checked, and swapped in;
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
    PolicyMode, Quota, Refusal, RefusalFormat, RefusalReason, grpc,
    http::{Protocol, RouteMatch, Routing, carries_key, key_headers, match_uncovered},
};
use parking_lot::Mutex;

use crate::{
    admin::auth::AdminTokens,
    config::{ConfigError, Env, GatewaySettings, SealSettings, ServeArgs},
    contract_page,
    jwt::JwtVerifier,
    openapi_document::Document,
    proxy::UpstreamRequestBody,
    routes::{RouteCandidates, RouteEntry},
    tls,
    trace::OtlpExporter,
    upstream::{self, UpstreamClient, UpstreamTarget},
};

/// How often the file is looked at. Its content is compared, so any way of replacing it is seen.
const FILE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Everything that a request is decided by.
pub struct ConfigSnapshot {
    /// As configured.
    pub settings: GatewaySettings,
    /// By URL.
    upstreams: HashMap<String, Arc<UpstreamClient<UpstreamRequestBody>>>,
    default_upstream: Arc<UpstreamClient<UpstreamRequestBody>>,
    /// The same upstreams for gRPC calls, by the same URLs: over HTTP/2 in any case.
    grpc_upstreams: HashMap<String, Arc<UpstreamClient<UpstreamRequestBody>>>,
    /// How the listener speaks TLS, if it does.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// How the admin port does.
    pub admin_tls: Option<Arc<rustls::ServerConfig>>,
    /// Verifies callers' tokens.
    jwt_verifier: Option<Arc<JwtVerifier>>,
    /// Who takes traces, if anybody does.
    pub(crate) collector: Option<Arc<OtlpExporter>>,
    /// Who may use the admin port.
    pub tokens: AdminTokens,
    /// The app's own OpenAPI documents, which are annotated.
    documents: Vec<Arc<Document>>,
    /// The published contract.
    pub page: RenderedContract,
}

/// The published contract, rendered.
#[derive(Debug)]
pub struct RenderedContract {
    /// For people.
    pub html: String,
    /// For programs.
    pub json: String,
}

/// The upstream that a request goes to, in its extensions.
#[derive(Clone)]
pub struct RoutedUpstream {
    /// Where to.
    pub upstream: Arc<UpstreamClient<UpstreamRequestBody>>,
    /// How refusals are written where no policy covers the request.
    pub refusals: RefusalFormat,
    route_match: RouteMatch,
}

/// What of a request decides which route it is under, and how that route handles it.
#[derive(Debug, Clone, Copy)]
pub struct RequestHead<'a> {
    /// As sent.
    pub method: &'a Method,
    /// As sent.
    pub uri: &'a Uri,
    /// Of HTTP.
    pub version: Version,
    /// All of them.
    pub headers: &'a HeaderMap,
}

impl RequestHead<'_> {
    /// Whether it is a gRPC call.
    fn is_grpc_call(&self) -> bool {
        grpc::is_call(self.version, self.headers) && self.method.as_str().eq_ignore_ascii_case("POST")
    }
}

/// The snapshot in force.
pub struct LiveConfig {
    current: ArcSwap<ConfigSnapshot>,
    /// What the process started with: what is only read at start-up is as it is here.
    startup_settings: GatewaySettings,
    /// Held from reading the file to putting it in force, so that no reload puts an older file in the place of a newer one.
    reload_lock: Mutex<()>,
    args: ServeArgs,
    /// What tenants may begin: counted on while its limits change.
    quota: Arc<Quota>,
}

/// What became of a changed file.
#[derive(Debug)]
pub enum ReloadOutcome {
    /// It says the same as before.
    Unchanged,
    /// It is in force. What it cannot change without a restart is listed.
    Applied(Vec<&'static str>),
    /// It is wrong; the old one stays.
    Invalid(String),
    /// It would forget what is remembered; the old one stays.
    WouldForget(Vec<String>),
}

impl RoutedUpstream {
    /// The one upstream that there is, with nothing covered.
    pub fn pass_through(upstream: Arc<UpstreamClient<UpstreamRequestBody>>) -> Self {
        Self { upstream, refusals: RefusalFormat::Problem, route_match: RouteMatch::NotCovered }
    }
}

impl ConfigSnapshot {
    /// Connects nothing yet; upstreams of `before` keep their connections.
    ///
    /// # Errors
    /// If an upstream or its certificates make no sense.
    pub fn new(settings: GatewaySettings, before: Option<&Self>) -> Result<Self, String> {
        let (mut upstreams, mut for_calls) = (HashMap::new(), HashMap::new());
        let routes = settings.routes.iter().filter_map(|route| route.upstream.as_ref());
        for url in routes.chain([&settings.upstream]) {
            let known = before.filter(|before| before.can_reuse_upstreams(&settings));
            for (protocol, all) in [(Protocol::Http, &mut upstreams), (Protocol::Grpc, &mut for_calls)] {
                let upstream = match known.and_then(|before| before.upstreams(protocol).get(url)) {
                    Some(known) => known.clone(),
                    None => build_upstream(url, protocol, &settings)?,
                };
                all.insert(url.clone(), upstream);
            }
        }
        let default = upstreams[&settings.upstream].clone();
        let page = RenderedContract {
            html: contract_page::render_html(&settings.routes),
            json: format!("{:#}\n", contract_page::json(&settings.routes)),
        };
        // TLS is not turned off without a restart: until then, the last certificate goes on serving.
        let tls = match &settings.tls {
            Some(tls) => Some(tls::listener_config(tls)?),
            None => before.and_then(|before| before.tls.clone()),
        };
        let admin_tls = match settings.admin.as_ref().and_then(|admin| admin.tls.as_ref()) {
            Some(tls) => Some(tls::admin_config(tls)?),
            None => before.and_then(|before| before.admin_tls.clone()),
        };
        let jwt = match &settings.jwt {
            None => None,
            Some(jwt) => Some(
                match before.and_then(|before| before.jwt_verifier.as_ref()).filter(|known| known.uses_settings(jwt)) {
                    Some(known) => known.clone(),
                    None => Arc::new(JwtVerifier::new(jwt)?),
                },
            ),
        };
        // Whoever traces at the start does so to the end; only where to may change.
        let collector = match &settings.trace {
            None => before.and_then(|before| before.collector.clone()),
            Some(trace) => match before.filter(|before| before.settings.trace.as_ref() == Some(trace)) {
                Some(before) => before.collector.clone(),
                None => Some(Arc::new(OtlpExporter::new(trace)?)),
            },
        };
        let tokens = AdminTokens::new(settings.admin.as_ref().map_or(&[], |admin| &admin.tokens));
        let documents = settings.openapi.iter();
        let documents = documents.map(|path| Document::new(path.clone(), settings.routes.clone())).collect();
        Ok(Self {
            settings,
            upstreams,
            default_upstream: default,
            grpc_upstreams: for_calls,
            tls,
            admin_tls,
            jwt_verifier: jwt,
            collector,
            tokens,
            documents,
            page,
        })
    }

    /// Who verifies the token of a request, and the claims that its route asks for. `None` if it asks for none.
    pub(crate) fn verifier_for(&self, chosen: &RoutedUpstream) -> Option<(Arc<JwtVerifier>, HashSet<String>)> {
        let RouteMatch::Covered { route, alternatives: also } = &chosen.route_match else { return None };
        let routes = std::iter::once(route).chain(also);
        let wanted: HashSet<_> = routes.flat_map(|route| route.policy.claims()).map(str::to_owned).collect();
        self.jwt_verifier.clone().filter(|_| !wanted.is_empty()).map(|verifier| (verifier, wanted))
    }

    pub(crate) fn upstreams(&self, protocol: Protocol) -> &HashMap<String, Arc<UpstreamClient<UpstreamRequestBody>>> {
        match protocol {
            Protocol::Http => &self.upstreams,
            Protocol::Grpc => &self.grpc_upstreams,
        }
    }

    /// Where the requests of a route go, or those of none.
    fn upstream(&self, protocol: Protocol, route: Option<&RouteEntry>) -> Arc<UpstreamClient<UpstreamRequestBody>> {
        let own = route.and_then(|route| route.upstream.as_ref()).and_then(|url| self.upstreams(protocol).get(url));
        match (own, protocol) {
            (Some(own), _) => own.clone(),
            (None, Protocol::Http) => self.default_upstream.clone(),
            (None, Protocol::Grpc) => self.grpc_upstreams[&self.settings.upstream].clone(),
        }
    }

    fn can_reuse_upstreams(&self, settings: &GatewaySettings) -> bool {
        self.settings.max_upstream == settings.max_upstream
            && self.settings.upstream_idle == settings.upstream_idle
            && self.settings.upstream_ca == settings.upstream_ca
            && self.settings.upstream_identity == settings.upstream_identity
    }

    /// Finds the route of a request, and where the request goes.
    pub fn route_request(&self, head: RequestHead<'_>) -> RoutedUpstream {
        let path = head.uri.path();
        let named = self.settings.routes.candidates(head.method, path);
        let protocol = if head.is_grpc_call() { Protocol::Grpc } else { Protocol::Http };
        // Where its path leads to, whether or not anything covers it.
        let upstream = self.upstream(protocol, named.first);
        RoutedUpstream {
            upstream,
            refusals: self.settings.routes.refusal_shape(path),
            route_match: self.match_route(head, &named),
        }
    }

    /// The OpenAPI document that a request asks for, if no route covers it.
    pub(crate) fn document(&self, head: RequestHead<'_>) -> Option<Arc<Document>> {
        let document = self.documents.iter().find(|document| document.is_at(head.uri.path()))?;
        // The app is asked with GET for both.
        let is_read = matches!(*head.method, Method::GET | Method::HEAD);
        let passes = |method| {
            matches!(
                self.route_request(RequestHead { method, ..head }).route_match,
                RouteMatch::NotCovered | RouteMatch::UncoveredKey
            )
        };
        (is_read && passes(head.method) && passes(&Method::GET)).then(|| document.clone())
    }

    /// Method and path alone decide what covers a request; media type and version only decide how it is handled.
    fn match_route(&self, head: RequestHead<'_>, named: &RouteCandidates<'_>) -> RouteMatch {
        let routes = &self.settings.routes;
        let covering = || {
            let all = named.first.iter().chain(&named.others).copied();
            all.filter(|route| route.policy.covers(head.method))
        };
        let passed = || match_uncovered(head.method, routes.has_key_header(head.headers));
        if named.has_dot_segments {
            let is_protected = |route: &RouteEntry| {
                let policy = &route.policy;
                let has_key = || carries_key(policy, head.uri, head.headers);
                policy.mode == PolicyMode::Enforce && (policy.key.required || has_key())
            };
            return if covering().any(is_protected) { RouteMatch::Refused(dot_segments_refusal()) } else { passed() };
        }
        let is_call = head.is_grpc_call();
        let Some(first) = covering().next().filter(|first| !(is_call && first.matches_unknown_paths())) else {
            let path = head.uri.path();
            return match routes.unknown_call_guard() {
                Some(guard) if is_call && !routes.unary_methods().is_known(path) => {
                    RouteMatch::UnknownCall(guard.clone())
                }
                _ if is_call && routes.unary_methods().is_known(path) && !routes.unary_methods().is_streaming(path) => {
                    RouteMatch::NotCovered
                }
                _ => passed(),
            };
        };
        let wants_call = first.protocol == Protocol::Grpc && grpc::is_grpc(head.headers);
        if wants_call && !is_call && first.policy.mode == PolicyMode::Enforce {
            return RouteMatch::Refused(not_http2_refusal());
        }
        let also = covering().skip(1).map(|route| route.guard(is_call).clone()).collect();
        RouteMatch::Covered { route: first.guard(is_call).clone(), alternatives: also }
    }
}

fn dot_segments_refusal() -> Refusal {
    let detail = "the path has dot segments, which the app may resolve to another path; send the path it resolves to";
    Refusal::new(RefusalReason::RequestAmbiguous, detail)
}

fn not_http2_refusal() -> Refusal {
    let detail = "the media type is that of gRPC, and there is no gRPC without HTTP/2; send it over HTTP/2";
    Refusal::new(RefusalReason::RequestAmbiguous, detail)
}

fn build_upstream(
    url: &str, protocol: Protocol, settings: &GatewaySettings,
) -> Result<Arc<UpstreamClient<UpstreamRequestBody>>, String> {
    let is_call = protocol == Protocol::Grpc;
    let url = match url.strip_prefix("http://") {
        Some(place) if is_call => format!("h2c://{place}"),
        _ => url.to_owned(),
    };
    let target: UpstreamTarget = url.parse().map_err(|why| format!("upstream {url:?}: {why}"))?;
    let settings = upstream::UpstreamSettings {
        max_connections: settings.max_upstream,
        pool_timeout: settings.limits.pool_timeout,
        idle_timeout: settings.upstream_idle,
        tls: tls::client_config("upstream_", settings.upstream_ca.as_ref(), settings.upstream_identity.as_ref())?,
        is_grpc: is_call,
        ..upstream::UpstreamSettings::default()
    };
    UpstreamClient::new(target, settings).map_err(|why| format!("upstream {url:?}: {why}"))
}

impl LiveConfig {
    /// Puts a snapshot in force.
    pub fn new(snapshot: ConfigSnapshot, args: ServeArgs) -> Arc<Self> {
        snapshot.jwt_verifier.iter().for_each(JwtVerifier::refresh_in_background);
        let limits = snapshot.settings.quota;
        let quota = Arc::new(Quota::new(limits.new_keys, limits.rate));
        quota.set_bytes(limits.new_bytes);
        let started = snapshot.settings.clone();
        Arc::new(Self {
            current: ArcSwap::from_pointee(snapshot),
            startup_settings: started,
            reload_lock: Mutex::default(),
            args,
            quota,
        })
    }

    /// What tenants may begin, as the settings in force say.
    pub fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// The snapshot in force.
    pub fn now(&self) -> arc_swap::Guard<Arc<ConfigSnapshot>> {
        self.current.load()
    }

    /// Reads the file again. One reload at a time; others wait.
    pub fn reload(&self, env: &Env<'_>) -> ReloadOutcome {
        let _alone = self.reload_lock.lock();
        self.reload_file(env, self.now().settings.reflected_descriptors.clone())
    }

    /// The same, with what the upstreams of `asked` say of themselves now. Nothing is done if another snapshot has taken its
    /// place since: its upstreams may be others.
    pub fn reload_with_reflection(
        &self, env: &Env<'_>, asked: &Arc<ConfigSnapshot>, reflected: Bytes,
    ) -> ReloadOutcome {
        let _alone = self.reload_lock.lock();
        if !Arc::ptr_eq(&self.now(), asked) {
            return ReloadOutcome::Unchanged;
        }
        self.reload_file(env, Some(reflected))
    }

    fn reload_file(&self, env: &Env<'_>, reflected: Option<Bytes>) -> ReloadOutcome {
        let mut settings = match GatewaySettings::load_with_reflection(&self.args, env, reflected) {
            Ok(settings) if settings.uses_reflection() && settings.reflected_descriptors.is_none() => {
                return ReloadOutcome::Invalid(
                    "descriptors: \"reflection\" is asked for at the start only; restart".into(),
                );
            }
            Ok(settings) => settings,
            Err(why) => return ReloadOutcome::Invalid(ConfigError::to_string(&why)),
        };
        let before = self.current.load();
        if settings == before.settings {
            return ReloadOutcome::Unchanged;
        }
        // The store is the one of the start, whatever files have said since.
        let mut in_force = before.settings.clone();
        in_force.store = self.startup_settings.store.clone();
        let forgotten = settings.forgotten_answers(&in_force);
        if !forgotten.is_empty() && !settings.accept_forgetting {
            return ReloadOutcome::WouldForget(forgotten);
        }
        let fixed = settings.settings_needing_restart(&self.startup_settings);
        if let (Some(seal), Some(before)) = (&mut settings.seal, &before.settings.seal) {
            seal.reuse_sealing(before);
        }
        match ConfigSnapshot::new(settings, Some(&before)) {
            Ok(snapshot) => {
                // Before the first request under the new settings.
                snapshot.settings.seal.iter().for_each(SealSettings::activate_keys);
                let known = before.jwt_verifier.as_ref();
                let new = snapshot.jwt_verifier.iter().filter(|jwt| known.is_none_or(|known| !Arc::ptr_eq(known, jwt)));
                new.for_each(JwtVerifier::refresh_in_background);
                let limits = snapshot.settings.quota;
                if limits != before.settings.quota {
                    self.quota.set(limits.new_keys, limits.rate);
                    self.quota.set_bytes(limits.new_bytes);
                }
                self.current.store(Arc::new(snapshot));
                ReloadOutcome::Applied(fixed)
            }
            Err(why) => ReloadOutcome::Invalid(why),
        }
    }

    /// Looks at the file, and at those that its values are read from, every second, and at once when `nudged`.
    pub async fn watch(self: Arc<Self>, mut nudged: tokio::sync::mpsc::Receiver<()>) {
        let Some(path) = self.now().settings.file.clone() else { return };
        // Nothing at first, because the file may have changed since it was loaded.
        let mut last = None;
        loop {
            let told_to = tokio::select! {
                () = tokio::time::sleep(FILE_POLL_INTERVAL) => false,
                Some(()) = nudged.recv() => true,
            };
            let content = Some(read_contents(&path, &self.now().settings.value_files.clone()).await);
            if content == last && !told_to {
                continue;
            }
            last = content;
            self.log_outcome(self.reload(&Env::process()));
        }
    }

    /// Says what became of a reload.
    pub(crate) fn log_outcome(&self, reload: ReloadOutcome) {
        let file = self.now().settings.file.clone().unwrap_or_default();
        let shown = file.display();
        match reload {
            ReloadOutcome::Unchanged => {}
            ReloadOutcome::Applied(fixed) if fixed.is_empty() => {
                tracing::info!(file = %shown, "configuration taken up")
            }
            ReloadOutcome::Applied(fixed) => {
                tracing::warn!(file = %shown, needs_restart = fixed.join(", "), "configuration taken up in part");
            }
            ReloadOutcome::Invalid(why) => tracing::error!("{why}; the configuration in force stays"),
            ReloadOutcome::WouldForget(what) => tracing::error!(
                file = %shown,
                "the changed configuration would forget what is remembered, so the one in force stays; \
                 set accept_forgetting = true to take it all the same: {}",
                what.join("; ")
            ),
        }
    }
}

async fn read_contents(file: &Path, files: &[std::path::PathBuf]) -> Vec<Option<Vec<u8>>> {
    let mut found = Vec::with_capacity(1 + files.len());
    for path in files.iter().map(std::path::PathBuf::as_path).chain([file]) {
        found.push(tokio::fs::read(path).await.ok());
    }
    found
}

/// Reads what [`ConfigSnapshot::route_request`] found from the request's extensions.
pub struct RoutedUpstreamLookup(pub Arc<LiveConfig>);

impl Routing for RoutedUpstreamLookup {
    fn route(&self, request: &Parts) -> RouteMatch {
        request.extensions.get::<RoutedUpstream>().map_or(RouteMatch::NotCovered, |chosen| chosen.route_match.clone())
    }

    fn key_headers(&self, method: &Method, request: &Parts) -> Option<Vec<HeaderName>> {
        let Parts { uri, version, headers, .. } = request;
        match self.0.now().route_request(RequestHead { method, uri, version: *version, headers }).route_match {
            RouteMatch::Covered { route, alternatives: also } => {
                let all = std::iter::once(&route).chain(&also);
                Some(all.flat_map(|route| key_headers(&route.policy)).collect())
            }
            RouteMatch::NotCovered | RouteMatch::UncoveredKey | RouteMatch::UnknownCall(_) | RouteMatch::Refused(_) => {
                None
            }
        }
    }

    fn refusals(&self, request: &Parts) -> RefusalFormat {
        request.extensions.get::<RoutedUpstream>().map(|chosen| chosen.refusals).unwrap_or_default()
    }
}
