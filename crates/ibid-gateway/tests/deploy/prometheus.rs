//! A Prometheus of its own scrapes a real gateway, and the shipped rules fire. Minutes are seconds here; nothing else of the
//! rules is changed.

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, TcpListener},
    process::{Child, Stdio},
    time::Duration,
};

use serde_json::Value;
use tempfile::TempDir;
use testbed::{
    client::{get, post},
    process::{GatewayProcess, ProcessSignal},
    upstream::{ReplyGate, TestUpstream, UpstreamReply},
};
use tokio::time::{Instant, sleep};

use super::{
    common::{BIN, text, tool},
    dashboard,
};

/// How long anything may take. It takes some seconds.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The windows of the rules, and how long they are here: several scrapes.
const SHORTENED_WINDOWS: [(&str, &str); 8] = [
    ("[5m]", "[15s]"),
    ("[10m]", "[15s]"),
    ("[15m]", "[15s]"),
    ("for: 10m", "for: 0s"),
    ("for: 5m", "for: 0s"),
    ("for: 2m", "for: 0s"),
    ("for: 1m", "for: 0s"),
    ("offset 30m", "offset 10m"),
];

/// A running Prometheus. Gone when dropped.
struct Prometheus {
    child: Child,
    addr: SocketAddr,
    folder: TempDir,
}

impl Prometheus {
    async fn start(scraped: SocketAddr) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut rules = text("deploy/prometheus/ibid.rules.yml");
        for (long, short) in SHORTENED_WINDOWS {
            assert!(rules.contains(long), "{long} is not in the rules");
            rules = rules.replace(long, short);
        }
        fs::write(folder.path().join("ibid.rules.yml"), rules).unwrap();
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: [ibid.rules.yml]\n\
             scrape_configs: [{{ job_name: ibid, static_configs: [{{ targets: [\"{scraped}\"] }}] }}]\n"
        );
        fs::write(folder.path().join("prometheus.yml"), config).unwrap();
        let addr = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port");
        let program = tool("prometheus", "prometheus").get_program().to_owned();
        let mut command = tool("setpriv", "util-linux");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).current_dir(folder.path());
        command.args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"]);
        command.arg(format!("--web.listen-address={addr}"));
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("it starts");
        let prometheus = Self { child, addr, folder };
        let since = Instant::now();
        while tokio::net::TcpStream::connect(addr).await.is_err() || get(addr, "/-/ready").send().await.status != 200 {
            assert!(since.elapsed() < WAIT_TIMEOUT, "it does not start: {}", prometheus.log());
            sleep(Duration::from_millis(100)).await;
        }
        prometheus
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    async fn api(&self, path: &str) -> Value {
        let answer = get(self.addr, path).send().await;
        let text = answer.text();
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|why| panic!("{path}: {why}: {text}"));
        assert_eq!(value["status"], "success", "{path}: {text}\n{}", self.log());
        value["data"].clone()
    }

    /// Names of alerts that fire now. Their texts are complete.
    async fn firing(&self) -> BTreeSet<String> {
        let data = self.api("/api/v1/alerts").await;
        let alerts = data["alerts"].as_array().expect("alerts");
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        firing
            .map(|alert| {
                let summary = alert["annotations"]["summary"].as_str().expect("a summary");
                assert!(!summary.contains("{{") && !summary.contains("error"), "{alert:#}");
                alert["labels"]["alertname"].as_str().expect("a name").to_owned()
            })
            .collect()
    }

    /// What a query finds now.
    async fn query(&self, query: &str) -> Vec<Value> {
        let escape = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        };
        let escaped: String = query.bytes().map(escape).collect();
        let data = self.api(&format!("/api/v1/query?query={escaped}")).await;
        data["result"].as_array().expect("a result").clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn the_alerts_fire_on_a_real_gateway_and_the_dashboard_shows_it() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on("/slow", UpstreamReply::usual().gated(&gate));
    upstream.on("/dark", UpstreamReply::status(504));
    let config = "[store]\nurl = \"memory:\"\n[policy]\ntimeout = \"5m\"\n";
    let mut gateway = GatewayProcess::spawn(BIN, config, &upstream.url()).await;
    let addr = gateway.addr();
    let prometheus = Prometheus::start(gateway.admin_addr()).await;

    // Nobody has asked for anything yet.
    let since = Instant::now();
    while prometheus.query("idempotency_outcome_unknown").await.is_empty() {
        assert!(since.elapsed() < WAIT_TIMEOUT, "nothing is scraped: {}", prometheus.log());
        sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(prometheus.firing().await, BTreeSet::new());

    // One that runs, one whose end is unknown, and clients that ask again and again.
    let _running = post(addr, "/slow").key("slow").start().await;
    gate.arrived(1).await;
    assert_eq!(post(addr, "/dark").key("dark").send().await.status, 504);
    let provoked = BTreeSet::from(["IbidHitRateHigh", "IbidConflictRateHigh", "IbidOutcomeUnknown"].map(str::to_owned));
    let since = Instant::now();
    let mut fired = BTreeSet::new();
    for n in 0.. {
        assert!(since.elapsed() < WAIT_TIMEOUT, "of {provoked:?} only these fire: {fired:?}\n{}", prometheus.log());
        for _ in 0..4 {
            assert_eq!(post(addr, "/pay").key(format!("k-{n}")).send().await.status, 201);
            assert_eq!(post(addr, "/slow").key("slow").send().await.status, 409);
        }
        fired.append(&mut prometheus.firing().await);
        if fired.is_superset(&provoked) {
            break;
        }
        sleep(Duration::from_millis(200)).await;
    }
    for quiet in ["IbidFallback", "IbidLostClaim", "IbidStoreErrors", "IbidUnprotected", "IbidUnknownGrowing"] {
        assert!(!fired.contains(quiet), "{fired:?}");
    }
    for (panel, query) in dashboard::queries("15s") {
        assert!(!prometheus.query(&query).await.is_empty(), "{panel} shows nothing: {query}");
    }

    gateway.signal(ProcessSignal::Kill);
    let since = Instant::now();
    while !prometheus.firing().await.contains("IbidDown") {
        assert!(since.elapsed() < WAIT_TIMEOUT, "nobody notices that it is gone: {}", prometheus.log());
        sleep(Duration::from_millis(200)).await;
    }
}
