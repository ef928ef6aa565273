//! The servers that are called, and the clients that call.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use ibid::{Answered, Ibid, Observer, Outcome, Reason, store::Memory};
use ibid_example_tonic::{DESCRIPTORS, Shop, serve};
use ibid_testkit::process::Gateway;
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    net::TcpListener,
    process::Command,
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::faults::kit::BIN;

/// How long a whole scenario may take, many of them at a time on few cores.
const SCENARIO: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug)]
pub(super) enum Client {
    Python,
    Node,
}

/// A shop that can be called.
pub(super) struct Scene {
    pub(super) shop: Shop,
    pub(super) protected: Protected,
    addr: SocketAddr,
    server: JoinHandle<()>,
    folder: TempDir,
}

/// By what.
pub(super) enum Protected {
    Layer(Arc<Refusals>),
    Gateway(Box<Gateway>),
}

/// How many calls were refused because another one runs.
#[derive(Default)]
pub(super) struct Refusals(AtomicUsize);

impl Observer for Refusals {
    fn answered(&self, request: &Answered<'_>) {
        if request.outcome == Outcome::Refused(Reason::InProgress) {
            self.0.fetch_add(1, SeqCst);
        }
    }
}

impl Scene {
    pub(super) async fn layer() -> Scene {
        let refusals = Arc::new(Refusals::default());
        let ibid = Ibid::builder(Arc::new(Memory::default())).observer(refusals.clone()).build();
        let (shop, addr, server) = start(Some(ibid)).await;
        Scene { shop, protected: Protected::Layer(refusals), addr, server, folder: described() }
    }

    pub(super) async fn gateway() -> Scene {
        let (shop, addr, server) = start(None).await;
        let folder = described();
        let config = format!(
            "descriptors = {:?}\n[store]\nurl = \"memory:\"\n\
             [[route]]\nmatch = \"grpc shop.Orders/*\"\npreset = \"platform\"\n",
            folder.path().join("shop.bin")
        );
        let gateway = Gateway::spawn(BIN, &config, &format!("http://{addr}")).await;
        Scene { shop, addr: gateway.addr(), protected: Protected::Gateway(Box::new(gateway)), server, folder }
    }

    /// What a client saw in a scenario.
    pub(super) async fn play(&self, client: Client, scenario: &str) -> Value {
        let mut command = client.command();
        command.arg(self.addr.to_string()).arg(self.folder.path().join("shop.bin")).arg(scenario);
        command.stdin(Stdio::null()).kill_on_drop(true);
        let output = timeout(SCENARIO, command.output()).await;
        let output = output.unwrap_or_else(|_| panic!("{client:?} did not end {scenario:?} within {SCENARIO:?}"));
        let output = output.unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
        let said = String::from_utf8_lossy(&output.stdout);
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{client:?} in {scenario:?}: {}\n{said}{complaints}", output.status);
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{client:?} said {said:?}, {error}\n{complaints}"))
    }

    /// Returns once so many calls were refused because another one runs.
    pub(super) async fn refused_as_in_progress(&self, at_least: usize) {
        let end = Instant::now() + SCENARIO;
        while self.refusals() < at_least {
            assert!(
                Instant::now() < end,
                "waited {SCENARIO:?} for {at_least} refusals; there were {}",
                self.refusals()
            );
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn refusals(&self) -> usize {
        match &self.protected {
            Protected::Layer(refusals) => refusals.0.load(SeqCst),
            Protected::Gateway(gateway) => {
                let refused = |line: &&String| line.contains("in-progress") && line.contains("/shop.Orders/Create");
                gateway.logs().iter().filter(refused).count()
            }
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn start(ibid: Option<Ibid>) -> (Shop, SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("it is bound");
    let shop = Shop::default();
    let served = shop.clone();
    let server = tokio::spawn(async move {
        serve(listener, served, ibid.as_ref(), std::future::pending()).await.expect("the shop serves");
    });
    (shop, addr, server)
}

/// A folder with the shop's descriptors in it.
fn described() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("shop.bin"), DESCRIPTORS).expect("the descriptors are written");
    folder
}

impl Client {
    fn command(self) -> Command {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/grpc");
        match self {
            Client::Python => {
                let mut command = Command::new(installed("python/bin/python"));
                command.arg(tests.join("client.py"));
                command
            }
            Client::Node => {
                let modules = installed("node/node_modules/@grpc/grpc-js");
                let mut command = Command::new("node");
                command.arg(tests.join("client.mjs")).env("NODE_MODULES", modules.ancestors().nth(3).expect("it has"));
                command
            }
        }
    }
}

fn installed(what: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/grpc-clients").join(what);
    assert!(
        path.exists(),
        "{} is not there: run scripts/tools, which installs the clients (Debian: python3-venv, nodejs, npm)",
        path.display()
    );
    path
}
