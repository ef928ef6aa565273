//! The gateways of a run, each behind a link of its own.
//!
//! A gateway has another port after each restart; its link has one address for ever. So clients always know where it is,
//! a killed gateway refuses connections instead of leaving its port to somebody else's process, and the way between the
//! clients and a gateway can be torn like any other.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use testbed::{
    FaultProxy, TestEnvoy,
    client::get,
    free_port,
    process::{GatewayProcess, ProcessSignal},
};
use tokio::{
    sync::Mutex,
    task::spawn_blocking,
    time::{sleep, timeout},
};

use crate::{exchange_app::ExchangeApp, sandbox::Sandbox};

/// What a gateway logs when it finds that an operation may have run twice.
const DOUBLE_RUN_LOG_TEXT: &str = "may have run twice";

/// How long a gateway may take to say how it is.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a gateway may take to finish what it runs.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(40);

/// What a gateway says about itself on `/readyz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayHealth {
    /// Whether its store answers.
    pub ready: bool,
    /// How many requests with a key are at work.
    pub requests_running: usize,
    /// How many ends its store has not taken yet.
    pub unsaved_results: usize,
}

/// The gateways.
pub struct GatewayFleet {
    gateways: Vec<FleetGateway>,
}

/// What clients connect to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FleetLayout {
    /// The gateway.
    #[default]
    Gateway,
    /// Envoy, with ibid as its external processor.
    ExtProc,
    /// An app that asks ibid by the exchange API.
    ExchangeApi,
}

/// What stands before ibid, and stays while it is down.
struct FleetFront {
    server: FrontServer,
    /// The way to ibid, which listens behind it.
    proxy: Arc<FaultProxy>,
    ibid: SocketAddr,
}

enum FrontServer {
    Envoy(Arc<TestEnvoy>),
    App(ExchangeApp),
}

struct FleetGateway {
    front: Option<FleetFront>,
    proxy: Arc<FaultProxy>,
    /// Held by the one fault that is at work on it.
    process: Mutex<GatewayProcess>,
}

impl FleetFront {
    async fn start(layout: FleetLayout, upstream: SocketAddr) -> io::Result<Option<Self>> {
        let ibid = (Ipv4Addr::LOCALHOST, free_port()).into();
        let proxy = Arc::new(FaultProxy::to(ibid));
        let at = proxy.addr();
        let server = match layout {
            FleetLayout::Gateway => return Ok(None),
            FleetLayout::ExtProc => {
                // What the clients retry.
                let closed = "failure_mode_allow: false";
                let status = format!("{closed}\n                      status_on_error: {{ code: ServiceUnavailable }}");
                let start = move || TestEnvoy::start_with(upstream, at, &[(closed, &status)]);
                FrontServer::Envoy(Arc::new(spawn_blocking(start).await.expect("Envoy starts")))
            }
            FleetLayout::ExchangeApi => FrontServer::App(ExchangeApp::start(upstream, at).await?),
        };
        Ok(Some(Self { server, proxy, ibid }))
    }

    fn addr(&self) -> SocketAddr {
        match &self.server {
            FrontServer::Envoy(envoy) => envoy.addr(),
            FrontServer::App(app) => app.addr(),
        }
    }

    /// What ibid's configuration needs.
    fn config(&self) -> String {
        match &self.server {
            FrontServer::Envoy(_) => format!("[ext_proc]\nlisten = \"{}\"\n", self.ibid),
            FrontServer::App(_) => ExchangeApp::config(self.ibid),
        }
    }
}

impl GatewayFleet {
    /// Starts one gateway per configuration, all in front of the same upstream, and in the sandbox if there is one.
    ///
    /// # Errors
    ///
    /// If there is no free port, or the sandbox has no disk for it.
    ///
    /// # Panics
    ///
    /// If one of them does not start, with all that it printed.
    pub async fn start(
        layout: FleetLayout, bin: &Path, configs: &[String], upstream: SocketAddr, sandbox: Option<&Sandbox>,
    ) -> io::Result<Arc<GatewayFleet>> {
        let mut members = Vec::with_capacity(configs.len());
        for (nth, config) in configs.iter().enumerate() {
            let front = FleetFront::start(layout, upstream).await?;
            let own = front.as_ref().map(FleetFront::config).unwrap_or_default();
            let launch = GatewayProcess::launch(bin).config(format!("{config}\n{own}"));
            let launch = match sandbox {
                Some(sandbox) => sandbox.launch(launch.upstream(&sandbox.upstream_url(upstream.port())), nth)?,
                None => launch.upstream(&format!("http://{upstream}")),
            };
            let gateway = launch.start().await;
            let link = Arc::new(FaultProxy::to(front.as_ref().map_or(gateway.addr(), FleetFront::addr)));
            members.push(FleetGateway { front, proxy: link, process: Mutex::new(gateway) });
        }
        Ok(Arc::new(GatewayFleet { gateways: members }))
    }

    /// The Envoys before the gateways.
    pub fn envoys(&self) -> Vec<Arc<TestEnvoy>> {
        let envoy = |front: &FleetFront| match &front.server {
            FrontServer::Envoy(envoy) => Some(Arc::clone(envoy)),
            FrontServer::App(_) => None,
        };
        self.gateways.iter().filter_map(|gateway| gateway.front.as_ref().and_then(envoy)).collect()
    }

    /// The ways from Envoys or apps to the gateways that they ask.
    pub fn front_proxies(&self) -> Vec<Arc<FaultProxy>> {
        self.gateways.iter().filter_map(|gateway| Some(Arc::clone(&gateway.front.as_ref()?.proxy))).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.gateways.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.gateways.is_empty()
    }

    /// Where clients reach the nth, always.
    pub fn addr(&self, nth: usize) -> SocketAddr {
        self.gateways[nth].proxy.addr()
    }

    /// The way between the clients and the nth.
    pub fn proxy(&self, nth: usize) -> &Arc<FaultProxy> {
        &self.gateways[nth].proxy
    }

    /// Kills the nth, as a crash would.
    pub async fn kill(&self, nth: usize) {
        let FleetGateway { front, proxy: link, process: gateway } = &self.gateways[nth];
        if front.is_some() {
            return gateway.lock().await.kill().await;
        }
        // First nothing new, or a connection could reach whoever gets the port next.
        link.refuse();
        gateway.lock().await.kill().await;
        link.reset();
    }

    /// Ends the nth as an upgrade does: it gets no new connections, and finishes what it runs.
    ///
    /// # Panics
    ///
    /// If it does not end.
    pub async fn terminate(&self, nth: usize) {
        let FleetGateway { proxy: link, process: gateway, .. } = &self.gateways[nth];
        link.refuse();
        let mut gateway = gateway.lock().await;
        gateway.signal(ProcessSignal::Term);
        gateway.wait_exit(SHUTDOWN_TIMEOUT).await;
    }

    /// Starts the nth again, in its own folder.
    ///
    /// # Panics
    ///
    /// If it does not start, with all that it printed.
    pub async fn restart(&self, nth: usize) {
        let FleetGateway { front, proxy: link, process: gateway } = &self.gateways[nth];
        let mut gateway = gateway.lock().await;
        gateway.restart().await;
        if front.is_some() {
            return;
        }
        link.set_target(gateway.addr());
        link.heal();
    }

    /// The nth's process, until it is restarted.
    pub async fn process_id(&self, nth: usize) -> u32 {
        self.gateways[nth].process.lock().await.id()
    }

    /// Stops the nth without its noticing.
    pub async fn pause(&self, nth: usize) {
        self.gateways[nth].process.lock().await.signal(ProcessSignal::Stop);
    }

    /// Lets the nth go on.
    pub async fn resume(&self, nth: usize) {
        self.gateways[nth].process.lock().await.signal(ProcessSignal::Cont);
    }

    /// The nth that ended without having been killed, if any: a crash of its own.
    pub async fn find_crashed(&self) -> Option<usize> {
        for (nth, member) in self.gateways.iter().enumerate() {
            if member.process.lock().await.has_exited() {
                return Some(nth);
            }
        }
        None
    }

    /// What the nth says about itself; nothing if it does not answer.
    pub async fn health(&self, nth: usize) -> Option<GatewayHealth> {
        let admin = self.gateways[nth].process.lock().await.admin_addr();
        let answer = timeout(HEALTH_TIMEOUT, get(admin, "/readyz").try_send()).await.ok()?.ok()?;
        let said = answer.json();
        let number = |value: &serde_json::Value| value.as_u64().map(|number| number as usize);
        // Of two stores, both.
        let ready = said["ready"].as_bool()? && said["store"]["degraded"].is_null();
        Some(GatewayHealth {
            ready,
            requests_running: number(&said["running"])?,
            unsaved_results: number(&said["store"]["waiting"])?,
        })
    }

    /// Waits until every gateway is ready, runs nothing, and has nothing left to tell its store; else says which does not.
    pub async fn wait_until_idle(&self, within: Duration) -> Result<(), String> {
        let end = Instant::now() + within;
        for nth in 0..self.len() {
            loop {
                let health = self.health(nth).await;
                if health
                    .is_some_and(|health| health.ready && health.requests_running == 0 && health.unsaved_results == 0)
                {
                    break;
                }
                if Instant::now() >= end {
                    return Err(format!("gateway {nth} has not settled within {within:?}: {health:?}"));
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    /// How often the gateways themselves said that an operation may have run twice.
    pub async fn double_runs_announced(&self) -> usize {
        let mut announced = 0;
        for member in &self.gateways {
            announced +=
                member.process.lock().await.logs().iter().filter(|line| line.contains(DOUBLE_RUN_LOG_TEXT)).count();
        }
        announced
    }
}
