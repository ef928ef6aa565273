//! Matches a request to its policy. The first matching route wins; `[policy]` covers the rest.
//!
//! Invariant: no spelling of a path, no media type and no HTTP version lets a request escape a route that names it.
//! Only method and path decide: the path as sent, and every way in which an app may [read](path::readings) it.

use std::{cmp::Ordering, collections::BTreeSet, ops::Deref, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, Method};
use ibid::{
    CheckedPolicy, Policy,
    grpc::UnaryMethods,
    http::{Protocol, Route as Guard},
    policy::{PolicyMode, RefusalFormat},
};

use self::pattern::PathComparison;

mod path;
mod pattern;

use crate::catalog_config::CONFIG_PATH;
pub use crate::config::GrpcUnknown;
pub use path::normalise;
pub use pattern::{Match, PathPattern};

/// One route: the requests that it matches, and their policy.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteEntry {
    /// The route's name, which operators see and `scope = ["route"]` puts into the address (`POST /payments/*` or `*`),
    /// and its policy. The policy's methods are those of the route.
    pub guard: Arc<Guard>,
    /// For gRPC routes: the guard for requests to its methods that are not gRPC, such as Connect.
    pub(crate) http_guard: Option<Arc<Guard>>,
    pub pattern: PathPattern,
    /// Overrides the top-level upstream. Normalised, such as `http://127.0.0.1:3000`.
    pub upstream: Option<String>,
    /// The preset that the policy is based on.
    pub preset: &'static str,
    /// Whether the policy is based on `[policy]`, and not directly on the preset.
    pub inherits_policy: bool,
    /// Whether this is `[policy]` itself, which covers the paths that no route names.
    pub is_default_policy: bool,
    /// Whether this is `[policy]` and the file also has routes.
    pub is_fallback_policy: bool,
    /// Whether a quota limits callers.
    pub has_quota: bool,
}

/// All routes in the order of the file, then `[policy]`.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteTable {
    routes: Vec<RouteEntry>,
    /// The gRPC methods that are known to be unary.
    pub unary_methods: UnaryMethods,
    /// The paths of `unary_methods`, sorted case-insensitively.
    unary_paths: Vec<String>,
    /// Every header that some policy reads a key from.
    key_headers: Vec<HeaderName>,
    /// The format of refusals that no policy covers, if it is the same for every path.
    common_refusals: Option<RefusalFormat>,
    /// Handles gRPC calls to unknown methods that no route names. `None`: they pass through.
    pub(crate) unknown_call_guard: Option<Arc<Guard>>,
}

/// The routes that may apply to a request.
#[derive(Debug, Default)]
pub struct RouteCandidates<'a> {
    /// The route that matches the path as sent; else the first route in the file that matches another reading of the
    /// path; else `[policy]`.
    pub first: Option<&'a RouteEntry>,
    /// Further routes that match another reading of the path.
    pub others: Vec<&'a RouteEntry>,
    /// Whether the path has dot segments, so that it may resolve to any path.
    pub has_dot_segments: bool,
}

impl RouteEntry {
    pub(crate) fn new(at: &Match, policy: Policy, preset: &'static str) -> Self {
        Self::with_name(at.to_string(), at.protocol, at.pattern.clone(), policy, preset)
    }

    fn with_name(name: String, protocol: Protocol, pattern: PathPattern, policy: Policy, preset: &'static str) -> Self {
        let protocol = if protocol == Protocol::Grpc { protocol } else { policy.protocol() };
        let guard = Guard { name, policy: expect_valid(policy), protocol };
        let for_http = Guard { protocol: Protocol::Http, ..guard.clone() };
        Self {
            guard: Arc::new(guard),
            http_guard: (protocol == Protocol::Grpc).then(|| Arc::new(for_http)),
            pattern,
            upstream: None,
            preset,
            inherits_policy: false,
            is_default_policy: false,
            is_fallback_policy: false,
            has_quota: false,
        }
    }

    /// `[policy]` for every path that no route names.
    pub(crate) fn for_all_paths(policy: Policy, preset: &'static str) -> Self {
        let pattern = "/*".parse().expect("a pattern");
        let route = Self::with_name("*".into(), Protocol::Http, pattern, policy, preset);
        Self { inherits_policy: true, is_default_policy: true, ..route }
    }

    /// `[policy]` for gRPC calls: every method that is known to be unary.
    pub(crate) fn for_all_calls(policy: Policy, preset: &'static str) -> Self {
        let at: Match = "grpc *".parse().expect("a match");
        Self { inherits_policy: true, is_default_policy: true, ..Self::new(&at, policy, preset) }
    }

    pub(crate) fn title(&self) -> &str {
        match (self.matches_unknown_paths(), self.is_fallback_policy) {
            (false, _) => &self.name,
            (true, false) => "every path",
            (true, true) => "every other path",
        }
    }

    /// Whether this is `[policy]` for HTTP paths that no route names.
    pub(crate) fn matches_unknown_paths(&self) -> bool {
        self.is_default_policy && self.protocol != Protocol::Grpc
    }

    /// The guard for a gRPC call or for any other request.
    pub(crate) fn guard(&self, is_call: bool) -> &Arc<Guard> {
        self.http_guard.as_ref().filter(|_| !is_call).unwrap_or(&self.guard)
    }
}

/// Returns the format that all routes have. Paths that no route matches have the default one.
fn common_refusals(routes: &[RouteEntry]) -> Option<RefusalFormat> {
    let format = routes.first().map(|route| route.policy.refusals).unwrap_or_default();
    let matches_every_path = format == RefusalFormat::default() || routes.iter().any(RouteEntry::matches_unknown_paths);
    let is_common = routes.iter().all(|route| route.policy.refusals == format);
    (is_common && matches_every_path).then_some(format)
}

fn expect_valid(policy: Policy) -> CheckedPolicy {
    policy.checked().expect("checked with its configuration")
}

impl Deref for RouteEntry {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        &self.guard
    }
}

impl RouteTable {
    /// The first match wins; `[policy]` must come last.
    pub fn new(routes: Vec<RouteEntry>) -> Self {
        let mut key_headers: Vec<HeaderName> = Vec::new();
        for name in routes.iter().flat_map(|route| ibid::http::key_headers(&route.policy)) {
            if !key_headers.contains(&name) {
                key_headers.push(name);
            }
        }
        let (unary_methods, unary_paths) = (UnaryMethods::default(), Vec::new());
        let common_refusals = common_refusals(&routes);
        let table = Self { routes, unary_methods, unary_paths, key_headers, common_refusals, unknown_call_guard: None };
        table.with_unknown_calls(None)
    }

    pub fn with_unary_methods(self, unary: UnaryMethods) -> Self {
        let mut unary_paths: Vec<String> = unary.paths().map(str::to_owned).collect();
        unary_paths.sort_by(|one, two| cmp_ignore_case(one.as_bytes(), two.as_bytes()));
        Self { unary_methods: unary, unary_paths, ..self }
    }

    /// Sets how the table handles gRPC calls to unknown methods that no route names.
    pub(crate) fn with_unknown_calls(mut self, set: Option<GrpcUnknown>) -> Self {
        let policy = self.routes.iter().find(|route| route.is_default_policy).map(|route| Policy::clone(&route.policy));
        let policy = policy.filter(|policy| policy.mode != PolicyMode::Off);
        let policy = match set {
            Some(GrpcUnknown::Pass) => None,
            Some(GrpcUnknown::Refuse) => Some(policy.unwrap_or_else(Policy::ietf)),
            None => policy,
        };
        self.unknown_call_guard = policy.map(|policy| {
            let mut policy = policy.for_grpc();
            policy.key.required |= set.is_some();
            Arc::new(Guard { name: "*".into(), policy: expect_valid(policy), protocol: Protocol::Grpc })
        });
        self
    }

    pub(crate) fn with_quota(mut self, is_limited: bool) -> Self {
        self.routes.iter_mut().for_each(|route| route.has_quota = is_limited);
        self
    }

    /// Whether the request has a header that some policy reads a key from.
    pub(crate) fn has_key_header(&self, headers: &HeaderMap) -> bool {
        self.key_headers.iter().any(|name| headers.contains_key(name))
    }

    /// Returns the route that matches the path as sent, without the query; else `[policy]`. Its mode may be `off`: use
    /// [`Policy::covers`] to check whether it applies.
    pub fn find(&self, method: &Method, raw_path: &str) -> Option<&RouteEntry> {
        let path = normalise(raw_path);
        let named = self.first_match(method, path.as_bytes(), PathComparison::EXACT).map(|at| &self.routes[at]);
        named.or_else(|| self.default_policy(method, [path.as_bytes()]))
    }

    /// Returns the route of a gRPC call such as `/shop.Orders/Create`, or `None` if the method is not known to be
    /// unary.
    pub fn find_call(&self, raw_path: &str) -> Option<&RouteEntry> {
        self.find(&Method::POST, raw_path).filter(|route| route.protocol == Protocol::Grpc)
    }

    /// Returns the paths of all gRPC methods that a route covers, sorted.
    pub fn calls(&self) -> BTreeSet<&str> {
        let named = self.iter().filter(|route| route.protocol == Protocol::Grpc && route.pattern.is_single_method());
        let all = named.map(|route| route.pattern.text.as_str()).chain(self.unary_methods.paths());
        all.filter(|path| self.find_call(path).is_some()).collect()
    }

    /// Returns every route that may apply to a request. `raw_path` is the path as sent, without the query.
    pub fn candidates(&self, method: &Method, raw_path: &str) -> RouteCandidates<'_> {
        if path::has_single_reading(raw_path) {
            // An exact match is also a loose match. If the first loose match is exact, all readings agree.
            let loosely = self.first_match(method, raw_path.as_bytes(), PathComparison::LOOSE);
            if loosely.is_none_or(|at| self.route_matches(at, method, raw_path.as_bytes(), PathComparison::EXACT)) {
                let route = loosely.map(|at| &self.routes[at]);
                let first = route.or_else(|| self.default_policy(method, [raw_path.as_bytes()]));
                return RouteCandidates { first, ..RouteCandidates::default() };
            }
        }
        let path::PathReadings { paths, has_dot_segments } = path::readings(raw_path);
        let sent = self.first_match(method, &paths[0], PathComparison::EXACT);
        let modes = paths.iter().flat_map(|path| PathComparison::ALL_MODES.map(|compared| (path, compared)));
        let read: BTreeSet<_> = modes.filter_map(|(path, compared)| self.first_match(method, path, compared)).collect();
        let others = read.into_iter().filter(|at| Some(*at) != sent);
        let mut routes = sent.into_iter().chain(others).map(|at| &self.routes[at]).collect::<Vec<_>>();
        if sent.is_none() || has_dot_segments {
            routes.extend(self.default_policy(method, paths.iter().map(Vec::as_slice)));
        }
        let mut routes = routes.into_iter();
        RouteCandidates { first: routes.next(), others: routes.collect(), has_dot_segments }
    }

    /// Returns the format of refusals for a path if no policy applies: that of the first route whose pattern matches
    /// the path, whatever its methods.
    pub fn refusal_shape(&self, path: &str) -> RefusalFormat {
        // Usually known: every request asks.
        self.common_refusals
            .unwrap_or_else(|| self.find_by_path(path).map(|route| route.policy.refusals).unwrap_or_default())
    }

    /// Returns how long the catalog behind this path remembers keys, if it is the path of an Iceberg catalog's
    /// configuration.
    pub(crate) fn key_lifetime(&self, path: &str) -> Option<Duration> {
        if !path.ends_with(CONFIG_PATH) {
            return None;
        }
        let policy = &self.find_by_path(path)?.policy;
        (policy.refusals == RefusalFormat::Iceberg && policy.mode == PolicyMode::Enforce).then_some(policy.ttl)
    }

    /// Returns the first route whose pattern matches the path, whatever its methods.
    fn find_by_path(&self, path: &str) -> Option<&RouteEntry> {
        let has_it = |route: &&RouteEntry| {
            route.protocol != Protocol::Grpc && route.pattern.matches_reading(path.as_bytes(), PathComparison::LOOSE)
        };
        self.iter().find(has_it)
    }

    /// Iterates in the order of the file; `[policy]` comes last.
    pub fn iter(&self) -> std::slice::Iter<'_, RouteEntry> {
        self.routes.iter()
    }

    /// Returns the index of the first route that matches a reading of the path.
    fn first_match(&self, method: &Method, path: &[u8], compared: PathComparison) -> Option<usize> {
        (0..self.routes.len())
            .find(|at| !self.routes[*at].is_default_policy && self.route_matches(*at, method, path, compared))
    }

    fn route_matches(&self, at: usize, method: &Method, path: &[u8], compared: PathComparison) -> bool {
        let route = &self.routes[at];
        if !route.policy.lists_method(method) {
            return false;
        }
        let matches = match compared {
            PathComparison::EXACT => std::str::from_utf8(path).is_ok_and(|path| route.pattern.matches(path)),
            _ => route.pattern.matches_reading(path, compared),
        };
        matches
            // A route that names a gRPC method declares it unary.
            && (route.protocol != Protocol::Grpc || route.pattern.is_single_method() || self.is_unary_path(path))
    }

    /// Returns `[policy]` if it covers the method, for a path in all its readings.
    fn default_policy<'p>(&self, method: &Method, readings: impl IntoIterator<Item = &'p [u8]>) -> Option<&RouteEntry> {
        let covers = |route: &&RouteEntry| route.is_default_policy && route.policy.lists_method(method);
        let of =
            |calls: bool| self.routes.iter().filter(covers).find(|route| calls == (route.protocol == Protocol::Grpc));
        let is_unary = |_: &&RouteEntry| readings.into_iter().any(|path| self.is_unary_path(path));
        of(true).filter(is_unary).or_else(|| of(false))
    }

    /// Whether the path is that of a unary method, ignoring case.
    fn is_unary_path(&self, path: &[u8]) -> bool {
        let path = path.strip_suffix(b"/").unwrap_or(path);
        self.unary_paths.binary_search_by(|known| cmp_ignore_case(known.as_bytes(), path)).is_ok()
    }
}

fn cmp_ignore_case(one: &[u8], two: &[u8]) -> Ordering {
    one.iter().map(u8::to_ascii_lowercase).cmp(two.iter().map(u8::to_ascii_lowercase))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(matches: &[&str]) -> RouteTable {
        let route = |text: &&str| {
            let at: Match = text.parse().unwrap();
            let mut policy = Policy::ietf();
            policy.methods = at.methods.to_vec();
            RouteEntry::new(&at, policy, "ietf")
        };
        RouteTable::new(matches.iter().map(route).collect())
    }

    #[test]
    fn the_first_matching_route_wins() {
        let table = table(&["POST /a/b", "POST|PUT /a/*", "DELETE /:x"]);
        let name = |method, path| table.find(&method, path).map(|route| route.name.as_str());
        assert_eq!(name(Method::POST, "/a/b"), Some("POST /a/b"));
        assert_eq!(name(Method::PUT, "/a/b"), Some("POST|PUT /a/*"));
        assert_eq!(name(Method::POST, "/%61/%62"), Some("POST /a/b"));
        assert_eq!(name(Method::DELETE, "/z"), Some("DELETE /:x"));
        assert_eq!(name(Method::GET, "/a/b"), None);
        assert_eq!(name(Method::POST, "/a"), None);
    }

    #[test]
    fn refusals_of_uncovered_requests_have_the_format_of_the_first_route_for_the_path() {
        let policy = |refusals| {
            let mut policy = Policy::ietf();
            policy.refusals = refusals;
            policy
        };
        let entry = |text: &str, refusals| RouteEntry::new(&text.parse().unwrap(), policy(refusals), "ietf");
        let iceberg = || entry("POST /catalog/*", RefusalFormat::Iceberg);
        let rest = |refusals| RouteEntry::for_all_paths(policy(refusals), "ietf");
        let default = RefusalFormat::default();
        for (routes, common, inside, outside) in [
            (vec![entry("POST /a", default)], Some(default), default, default),
            (vec![iceberg()], None, RefusalFormat::Iceberg, default),
            (vec![iceberg(), rest(default)], None, RefusalFormat::Iceberg, default),
            (
                vec![iceberg(), rest(RefusalFormat::Iceberg)],
                Some(RefusalFormat::Iceberg),
                RefusalFormat::Iceberg,
                RefusalFormat::Iceberg,
            ),
        ] {
            let table = RouteTable::new(routes);
            let shapes = (table.refusal_shape("/catalog/x"), table.refusal_shape("/b"));
            assert_eq!((table.common_refusals, shapes), (common, (inside, outside)));
        }
    }

    /// The names of the routes that may apply to a POST. The first one governs it.
    fn named(table: &RouteTable, path: &str) -> Vec<String> {
        let named = table.candidates(&Method::POST, path);
        named.first.into_iter().chain(named.others).map(|route| route.name.clone()).collect()
    }

    #[test]
    fn no_spelling_slips_past_its_route() {
        let table = table(&["POST /payments", "POST /hooks/github", "POST /x/y"]);
        for path in
            ["/payments", "/payments/", "/Payments", "/payments;x=1", "/;/payments", "//payments", "/PAYMENTS;/"]
                .into_iter()
                .chain([
                    "/pay%6Dents",
                    "/payments%2f",
                    "\\payments",
                    "/%70ayments%3Bx",
                    "/.;/payments",
                    "/x/..;/payments",
                ])
        {
            assert_eq!(named(&table, path), ["POST /payments"], "{path}");
            let lower = Method::from_bytes(b"post").unwrap();
            assert_eq!(table.candidates(&lower, path).first.map(|route| route.name.as_str()), Some("POST /payments"));
            assert!(table.candidates(&Method::GET, path).first.is_none(), "{path}");
        }
        for path in ["/hooks/github/", "/Hooks/GitHub", "/hooks%2Fgithub", "/hooks;a/github;b"] {
            assert_eq!(named(&table, path), ["POST /hooks/github"], "{path}");
        }
        for path in ["/payments/1", "/static//a", "/x/z%2fy", "/@scope%2fname", "/payment"] {
            assert!(named(&table, path).is_empty(), "{path}");
        }
        for (path, has_dots) in [("/x/..;/payments", true), ("/a/%2e%2e/b", true), ("/a//b", false), ("/a", false)] {
            assert_eq!(table.candidates(&Method::POST, path).has_dot_segments, has_dots, "{path}");
        }
    }

    #[test]
    fn the_path_as_sent_picks_the_route_and_other_readings_add_theirs() {
        let table = table(&["POST /a/b", "POST /a/*", "POST /A/b", "POST /:x/b"]);
        assert_eq!(
            named(&table, "/a/b"),
            ["POST /a/b"],
            "what the first route takes is none of the later ones' business"
        );
        assert_eq!(named(&table, "/A/b"), ["POST /A/b", "POST /a/b"]);
        assert_eq!(named(&table, "/a/B"), ["POST /a/*", "POST /a/b"]);
        assert_eq!(named(&table, "/a/c"), ["POST /a/*"]);
        assert_eq!(named(&table, "/a%2Fb"), ["POST /a/b"]);
        assert_eq!(named(&table, "/z/b;x"), ["POST /:x/b"]);
        assert_eq!(named(&table, "/a//b"), ["POST /a/*", "POST /a/b"]);
    }

    #[test]
    fn what_no_route_names_is_under_the_policy() {
        let mut routes = table(&["POST /a"]).routes;
        routes.push(RouteEntry::for_all_paths(Policy::ietf(), "ietf"));
        let table = RouteTable::new(routes);
        assert_eq!(named(&table, "/b"), ["*"]);
        assert_eq!(named(&table, "/a"), ["POST /a"]);
        assert_eq!(named(&table, "/A"), ["POST /a", "*"], "a route that is named beats the policy, which applies too");
        assert_eq!(named(&table, "/b//c%2fd"), ["*"]);
        assert_eq!(table.find(&Method::PUT, "/a").map(|route| route.name.as_str()), Some("*"));
    }

    #[test]
    fn paths_of_grpc_methods_are_covered_whatever_is_sent_to_them() {
        let mut routes = table(&["grpc shop.Orders/Create", "grpc shop.Users/*"]).routes;
        routes.push(RouteEntry::for_all_paths(Policy::ietf(), "ietf"));
        routes.push(RouteEntry::for_all_calls(Policy::ietf(), "ietf"));
        let unary = UnaryMethods::methods(["shop.Users/Add", "shop.Carts/Fill"]);
        let table = RouteTable::new(routes).with_unary_methods(unary);
        let first = |path| table.candidates(&Method::POST, path).first.unwrap();
        for (path, name) in [
            ("/shop.Orders/Create", "grpc shop.Orders/Create"),
            ("/shop.Orders/create/", "grpc shop.Orders/Create"),
            ("/shop.Users/Add", "grpc shop.Users/*"),
            ("/SHOP.users/add", "grpc shop.Users/*"),
            ("/shop.Carts/Fill", "grpc *"),
            ("/shop.Carts//fill", "grpc *"),
            ("/shop.Users/Watch", "*"),
            ("/shop.Orders/Watch", "*"),
        ] {
            let route = first(path);
            assert_eq!(route.name, name, "{path}");
            assert_eq!(route.guard(false).protocol, Protocol::Http);
            let protocol = if name == "*" { Protocol::Http } else { Protocol::Grpc };
            assert_eq!(route.guard(true).protocol, protocol, "{path}");
        }
    }
}
