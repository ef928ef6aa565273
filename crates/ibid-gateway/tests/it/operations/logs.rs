//! The log: one line per covered request, at the level and with the fields that operators rely on.

use std::{
    io::{self, Write},
    sync::Arc,
};

use ibid::{
    Observer,
    observe::EngineEvent,
    store::{Address, ErrorKind, StoreError},
};
use ibid_gateway::logs::LogObserver;
use ibid_testkit::wrappers::CallFilter;
use parking_lot::Mutex;
use serde_json::Value;
use testbed::{
    client::{TestRequest, post},
    process::{GatewayProcess, ProcessSignal},
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};
use tracing_subscriber::fmt::MakeWriter;

use crate::support::{TestGateway, anonymous_pay, failing_store, lines, start_gateway, start_in_process};
use testbed::http1::WAIT_TIMEOUT;

/// What was written to standard error: all but the two lines on standard output.
fn stderr(gateway: &GatewayProcess) -> Vec<String> {
    gateway.logs().into_iter().filter(|line| !line.starts_with("ibid: ")).collect()
}

fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|why| panic!("not JSON ({why}): {line}"))
}

fn text<'a>(line: &'a Value, field: &str) -> &'a str {
    line[field].as_str().unwrap_or_else(|| panic!("no {field}: {line}"))
}

/// One request of each kind.
async fn send_each_kind(gateway: &mut GatewayProcess, upstream: &TestUpstream) {
    let addr = gateway.addr();
    let gate = upstream.gate("/slow");
    upstream.on("/unknown", UpstreamReply::status(504));
    upstream.on("/released", UpstreamReply::status(500));
    assert_eq!(post(addr, "/pay").header("User-Agent", "shop/1.0").send().await.status, 400);
    assert_eq!(anonymous_pay(addr, "two, keys").header("User-Agent", "shop/1.0").send().await.status, 400);
    for _ in 0..2 {
        assert_eq!(anonymous_pay(addr, "550e8400-e29b-0000").header("User-Agent", "shop/1.0").send().await.status, 201);
    }
    let reused = post(addr, "/pay").key("550e8400-e29b-0000").json("{}").header("User-Agent", "shop/1.0");
    assert_eq!(reused.send().await.status, 422);
    let slow = post(addr, "/slow").key("slow-key-000001").header("User-Agent", "shop/1.0");
    let mut running = slow.start().await;
    gate.arrived(1).await;
    assert_eq!(slow.send().await.status, 409);
    gate.open();
    running.read_response().await;
    assert_eq!(post(addr, "/unknown").key("k-3").header("User-Agent", "shop/1.0").send().await.status, 504);
    assert_eq!(post(addr, "/released").key("k-4").header("User-Agent", "shop/1.0").send().await.status, 500);
    gateway.signal(ProcessSignal::Term);
    assert_eq!(gateway.wait_exit(WAIT_TIMEOUT).await.code(), Some(0));
}

const EXPECTED: [(&str, &str, &str, u64); 8] = [
    ("key-missing", "WARN", "missing idempotency key", 400),
    ("key-invalid", "WARN", "invalid idempotency key", 400),
    ("executed", "INFO", "answer stored", 201),
    ("replayed", "INFO", "duplicate: stored answer replayed", 201),
    ("key-reused", "INFO", "refused", 422),
    ("in-progress", "INFO", "duplicate while the first is running", 409),
    ("unknown", "WARN", "outcome unknown", 504),
    ("released", "INFO", "answered", 500),
];

#[tokio::test]
async fn as_json_every_line_parses_and_has_its_level_and_fields() {
    let upstream = TestUpstream::start().await;
    let config = "log = { format = \"json\", level = \"debug\" }\n[policy]\nkey.required = true\n";
    let mut gateway = start_gateway(config, &upstream).await;
    send_each_kind(&mut gateway, &upstream).await;
    let all: Vec<Value> = stderr(&gateway).iter().map(|line| json(line)).collect();
    for (outcome, level, message, status) in EXPECTED {
        let line =
            all.iter().find(|line| line["outcome"] == outcome).unwrap_or_else(|| panic!("no {outcome}: {all:#?}"));
        assert_eq!(line["level"], level, "{line}");
        assert_eq!(line["message"], message, "{line}");
        assert_eq!(line["status"], status, "{line}");
        assert_eq!(line["peer"], "127.0.0.1", "{line}");
        assert_eq!(line["user_agent"], "shop/1.0", "{line}");
        assert_eq!(line["method"], "POST", "{line}");
        assert!(line["took_ms"].as_f64().is_some_and(|took| took > 0.0), "{line}");
        assert!(line["ran_ms"].is_number() && line["timestamp"].is_string() && line["path"].is_string(), "{line}");
    }
    let executed = all.iter().find(|line| line["outcome"] == "executed").unwrap();
    assert_eq!((&executed["key"], &executed["attempt"]), (&"550e****0000".into(), &1.into()), "{executed}");
    let address = executed["address"].as_str().unwrap();
    assert!(address.len() == 12 && address.contains("****"), "hashes are masked: {address}");
    let ran = executed["ran_ms"].as_f64().unwrap();
    assert!(ran > 0.0 && ran <= executed["took_ms"].as_f64().unwrap(), "{executed}");
}

#[tokio::test]
async fn as_text_each_line_has_the_same() {
    let TestGateway { upstream, mut gateway } = TestGateway::start("[policy]\nkey.required = true\n").await;
    send_each_kind(&mut gateway, &upstream).await;
    let all = stderr(&gateway);
    for (outcome, level, message, status) in EXPECTED {
        let outcome = format!("outcome=\"{outcome}\"");
        let line = all.iter().find(|line| line.contains(&outcome)).unwrap_or_else(|| panic!("no {outcome}: {all:#?}"));
        for part in [&format!(" {level} "), message, &format!("status={status}"), "127.0.0.1", "shop/1.0", "took_ms="] {
            assert!(line.contains(part), "{part:?}: {line}");
        }
        assert!(!line.contains('\x1b'), "no colours: {line:?}");
    }
    assert!(all.iter().any(|line| line.contains("key=\"550e****0000\"")), "{all:#?}");
}

/// Behind a proxy on this machine, as most are.
#[tokio::test]
async fn a_line_has_the_clients_address_and_the_id_of_its_request() {
    let TestGateway { upstream, gateway } =
        TestGateway::start("log = { format = \"json\" }\n[policy]\nkey.required = true\n").await;
    let behind = |request: TestRequest| request.header("X-Forwarded-For", "198.51.100.9, 203.0.113.7");
    behind(anonymous_pay(gateway.addr(), "k-1")).header("X-Request-Id", "req-42").send().await;
    behind(post(gateway.addr(), "/pay")).send().await;
    let stored = json(&lines(&gateway, "answer stored", 1).await[0]);
    assert_eq!((&stored["peer"], &stored["request_id"]), (&"203.0.113.7".into(), &"req-42".into()), "{stored}");
    assert_eq!(upstream.last().header("x-request-id"), Some("req-42"));
    // The caller's trace is named although the gateway traces nothing.
    let traced = anonymous_pay(gateway.addr(), "k-2").header("Traceparent", TRACEPARENT);
    traced.send().await;
    let traced = json(&lines(&gateway, "answer stored", 2).await[1]);
    assert_eq!((&traced["trace_id"], &stored["trace_id"]), (&TRACE_ID.into(), &().into()), "{traced}");
    assert_eq!(traced["request_id"].as_str().map(str::len), Some(36), "{traced}");
    let missing = json(&lines(&gateway, "missing idempotency key", 1).await[0]);
    assert_eq!(missing["peer"], "203.0.113.7", "{missing}");
    assert_eq!(missing["request_id"].as_str().map(str::len), Some(36), "{missing}");
}

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Also the lines about the app and the store that are written on the way, and what the claim beside a run in shadow mode
/// meets.
#[tokio::test]
async fn every_line_that_is_written_while_a_request_is_handled_has_its_id() {
    let upstream = TestUpstream::start().await;
    upstream.on("/lost", UpstreamFault::CloseWithoutReply);
    let gate = upstream.gate("/slow");
    let config = "log = { format = \"json\" }\nlimits.reply_timeout = \"200ms\"\n[store]\nurl = \"redis://127.0.0.1:9/0\"\n\
                  [policy]\non_store_down = \"open\"\n\
                  [[route]]\nmatch = \"POST /shadow\"\nmode = \"shadow\"\n[[route]]\nmatch = \"POST /far\"\nupstream = \"http://127.0.0.1:9\"\n\
                  on_store_down = \"open\"\n";
    let gateway = start_gateway(config, &upstream).await;
    let send = async |path: &str, id: &str, key: Option<&str>| {
        let request = post(gateway.addr(), path).header("X-Request-Id", id).header("Traceparent", TRACEPARENT);
        key.into_iter().fold(request, |request, key| request.key(key)).send().await.status
    };
    assert_eq!(send("/lost", "lost-with-key", Some("k-1")).await, 502);
    assert_eq!(send("/lost", "lost-without-key", None).await, 502);
    assert_eq!(send("/far", "far-with-key", Some("k-2")).await, 502);
    assert_eq!(send("/slow", "slow-without-key", None).await, 504);
    assert_eq!(send("/shadow", "beside-a-run", Some("k-3")).await, 201);
    // One is made where none is sent.
    assert_eq!(post(gateway.addr(), "/lost").key("k-4").send().await.status, 502);

    let upstream = lines(&gateway, "\"message\":\"upstream\"", 5).await;
    let upstream: Vec<Value> = upstream.iter().map(|line| json(line)).collect();
    let told: Vec<_> = upstream.iter().map(|line| (text(line, "reason"), text(line, "request_id"))).collect();
    let made = told[4].1;
    assert_eq!(made.len(), 36, "a UUID: {told:?}");
    let expected = [
        ("upstream-lost", "lost-with-key"),
        ("upstream-lost", "lost-without-key"),
        ("upstream-unreachable", "far-with-key"),
        ("upstream-timeout", "slow-without-key"),
        ("upstream-lost", made),
    ];
    assert_eq!(told, expected);
    let traced: Vec<_> = upstream.iter().map(|line| &line["trace_id"]).collect();
    assert_eq!(traced, [&TRACE_ID.into(), &TRACE_ID.into(), &TRACE_ID.into(), &TRACE_ID.into(), &Value::Null]);
    // One line for the whole outage.
    let failed = lines(&gateway, "claim: the redis store", 1).await;
    let failed: Vec<Value> = failed.iter().map(|line| json(line)).collect();
    let told: Vec<_> = failed.iter().map(|line| text(line, "request_id")).collect();
    assert_eq!((&told[..], &failed[0]["trace_id"]), (&["lost-with-key"][..], &TRACE_ID.into()));
    let answered = lines(&gateway, "\"outcome\":\"degraded\"", 2).await;
    assert_eq!(json(&answered[1])["request_id"], made);
    gate.open();
}

#[tokio::test]
async fn what_passes_without_a_key_is_told_at_debug_only() {
    let upstream = TestUpstream::start().await;
    for (level, told) in [("info", 0), ("debug", 1)] {
        let mut gateway = start_gateway(&format!("log.level = \"{level}\""), &upstream).await;
        post(gateway.addr(), "/pay").send().await;
        anonymous_pay(gateway.addr(), "k-1").send().await;
        lines(&gateway, "answer stored", 1).await;
        gateway.signal(ProcessSignal::Term);
        gateway.wait_exit(WAIT_TIMEOUT).await;
        assert_eq!(gateway.logs().iter().filter(|line| line.contains("no key")).count(), told, "{level}");
    }
}

#[tokio::test]
async fn at_warn_the_ordinary_is_silent() {
    let TestGateway { upstream: _upstream, mut gateway } =
        TestGateway::start("log.level = \"warn\"\n[policy]\nkey.required = true\n").await;
    anonymous_pay(gateway.addr(), "k-1").send().await;
    anonymous_pay(gateway.addr(), "k-1").send().await;
    post(gateway.addr(), "/pay").send().await;
    gateway.signal(ProcessSignal::Term);
    gateway.wait_exit(WAIT_TIMEOUT).await;
    let all = stderr(&gateway);
    assert!(matches!(&all[..], [line] if line.contains("missing idempotency key")), "{all:#?}");
}

/// The log of this thread.
#[derive(Clone, Default)]
struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl Write for CapturedLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for CapturedLog {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn store_failures_are_errors() {
    let written = CapturedLog::default();
    let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_writer(written.clone()).finish();
    // The gateway logs to the subscriber of the thread that starts it.
    let _logging = tracing::subscriber::set_default(subscriber);
    let upstream = TestUpstream::start().await;
    let store = failing_store();
    let gateway =
        start_in_process("[policy]\nlease = \"300ms\"", &upstream, store.clone(), Arc::new(LogObserver::default()))
            .await;
    store.fail(CallFilter::All, ErrorKind::NotApplied);
    for key in 0..20 {
        assert_eq!(anonymous_pay(gateway.address, &format!("k-{key}")).send().await.status, 503);
    }
    store.heal();
    let gate = upstream.gate("/pay");
    let mut running = anonymous_pay(gateway.address, "k-2").start().await;
    gate.arrived(1).await;
    store.fail(CallFilter::Settle, ErrorKind::Ambiguous);
    gate.open();
    assert_eq!(running.read_response().await.status, 503);
    let text = String::from_utf8(written.0.lock().clone()).unwrap();
    let lines: Vec<Value> = text.lines().map(json).collect();
    // One outage, one error. The requests have their own lines.
    let errors: Vec<&Value> = lines.iter().filter(|line| line["level"] == "ERROR").collect();
    assert_eq!(errors.len(), 1, "{errors:#?}");
    assert_eq!(errors[0]["failures"], 1);
    let said = errors[0]["message"].as_str().unwrap();
    assert!(said.contains("claim: the testkit store did not apply the call"), "{said}");
    assert!(errors[0]["request_id"].is_string());
    let refused = lines.iter().filter(|line| line["outcome"] == "store-unavailable" && line["level"] == "INFO");
    assert_eq!(refused.count(), 21, "{lines:#?}");
    for line in lines.iter().filter(|line| line["took_ms"].is_number()) {
        let took = line["took_ms"].to_string();
        assert!(took.split('.').nth(1).is_none_or(|digits| digits.len() <= 3), "{took}");
    }
}

#[test]
fn a_store_that_decides_without_the_other_is_a_warning() {
    let written = CapturedLog::default();
    let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_writer(written.clone()).finish();
    let error = StoreError::new(ErrorKind::NotApplied, "redis", "connection refused");
    tracing::subscriber::with_default(subscriber, || {
        LogObserver::default().on_event(&EngineEvent::Fallback("claim", &error));
        LogObserver::default().on_event(&EngineEvent::FrontOnlyClaim(&Address([0xab; 32])));
    });
    let text = String::from_utf8(written.0.lock().clone()).unwrap();
    let told: Vec<_> = text.lines().map(json).map(|line| (line["level"].clone(), line["message"].clone())).collect();
    let expected = [
        "claim: decided by the fallback store: the redis store did not apply the call: connection refused",
        "abab****abab: claimed without the store that decides; degraded",
    ];
    assert_eq!(told, expected.map(|message| (Value::from("WARN"), Value::from(message))));
}
