//! The gateway in the test's own process, on a store that fails on demand; and other commands of the binary.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use ibid::{
    EngineEvent, Observer,
    store::{ClaimOutcome, EntryFilter, ListCursor, Memory, Store as _},
};
use ibid_gateway::{
    commands::serve,
    config::{Env, GatewaySettings, ServeArgs},
    metrics::MetricsObserver,
};
use ibid_stores::OpenedStore;
use ibid_testkit::wrappers::FailingStore;
use parking_lot::Mutex;
use tempfile::TempDir;
use testbed::{
    client::{TestRequest, TestResponse, get, post},
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::time::{sleep, timeout};

pub(super) const BIN: &str = env!("CARGO_BIN_EXE_ibid");
pub(super) const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) type SharedFailingStore = Arc<FailingStore<Memory>>;

pub(super) fn failing_store() -> SharedFailingStore {
    Arc::new(FailingStore::new(Memory::default()))
}

/// A gateway in this process.
pub(super) struct InProcessGateway {
    pub(super) gateway: serve::RunningGateway,
    pub(super) store: SharedFailingStore,
    pub(super) told: Arc<EventLog>,
}

impl InProcessGateway {
    pub(super) async fn start(config: &str, upstream: &TestUpstream) -> InProcessGateway {
        InProcessGateway::start_on_store(failing_store(), config, upstream).await
    }

    pub(super) async fn start_on_store(
        store: SharedFailingStore, config: &str, upstream: &TestUpstream,
    ) -> InProcessGateway {
        let told = Arc::new(EventLog::default());
        let gateway = start(config, upstream, store.clone(), told.clone()).await;
        InProcessGateway { gateway, store, told }
    }

    pub(super) fn pay(&self, key: &str) -> TestRequest {
        pay(self.gateway.address(), key)
    }

    pub(super) async fn ready(&self) -> TestResponse {
        get(self.gateway.admin().expect("it has an admin port"), "/readyz").send().await
    }

    /// What the store really holds.
    pub(super) async fn entries(&self) -> Vec<ClaimOutcome> {
        entries(&self.store).await
    }
}

/// Starts a gateway in this process, on free ports.
pub(super) async fn start(
    config: &str, upstream: &TestUpstream, store: SharedFailingStore, observer: Arc<dyn Observer>,
) -> serve::RunningGateway {
    let args = ServeArgs {
        listen: Some("127.0.0.1:0".into()),
        admin: Some("127.0.0.1:0".into()),
        upstream: Some(upstream.url()),
        store: Some("memory:".into()),
        ..ServeArgs::default()
    };
    let settings =
        GatewaySettings::from_text(config, None, &args, &Env::from_pairs(&[])).expect("a valid configuration");
    serve::RunningGateway::start(
        settings,
        args,
        OpenedStore::plain(store),
        MetricsObserver::with_shared_observer(observer),
    )
    .await
    .expect("the gateway starts")
}

pub(super) async fn entries(store: &SharedFailingStore) -> Vec<ClaimOutcome> {
    let inner = store.inner();
    let page = inner.admin().list(&EntryFilter::default(), ListCursor::default(), 100).await.expect("memory answers");
    let mut found = Vec::new();
    for listed in page.entries {
        found.extend(inner.get(&listed.address).await.expect("memory answers"));
    }
    found
}

pub(super) fn pay(addr: SocketAddr, key: &str) -> TestRequest {
    post(addr, "/pay").key(key).json(r#"{"amount":1}"#)
}

/// Remembers what it is told.
#[derive(Default)]
pub(super) struct EventLog(Mutex<Vec<String>>);

impl EventLog {
    pub(super) fn count(&self, part: &str) -> usize {
        self.0.lock().iter().filter(|notice| notice.contains(part)).count()
    }

    pub(super) async fn wait_for(&self, part: &str) {
        wait_until(part, || self.count(part) > 0).await;
    }
}

impl Observer for EventLog {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        self.0.lock().push(notice.to_string());
    }
}

/// Heals the store once that many calls of a kind have failed.
pub(super) struct HealAfterFailures {
    call: &'static str,
    failures_left: AtomicUsize,
    store: SharedFailingStore,
}

impl HealAfterFailures {
    pub(super) fn new(call: &'static str, failures: usize, store: &SharedFailingStore) -> Arc<HealAfterFailures> {
        Arc::new(HealAfterFailures { call, failures_left: AtomicUsize::new(failures), store: store.clone() })
    }
}

impl Observer for HealAfterFailures {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        let EngineEvent::StoreFailed { call, .. } = notice else { return };
        if *call == self.call && self.failures_left.fetch_sub(1, SeqCst) == 1 {
            self.store.heal();
        }
    }
}

/// Waits until something is so.
pub(super) async fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let so = async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT_TIMEOUT, so).await.unwrap_or_else(|_| panic!("waited {WAIT_TIMEOUT:?} for: {what}"));
}

/// Waits until the log has `n` lines with `part`.
pub(super) async fn lines(gateway: &GatewayProcess, part: &str, n: usize) -> Vec<String> {
    let found = || gateway.logs().into_iter().filter(|line| line.contains(part)).collect::<Vec<_>>();
    wait_until(&format!("{n} lines with {part:?}"), || found().len() >= n).await;
    found()
}

pub(super) async fn gateway(config: &str, upstream: &TestUpstream) -> GatewayProcess {
    GatewayProcess::spawn(BIN, config, &upstream.url()).await
}

/// The name of the refusal in an answer.
pub(super) fn refusal_name(answer: &TestResponse) -> String {
    let kind = answer.json()["type"].as_str().unwrap_or_default().to_owned();
    let name = kind.strip_prefix("/.well-known/idempotency#");
    name.unwrap_or_else(|| panic!("no refusal of ours: {answer:?}")).to_owned()
}

/// Any command of the binary, printing into files. Killed when dropped.
pub(super) struct IbidProcess {
    child: Child,
    dir: TempDir,
}

impl IbidProcess {
    pub(super) fn start(args: &[&str], env: &[(&str, &str)]) -> IbidProcess {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = File::create(dir.path().join("out")).expect("a file");
        let mut command = Command::new(BIN);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("IBID_")) {
            command.env_remove(name);
        }
        command.args(args).envs(env.iter().copied()).current_dir(dir.path()).stdin(Stdio::null());
        command.stderr(out.try_clone().expect("a second handle")).stdout(out);
        IbidProcess { child: command.spawn().expect("the binary runs"), dir }
    }

    /// All that it printed so far.
    pub(super) fn printed(&self) -> String {
        fs::read_to_string(self.dir.path().join("out")).unwrap_or_default()
    }

    pub(super) async fn wait_for(&self, part: &str) -> String {
        wait_until(part, || self.printed().contains(part)).await;
        self.printed()
    }

    pub(super) fn interrupt(&self) {
        let status = Command::new("kill").arg("-INT").arg(self.child.id().to_string()).status();
        assert!(status.is_ok_and(|status| status.success()));
    }

    pub(super) async fn exit_code(&mut self) -> Option<i32> {
        let mut status = None;
        wait_until("the end of the process", || {
            status = self.child.try_wait().expect("our child");
            status.is_some()
        })
        .await;
        status.and_then(|status| status.code())
    }
}

impl Drop for IbidProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- it printed ---\n{}\n---", self.printed());
        }
    }
}

/// A folder with a file in it.
pub(super) fn folder_with(name: &str, text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join(name);
    fs::write(&path, text).expect("the file is written");
    (dir, path)
}
