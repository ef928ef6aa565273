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

use ibid::{Ibid, Observer, RefusalReason, RequestOutcome, RequestReport, store::Memory};
use ibid_example_tonic::{DESCRIPTORS, Shop, serve};
use serde_json::Value;
use tempfile::TempDir;
use testbed::{HTTP2_APP, TestEnvoy, process::GatewayProcess};
use tokio::{
    net::TcpListener,
    process::Command,
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::support::BIN;

/// How long a whole scenario may take, many of them at a time on few cores.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug)]
pub(super) enum GrpcClientKind {
    Python,
    Node,
}

/// A shop that can be called.
pub(super) struct GrpcShop {
    pub(super) shop: Shop,
    pub(super) protection: GrpcProtection,
    addr: SocketAddr,
    server: JoinHandle<()>,
    descriptor_folder: TempDir,
}

/// By what.
pub(super) enum GrpcProtection {
    Layer(Arc<InProgressCounter>),
    Gateway(Box<GatewayProcess>),
    Envoy(Box<GatewayProcess>, #[expect(dead_code, reason = "it runs until it is dropped")] Box<TestEnvoy>),
}

/// How many calls were refused because another one runs.
#[derive(Default)]
pub(super) struct InProgressCounter(AtomicUsize);

impl Observer for InProgressCounter {
    fn on_request(&self, request: &RequestReport<'_>) {
        if request.outcome == RequestOutcome::Refused(RefusalReason::InProgress) {
            self.0.fetch_add(1, SeqCst);
        }
    }
}

impl GrpcShop {
    pub(super) async fn start_with_layer() -> GrpcShop {
        let refusals = Arc::new(InProgressCounter::default());
        let ibid = Ibid::builder(Arc::new(Memory::default())).observer(refusals.clone()).build();
        let (shop, addr, server) = start(Some(ibid)).await;
        GrpcShop {
            shop,
            protection: GrpcProtection::Layer(refusals),
            addr,
            server,
            descriptor_folder: descriptor_folder(),
        }
    }

    pub(super) async fn start_with_gateway() -> GrpcShop {
        let (shop, addr, server) = start(None).await;
        let folder = descriptor_folder();
        let gateway = GatewayProcess::spawn(BIN, &config(&folder), &format!("http://{addr}")).await;
        GrpcShop {
            shop,
            addr: gateway.addr(),
            protection: GrpcProtection::Gateway(Box::new(gateway)),
            server,
            descriptor_folder: folder,
        }
    }

    pub(super) async fn start_with_envoy() -> GrpcShop {
        let (shop, addr, server) = start(None).await;
        let folder = descriptor_folder();
        // Without the headers that Envoy adds to responses of the app, and to no replay.
        let plain = (".router.v3.Router }", ".router.v3.Router, suppress_envoy_headers: true }");
        let envoy = TestEnvoy::start(addr, &[HTTP2_APP, plain]);
        let config = format!("{}[ext_proc]\nlisten = \"{}\"\n", config(&folder), envoy.ext_proc_addr());
        let ibid = GatewayProcess::spawn(BIN, &config, &format!("http://{addr}")).await;
        GrpcShop {
            shop,
            addr: envoy.addr(),
            protection: GrpcProtection::Envoy(Box::new(ibid), Box::new(envoy)),
            server,
            descriptor_folder: folder,
        }
    }

    /// What a client saw in a scenario.
    pub(super) async fn run_scenario(&self, client: GrpcClientKind, scenario: &str) -> Value {
        let mut command = client.command();
        command.arg(self.addr.to_string()).arg(self.descriptor_folder.path().join("shop.bin")).arg(scenario);
        command.stdin(Stdio::null()).kill_on_drop(true);
        let output = timeout(SCENARIO_TIMEOUT, command.output()).await;
        let output =
            output.unwrap_or_else(|_| panic!("{client:?} did not end {scenario:?} within {SCENARIO_TIMEOUT:?}"));
        let output = output.unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
        let said = String::from_utf8_lossy(&output.stdout);
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{client:?} in {scenario:?}: {}\n{said}{complaints}", output.status);
        let seen = serde_json::from_str(&said);
        let mut seen = seen.unwrap_or_else(|error| panic!("{client:?} said {said:?}, {error}\n{complaints}"));
        if let GrpcProtection::Envoy(..) = self.protection {
            join_values(&mut seen);
        }
        seen
    }

    /// Returns once so many calls were refused because another one runs.
    pub(super) async fn wait_for_in_progress_refusals(&self, at_least: usize) {
        let end = Instant::now() + SCENARIO_TIMEOUT;
        while self.refusals() < at_least {
            assert!(
                Instant::now() < end,
                "waited {SCENARIO_TIMEOUT:?} for {at_least} refusals; there were {}",
                self.refusals()
            );
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn refusals(&self) -> usize {
        match &self.protection {
            GrpcProtection::Layer(refusals) => refusals.0.load(SeqCst),
            GrpcProtection::Gateway(gateway) | GrpcProtection::Envoy(gateway, _) => {
                let refused = |line: &&String| line.contains("in-progress") && line.contains("/shop.Orders/Create");
                gateway.logs().iter().filter(refused).count()
            }
        }
    }
}

impl Drop for GrpcShop {
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

/// Joins the values of each name in metadata, as Envoy does in replays.
fn join_values(seen: &mut Value) {
    match seen {
        Value::Object(fields) => {
            for (name, field) in fields {
                match (name.as_str(), field) {
                    ("initial" | "trailing", Value::Array(pairs)) => pairs.dedup_by(|next, pair| {
                        let is_same = next[0] == pair[0];
                        if is_same {
                            pair[1] = format!("{}, {}", pair[1].as_str().unwrap(), next[1].as_str().unwrap()).into();
                        }
                        is_same
                    }),
                    (_, field) => join_values(field),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(join_values),
        _ => {}
    }
}

fn config(descriptors: &TempDir) -> String {
    format!(
        "descriptors = {:?}\n[store]\nurl = \"memory:\"\n\
         [[route]]\nmatch = \"grpc shop.Orders/*\"\npreset = \"platform\"\n",
        descriptors.path().join("shop.bin")
    )
}

/// A folder with the shop's descriptors in it.
fn descriptor_folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("shop.bin"), DESCRIPTORS).expect("the descriptors are written");
    folder
}

impl GrpcClientKind {
    fn command(self) -> Command {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/grpc");
        match self {
            GrpcClientKind::Python => {
                let mut command = Command::new(installed_path("python/bin/python"));
                command.arg(tests.join("client.py"));
                command
            }
            GrpcClientKind::Node => {
                let modules = installed_path("node/node_modules/@grpc/grpc-js");
                let mut command = Command::new("node");
                command.arg(tests.join("client.mjs")).env("NODE_MODULES", modules.ancestors().nth(3).expect("it has"));
                command
            }
        }
    }
}

fn installed_path(what: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/grpc-clients").join(what);
    assert!(
        path.exists(),
        "{} is not there: run scripts/tools, which installs the clients (Debian: python3-venv, nodejs, npm)",
        path.display()
    );
    path
}
