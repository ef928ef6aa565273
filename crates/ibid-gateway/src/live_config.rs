//! The configuration in force, and its replacement without dropping a request.
//!
//! Each request uses one [`ConfigSnapshot`] from its start to its end. A changed file is read, checked and swapped in.
//! A file that is invalid, or that would make remembered answers unreachable, is rejected and logged.

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

/// Interval between two checks of the file. Its content is compared, so every way of replacing it is noticed.
const FILE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Everything that decides how a request is handled.
pub struct ConfigSnapshot {
    pub settings: GatewaySettings,
    /// Keyed by URL.
    upstreams: HashMap<String, Arc<UpstreamClient<UpstreamRequestBody>>>,
    default_upstream: Arc<UpstreamClient<UpstreamRequestBody>>,
    /// The same upstreams for gRPC calls, keyed by the same URLs. They always use HTTP/2.
    grpc_upstreams: HashMap<String, Arc<UpstreamClient<UpstreamRequestBody>>>,
    pub tls: Option<Arc<rustls::ServerConfig>>,
    pub admin_tls: Option<Arc<rustls::ServerConfig>>,
    jwt_verifier: Option<Arc<JwtVerifier>>,
    pub(crate) collector: Option<Arc<OtlpExporter>>,
    pub tokens: AdminTokens,
    /// The app's own OpenAPI documents, which the gateway annotates.
    documents: Vec<Arc<Document>>,
    pub page: RenderedContract,
}

/// The published contract, rendered for people (`html`) and for programs (`json`).
#[derive(Debug)]
pub struct RenderedContract {
    pub html: String,
    pub json: String,
}

/// The upstream that a request goes to. The server stores it in the request's extensions.
#[derive(Clone)]
pub struct RoutedUpstream {
    pub upstream: Arc<UpstreamClient<UpstreamRequestBody>>,
    /// Format of refusals if no policy covers the request.
    pub refusals: RefusalFormat,
    route_match: RouteMatch,
}

/// The parts of a request that decide its route, and how the route handles it.
#[derive(Debug, Clone, Copy)]
pub struct RequestHead<'a> {
    pub method: &'a Method,
    pub uri: &'a Uri,
    pub version: Version,
    pub headers: &'a HeaderMap,
}

impl RequestHead<'_> {
    fn is_grpc_call(&self) -> bool {
        grpc::is_call(self.version, self.headers) && self.method.as_str().eq_ignore_ascii_case("POST")
    }
}

/// Holds the snapshot in force.
pub struct LiveConfig {
    current: ArcSwap<ConfigSnapshot>,
    /// The settings at start-up. Settings that are only read at start-up keep these values.
    startup_settings: GatewaySettings,
    /// Held from reading the file to swapping it in, so that a reload cannot replace a newer file with an older one.
    reload_lock: Mutex<()>,
    args: ServeArgs,
    /// Keeps its counts when a reload changes the limits.
    quota: Arc<Quota>,
}

/// The result of a reload.
#[derive(Debug)]
pub enum ReloadOutcome {
    /// The file is equivalent to the configuration in force.
    Unchanged,
    /// The file is in force. Lists the settings that take effect only after a restart.
    Applied(Vec<&'static str>),
    /// The file is invalid; the old configuration stays in force.
    Invalid(String),
    /// The file would make remembered answers unreachable; the old configuration stays in force.
    WouldForget(Vec<String>),
}

impl RoutedUpstream {
    /// Routes every request to `upstream`; no policy covers anything.
    pub fn pass_through(upstream: Arc<UpstreamClient<UpstreamRequestBody>>) -> Self {
        Self { upstream, refusals: RefusalFormat::Problem, route_match: RouteMatch::NotCovered }
    }
}

impl ConfigSnapshot {
    /// Opens no connection. Upstreams that `before` also has keep their connections.
    ///
    /// # Errors
    /// Returns an error if an upstream or its certificates are invalid.
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
        // Turning TLS off needs a restart. Until then the last certificate stays in use.
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
        // Tracing that is on at start-up stays on. A reload changes only the collector.
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

    /// Returns the verifier for the request's token and the claims that its route needs, or `None` if it needs none.
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

    /// Returns the upstream of a route, or the default one.
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
            && self.settings.upstream_tls == settings.upstream_tls
    }

    /// Finds the route and the upstream of a request.
    pub fn route_request(&self, head: RequestHead<'_>) -> RoutedUpstream {
        let path = head.uri.path();
        let named = self.settings.routes.candidates(head.method, path);
        let protocol = if head.is_grpc_call() { Protocol::Grpc } else { Protocol::Http };
        // The path decides the upstream, whether or not a policy covers the request.
        let upstream = self.upstream(protocol, named.first);
        RoutedUpstream {
            upstream,
            refusals: self.settings.routes.refusal_shape(path),
            route_match: self.match_route(head, &named),
        }
    }

    /// Returns the OpenAPI document that the request is for, if no route covers the request.
    pub(crate) fn document(&self, head: RequestHead<'_>) -> Option<Arc<Document>> {
        let document = self.documents.iter().find(|document| document.is_at(head.uri.path()))?;
        // The gateway sends GET to the app for both methods.
        let is_read = matches!(*head.method, Method::GET | Method::HEAD);
        let passes = |method| {
            matches!(
                self.route_request(RequestHead { method, ..head }).route_match,
                RouteMatch::NotCovered | RouteMatch::UncoveredKey
            )
        };
        (is_read && passes(head.method) && passes(&Method::GET)).then(|| document.clone())
    }

    /// Matches a request to its route. Only method and path decide what covers it; media type and version decide how it
    /// is handled.
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
        tls: tls::client_config("upstream_", &settings.upstream_tls)?,
        is_grpc: is_call,
        ..upstream::UpstreamSettings::default()
    };
    UpstreamClient::new(target, settings).map_err(|why| format!("upstream {url:?}: {why}"))
}

impl LiveConfig {
    /// Puts a first snapshot in force.
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

    pub fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// Returns the snapshot in force.
    pub fn now(&self) -> arc_swap::Guard<Arc<ConfigSnapshot>> {
        self.current.load()
    }

    /// Reads the file again. Concurrent reloads wait for each other.
    pub fn reload(&self, env: &Env<'_>) -> ReloadOutcome {
        let _alone = self.reload_lock.lock();
        self.reload_file(env, self.now().settings.reflected_descriptors.clone())
    }

    /// Like [`reload`](Self::reload), with the descriptor set that the upstreams of `asked` returned. Does nothing if
    /// `asked` is no longer in force, because the upstreams may differ.
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
        // The process still uses the store that it opened at start-up, whatever later files say.
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
                // This must happen before the first request under the new settings.
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

    /// Checks the file, and the files that its values come from, every second and whenever `nudged` receives.
    pub async fn watch(self: Arc<Self>, mut nudged: tokio::sync::mpsc::Receiver<()>) {
        let Some(path) = self.now().settings.file.clone() else { return };
        // `None` at first, because the file may have changed since it was loaded.
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

/// Reads the [`RoutedUpstream`] that [`ConfigSnapshot::route_request`] returned from the request's extensions.
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
