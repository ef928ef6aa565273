//! `ibid serve`: runs the gateway.

use std::{
    fs,
    io::{ErrorKind, Write},
    net::SocketAddr,
    os::unix::fs::DirBuilderExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use ibid::{Ibid, Observer, http::Cors, journal::Journal, store::Store};
use ibid_stores::{OpenedStore, ProcessLock};
use ibid_tools::CommandError;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use super::{admin::local_address, store};
use crate::{
    admin::AdminServer,
    api::ApiServer,
    config::{ApiListen, Env, GatewaySettings, SealSettings, ServeArgs},
    cores::StoreThread,
    ext_proc::ExtProcServer,
    logs,
    metrics::MetricsObserver,
    reflection,
    server::GatewayServer,
    snapshot::ConfigSnapshot,
    startup_checks::{self, StartupVerdict},
    trace::{TraceObserver, Tracer},
    watch::LiveConfig,
};

pub fn run(args: ServeArgs, env: &Env<'_>) -> Result<(), CommandError> {
    let settings = GatewaySettings::load(&args, env)?;
    let _logs = logs::start(&settings.log).map_err(CommandError::Conflict)?;
    block_on(async {
        let settings = reflection::load_methods(settings, &args, env).await?;
        let watched = MetricsObserver::new(logs::LogObserver::default());
        let url = &settings.store.url;
        let config = settings.store.store_config().with_sealer(settings.sealing());
        let store_thread = StoreThread::start().map_err(|why| CommandError::Conflict(why.to_string()))?;
        let observer = watched.clone();
        let store = store_thread.run(async move { config.open(observer).await }).await;
        let store = store.map_err(|why| CommandError::Conflict(format!("the store {url} cannot be opened: {why}")))?;
        let gateway = RunningGateway::start(settings, args, store, watched).await.map_err(CommandError::Conflict)?;
        let stopped = stop_signals()?;
        print_addresses(&gateway);
        tokio::spawn(check_apps(gateway.live.now().settings.clone()));
        stopped.await;
        tracing::info!("stopping: no new connections; requests that have begun run to their end");
        gateway.stop().await;
        Ok(())
    })
}

/// At shutdown: maximum time to save what was found out about unknown outcomes.
const SAVE_FINDINGS_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs a gateway on a runtime of its own.
pub(super) fn block_on(work: impl Future<Output = Result<(), CommandError>>) -> Result<(), CommandError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.map_err(|why| CommandError::Conflict(why.to_string()))?.block_on(work)
}

pub struct RunningGateway {
    /// Where clients connect.
    pub address: SocketAddr,
    pub admin: Option<SocketAddr>,
    /// Where apps call the exchange API.
    pub api: Option<ApiListen>,
    /// Where Envoy connects.
    pub ext_proc: Option<SocketAddr>,
    /// The path on the admin port that logs in to the console once.
    pub login_path: Option<String>,
    is_secure: bool,
    is_admin_secure: bool,
    pub live: Arc<LiveConfig>,
    pub ibid: Ibid,
    stop: watch::Sender<bool>,
    server: tokio::task::JoinHandle<()>,
    /// The admin port's task and its stop signal. It stops last.
    admin_task: Option<(oneshot::Sender<()>, tokio::task::JoinHandle<()>)>,
    /// Stops after the server, so that exchanges can end meanwhile.
    api_task: Option<(oneshot::Sender<()>, tokio::task::JoinHandle<()>)>,
    /// Saves what was found out about unknown outcomes. Stops after all requests, with the last of them.
    findings_task: (watch::Sender<bool>, tokio::task::JoinHandle<()>),
    /// Stops after the server, so that requests can end meanwhile.
    ext_proc_task: Option<(oneshot::Sender<()>, tokio::task::JoinHandle<()>)>,
    tracer: Option<Tracer>,
    /// Holds the journal lock. Two gateways on one directory would each delete the other's pending answers.
    _journal: Option<ProcessLock>,
}

impl RunningGateway {
    pub async fn start(
        settings: GatewaySettings, args: ServeArgs, opened: OpenedStore, watched: Arc<MetricsObserver>,
    ) -> Result<Self, String> {
        let OpenedStore { store, sealed, members } = opened;
        startup_checks::raise_file_limit();
        run_checks(&settings, store.as_ref()).await?;
        watched.metrics.register_routes(&settings.routes);
        let live = LiveConfig::new(ConfigSnapshot::new(settings.clone(), None)?, args);
        let tracer = live.now().collector.is_some().then(|| Tracer::start(live.clone()));
        let observer: Arc<dyn Observer> =
            if tracer.is_some() { Arc::new(TraceObserver(watched.clone())) } else { watched.clone() };
        let _journal = live.now().settings.journal.as_deref().map(lock_journal).transpose()?;
        let ibid = build_ibid(&live, store, observer)?;
        let admin_server = match settings.admin {
            Some(admin) => {
                Some(AdminServer::bind(&admin, ibid.clone(), members, sealed, live.clone(), &watched).await?)
            }
            None => None,
        };
        let (stop, stopping) = watch::channel(false);
        let (end_findings, findings_ended) = watch::channel(false);
        let saving = watched.recent.clone().save_findings(ibid.engine().store().clone(), findings_ended);
        let findings_task = (end_findings, tokio::spawn(saving));
        let server = GatewayServer::bind(live.clone(), ibid.clone(), tracer.clone(), stopping.clone()).await?;
        let (mut api, mut api_task) = (None, None);
        if let Some(settings) = &settings.api {
            let server = ApiServer::bind(settings, live.clone(), ibid.clone(), stopping.clone()).await?;
            api = Some(server.address().map_or_else(|| settings.listen.clone(), ApiListen::Tcp));
            let (end, ended) = oneshot::channel();
            api_task = Some((end, tokio::spawn(server.run(ended))));
        }
        let unnamed = |why: std::io::Error| format!("the listener has no address: {why}");
        let (mut ext_proc, mut ext_proc_task) = (None, None);
        if let Some(address) = settings.ext_proc {
            let server = ExtProcServer::bind(address, live.clone(), ibid.clone(), stopping.clone()).await?;
            ext_proc = Some(server.address().map_err(unnamed)?);
            let (end, ended) = oneshot::channel();
            ext_proc_task = Some((end, tokio::spawn(server.run(ended))));
        }
        let address = server.address().map_err(unnamed)?;
        let admin = admin_server.as_ref().map(AdminServer::address).transpose().map_err(unnamed)?;
        let login_path = admin_server.as_ref().map(|admin| format!("/login?code={}", admin.create_login_link()));
        let is_admin_secure = admin_server.as_ref().is_some_and(|admin| admin.is_secure);
        let (end, ended) = oneshot::channel();
        let admin_task = admin_server.map(|admin| (end, tokio::spawn(admin.run(stopping, ended))));
        tokio::spawn(sweep_periodically(ibid.clone(), settings.store.sweep_every));
        let (nudge, nudged) = mpsc::channel(1);
        tokio::spawn(live.clone().watch(nudged));
        // Installs the handler now, not when the task is first polled: until then SIGHUP would kill the process.
        let mut hangup = signal(SignalKind::hangup()).map_err(|why| format!("signals: {why}"))?;
        tokio::spawn(async move { while hangup.recv().await.is_some() && nudge.send(()).await.is_ok() {} });
        tokio::spawn(reflection::refresh_methods(live.clone()));
        let is_secure = server.is_secure();
        let server = tokio::spawn(server.run());
        Ok(Self {
            address,
            admin,
            api,
            ext_proc,
            login_path,
            is_secure,
            is_admin_secure,
            live,
            ibid,
            stop,
            server,
            admin_task,
            api_task,
            findings_task,
            ext_proc_task,
            tracer,
            _journal,
        })
    }

    pub async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = self.server.await;
        for (end, task) in self.api_task.into_iter().chain(self.ext_proc_task).chain(self.admin_task) {
            let _ = end.send(());
            let _ = task.await;
        }
        let (end, task) = self.findings_task;
        let _ = end.send(true);
        let _ = timeout(SAVE_FINDINGS_TIMEOUT, task).await;
        if let Some(tracer) = &self.tracer {
            tracer.flush().await;
        }
    }
}

/// Creates the journal's directory if necessary, and locks it for this gateway.
fn lock_journal(folder: &Path) -> Result<ProcessLock, String> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    let taken = made.and_then(|()| ProcessLock::acquire_directory(folder, "journal.lock"));
    taken.map_err(|why| match why.kind() {
        ErrorKind::WouldBlock => {
            format!("journal: {}: {why}; each gateway has a journal of its own, so name another", folder.display())
        }
        _ => format!("journal: {}: {why}", folder.display()),
    })
}

fn build_ibid(live: &LiveConfig, store: Arc<dyn Store>, observer: Arc<dyn Observer>) -> Result<Ibid, String> {
    let now = live.now();
    let settings = &now.settings;
    // The gateway sweeps by itself, and logs the results.
    let mut builder = Ibid::builder(store)
        .sweep_every(None)
        .observer(observer)
        .trusted_proxies(settings.trusted_proxies.clone())
        .credentials(settings.credentials.clone())
        .max_running(settings.max_running)
        .max_late_answers((settings.max_upstream / 4).max(1))
        .buffer_memory(settings.buffer_memory)
        .body_timeout(settings.limits.body_timeout)
        // Sealing compresses by itself.
        .compress(settings.seal.is_none() && settings.store.compresses())
        .quota(live.quota.clone());
    builder = builder.label_key(settings.seal.is_some());
    if let Some(secret) = settings.seal.as_ref().and_then(SealSettings::address_secret) {
        builder = builder.address_secret(secret);
    }
    if !settings.cors_origins.is_empty() {
        let origins = settings.cors_origins.iter().filter_map(|origin| origin.to_str().ok());
        builder = builder.cors(Cors::parse(origins).map_err(|why| format!("cors.origins: {why}"))?);
    }
    if let Some(folder) = &settings.journal {
        let journal = match settings.sealing() {
            None => Journal::open(folder),
            Some(sealing) => Journal::open_sealed(folder, Arc::new(sealing)),
        };
        let journal = journal.map_err(|why| format!("journal: {}: {why}", folder.display()))?;
        for file in journal.unreadable() {
            tracing::error!(file = %file.display(), "an answer in the journal cannot be read; it was set aside");
        }
        builder = builder.journal(Arc::new(journal));
    }
    Ok(builder.build())
}

/// Logs the guarantees of the store, and every check that did not pass. With `strict`, a weak promise or a store that does
/// not answer prevents the start.
async fn run_checks(settings: &GatewaySettings, store: &dyn Store) -> Result<(), String> {
    let promise = store.guarantees();
    tracing::info!(store = promise.store, durable = promise.durable, shared = promise.shared, "store");
    let stored = startup_checks::check_store(settings, store).await;
    let mut others = startup_checks::check_settings(settings);
    others.extend(startup_checks::check_machine(settings));
    for result in others.iter().filter(|result| result.verdict != StartupVerdict::Passed) {
        tracing::warn!("{}", result.message);
    }
    for result in stored.iter().filter(|result| result.verdict != StartupVerdict::Passed) {
        tracing::warn!(store = promise.store, "{}", result.message);
    }
    if settings.store.strict && !promise.warnings.is_empty() {
        return Err(format!(
            "store.strict is set, and the {} store has weaknesses: {}",
            promise.store,
            promise.warnings.join("; ")
        ));
    }
    match stored.iter().find(|result| result.verdict == StartupVerdict::Failed) {
        Some(failed) if settings.store.strict => Err(format!("store.strict is set, and {}", failed.message)),
        _ => Ok(()),
    }
}

/// Apps often start together with the gateway.
const APP_START_ALLOWANCE: Duration = Duration::from_secs(10);

/// Logs every check of the apps that did not pass. The gateway serves meanwhile.
async fn check_apps(settings: GatewaySettings) {
    tokio::time::sleep(APP_START_ALLOWANCE).await;
    let results = startup_checks::check_upstreams(&settings).await;
    for result in results.iter().filter(|result| result.verdict != StartupVerdict::Passed) {
        tracing::warn!("{}: {}", result.subject, result.message);
    }
}

async fn sweep_periodically(ibid: Ibid, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        match store::sweep_all(ibid.engine().store().as_ref()).await.0 {
            (0, 0) => {}
            (removed, 0) => tracing::debug!(removed, "swept"),
            (removed, lapsed) => tracing::info!(removed, lapsed, "swept: some leases had expired"),
        }
    }
}

/// Prints the addresses to standard output, where a parent process can read the ports. Without a token, and on loopback, a
/// link into the console follows.
fn print_addresses(gateway: &RunningGateway) {
    let scheme = |secure: bool| if secure { "https" } else { "http" };
    let mut out = std::io::stdout().lock();
    let admin_scheme = scheme(gateway.is_admin_secure);
    if let Some(admin) = gateway.admin {
        let _ = writeln!(out, "ibid: admin on {admin_scheme}://{admin}");
    }
    if let Some(api) = &gateway.api {
        let _ = writeln!(out, "ibid: api on {api}");
    }
    if let Some(ext_proc) = gateway.ext_proc {
        let _ = writeln!(out, "ibid: ext_proc on {ext_proc}");
    }
    let _ = writeln!(out, "ibid: listening on {}://{}", scheme(gateway.is_secure), gateway.address);
    if let (Some(admin), Some(path)) = (gateway.admin, &gateway.login_path)
        && gateway.live.now().tokens.is_empty()
        && (admin.ip().is_loopback() || admin.ip().is_unspecified())
    {
        let link = format!("{admin_scheme}://{}{path}", local_address(admin));
        let _ = writeln!(out, "ibid: console (this link logs in once, within ten minutes): {link}");
    }
    let _ = out.flush();
}

/// Installs handlers for SIGINT and SIGTERM. Call this before announcing the addresses; otherwise a signal that arrives
/// early kills the process. The future completes on either signal.
pub(super) fn stop_signals() -> Result<impl Future<Output = ()>, CommandError> {
    let install = |kind| signal(kind).map_err(|why| CommandError::Conflict(format!("signals: {why}")));
    let (mut terminate, mut interrupt) = (install(SignalKind::terminate())?, install(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
