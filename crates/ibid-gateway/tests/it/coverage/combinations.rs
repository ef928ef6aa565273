//! Every combination of HTTP version, media type, upgrade, method in another case and spelling of the path.

use testbed::{
    client::request,
    grpc::message,
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};

use super::Http2Connection;
use crate::support::{BIN, within};

const ROUTES: &str = r#"
    [[route]]
    match = "POST /payments/card"
    [[route]]
    match = "POST /orders/new"
    preset = "platform"
    [[route]]
    match = "POST /hooks/github"
    preset = "webhook:github"
    secrets = ["a secret of the test"]
    [[route]]
    match = "grpc shop.Orders/Create"
"#;

const MEDIA_TYPES: [&str; 5] =
    ["application/json", "application/grpc", "Application/gRPC+proto;x=1", "application/grpc-web", ""];

/// How a request is sent.
#[derive(Debug, Clone)]
struct RequestForm {
    is_http2: bool,
    media_type: &'static str,
    /// What HTTP/1.1 asks to upgrade to.
    upgrade: &'static str,
    method: &'static str,
    path: String,
    /// Whether the path has dot segments in some reading.
    has_dots: bool,
}

/// Other spellings of a path of two segments, as some app reads them.
fn spellings(path: &str) -> Vec<(String, bool)> {
    let (first, second) = path[1..].split_once('/').expect("two segments");
    let encoded = format!("/{first}/%{:02x}{}", second.as_bytes()[0], &second[1..]);
    let upper = path.to_ascii_uppercase();
    let plain = [
        path.to_owned(),
        format!("{path}/"),
        upper.clone(),
        format!("{upper};x=1/"),
        format!("/;{path}"),
        format!("/{path}"),
        encoded,
        format!("/{first}%2F{second}"),
        format!("/{first}\\{second}%3Bx"),
    ];
    let dots = [format!("/x/..;{path}"), format!("/.{path}"), format!("/x/%2e%2e{path}"), format!("/x%5C..{path}")];
    plain.into_iter().map(|path| (path, false)).chain(dots.into_iter().map(|path| (path, true))).collect()
}

fn request_forms(path: &str) -> Vec<RequestForm> {
    let mut all = Vec::new();
    for (path, has_dots) in spellings(path) {
        for media_type in MEDIA_TYPES {
            for method in ["POST", "post"] {
                for (is_http2, upgrade) in [(true, ""), (false, ""), (false, "websocket"), (false, "h2c")] {
                    all.push(RequestForm { is_http2, media_type, upgrade, method, path: path.clone(), has_dots });
                }
            }
        }
    }
    all
}

struct CoverageGateway {
    upstream: TestUpstream,
    gateway: GatewayProcess,
    http2: Http2Connection,
    /// Of so many ways one is tried.
    sample_one_in: usize,
}

impl CoverageGateway {
    async fn start(policy: &str, one_in: usize) -> Self {
        let upstream = TestUpstream::start_h2c().await;
        let reply = UpstreamReply::chunks([message("done")]).header("content-type", "application/grpc");
        upstream.reply_by_default(reply.trailer("grpc-status", "0"));
        let gateway = GatewayProcess::spawn(
            BIN,
            &format!("store.url = \"memory:\"\n{policy}\n{ROUTES}"),
            &format!("h2c://{}", upstream.addr()),
        )
        .await;
        let http2 = Http2Connection::connect(gateway.addr()).await;
        Self { upstream, gateway, http2, sample_one_in: one_in }
    }

    async fn send(&self, way: &RequestForm, headers: &[(&str, &str)]) {
        let mut headers = headers.to_vec();
        headers.extend((!way.media_type.is_empty()).then_some(("content-type", way.media_type)));
        if way.is_http2 {
            self.http2.send(way.method, &way.path, &headers, message("x")).await;
            return;
        }
        if !way.upgrade.is_empty() {
            headers.extend([("upgrade", way.upgrade), ("connection", "upgrade")]);
        }
        let request = request(way.method, self.gateway.addr(), &way.path).body(message("x"));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        within("an answer over HTTP/1.1", request.send()).await;
    }

    /// Sent twice, a request runs as often as `runs` says: once, or never.
    async fn assert_runs(&self, path: &str, runs: impl Fn(&RequestForm) -> usize) {
        for (at, way) in request_forms(path).into_iter().enumerate().step_by(self.sample_one_in) {
            let key = format!("{path}-{at}");
            for _ in 0..2 {
                self.send(&way, &[("idempotency-key", &key)]).await;
            }
            assert_eq!(self.upstream.executions_with_key(&key), runs(&way), "{way:?}");
        }
    }

    /// No request reaches the app.
    async fn assert_never_runs(&self, path: &str, headers: &[(&str, &str)]) {
        let before = self.upstream.requests();
        for way in request_forms(path).into_iter().step_by(self.sample_one_in) {
            self.send(&way, headers).await;
            assert_eq!(self.upstream.requests(), before, "{way:?}");
        }
    }
}

fn is_refused(way: &RequestForm) -> bool {
    // Other upgrades are not tunnelled: the request goes on as an ordinary one.
    way.has_dots || way.upgrade == "websocket"
}

async fn assert_covered(policy: &str, one_in: usize) {
    let world = CoverageGateway::start(policy, one_in).await;
    world.assert_runs("/payments/card", |way| usize::from(!is_refused(way))).await;
    world
        .assert_runs("/shop.Orders/Create", |way| {
            let is_no_call = !way.is_http2
                && way.media_type.to_ascii_lowercase().starts_with("application/grpc")
                && !way.media_type.contains("web");
            usize::from(!is_refused(way) && !is_no_call)
        })
        .await;
    world.assert_never_runs("/orders/new", &[]).await;
    let unsigned = [("x-github-delivery", "d-1"), ("x-hub-signature-256", "sha256=00"), ("x-github-event", "push")];
    world.assert_never_runs("/hooks/github", &unsigned).await;
}

#[tokio::test]
async fn what_a_route_names_is_covered_however_it_is_sent() {
    assert_covered("[policy]\npreset = \"off\"", 1).await;
}

#[tokio::test]
async fn what_a_route_names_is_covered_however_it_is_sent_beside_a_policy() {
    assert_covered("[policy]\npreset = \"ietf\"", 7).await;
}
