//! No header, version or spelling makes a request pass that the layer covers; and routes beside the one that is named.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use axum::{Router, body::Body};
use http::{HeaderName, Method, Request, Response, StatusCode, Version, request::Parts};
use ibid::{
    Ibid, Observer, Policy,
    grpc::UnaryMethods,
    http::{IbidLayer, Protocol, Route, RouteMatch, Routing},
    observe::EngineEvent,
    policy::PolicyMode,
    store::Memory,
    webhook::WebhookScheme,
};
use parking_lot::Mutex;
use tower::ServiceExt;

/// An app that runs whatever comes, and a layer around it.
struct LayerFixture {
    router: Router,
    runs: Arc<AtomicUsize>,
    uncovered_events: Arc<UncoveredEvents>,
}

/// What was told about requests that nothing covers.
#[derive(Default)]
struct UncoveredEvents(Mutex<Vec<String>>);

impl Observer for UncoveredEvents {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        if let EngineEvent::UncoveredKey { method, path } = notice {
            self.0.lock().push(format!("{method} {path}"));
        }
    }
}

impl LayerFixture {
    fn new(layer: impl FnOnce(&Ibid) -> IbidLayer) -> Self {
        let (runs, uncovered_events) = (Arc::new(AtomicUsize::new(0)), Arc::new(UncoveredEvents::default()));
        let ibid = Ibid::builder(Arc::new(Memory::default())).observer(uncovered_events.clone()).build();
        let counted = runs.clone();
        let handler = move || {
            counted.fetch_add(1, SeqCst);
            async { StatusCode::CREATED }
        };
        Self { router: Router::new().fallback(handler).layer(layer(&ibid)), runs, uncovered_events }
    }

    async fn send(&self, method: &str, version: Version, path: &str, headers: &[(&str, &str)]) -> Response<Body> {
        let mut request = Request::builder().method(method).version(version).uri(path).header("host", "x");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.router.clone().oneshot(request.body(Body::from("{}")).unwrap()).await.unwrap()
    }

    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }
}

const KEY: (&str, &str) = ("idempotency-key", "key-1");
const GRPC: (&str, &str) = ("content-type", "application/grpc");

#[tokio::test]
async fn neither_media_type_nor_version_nor_case_gets_past_the_layer() {
    let world = LayerFixture::new(|ibid| ibid.layer(Policy::ietf()).unwrap());
    for (at, version) in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2].into_iter().enumerate() {
        for kind in ["application/json", "application/grpc", "application/grpc+proto"] {
            for method in ["POST", "post", "Post"] {
                let (before, key) = (world.runs(), format!("{at}-{kind}-{method}"));
                for _ in 0..2 {
                    world.send(method, version, "/pay", &[("idempotency-key", &key), ("content-type", kind)]).await;
                }
                let is_call = version == Version::HTTP_2 && kind != "application/json";
                assert_eq!(world.runs() - before, usize::from(!is_call), "{version:?} {kind} {method}");
            }
        }
    }
}

#[tokio::test]
async fn a_call_that_may_be_a_stream_passes_without_a_key_and_is_refused_with_one() {
    let world = LayerFixture::new(|ibid| ibid.layer(Policy::ietf()).unwrap());
    let refused = world.send("POST", Version::HTTP_2, "/shop.Orders/Create", &[KEY, GRPC]).await;
    assert_eq!((refused.status(), &refused.headers()["grpc-status"]), (StatusCode::OK, &"9".parse().unwrap()));
    assert_eq!(world.runs(), 0);
    world.send("POST", Version::HTTP_2, "/shop.Orders/Create", &[GRPC]).await;
    assert_eq!(world.runs(), 1);
    let required = LayerFixture::new(|ibid| ibid.layer(Policy::platform()).unwrap());
    let refused = required.send("POST", Version::HTTP_2, "/shop.Orders/Create", &[GRPC]).await;
    assert_eq!((&refused.headers()["grpc-status"], required.runs()), (&"9".parse().unwrap(), 0));
    let mut shadow = Policy::ietf();
    shadow.mode = PolicyMode::Shadow;
    let shadow = LayerFixture::new(|ibid| ibid.layer(shadow).unwrap());
    shadow.send("POST", Version::HTTP_2, "/shop.Orders/Create", &[KEY, GRPC]).await;
    assert_eq!(shadow.runs(), 1, "shadow mode refuses nothing");
}

#[tokio::test]
async fn a_unary_method_is_covered_whatever_is_sent_to_it() {
    let world = LayerFixture::new(|ibid| {
        ibid.grpc_layer(UnaryMethods::methods(["shop.Orders/Create"]), Policy::platform()).unwrap()
    });
    for kind in ["application/json", "application/proto", "application/grpc-web", ""] {
        let headers = [("idempotency-key", kind), ("content-type", kind)];
        for method in ["POST", "post"] {
            let answer = world.send(method, Version::HTTP_2, "/shop.Orders/Create", &headers[1..]).await;
            assert_eq!(answer.status(), StatusCode::BAD_REQUEST, "a key is required: {kind}");
        }
        let before = world.runs();
        for _ in 0..2 {
            world.send("POST", Version::HTTP_2, "/shop.Orders/Create", &[("idempotency-key", "k"), headers[1]]).await;
        }
        assert!(world.runs() - before <= 1, "{kind}");
    }
    assert_eq!(world.runs(), 1);
}

#[tokio::test]
async fn a_key_that_nothing_covers_is_told() {
    let world = LayerFixture::new(|ibid| ibid.layer(Policy::stripe()).unwrap());
    for method in ["GET", "HEAD", "OPTIONS", "get", "PUT", "DELETE"] {
        world.send(method, Version::HTTP_11, "/a?x=1", &[KEY]).await;
    }
    world.send("PUT", Version::HTTP_11, "/b", &[]).await;
    assert_eq!(*world.uncovered_events.0.lock(), ["PUT /a", "DELETE /a"]);
    assert_eq!(world.runs(), 7);
}

/// Every request is under the first route, and could be taken for one of the others.
struct AmbiguousRoutes(Vec<Arc<Route>>);

impl Routing for AmbiguousRoutes {
    fn route(&self, _: &Parts) -> RouteMatch {
        RouteMatch::Covered { route: self.0[0].clone(), alternatives: self.0[1..].to_vec() }
    }

    fn key_headers(&self, _: &Method, _: &Parts) -> Option<Vec<HeaderName>> {
        None
    }
}

fn several(policies: Vec<Policy>) -> LayerFixture {
    let route = |(at, policy): (usize, Policy)| {
        Arc::new(Route { name: format!("r{at}"), policy: policy.checked().unwrap(), protocol: Protocol::Http })
    };
    let routes = policies.into_iter().enumerate().map(route).collect();
    LayerFixture::new(|ibid| ibid.layer_with_routing(Arc::new(AmbiguousRoutes(routes))))
}

fn keyed_by(header: &str, required: bool) -> Policy {
    let mut policy = Policy::ietf();
    policy.key.from = vec![format!("header:{header}").parse().unwrap()];
    policy.key.required = required;
    policy
}

#[tokio::test]
async fn what_any_of_several_routes_requires_is_required() {
    let world = several(vec![keyed_by("a", false), keyed_by("b", true)]);
    for headers in [&[][..], &[("a", "key-1")], &[("b", "")]] {
        let refused = world.send("POST", Version::HTTP_11, "/", headers).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{headers:?}");
    }
    assert_eq!(world.runs(), 0);
    for _ in 0..2 {
        let answer = world.send("POST", Version::HTTP_11, "/", &[("a", "key-1"), ("b", "key-2")]).await;
        assert_eq!(answer.status(), StatusCode::CREATED);
    }
    assert_eq!(world.runs(), 1);

    let signed = Policy::webhook(WebhookScheme::GitHub, ["secret"]).unwrap();
    let world = several(vec![keyed_by("a", false), signed]);
    let forged = [("x-github-delivery", "d-1"), ("x-hub-signature-256", "sha256=00")];
    for headers in [&forged[..], &[("a", "key-1"), forged[0], forged[1]]] {
        let refused = world.send("POST", Version::HTTP_11, "/", headers).await;
        assert_eq!(refused.status(), StatusCode::UNAUTHORIZED, "{headers:?}");
    }
    assert_eq!(world.send("POST", Version::HTTP_11, "/", &[("a", "key-1")]).await.status(), StatusCode::BAD_REQUEST);
    assert_eq!(world.runs(), 0);
}

#[tokio::test]
async fn the_first_of_several_routes_by_which_a_request_has_a_key_governs_it() {
    let mut watched = keyed_by("s", false);
    watched.mode = PolicyMode::Shadow;
    let mut in_body = keyed_by("c", false);
    in_body.key.from = vec!["json:/id".parse().unwrap()];
    let world = several(vec![in_body, watched, keyed_by("b", false), keyed_by("c", false)]);
    for (headers, runs) in [
        (&[("b", "key-1")][..], 1),
        (&[("c", "key-5")], 1),
        // The body has no key after all, which only its reading shows.
        (&[("b", "key-2"), ("content-type", "application/json")], 1),
        (&[("s", "key-3"), ("c", "key-3")], 1),
        (&[("s", "key-4")], 2),
        (&[], 2),
    ] {
        let before = world.runs();
        for _ in 0..2 {
            let answer = world.send("POST", Version::HTTP_11, "/", headers).await;
            assert!(answer.status() == StatusCode::CREATED, "{headers:?}: {answer:?}");
        }
        assert_eq!(world.runs() - before, runs, "{headers:?}");
    }
}
