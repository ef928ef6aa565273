//! Traces: a collector sees what a request did, the app is part of its caller's trace, and a replay links to its original.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde_json::Value;
use testbed::{
    client::{get, post},
    process::{self, GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};
use tokio::time::sleep;

use super::common::{BIN, installed, run};

const WAIT_TIMEOUT: Duration = Duration::from_secs(30);
const CALLER_TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const OTHER_TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// One span, as the collector got it.
#[derive(Debug, Clone)]
struct ReceivedSpan(Value);

impl ReceivedSpan {
    fn text(&self, name: &str) -> &str {
        self.0[name].as_str().unwrap_or_else(|| panic!("no {name}: {:#}", self.0))
    }

    fn attribute(&self, key: &str) -> Option<&str> {
        let attributes = self.0["attributes"].as_array().expect("attributes");
        let value = &attributes.iter().find(|attribute| attribute["key"] == key)?["value"];
        value["stringValue"].as_str().or_else(|| value["intValue"].as_str())
    }

    fn nanos(&self, name: &str) -> u64 {
        self.text(name).parse().expect("a number")
    }
}

/// Where the gateway sends its traces. It speaks HTTP and keeps what it gets, as the stand-in of an app does.
struct TestCollector(TestUpstream);

impl TestCollector {
    async fn start() -> Self {
        Self(TestUpstream::start().await)
    }

    fn config(&self) -> String {
        format!("[trace]\notlp = \"{}\"\n[store]\nurl = \"embedded:data\"\n", self.0.url())
    }

    fn messages(&self) -> Vec<Value> {
        let sent = self.0.log().into_iter().filter(|seen| seen.path() == "/v1/traces");
        sent.map(|seen| {
            assert_eq!((&*seen.method, seen.header("content-type")), ("POST", Some("application/json")));
            serde_json::from_slice(&seen.body).expect("JSON")
        })
        .collect()
    }

    /// The spans of a trace.
    fn spans(&self, trace: &str) -> Vec<ReceivedSpan> {
        let messages = self.messages();
        let spans = messages.iter().flat_map(|message| {
            let resource = &message["resourceSpans"][0];
            let attributes = resource["resource"]["attributes"].as_array().expect("attributes");
            let names: Vec<_> = attributes.iter().map(|attribute| attribute["key"].as_str().unwrap()).collect();
            assert_eq!(names, ["service.name", "service.version", "service.instance.id"]);
            assert_eq!(attributes[0]["value"]["stringValue"], "ibid");
            assert_eq!(attributes[2]["value"]["stringValue"].as_str().map(str::len), Some(32));
            resource["scopeSpans"][0]["spans"].as_array().expect("spans").clone()
        });
        spans.filter(|span| span["traceId"] == trace).map(ReceivedSpan).collect()
    }

    /// The spans of a caller's trace, once the request's own is there, which is sent last.
    async fn trace(&self, caller: &str) -> Vec<ReceivedSpan> {
        let (trace, span) = (&caller[3..35], &caller[36..52]);
        let since = Instant::now();
        loop {
            let spans = self.spans(trace);
            if spans.iter().any(|one| one.text("parentSpanId") == span) {
                return spans;
            }
            assert!(since.elapsed() < WAIT_TIMEOUT, "no span below {caller}: {:#?}", self.messages());
            sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Name and parent's name of each span, sorted.
fn tree(spans: &[ReceivedSpan]) -> Vec<(&str, &str)> {
    let name =
        |id: &str| spans.iter().find(|span| span.text("spanId") == id).map_or("caller", |span| span.text("name"));
    let mut tree: Vec<_> = spans.iter().map(|span| (span.text("name"), name(span.text("parentSpanId")))).collect();
    tree.sort_unstable();
    tree
}

fn named<'a>(spans: &'a [ReceivedSpan], name: &str) -> &'a ReceivedSpan {
    spans.iter().find(|span| span.text("name") == name).unwrap_or_else(|| panic!("no {name} in {spans:#?}"))
}

#[tokio::test]
async fn a_request_is_traced_to_the_app_and_a_replay_links_to_it() {
    let (upstream, collector) = (TestUpstream::start().await, TestCollector::start().await);
    upstream.on("/pay", UpstreamReply::usual().header("x-ibid-trace", OTHER_TRACEPARENT));
    // The port, and with it the host, is another one after the restart.
    let config = format!("{}[[route]]\nmatch = \"POST /pay\"\nscope = \"global\"\n", collector.config());
    let mut gateway = GatewayProcess::spawn(BIN, &config, &upstream.url()).await;
    let pay = |caller: &str| post(gateway.addr(), "/pay").key("order-1841-pay").header("traceparent", caller);

    let first = pay(CALLER_TRACEPARENT).header("tracestate", "shop=1").send().await;
    assert_eq!((first.status, first.header("x-ibid-trace")), (201, None), "{first:?}");
    let spans = collector.trace(CALLER_TRACEPARENT).await;
    let below = [("POST /pay", "caller"), ("claim", "POST /pay"), ("run", "POST /pay"), ("settle", "POST /pay")];
    assert_eq!(tree(&spans), below);
    let (request, run) = (named(&spans, "POST /pay"), named(&spans, "run"));
    for (key, value) in [
        ("http.request.method", "POST"),
        ("url.path", "/pay"),
        ("http.route", "POST /pay"),
        ("http.response.status_code", "201"),
        ("ibid.outcome", "executed"),
        ("ibid.key", "orde****-pay"),
        ("ibid.attempt", "1"),
    ] {
        assert_eq!(request.attribute(key), Some(value), "{key}");
    }
    assert_eq!((&request.0["kind"], &run.0["kind"]), (&2.into(), &3.into()));
    for span in &spans {
        assert!(span.nanos("startTimeUnixNano") >= request.nanos("startTimeUnixNano"), "{span:?}");
        assert!(span.nanos("endTimeUnixNano") <= request.nanos("endTimeUnixNano"), "{span:?}");
    }
    let seen = upstream.last();
    assert_eq!(seen.header("traceparent"), Some(&*format!("{}{}-01", &CALLER_TRACEPARENT[..36], run.text("spanId"))));
    assert_eq!(seen.header("tracestate"), Some("shop=1"));

    let again = pay(OTHER_TRACEPARENT).send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")));
    assert_eq!((again.header("x-ibid-trace"), &again.body), (None, &first.body));
    let spans = collector.trace(OTHER_TRACEPARENT).await;
    assert_eq!(tree(&spans), [("POST /pay", "caller"), ("claim", "POST /pay")]);
    let replay = named(&spans, "POST /pay");
    assert_eq!(replay.attribute("ibid.outcome"), Some("replayed"));
    let link = &replay.0["links"][0];
    assert_eq!((&link["traceId"], &link["spanId"]), (&request.0["traceId"], &request.0["spanId"]));
    assert_eq!(request.0["links"].as_array().map(Vec::len), Some(0));

    // A gateway that does not trace gives the same answer.
    let untraced = config.split_once('\n').unwrap().1.split_once('\n').unwrap().1.to_owned();
    gateway.rewrite_config(&untraced);
    gateway.restart().await;
    let later = post(gateway.addr(), "/pay").key("order-1841-pay").send().await;
    assert_eq!((later.header("idempotent-replayed"), later.header("x-ibid-trace")), (Some("true"), None), "{later:?}");
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn what_is_sent_is_what_opentelemetry_defines() {
    let (upstream, collector) = (TestUpstream::start().await, TestCollector::start().await);
    let gateway = GatewayProcess::spawn(BIN, &collector.config(), &upstream.url()).await;
    post(gateway.addr(), "/pay").key("k-1").send().await;
    post(gateway.addr(), "/pay").key("k-1").header("traceparent", CALLER_TRACEPARENT).send().await;
    collector.trace(CALLER_TRACEPARENT).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("message.json");
    let program = "import sys\nfrom google.protobuf import json_format\n\
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest\n\
        json_format.Parse(open(sys.argv[1]).read(), ExportTraceServiceRequest())\n";
    let judge = |message: &Value| {
        fs::write(&file, message.to_string()).unwrap();
        run(installed("python").args(["-c", program]).arg(&file))
    };
    for mut message in collector.messages() {
        let (fine, told) = judge(&message);
        assert!(fine, "{told}");
        message["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["begun"] = 1.into();
        assert!(!judge(&message).0, "what is not defined is found");
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_end_the_trace() {
    let (upstream, collector, gate) = (TestUpstream::start().await, TestCollector::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let gateway = GatewayProcess::spawn(BIN, &collector.config(), &upstream.url()).await;
    let client = post(gateway.addr(), "/pay").key("k-1").header("traceparent", CALLER_TRACEPARENT).start().await;
    gate.arrived(1).await;
    client.abort();
    sleep(Duration::from_millis(300)).await;
    gate.open();
    let spans = collector.trace(CALLER_TRACEPARENT).await;
    assert_eq!(tree(&spans), [("POST", "caller"), ("claim", "POST"), ("run", "POST"), ("settle", "POST")]);
    let request = named(&spans, "POST");
    assert_eq!((request.attribute("ibid.client"), request.attribute("ibid.outcome")), (Some("gone"), Some("executed")));
}

#[tokio::test]
async fn what_is_not_covered_is_traced_too_and_what_its_caller_does_not_trace_is_not() {
    let (upstream, collector) = (TestUpstream::start().await, TestCollector::start().await);
    let gateway = GatewayProcess::spawn(BIN, &collector.config(), &upstream.url()).await;
    let unsampled = OTHER_TRACEPARENT.replace("-01", "-00");
    get(gateway.addr(), "/orders").header("traceparent", &*unsampled).send().await;
    assert_eq!(upstream.last().header("traceparent"), Some(&*unsampled));
    get(gateway.addr(), "/orders").header("traceparent", CALLER_TRACEPARENT).send().await;
    let spans = collector.trace(CALLER_TRACEPARENT).await;
    assert_eq!(tree(&spans), [("GET", "caller"), ("pass", "GET")]);
    assert_eq!(collector.spans(&OTHER_TRACEPARENT[3..35]).len(), 0);
    get(gateway.addr(), "/orders").send().await;
    let own = upstream.last().header("traceparent").expect("a trace of its own").to_owned();
    assert!(own.starts_with("00-") && own.ends_with("-01") && own[3..35] != CALLER_TRACEPARENT[3..35], "{own}");
}

#[tokio::test]
async fn a_collector_that_cannot_be_is_refused_at_the_start() {
    let check = async |otlp: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ibid.toml");
        fs::write(&file, format!("upstream = \"http://127.0.0.1:3000\"\ntrace.otlp = \"{otlp}\"\n")).unwrap();
        let output = process::run(BIN, &["check", file.to_str().unwrap()], &[]).await;
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let (code, told) = check("http://collector").await;
    assert!(code == Some(0) && told.contains("  trace           http://collector:4318/v1/traces\n"), "{told}");
    let (code, told) = check("https://collector").await;
    assert!(code == Some(0) && told.contains("  trace           https://collector:4318/v1/traces\n"), "{told}");
    let (code, told) = check("grpc://collector:4317").await;
    assert!(code == Some(64) && told.contains("trace.otlp: found \"grpc://collector:4317\"; "), "{told}");
    assert!(told.contains("allowed is a URL such as"), "{told}");
}

#[tokio::test]
async fn a_shutdown_sends_what_is_left_and_a_collector_that_is_away_holds_nobody_up() {
    let (upstream, collector) = (TestUpstream::start().await, TestCollector::start().await);
    let mut gateway = GatewayProcess::spawn(BIN, &collector.config(), &upstream.url()).await;
    post(gateway.addr(), "/pay").key("k-1").header("traceparent", CALLER_TRACEPARENT).send().await;
    gateway.signal(ProcessSignal::Term);
    assert!(gateway.wait_exit(WAIT_TIMEOUT).await.success());
    assert_eq!(tree(&collector.spans(&CALLER_TRACEPARENT[3..35])).len(), 4);

    let config = "[trace]\notlp = \"http://127.0.0.1:9\"\n[store]\nurl = \"memory:\"\n";
    let gateway = GatewayProcess::spawn(BIN, config, &upstream.url()).await;
    assert_eq!(post(gateway.addr(), "/pay").key("k-2").send().await.status, 201);
    let line = gateway.wait_for_log("traces cannot be sent").await;
    assert!(line.contains("http://127.0.0.1:9/v1/traces"), "{line}");
    assert_eq!(post(gateway.addr(), "/pay").key("k-2").send().await.status, 201);
}

/// The log leads to the trace.
#[tokio::test]
async fn the_lines_of_a_request_have_its_trace() {
    let (upstream, collector) = (TestUpstream::start().await, TestCollector::start().await);
    let config = format!("log.format = \"json\"\n{}", collector.config());
    let gateway = GatewayProcess::spawn(BIN, &config, &upstream.url()).await;
    let paid =
        post(gateway.addr(), "/pay").key("order-1841-pay").header("traceparent", CALLER_TRACEPARENT).send().await;
    assert_eq!(paid.status, 201, "{paid:?}");
    let line: Value = serde_json::from_str(&gateway.wait_for_log("answer stored").await).expect("JSON");
    assert_eq!(line["trace_id"], CALLER_TRACEPARENT[3..35], "{line}");
}
