//! A loaded configuration: everything that decides how a request is handled. Each request uses one [`ConfigSnapshot`]
//! from its start to its end.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Uri, Version, request::Parts};
use ibid::{
    Refusal, RefusalReason, grpc,
    http::{Protocol, RouteMatch, carries_key, key_headers, match_uncovered},
    policy::{PolicyMode, RefusalFormat},
};

use crate::{
    admin::auth::AdminTokens,
    config::GatewaySettings,
    contract_page,
    jwt::JwtVerifier,
    openapi_document::Document,
    proxy::UpstreamRequestBody,
    routes::{RouteCandidates, RouteEntry},
    tls,
    trace::OtlpExporter,
    upstream::{self, UpstreamClient, UpstreamTarget},
};

type SharedUpstream = Arc<UpstreamClient<UpstreamRequestBody>>;

/// Everything that decides how a request is handled.
pub struct ConfigSnapshot {
    pub settings: GatewaySettings,
    /// Keyed by URL.
    upstreams: HashMap<String, SharedUpstream>,
    default_upstream: SharedUpstream,
    /// The same upstreams for gRPC calls, keyed by the same URLs. They always use HTTP/2.
    grpc_upstreams: HashMap<String, SharedUpstream>,
    pub tls: Option<Arc<rustls::ServerConfig>>,
    pub admin_tls: Option<Arc<rustls::ServerConfig>>,
    pub(crate) jwt_verifier: Option<Arc<JwtVerifier>>,
    pub(crate) collector: Option<Arc<OtlpExporter>>,
    pub tokens: AdminTokens,
    /// The app's own OpenAPI documents, which the gateway annotates.
    documents: Vec<Arc<Document>>,
    pub page: RenderedContract,
}

/// The published contract, rendered for people (`html`) and for programs (`json`).
#[derive(Debug)]
pub struct RenderedContract {
    pub html: Bytes,
    pub json: Bytes,
}

/// The upstream that a request goes to, and the route that covers it.
pub struct RoutedUpstream {
    pub upstream: SharedUpstream,
    /// Format of refusals if no policy covers the request.
    pub refusals: RefusalFormat,
    pub route_match: RouteMatch,
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

impl ConfigSnapshot {
    /// Opens no connection. Upstreams that `before` also has keep their connections.
    pub fn new(settings: GatewaySettings, before: Option<&Self>) -> Result<Self, String> {
        let (mut upstreams, mut grpc_upstreams) = (HashMap::new(), HashMap::new());
        let routes = settings.routes.iter().filter_map(|route| route.upstream.as_ref());
        for url in routes.chain([&settings.upstream]) {
            let known = before.filter(|before| before.can_reuse_upstreams(&settings));
            for (protocol, all) in [(Protocol::Http, &mut upstreams), (Protocol::Grpc, &mut grpc_upstreams)] {
                let upstream = match known.and_then(|before| before.upstreams(protocol).get(url)) {
                    Some(known) => known.clone(),
                    None => build_upstream(url, protocol, &settings)?,
                };
                all.insert(url.clone(), upstream);
            }
        }
        let default_upstream = upstreams[&settings.upstream].clone();
        let page = RenderedContract {
            html: contract_page::render_html(&settings.routes).into(),
            json: format!("{:#}\n", contract_page::json(&settings.routes)).into(),
        };
        // Turning TLS off needs a restart. Until then the last certificate stays in use.
        let tls = match &settings.tls {
            Some(tls) => Some(tls::server_config("tls", tls, &["h2", "http/1.1"])?),
            None => before.and_then(|before| before.tls.clone()),
        };
        let admin_tls = match settings.admin.as_ref().and_then(|admin| admin.tls.as_ref()) {
            Some(tls) => Some(tls::server_config("admin.tls", tls, &["http/1.1"])?),
            None => before.and_then(|before| before.admin_tls.clone()),
        };
        let known = before.and_then(|before| before.jwt_verifier.as_ref());
        let jwt_verifier = match &settings.jwt {
            None => None,
            Some(jwt) if known.is_some_and(|known| known.settings == *jwt) => known.cloned(),
            Some(jwt) => Some(Arc::new(JwtVerifier::new(jwt)?)),
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
            default_upstream,
            grpc_upstreams,
            tls,
            admin_tls,
            jwt_verifier,
            collector,
            tokens,
            documents,
            page,
        })
    }

    /// Returns the verifier for the request's token and the claims that its route needs, or `None` if it needs none.
    pub(crate) fn verifier_for(&self, chosen: &RoutedUpstream) -> Option<(Arc<JwtVerifier>, HashSet<String>)> {
        let verifier = self.jwt_verifier.as_ref()?;
        let RouteMatch::Covered { route, alternatives: also } = &chosen.route_match else { return None };
        let routes = std::iter::once(route).chain(also);
        let wanted: HashSet<_> = routes.flat_map(|route| route.policy.claims()).map(str::to_owned).collect();
        (!wanted.is_empty()).then(|| (verifier.clone(), wanted))
    }

    pub(crate) fn upstreams(&self, protocol: Protocol) -> &HashMap<String, SharedUpstream> {
        match protocol {
            Protocol::Http | Protocol::JsonRpc => &self.upstreams,
            Protocol::Grpc => &self.grpc_upstreams,
        }
    }

    /// Returns the upstream of a route, or the default one.
    fn upstream(&self, protocol: Protocol, route: Option<&RouteEntry>) -> SharedUpstream {
        match (route.and_then(|route| route.upstream.as_ref()), protocol) {
            (None, Protocol::Http | Protocol::JsonRpc) => self.default_upstream.clone(),
            (own, _) => self.upstreams(protocol)[own.unwrap_or(&self.settings.upstream)].clone(),
        }
    }

    fn can_reuse_upstreams(&self, settings: &GatewaySettings) -> bool {
        self.settings.max_upstream == settings.max_upstream
            && self.settings.upstream_idle == settings.upstream_idle
            && self.settings.upstream_tls == settings.upstream_tls
    }

    /// The headers that carry the key of requests with this method, for a CORS preflight. `None` if no route covers them.
    pub fn key_headers(&self, method: &Method, preflight: &Parts) -> Option<Vec<HeaderName>> {
        let Parts { uri, version, headers, .. } = preflight;
        match self.route_request(RequestHead { method, uri, version: *version, headers }).route_match {
            RouteMatch::Covered { route, alternatives } => {
                let all = std::iter::once(&route).chain(&alternatives);
                Some(all.flat_map(|route| key_headers(&route.policy)).collect())
            }
            _ => None,
        }
    }

    /// Finds the route and the upstream of a request.
    pub fn route_request(&self, head: RequestHead<'_>) -> RoutedUpstream {
        let path = head.uri.path();
        let named = self.settings.routes.candidates(head.method, path);
        let protocol = if head.is_grpc_call() { Protocol::Grpc } else { Protocol::Http };
        // The path decides the upstream, whether or not a policy covers the request.
        let (upstream, refusals) = (self.upstream(protocol, named.first), self.settings.routes.refusal_shape(path));
        RoutedUpstream { upstream, refusals, route_match: self.match_route(head, &named) }
    }

    /// Returns the OpenAPI document that the request is for, if no route covers the request.
    pub(crate) fn document(&self, head: RequestHead<'_>) -> Option<Arc<Document>> {
        let document = self.documents.iter().find(|document| document.path == head.uri.path())?;
        // The gateway sends GET to the app for both methods.
        let is_read = matches!(*head.method, Method::GET | Method::HEAD);
        let passes = |method| is_uncovered(&self.route_request(RequestHead { method, ..head }));
        (is_read && passes(head.method) && passes(&Method::GET)).then(|| document.clone())
    }

    /// Returns the lifetime of keys to add to the response, if the request is for the configuration of an Iceberg
    /// catalog.
    pub(crate) fn key_lifetime(&self, head: RequestHead<'_>, routed: &RoutedUpstream) -> Option<Duration> {
        if head.method != Method::GET || !is_uncovered(routed) {
            return None;
        }
        self.settings.routes.key_lifetime(head.uri.path())
    }

    /// Matches a request to its route. Only method and path decide what covers it; media type and version decide how it
    /// is handled.
    fn match_route(&self, head: RequestHead<'_>, named: &RouteCandidates<'_>) -> RouteMatch {
        let routes = &self.settings.routes;
        let refuse = |detail| {
            let refusal = Refusal::new(RefusalReason::RequestAmbiguous, detail);
            RouteMatch::Refused(refusal, routes.refusal_shape(head.uri.path()))
        };
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
            return if covering().any(is_protected) { refuse(DOT_SEGMENTS) } else { passed() };
        }
        let is_call = head.is_grpc_call();
        let Some(first) = covering().next().filter(|first| !(is_call && first.matches_unknown_paths())) else {
            let path = head.uri.path();
            return match &routes.unknown_call_guard {
                Some(guard) if is_call && !routes.unary_methods.is_known(path) => {
                    RouteMatch::UnknownCall(guard.clone())
                }
                _ if is_call && routes.unary_methods.is_known(path) && !routes.unary_methods.is_streaming(path) => {
                    RouteMatch::NotCovered
                }
                _ => passed(),
            };
        };
        let wants_call = first.protocol == Protocol::Grpc && grpc::is_grpc(head.headers);
        if wants_call && !is_call && first.policy.mode == PolicyMode::Enforce {
            return refuse(NOT_HTTP2);
        }
        let also = covering().skip(1).map(|route| route.guard(is_call).clone()).collect();
        RouteMatch::Covered { route: first.guard(is_call).clone(), alternatives: also }
    }
}

fn is_uncovered(routed: &RoutedUpstream) -> bool {
    matches!(routed.route_match, RouteMatch::NotCovered | RouteMatch::UncoveredKey)
}

const DOT_SEGMENTS: &str =
    "the path has dot segments, which the app may resolve to another path; send the path it resolves to";
const NOT_HTTP2: &str = "the media type is that of gRPC, and there is no gRPC without HTTP/2; send it over HTTP/2";

fn build_upstream(url: &str, protocol: Protocol, settings: &GatewaySettings) -> Result<SharedUpstream, String> {
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
