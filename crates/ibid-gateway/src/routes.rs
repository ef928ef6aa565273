//! Which policy a request is under. The first matching route wins.
//!
//! Matching is on a [normalised](path::normalise) path, so that no second spelling of a path slips past its route; what
//! an app could still understand as a covered path is [ambiguous](RouteTable::ambiguous), and refused.

use std::{collections::BTreeSet, ops::Deref, sync::Arc};

use http::Method;
use ibid::{
    Mode, Policy, Refusals,
    grpc::Unary,
    http::{Protocol, Route as Guard},
};

mod path;
mod pattern;

pub use path::{normalise, suspicious};
pub use pattern::{Match, Pattern};

/// One route: which requests, and what holds for them.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// What operators call it, and what `scope = ["route"]` puts into the address: `POST /payments/*`, or `*`; and
    /// what holds. The policy's methods are those of the route.
    pub guard: Arc<Guard>,
    /// Which paths.
    pub pattern: Pattern,
    /// Where its requests go, if not to the top-level upstream. Normalised, such as `http://127.0.0.1:3000`.
    pub upstream: Option<String>,
    /// The preset that the policy started from.
    pub preset: &'static str,
    /// Whether it went through `[policy]`, or from the preset straight to the route.
    pub via_policy: bool,
    /// Whether it is `[policy]` itself, in a configuration without routes.
    pub is_policy: bool,
    /// Whether there is a quota on what callers may begin.
    pub is_limited: bool,
}

/// All routes, in the order of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteTable {
    routes: Vec<Route>,
    /// The gRPC methods that are known to be unary.
    unary: Unary,
}

impl Route {
    /// A route of the file.
    pub(crate) fn new(at: &Match, policy: Policy, preset: &'static str) -> Self {
        Self {
            guard: Arc::new(Guard { name: at.to_string(), policy, protocol: at.protocol() }),
            pattern: at.pattern().clone(),
            upstream: None,
            preset,
            via_policy: false,
            is_policy: false,
            is_limited: false,
        }
    }

    /// The one route of a configuration without routes: every path.
    pub(crate) fn everything(policy: Policy, preset: &'static str) -> Self {
        Self {
            guard: Arc::new(Guard { name: "*".into(), policy, protocol: Protocol::Http }),
            pattern: Pattern::everything(),
            upstream: None,
            preset,
            via_policy: true,
            is_policy: true,
            is_limited: false,
        }
    }

    /// The same for gRPC calls: every method that is known to be unary.
    pub(crate) fn every_call(policy: Policy, preset: &'static str) -> Self {
        let at: Match = "grpc *".parse().expect("a match");
        Self { via_policy: true, is_policy: true, ..Self::new(&at, policy, preset) }
    }
}

impl Deref for Route {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        &self.guard
    }
}

impl RouteTable {
    /// These routes, the first match winning.
    pub fn new(routes: Vec<Route>) -> Self {
        Self { routes, unary: Unary::default() }
    }

    /// With the gRPC methods that are known to be unary.
    pub fn knowing(self, unary: Unary) -> Self {
        Self { unary, ..self }
    }

    /// With a quota on what callers may begin, or without one.
    pub(crate) fn limited(mut self, is_limited: bool) -> Self {
        self.routes.iter_mut().for_each(|route| route.is_limited = is_limited);
        self
    }

    /// The gRPC methods that are known to be unary.
    pub fn unary(&self) -> &Unary {
        &self.unary
    }

    /// The route of a request. Its mode may be `off`: [`Policy::covers`] tells whether anything is done about it.
    /// `raw_path` is the path as it was sent, without the query.
    pub fn find(&self, method: &Method, raw_path: &str) -> Option<&Route> {
        self.at(Protocol::Http, method, &normalise(raw_path))
    }

    /// The route of a gRPC call, such as `/shop.Orders/Create`. `None` for one that is not known to be unary.
    pub fn find_call(&self, raw_path: &str) -> Option<&Route> {
        self.at(Protocol::Grpc, &Method::POST, &normalise(raw_path))
    }

    /// The paths of every gRPC method that a route covers, sorted.
    pub fn calls(&self) -> BTreeSet<&str> {
        let named = self.iter().filter(|route| route.protocol == Protocol::Grpc && route.pattern.names_one());
        let all = named.map(|route| route.pattern.text()).chain(self.unary.paths());
        all.filter(|path| self.find_call(path).is_some()).collect()
    }

    /// The shape of a refusal that no policy gives, or of a request that none covers: that of the first route whose pattern has
    /// the path, whatever its methods.
    pub fn refusals(&self, path: &str) -> Refusals {
        if self.iter().all(|route| route.policy.refusals == Refusals::default()) {
            return Refusals::default();
        }
        let has_it = |route: &&Route| route.protocol == Protocol::Http && route.pattern.matches(path);
        self.iter().find(has_it).map(|route| route.policy.refusals).unwrap_or_default()
    }

    /// Whether an app could understand this path as that of an enforced route, or as another one although it is.
    /// Such a request is refused (`request-ambiguous`).
    pub fn ambiguous(&self, protocol: Protocol, method: &Method, raw_path: &str) -> bool {
        let enforced = |path: &str| {
            self.at(protocol, method, path)
                .is_some_and(|route| route.policy.mode == Mode::Enforce && route.policy.covers(method))
        };
        suspicious(raw_path)
            && (enforced(&normalise(raw_path)) || path::readings(raw_path).iter().any(|reading| enforced(reading)))
    }

    /// In the order of the file.
    pub fn iter(&self) -> std::slice::Iter<'_, Route> {
        self.routes.iter()
    }

    fn at(&self, protocol: Protocol, method: &Method, path: &str) -> Option<&Route> {
        let known = |route: &Route| match protocol {
            Protocol::Http => true,
            // Who names a method says that it is unary.
            Protocol::Grpc => route.pattern.names_one() || self.unary.has(path),
        };
        self.routes.iter().find(|route| {
            route.protocol == protocol
                && route.policy.methods.contains(method)
                && route.pattern.matches(path)
                && known(route)
        })
    }
}

impl<'a> IntoIterator for &'a RouteTable {
    type Item = &'a Route;
    type IntoIter = std::slice::Iter<'a, Route>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(matches: &[&str]) -> RouteTable {
        let route = |text: &&str| {
            let at: Match = text.parse().unwrap();
            let mut policy = Policy::ietf();
            policy.methods = at.methods().to_vec();
            Route::new(&at, policy, "ietf")
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
    fn a_path_that_could_be_a_covered_one_is_ambiguous() {
        let table = table(&["POST /payments", "POST /payments/*", "POST /x/y"]);
        for path in [
            "/payments//1",
            "/payments/../static",
            "/static/../payments/1",
            "//payments",
            "/payments/./",
            "/payments/.",
            "/x%2fy",
            "/x\\y",
            "/x%5Cy",
            "/s/%2e%2e/x/y",
            "/./x/y",
            "/q//../x/y",
            "/q%2f..%2fx/y",
            "/x//y/",
        ] {
            assert!(table.ambiguous(Protocol::Http, &Method::POST, path), "{path}");
            assert!(!table.ambiguous(Protocol::Http, &Method::GET, path), "{path}");
        }
        for path in ["/payments", "/payments/1", "/static//a", "/static/../b", "/x/y", "/x/z%2fy"] {
            assert!(!table.ambiguous(Protocol::Http, &Method::POST, path), "{path}");
        }
    }

    #[test]
    fn where_every_path_is_covered_every_suspicious_path_is_ambiguous() {
        let table = RouteTable::new(vec![Route::everything(Policy::ietf(), "ietf")]);
        for path in ["//", "/a/../b", "/a%2fb", "/a\\b", "/."] {
            assert!(table.ambiguous(Protocol::Http, &Method::POST, path), "{path}");
            assert!(!table.ambiguous(Protocol::Http, &Method::GET, path), "{path}");
        }
        assert!(!table.ambiguous(Protocol::Http, &Method::POST, "/a/b"));
    }

    #[test]
    fn what_is_not_enforced_is_never_ambiguous() {
        for mode in [Mode::Shadow, Mode::Off] {
            let mut policy = Policy::ietf();
            policy.mode = mode;
            let table = RouteTable::new(vec![Route::everything(policy, "ietf")]);
            assert!(!table.ambiguous(Protocol::Http, &Method::POST, "/a//b"));
            assert!(table.find(&Method::POST, "/a//b").is_some());
        }
    }
}
