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
    Notice, Observer,
    store::{Claim, Cursor, Filter, Memory, Store as _},
};
use ibid_gateway::{
    commands::serve,
    config::{Env, ServeArgs, Settings},
    metrics::Watched,
};
use ibid_stores::Opened;
use ibid_testkit::{
    client::{Request, Response, get, post},
    process::Gateway,
    upstream::Upstream,
    wrappers::FailsOnDemand,
};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

pub(super) const BIN: &str = env!("CARGO_BIN_EXE_ibid");
pub(super) const DEADLINE: Duration = Duration::from_secs(10);

pub(super) type Switchable = Arc<FailsOnDemand<Memory>>;

pub(super) fn switchable() -> Switchable {
    Arc::new(FailsOnDemand::new(Memory::default()))
}

/// A gateway in this process.
pub(super) struct Here {
    pub(super) gateway: serve::Gateway,
    pub(super) store: Switchable,
    pub(super) told: Arc<Told>,
}

impl Here {
    pub(super) async fn start(config: &str, upstream: &Upstream) -> Here {
        Here::start_on(switchable(), config, upstream).await
    }

    pub(super) async fn start_on(store: Switchable, config: &str, upstream: &Upstream) -> Here {
        let told = Arc::new(Told::default());
        let gateway = start(config, upstream, store.clone(), told.clone()).await;
        Here { gateway, store, told }
    }

    pub(super) fn pay(&self, key: &str) -> Request {
        pay(self.gateway.address(), key)
    }

    pub(super) async fn ready(&self) -> Response {
        get(self.gateway.admin().expect("it has an admin port"), "/readyz").send().await
    }

    /// What the store really holds.
    pub(super) async fn entries(&self) -> Vec<Claim> {
        entries(&self.store).await
    }
}

/// Starts a gateway in this process, on free ports.
pub(super) async fn start(
    config: &str, upstream: &Upstream, store: Switchable, observer: Arc<dyn Observer>,
) -> serve::Gateway {
    let args = ServeArgs {
        listen: Some("127.0.0.1:0".into()),
        admin: Some("127.0.0.1:0".into()),
        upstream: Some(upstream.url()),
        store: Some("memory:".into()),
        ..ServeArgs::default()
    };
    let settings = Settings::from_text(config, None, &args, &Env::of(&[])).expect("a valid configuration");
    serve::Gateway::start(settings, args, Opened::plain(store), Watched::by(observer))
        .await
        .expect("the gateway starts")
}

pub(super) async fn entries(store: &Switchable) -> Vec<Claim> {
    let inner = store.inner();
    let page = inner.operators().list(&Filter::default(), Cursor::default(), 100).await.expect("memory answers");
    let mut found = Vec::new();
    for listed in page.entries {
        found.extend(inner.get(&listed.address).await.expect("memory answers"));
    }
    found
}

pub(super) fn pay(addr: SocketAddr, key: &str) -> Request {
    post(addr, "/pay").key(key).json(r#"{"amount":1}"#)
}

/// Remembers what it is told.
#[derive(Default)]
pub(super) struct Told(Mutex<Vec<String>>);

impl Told {
    pub(super) fn count(&self, part: &str) -> usize {
        self.0.lock().iter().filter(|notice| notice.contains(part)).count()
    }

    pub(super) async fn wait_for(&self, part: &str) {
        eventually(part, || self.count(part) > 0).await;
    }
}

impl Observer for Told {
    fn noticed(&self, notice: &Notice<'_>) {
        self.0.lock().push(notice.to_string());
    }
}

/// Heals the store once that many calls of a kind have failed.
pub(super) struct HealsAfter {
    call: &'static str,
    left: AtomicUsize,
    store: Switchable,
}

impl HealsAfter {
    pub(super) fn new(call: &'static str, failures: usize, store: &Switchable) -> Arc<HealsAfter> {
        Arc::new(HealsAfter { call, left: AtomicUsize::new(failures), store: store.clone() })
    }
}

impl Observer for HealsAfter {
    fn noticed(&self, notice: &Notice<'_>) {
        let Notice::StoreFailed { call, .. } = notice else { return };
        if *call == self.call && self.left.fetch_sub(1, SeqCst) == 1 {
            self.store.heal();
        }
    }
}

/// Waits until something is so.
pub(super) async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let so = async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(DEADLINE, so).await.unwrap_or_else(|_| panic!("waited {DEADLINE:?} for: {what}"));
}

/// Waits until the log has `n` lines with `part`.
pub(super) async fn lines(gateway: &Gateway, part: &str, n: usize) -> Vec<String> {
    let found = || gateway.logs().into_iter().filter(|line| line.contains(part)).collect::<Vec<_>>();
    eventually(&format!("{n} lines with {part:?}"), || found().len() >= n).await;
    found()
}

pub(super) async fn gateway(config: &str, upstream: &Upstream) -> Gateway {
    Gateway::spawn(BIN, config, &upstream.url()).await
}

/// The name of the refusal in an answer.
pub(super) fn refusal(answer: &Response) -> String {
    let kind = answer.json()["type"].as_str().unwrap_or_default().to_owned();
    let name = kind.strip_prefix("/.well-known/idempotency#");
    name.unwrap_or_else(|| panic!("no refusal of ours: {answer:?}")).to_owned()
}

/// Any command of the binary, printing into files. Killed when dropped.
pub(super) struct Spawned {
    child: Child,
    dir: TempDir,
}

impl Spawned {
    pub(super) fn start(args: &[&str], env: &[(&str, &str)]) -> Spawned {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = File::create(dir.path().join("out")).expect("a file");
        let mut command = Command::new(BIN);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("IBID_")) {
            command.env_remove(name);
        }
        command.args(args).envs(env.iter().copied()).current_dir(dir.path()).stdin(Stdio::null());
        command.stderr(out.try_clone().expect("a second handle")).stdout(out);
        Spawned { child: command.spawn().expect("the binary runs"), dir }
    }

    /// All that it printed so far.
    pub(super) fn printed(&self) -> String {
        fs::read_to_string(self.dir.path().join("out")).unwrap_or_default()
    }

    pub(super) async fn wait_for(&self, part: &str) -> String {
        eventually(part, || self.printed().contains(part)).await;
        self.printed()
    }

    pub(super) fn interrupt(&self) {
        let status = Command::new("kill").arg("-INT").arg(self.child.id().to_string()).status();
        assert!(status.is_ok_and(|status| status.success()));
    }

    pub(super) async fn exit_code(&mut self) -> Option<i32> {
        let mut status = None;
        eventually("the end of the process", || {
            status = self.child.try_wait().expect("our child");
            status.is_some()
        })
        .await;
        status.and_then(|status| status.code())
    }
}

impl Drop for Spawned {
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
