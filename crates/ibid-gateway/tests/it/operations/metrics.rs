//! `GET /metrics` on the admin port: every name from the start, every event counted once.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use ibid::{RefusalReason, store::ErrorKind};
use ibid_gateway::metrics::FAMILIES;
use ibid_testkit::wrappers::CallFilter;
use testbed::{
    client::{TestRequest, get, post, request},
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};
use tokio::time::{sleep, timeout};

use super::metrics_format::MetricsPage;
use crate::support::{InProcessGateway, TestGateway, anonymous_pay, lines, refusal_name, start_gateway, until};
use testbed::http1::WAIT_TIMEOUT;

async fn scrape(admin: SocketAddr) -> MetricsPage {
    let answer = get(admin, "/metrics").send().await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    MetricsPage::parse(&answer.text())
}

/// Scrapes until a gauge has this value: it may be a second old.
async fn scrape_until(admin: SocketAddr, gauge: &str, value: f64) -> MetricsPage {
    let reached = async {
        loop {
            let page = scrape(admin).await;
            if page.value(gauge) == value {
                return page;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(WAIT_TIMEOUT, reached).await.unwrap_or_else(|_| panic!("waited {WAIT_TIMEOUT:?} for {gauge} to be {value}"))
}

/// Everything that is counted, histograms by their counts, but for what is 0.
fn nonzero_counters(page: &MetricsPage) -> Vec<(String, f64)> {
    let ours = page.families().iter().filter(|family| family.name.starts_with("idempotency_"));
    let samples = ours.filter(|family| family.kind != "gauge").flat_map(|family| &family.samples);
    let counts = samples.filter(|sample| !sample.name.ends_with("_bucket") && !sample.name.ends_with("_sum"));
    let named = counts.filter(|sample| sample.value != 0.0).map(|sample| {
        let short = sample.name.strip_prefix("idempotency_").expect("a name of ours");
        let labels: Vec<_> = sample.labels.values().map(String::as_str).collect();
        (format!("{short} {}", labels.join(" ")).trim_end().to_owned(), sample.value)
    });
    named.collect()
}

/// What has grown since, and by how much. Nothing ever falls.
fn counter_increases(before: &MetricsPage, after: &MetricsPage) -> Vec<(String, f64)> {
    let (before, mut after) = (nonzero_counters(before), nonzero_counters(after));
    for (name, value) in before {
        let now = after.iter_mut().find(|(other, _)| *other == name).unwrap_or_else(|| panic!("{name} has fallen"));
        now.1 -= value;
        assert!(now.1 >= 0.0, "{name} has fallen");
    }
    after.retain(|(_, value)| *value != 0.0);
    after
}

fn events(list: &[(&str, u32)]) -> Vec<(String, f64)> {
    list.iter().map(|(name, value)| ((*name).to_owned(), f64::from(*value))).collect()
}

#[tokio::test]
async fn every_name_is_there_from_the_start_at_zero() {
    let upstream = TestUpstream::start().await;
    let config = "[[route]]\nmatch = \"POST /pay\"\n[[route]]\nmatch = \"POST|PUT /orders/*\"\n";
    let gateway = start_gateway(config, &upstream).await;
    let admin = gateway.admin_addr();
    let page = scrape(admin).await;
    let found: Vec<_> = page.families().iter().map(|family| (&*family.name, &*family.kind, &*family.help)).collect();
    let kinds: Vec<_> = FAMILIES.iter().map(|family| family.kind.to_string()).collect();
    let listed: Vec<_> =
        FAMILIES.iter().zip(&kinds).map(|(family, kind)| (family.name, &**kind, family.help)).collect();
    assert_eq!(found, listed);
    for family in page.families() {
        assert!(!family.samples.is_empty(), "{}", family.name);
        if !family.name.starts_with("idempotency_") {
            assert!(family.samples.iter().all(|sample| sample.value >= 0.0), "{family:#?}");
            continue;
        }
        // A store that is up is up from the start.
        let at_first = if family.name == "idempotency_store_up" { 1.0 } else { 0.0 };
        assert!(family.samples.iter().all(|sample| sample.value == at_first), "{family:#?}");
    }
    assert_eq!(page.sum("ibid_build_info", &[("version", env!("CARGO_PKG_VERSION"))]), 1.0);
    for name in ["process_resident_memory_bytes", "process_open_fds", "process_max_fds", "process_start_time_seconds"] {
        assert!(page.value(name) > 1.0, "{name}");
    }
    let outcomes = "executed released pending unknown degraded replayed keyless shadow-replay shadow-refusal";
    for outcome in outcomes.split(' ').chain(RefusalReason::all().map(RefusalReason::name)) {
        for route in ["POST /pay", "POST|PUT /orders/*", "*"] {
            page.sum("idempotency_requests_total", &[("route", route), ("outcome", outcome)]);
        }
    }
    assert_eq!(page.families()[0].samples.len(), 3 * (9 + RefusalReason::COUNT), "and no others");
    for op in ["claim", "extend", "settle", "wait", "get"] {
        assert_eq!(page.store_calls(op), 0.0);
    }
    let head = request("HEAD", admin, "/metrics").send().await;
    assert_eq!((head.status, head.body.len()), (200, 0), "{head:?}");
    assert_eq!(post(admin, "/metrics").send().await.status, 405);
}

/// The names are what dashboards are built on: they are spelled out here once more, so that no change goes unnoticed.
#[test]
fn the_names_are_the_promised_ones() {
    let names: Vec<_> = FAMILIES.iter().map(|family| format!("{} {}", family.kind, family.name)).collect();
    let promised = [
        "counter idempotency_requests_total",
        "counter idempotency_cache_hit_total",
        "counter idempotency_cache_miss_total",
        "counter idempotency_conflicts_total",
        "counter idempotency_mismatches_total",
        "counter idempotency_retries_total",
        "counter idempotency_uncovered_total",
        "counter idempotency_fallback_total",
        "gauge idempotency_processing_gauge",
        "gauge idempotency_outcome_unknown",
        "counter idempotency_unknown_total",
        "counter idempotency_late_answers_total",
        "counter idempotency_lost_claims_total",
        "counter idempotency_dropped_total",
        "counter idempotency_shared_keys_total",
        "counter idempotency_duplicate_intents_total",
        "histogram idempotency_store_seconds",
        "histogram idempotency_overhead_seconds",
        "gauge idempotency_store_bytes",
        "gauge idempotency_store_up",
        "counter idempotency_log_lines_lost_total",
        "gauge ibid_build_info",
        "gauge process_start_time_seconds",
        "counter process_cpu_seconds_total",
        "gauge process_resident_memory_bytes",
        "gauge process_virtual_memory_bytes",
        "gauge process_open_fds",
        "gauge process_max_fds",
    ];
    assert_eq!(names, promised);
}

const CLAIM_METRICS: [&str; 2] = ["store_seconds_count claim", "overhead_seconds_count"];
const RUN_METRICS: [&str; 4] =
    ["cache_miss_total", "store_seconds_count claim", "store_seconds_count settle", "overhead_seconds_count"];

/// Requests one after another, what they get, and exactly what is counted for each.
#[rustfmt::skip]
fn steps(addr: SocketAddr) -> Vec<(TestRequest, u16, Vec<&'static str>)> {
    let at = |path: &str| pay_at(addr, path);
    let begun = |counts: &[&'static str]| [counts, &CLAIM_METRICS].concat();
    let ran = |counts: &[&'static str]| [counts, &RUN_METRICS].concat();
    let other = post(addr, "/pay").key("/pay").json("{}");
    vec![
        (at("/pay"), 201, ran(&["requests_total executed POST /*"])),
        (at("/pay"), 201, begun(&["requests_total replayed POST /*", "cache_hit_total", "retries_total"])),
        (other, 422, begun(&["requests_total key-reused POST /*", "mismatches_total", "conflicts_total mismatch", "retries_total"])),
        (post(addr, "/pay"), 201, vec!["requests_total keyless POST /*"]),
        (post(addr, "/strict"), 400, vec!["requests_total key-missing POST /strict"]),
        (at("/slow"), 409, begun(&["requests_total in-progress POST /*", "conflicts_total in_progress", "retries_total"])),
        (at("/unknown"), 504, ran(&["requests_total unknown POST /*", "unknown_total"])),
        (at("/unknown"), 409, begun(&["requests_total outcome-unknown POST /*", "retries_total"])),
        (at("/released"), 500, ran(&["requests_total released POST /*"])),
        (at("/released"), 201, ran(&["requests_total executed POST /*", "retries_total"])),
        (at("/retried"), 504, ran(&["requests_total unknown POST /retried", "unknown_total"])),
        // The takeover is a second claim.
        (at("/retried"), 201, ran(&["requests_total executed POST /retried", "retries_total", CLAIM_METRICS[0]])),
    ]
}

/// A payment under a key of this path's own.
fn pay_at(addr: SocketAddr, path: &str) -> TestRequest {
    post(addr, path).key(path).json(r#"{"amount":1}"#)
}

#[tokio::test]
async fn each_event_is_counted_once_and_nothing_else_is() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/slow");
    upstream.on("/unknown", UpstreamReply::status(504));
    upstream.on_each("/retried", [UpstreamReply::status(504), UpstreamReply::usual()]);
    upstream.on_each("/released", [UpstreamReply::status(500), UpstreamReply::usual()]);
    let config = "[[route]]\nmatch = \"POST /retried\"\non_unknown = \"retry\"\n\
                  [[route]]\nmatch = \"POST /strict\"\nkey.required = true\n[[route]]\nmatch = \"POST /*\"\n";
    let gateway = start_gateway(config, &upstream).await;
    let (addr, admin) = (gateway.addr(), gateway.admin_addr());
    let at_first = scrape(admin).await;
    let mut running = pay_at(addr, "/slow").start().await;
    gate.arrived(1).await;
    let mut before = scrape_until(admin, "idempotency_processing_gauge", 1.0).await;
    assert_eq!(counter_increases(&at_first, &before), events(&[("store_seconds_count claim", 1)]), "it has only begun");
    for (n, (request, status, expected)) in steps(addr).into_iter().enumerate() {
        let answer = request.send().await;
        assert_eq!(answer.status, status, "step {n}: {answer:?}");
        let after = scrape(admin).await;
        let mut counts = BTreeMap::new();
        expected.into_iter().for_each(|name| *counts.entry(name.to_owned()).or_insert(0.0) += 1.0);
        assert_eq!(BTreeMap::from_iter(counter_increases(&before, &after)), counts, "step {n}");
        before = after;
    }
    let page = scrape_until(admin, "idempotency_outcome_unknown", 1.0).await;
    assert_eq!(page.value("idempotency_processing_gauge"), 1.0);
    assert!(page.value("idempotency_store_bytes") > 500.0, "some entries are there");
    gate.open();
    assert_eq!(running.read_response().await.status, 201);
    scrape_until(admin, "idempotency_processing_gauge", 0.0).await;
    assert_eq!(get(admin, "/readyz").send().await.status, 200);
    assert_eq!(scrape(admin).await.store_calls("get"), 1.0);
}

#[tokio::test]
async fn fifty_at_once_are_counted_exactly() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start("[policy]\non_concurrent = \"wait\"\n").await;
    let addr = gateway.addr();
    let clients: Vec<_> = (0..50)
        .map(|n| {
            tokio::spawn(async move {
                for path in ["/pay", "/pay", "/orders"] {
                    let answer = post(addr, path).key(format!("k-{path}-{n}")).send().await;
                    assert_eq!(answer.status, 201, "{answer:?}");
                }
            })
        })
        .collect();
    for client in clients {
        client.await.expect("every request is answered");
    }
    let page = scrape(gateway.admin_addr()).await;
    let expected = [
        ("requests_total executed *", 100),
        ("requests_total replayed *", 50),
        ("cache_hit_total", 50),
        ("cache_miss_total", 100),
        ("retries_total", 50),
        ("store_seconds_count claim", 150),
        ("store_seconds_count settle", 100),
        ("overhead_seconds_count", 150),
    ];
    assert_eq!(nonzero_counters(&page), events(&expected));
}

#[tokio::test]
async fn one_key_sent_fifty_times_at_once_runs_once_and_every_request_is_counted() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let gateway = start_gateway("", &upstream).await;
    let mut first = anonymous_pay(gateway.addr(), "k-1").start().await;
    gate.arrived(1).await;
    let answers = testbed::client::many(49, || anonymous_pay(gateway.addr(), "k-1")).await;
    assert!(answers.iter().all(|answer| refusal_name(answer) == "in-progress"), "{answers:?}");
    gate.open();
    assert_eq!(first.read_response().await.status, 201);
    let page = scrape(gateway.admin_addr()).await;
    let conflicts = |reason| page.sum("idempotency_conflicts_total", &[("reason", reason)]);
    assert_eq!((conflicts("in_progress"), conflicts("mismatch"), page.outcome("executed")), (49.0, 0.0, 1.0));
    assert_eq!(page.value("idempotency_retries_total"), 49.0);
    assert_eq!((page.value("idempotency_cache_miss_total"), page.value("idempotency_cache_hit_total")), (1.0, 0.0));
}

#[tokio::test]
async fn a_reload_forgets_no_count_and_shows_new_routes_at_zero() {
    const RELOADED_LOG_TEXT: &str = "configuration taken up";
    let executed = |page: &MetricsPage, route| {
        page.sum("idempotency_requests_total", &[("route", route), ("outcome", "executed")])
    };
    let upstream = TestUpstream::start().await;
    let gateway: GatewayProcess = start_gateway("[[route]]\nmatch = \"POST /pay\"\n", &upstream).await;
    let (addr, admin) = (gateway.addr(), gateway.admin_addr());
    assert_eq!(anonymous_pay(addr, "k-1").send().await.status, 201);
    let before = scrape(admin).await;
    gateway.rewrite_config(
        "accept_forgetting = true\n[[route]]\nmatch = \"POST /orders\"\n[[route]]\nmatch = \"POST /pay\"\nttl = \"2h\"\n",
    );
    gateway.wait_for_log(RELOADED_LOG_TEXT).await;
    let after = scrape(admin).await;
    assert_eq!(counter_increases(&before, &after), [], "nothing was lost, and nothing counted twice");
    assert_eq!((executed(&after, "POST /pay"), executed(&after, "POST /orders")), (1.0, 0.0));
    assert_eq!(anonymous_pay(addr, "k-2").send().await.status, 201);
    assert_eq!(post(addr, "/orders").key("k-3").send().await.status, 201);
    let page = scrape(admin).await;
    assert_eq!((executed(&page, "POST /pay"), executed(&page, "POST /orders")), (2.0, 1.0));
}

/// A claim is lost when another takes it over while it runs: here, because its heartbeats do not reach the store.
#[tokio::test]
async fn a_lost_claim_is_counted_and_its_request_is_no_hit() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on_each("/pay", [UpstreamReply::usual().gated(&gate), UpstreamReply::usual()]);
    let here =
        InProcessGateway::start("[policy]\nlease = \"200ms\"\ntimeout = \"20s\"\non_unknown = \"retry\"", &upstream)
            .await;
    let admin = here.gateway.admin.expect("it has an admin port");
    here.store.fail(CallFilter::Extend, ErrorKind::NotApplied);
    let mut first = here.pay("k-1").start().await;
    gate.arrived(1).await;
    let taken_over = async {
        loop {
            let answer = here.pay("k-1").send().await;
            if answer.status != 409 {
                return answer;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let second = timeout(WAIT_TIMEOUT, taken_over).await.expect("the lease lapses");
    assert_eq!(second.status, 201, "{second:?}");
    gate.open();
    let first = first.read_response().await;
    assert_eq!((first.header("idempotent-replayed"), &first.body), (Some("true"), &second.body), "{first:?}");
    let page = scrape(admin).await;
    assert_eq!(page.value("idempotency_lost_claims_total"), 1.0);
    assert_eq!((page.value("idempotency_cache_miss_total"), page.value("idempotency_cache_hit_total")), (2.0, 0.0));
    assert_eq!((page.outcome("executed"), page.outcome("replayed")), (1.0, 1.0));
    let refused = page.outcome("in-progress") + page.outcome("outcome-unknown");
    assert_eq!(
        page.value("idempotency_retries_total"),
        refused + 1.0,
        "the first is none, though it got another's record"
    );
    assert!(page.store_calls("extend") >= 1.0, "failed calls are timed, too");
}

#[tokio::test]
async fn a_store_that_is_down_leaves_the_page_as_it_was() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let here = InProcessGateway::start("[policy]\non_store_down = \"open\"", &upstream).await;
    let admin = here.gateway.admin.expect("it has an admin port");
    let mut running = here.pay("k-1").start().await;
    gate.arrived(1).await;
    let up = scrape_until(admin, "idempotency_processing_gauge", 1.0).await;
    here.store.fail(CallFilter::All, ErrorKind::NotApplied);
    // Longer than any number is kept without asking again.
    sleep(Duration::from_millis(1500)).await;
    let down = scrape(admin).await;
    for gauge in ["processing_gauge", "outcome_unknown", "store_bytes"] {
        let gauge = format!("idempotency_{gauge}");
        assert_eq!(down.value(&gauge), up.value(&gauge), "{gauge}");
    }
    assert_eq!(down.families().len(), FAMILIES.len(), "and nothing else is there");
    gate.open();
    assert_eq!(here.pay("k-2").send().await.header("idempotency-guarantee"), Some("degraded"));
    let page = scrape(admin).await;
    assert_eq!(page.outcome("degraded"), 1.0);
    assert_eq!(page.value("idempotency_cache_miss_total") + page.value("idempotency_cache_hit_total"), 0.0);
    assert_eq!(page.value("idempotency_fallback_total"), 0.0, "there is no second store to fall back on");
    here.store.heal();
    running.read_response().await;
}

#[tokio::test]
async fn a_store_call_that_is_sent_again_is_timed_each_time() {
    let upstream = TestUpstream::start().await;
    let here = InProcessGateway::start("", &upstream).await;
    let admin = here.gateway.admin.expect("it has an admin port");
    here.store.lose_answers(CallFilter::Claim);
    assert_eq!(refusal_name(&here.pay("k-1").send().await), "store-unavailable");
    until("the given-up claim is released", || here.gateway.ibid.engine().settle_queue().pending() == 0).await;
    let page = scrape(admin).await;
    assert_eq!(
        (page.store_calls("claim"), page.store_calls("settle")),
        (3.0, 1.0),
        "asked three times, then released behind it"
    );
    assert_eq!((page.outcome("store-unavailable"), page.value("idempotency_cache_miss_total")), (1.0, 0.0));
}

#[tokio::test]
async fn what_shadow_mode_would_have_done_is_neither_hit_nor_conflict() {
    let TestGateway { upstream, gateway } = TestGateway::start("[policy]\nmode = \"shadow\"\n").await;
    for _ in 0..2 {
        assert_eq!(anonymous_pay(gateway.addr(), "k-1").send().await.status, 201);
    }
    let reused = post(gateway.addr(), "/pay").key("k-1").json("{}").send().await;
    assert_eq!((reused.status, upstream.executions()), (201, 3));
    // It is counted beside the requests, and so maybe after them.
    for outcome in ["executed", "shadow-replay", "shadow-refusal"] {
        lines(&gateway, outcome, 1).await;
    }
    let expected = [
        ("requests_total executed *", 1),
        ("requests_total shadow-replay *", 1),
        ("requests_total shadow-refusal *", 1),
        ("cache_miss_total", 1),
        ("retries_total", 2),
        ("store_seconds_count claim", 3),
        ("store_seconds_count settle", 1),
        ("overhead_seconds_count", 3),
    ];
    assert_eq!(nonzero_counters(&scrape(gateway.admin_addr()).await), events(&expected));
}

/// The time that a duplicate waits is the store's `wait`, and part of what its request took beyond its operation.
#[tokio::test]
async fn a_duplicate_that_waits_is_a_hit_and_its_wait_is_timed() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let gateway = start_gateway("[policy]\non_concurrent = \"wait\"\n", &upstream).await;
    let admin = gateway.admin_addr();
    let mut first = anonymous_pay(gateway.addr(), "k-1").start().await;
    gate.arrived(1).await;
    let mut second = anonymous_pay(gateway.addr(), "k-1").start().await;
    let both_asked = async {
        while scrape(admin).await.store_calls("claim") < 2.0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(WAIT_TIMEOUT, both_asked).await.expect("the second asks as well");
    sleep(Duration::from_millis(100)).await;
    gate.open();
    assert_eq!((first.read_response().await.status, second.read_response().await.status), (201, 201));
    let page = scrape(admin).await;
    assert_eq!((page.value("idempotency_cache_hit_total"), page.sum("idempotency_conflicts_total", &[])), (1.0, 0.0));
    assert!(page.store_calls("wait") >= 1.0);
    assert!(page.sum("idempotency_store_seconds_sum", &[("op", "wait")]) >= 0.1);
    assert!(page.value("idempotency_overhead_seconds_sum") >= 0.1);
    assert_eq!(page.value("idempotency_overhead_seconds_count"), 2.0);
}
