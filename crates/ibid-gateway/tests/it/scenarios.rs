//! One file of scenarios (`tests/scenarios.toml`), run by every transport: the gateway or Envoy in front of an app, and
//! an SDK, the exchange API or the layer inside it.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde::Deserialize;
use testbed::{
    TestEnvoy,
    client::{Broken, RawClient, TestRequest, TestResponse, get, post},
    process::GatewayProcess,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use crate::support::{BIN, is_in_progress, until};

mod rust_app;

const ADMIN_TOKEN: &str = "token-of-the-operator";
const APP_START_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScenarioFile {
    config: String,
    scenario: Vec<Scenario>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    name: String,
    key: Option<String>,
    key_header: Option<String>,
    runs: usize,
    #[serde(default)]
    only: Vec<String>,
    why: Option<String>,
    #[serde(default)]
    differs: BTreeMap<String, ScenarioDifference>,
    steps: Vec<ScenarioStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScenarioDifference {
    runs: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScenarioStep {
    post: Option<String>,
    key: Option<String>,
    content: Option<String>,
    content_bytes: Option<usize>,
    #[serde(default)]
    with: BTreeMap<String, String>,
    times: Option<usize>,
    replays: Option<usize>,
    #[serde(default)]
    start: bool,
    #[serde(default)]
    finish: bool,
    #[serde(default)]
    disconnect: bool,
    #[serde(default)]
    settled: bool,
    restart: Option<String>,
    stop: Option<String>,
    resolve: Option<String>,
    #[serde(flatten)]
    expected: ScenarioAnswer,
    #[serde(default)]
    differs: BTreeMap<String, ScenarioAnswer>,
}

/// What the client must get.
#[derive(Deserialize, Default)]
struct ScenarioAnswer {
    status: Option<u16>,
    #[serde(default)]
    broken: bool,
    refusal: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    absent: Vec<String>,
    body: Option<String>,
    contains: Option<String>,
    length: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScenarioTransport {
    /// The gateway in front of an app that knows nothing of it.
    Gateway,
    /// Envoy in front of the same app, with ibid as its external processor.
    Envoy,
    /// An app with an SDK that calls the exchange API.
    Sdk,
    /// An app that calls the exchange API itself.
    Api,
    /// An app with ibid's layer. There is no ibid beside it: to restart ibid is to restart the app.
    Layer,
}

/// How to start an app: program, arguments, variables, and the directory of its files.
pub(crate) struct ScenarioApp {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) folder: PathBuf,
}

struct AppProcess {
    addr: SocketAddr,
    /// The process group, which has the workers too.
    group: u32,
    process: Child,
}

struct ScenarioRun {
    transport: ScenarioTransport,
    launch: ScenarioApp,
    app: AppProcess,
    ibid: GatewayProcess,
    envoy: Option<TestEnvoy>,
    runs_file: PathBuf,
    _folder: tempfile::TempDir,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

fn read_file() -> ScenarioFile {
    let text = fs::read_to_string(root().join("crates/ibid-gateway/tests/scenarios.toml")).expect("the file");
    toml::from_str(&text).unwrap_or_else(|why| panic!("{why}"))
}

/// Runs all scenarios of a transport.
pub(crate) async fn run_all(transport: ScenarioTransport, launch: ScenarioApp) {
    let file = read_file();
    let mut run = ScenarioRun::start(transport, launch, &file.config).await;
    for (at, scenario) in file.scenario.iter().enumerate() {
        if scenario.only.is_empty() || scenario.only.iter().any(|name| name == transport.name()) {
            eprintln!("scenario: {}", scenario.name);
            run.run_scenario(scenario, scenario.key.clone().unwrap_or_else(|| format!("scenario-{at}"))).await;
        }
    }
}

#[test]
fn a_difference_has_a_reason() {
    for scenario in read_file().scenario {
        let differs = !scenario.differs.is_empty()
            || !scenario.only.is_empty()
            || scenario.steps.iter().any(|step| !step.differs.is_empty());
        assert_eq!(differs, scenario.why.is_some(), "{}", scenario.name);
    }
}

impl ScenarioTransport {
    fn name(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Envoy => "envoy",
            Self::Sdk => "sdk",
            Self::Api => "api",
            Self::Layer => "layer",
        }
    }

    /// Whether the app calls the exchange API.
    fn has_api(self) -> bool {
        matches!(self, Self::Sdk | Self::Api)
    }
}

impl ScenarioApp {
    async fn start(&self, api: Option<&Path>, runs_file: &Path) -> AppProcess {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(name, value)| (name, value)));
        command.env("RUNS_FILE", runs_file).current_dir(&self.folder);
        match api {
            Some(path) => command.env("IBID_API", format!("unix:{}", path.display())),
            None => command.env_remove("IBID_API"),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).process_group(0);
        let mut process = command.spawn().unwrap_or_else(|why| panic!("{}: {why}", self.program.display()));
        let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines();
        let listening = async {
            let mut all = String::new();
            while let Some(line) = lines.next_line().await.expect("text") {
                if let Some((_, rest)) = line.split_once("http://") {
                    let end = rest.find(|char: char| !matches!(char, '0'..='9' | '.' | ':')).unwrap_or(rest.len());
                    return rest[..end].parse().expect("an address");
                }
                all += &line;
                all.push('\n');
            }
            panic!("the app ended before it listened:\n{all}");
        };
        let addr = timeout(APP_START_TIMEOUT, listening).await.expect("it listens in time");
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                eprintln!("app: {line}")
            }
        });
        let answers = || async move { RawClient::try_connect(addr).await.ok() };
        crate::support::until_some("the app to listen", answers).await;
        AppProcess { addr, group: process.id().expect("it runs"), process }
    }
}

impl AppProcess {
    fn kill(&self) {
        let group = format!("-{}", self.group);
        let _ = std::process::Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
    }
}

impl Drop for AppProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

impl ScenarioRun {
    async fn start(transport: ScenarioTransport, launch: ScenarioApp, config: &str) -> ScenarioRun {
        let folder = tempfile::tempdir().expect("a folder");
        let runs_file = folder.path().join("runs");
        fs::write(&runs_file, "").expect("it is written");
        let socket = folder.path().join("api.sock");
        let app = launch.start(transport.has_api().then_some(&*socket), &runs_file).await;
        let envoy = (transport == ScenarioTransport::Envoy).then(|| TestEnvoy::start(app.addr, &[]));
        let mut config = format!(
            "{config}\n[admin]\ntoken = \"{ADMIN_TOKEN}\"\n[store]\nurl = \"embedded:data\"\n[api]\nlisten = \"unix:{}\"\n",
            socket.display()
        );
        if let Some(envoy) = &envoy {
            config += &format!("[ext_proc]\nlisten = \"{}\"\n", envoy.ext_proc_addr());
        }
        // An app with ibid inside is called directly, and nobody uses the gateway's port.
        let ibid = GatewayProcess::launch(BIN).config(config).upstream(&format!("http://{}", app.addr));
        let ibid = ibid.start().await;
        ScenarioRun { transport, launch, app, ibid, envoy, runs_file, _folder: folder }
    }

    fn runs(&self) -> usize {
        fs::read_to_string(&self.runs_file).expect("the app writes it").lines().count()
    }

    async fn run_scenario(&mut self, scenario: &Scenario, key: String) {
        let name = &scenario.name;
        let before = self.runs();
        let (mut first, mut started): (Option<TestResponse>, Option<JoinHandle<_>>) = (None, None);
        for (at, step) in scenario.steps.iter().enumerate() {
            let place = format!("{name}, step {}", at + 1);
            let expected = step.differs.get(self.transport.name()).unwrap_or(&step.expected);
            if let Some(who) = step.restart.as_ref().or(step.stop.as_ref()) {
                self.restart(who, step.stop.is_some()).await;
                continue;
            }
            if step.resolve.is_some() {
                self.resolve(step.resolve.as_deref().expect("just seen")).await;
                continue;
            }
            let answer = if step.finish {
                started.take().expect("it was started").await.expect("it ends")
            } else {
                let request = self.request(scenario, step, &key);
                if step.start || step.disconnect {
                    let runs = self.runs();
                    let sent = tokio::spawn(async move { request.try_send().await });
                    until("the handler to start", || self.runs() > runs).await;
                    // Aborting the task closes the connection.
                    if step.disconnect {
                        sent.abort()
                    } else {
                        started = Some(sent)
                    }
                    continue;
                }
                if let Some(times) = step.times {
                    check_many(&place, &request, times, step.replays.unwrap_or(0), expected).await;
                    continue;
                }
                send_until(&request, step.settled).await
            };
            expected.check(&place, answer.as_ref(), first.as_ref());
            if first.is_none() {
                first = answer.ok();
            }
        }
        let runs = scenario.differs.get(self.transport.name()).map_or(scenario.runs, |differs| differs.runs);
        assert_eq!(self.runs() - before, runs, "{name}: runs");
    }

    fn request(&self, scenario: &Scenario, step: &ScenarioStep, key: &str) -> TestRequest {
        let addr = match (self.transport, &self.envoy) {
            (ScenarioTransport::Gateway, _) => self.ibid.addr(),
            (_, Some(envoy)) => envoy.addr(),
            (_, None) => self.app.addr,
        };
        let path = step.post.as_deref().expect("a step sends, or does something to a process");
        let key = step.key.as_deref().unwrap_or(key);
        let padding = step.content_bytes.map(|bytes| format!("\"{}\"", "x".repeat(bytes - 2)));
        let content = padding.or(step.content.clone()).unwrap_or_else(|| r#"{"amount":1}"#.into());
        let mut request = post(addr, path).header("Authorization", "Bearer one").json(&content);
        if !key.is_empty() {
            request = request.header(scenario.key_header.as_deref().unwrap_or("Idempotency-Key"), key);
        }
        step.with.iter().fold(request, |request, (name, value)| request.header(name, value))
    }

    async fn restart(&mut self, who: &str, only_stop: bool) {
        match (who, only_stop) {
            ("ibid", false) if self.transport == ScenarioTransport::Layer => {
                self.app.kill();
                self.start_app_again().await;
            }
            ("ibid", true) => self.ibid.kill().await,
            ("ibid", false) => self.ibid.restart().await,
            ("app", false) => {
                // A server that is still there replaces its worker by itself.
                if timeout(Duration::from_secs(1), self.app.process.wait()).await.is_err() {
                    return;
                }
                self.app.kill();
                self.start_app_again().await;
            }
            other => panic!("{other:?} is nothing to restart"),
        }
    }

    /// On the same port, which the gateway knows.
    async fn start_app_again(&mut self) {
        let _ = self.app.process.wait().await;
        self.launch.env.push(("PORT".into(), self.app.addr.port().to_string()));
        let socket = self.runs_file.with_file_name("api.sock");
        self.app = self.launch.start(self.transport.has_api().then_some(&*socket), &self.runs_file).await;
    }

    /// Resolves the only unknown outcome, as an operator would.
    async fn resolve(&self, outcome: &str) {
        let admin = self.ibid.admin_addr();
        let token = format!("Bearer {ADMIN_TOKEN}");
        let list = get(admin, "/api/records?state=unknown&endpoint=POST%20/killed").header("Authorization", &token);
        let list = list.send().await.json();
        let address = list["records"][0]["address"].as_str().unwrap_or_else(|| panic!("{list}")).to_owned();
        let change = format!(r#"{{"reason":"the app was killed","as":"{outcome}"}}"#);
        let resolve = post(admin, format!("/api/records/{address}/resolve")).header("Authorization", &token);
        let done = resolve.json(&change).send().await;
        assert_eq!(done.status, 200, "{done:?}");
    }
}

async fn send_until(request: &TestRequest, is_settled: bool) -> Result<TestResponse, Broken> {
    let end = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let answer = request.try_send().await;
        let is_early = answer.as_ref().is_ok_and(is_in_progress);
        if !is_settled || !is_early || tokio::time::Instant::now() > end {
            return answer;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn check_many(place: &str, request: &TestRequest, times: usize, replays: usize, expected: &ScenarioAnswer) {
    let mut all = JoinSet::new();
    for _ in 0..times {
        let request = request.clone();
        all.spawn(async move { request.try_send().await });
    }
    let answers = all.join_all().await;
    let replayed = answers.iter().flatten().filter(|answer| answer.headers.contains("idempotent-replayed")).count();
    let first = answers[0].as_ref().expect("an answer");
    for answer in &answers {
        expected.check(place, answer.as_ref(), None);
        assert_eq!(answer.as_ref().unwrap().body, first.body, "{place}");
    }
    assert_eq!(replayed, replays, "{place}");
}

impl ScenarioAnswer {
    #[track_caller]
    fn check(&self, place: &str, answer: Result<&TestResponse, &Broken>, first: Option<&TestResponse>) {
        let answer = match answer {
            Ok(answer) => answer,
            Err(broken) => {
                assert!(self.broken, "{place}: {broken}");
                return;
            }
        };
        assert!(!self.broken, "{place}: {answer:?}");
        assert_eq!(Some(answer.status), self.status, "{place}: {answer:?}");
        for (name, value) in &self.headers {
            let sent = answer.header(name).unwrap_or_else(|| panic!("{place}: no {name}: {answer:?}"));
            assert!(value == "*" || sent == value, "{place}: {name} is {sent:?}");
        }
        for name in &self.absent {
            assert!(!answer.headers.contains(name), "{place}: {name} is there: {answer:?}");
        }
        if let Some(refusal) = &self.refusal {
            assert!(answer.text().contains(&format!("idempotency#{refusal}\"")), "{place}: {answer:?}");
        }
        if self.body.is_some() {
            assert_eq!(Some(&answer.body), first.map(|first| &first.body), "{place}");
        }
        if let Some(part) = &self.contains {
            assert!(answer.text().contains(part), "{place}: {answer:?}");
        }
        if let Some(length) = self.length {
            assert_eq!(answer.body.len(), length, "{place}");
        }
    }
}
