//! `ibid serve`: the gateway, from its settings to its end.

use std::{
    fs,
    io::{ErrorKind, Write},
    os::unix::fs::DirBuilderExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use ibid::{
    Ibid, Journal, Observer,
    http::Cors,
    store::{Address, Store, Swept},
};
use ibid_stores::{Lock, Opened};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use crate::{
    admin::Admin,
    config::{Env, Seal, ServeArgs, Settings},
    live::{Live, Snapshot},
    logs,
    metrics::Watched,
    reflection,
    server::Server,
    trace::{Tracer, Watching},
};

/// How long at least the store may take to answer at the start.
const PATIENCE: Duration = Duration::from_secs(1);
/// What a sweep removes at a time.
const SWEEP: u32 = 1000;

/// Why the gateway did not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The settings are wrong: the line says where and what is allowed.
    #[error("{0}")]
    Settings(String),
    /// The settings are fine, but something that they name is not.
    #[error("ibid: {0}")]
    Start(String),
}

/// Runs the gateway until it is told to stop.
///
/// # Errors
/// If it cannot start.
pub fn run(args: ServeArgs, env: &Env<'_>) -> Result<(), ServeError> {
    let settings = Settings::load(&args, env).map_err(|why| ServeError::Settings(why.to_string()))?;
    let _logs = logs::start(&settings.log).map_err(ServeError::Start)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|why| ServeError::Start(why.to_string()))?;
    runtime.block_on(async {
        let settings = reflection::known(settings, &args, env).await?;
        let watched = Watched::new(logs::Logged::default());
        let url = &settings.store.url;
        let store = settings.store.layout().sealed(settings.sealing()).open(watched.clone()).await;
        let store = store.map_err(|why| ServeError::Start(format!("the store {url} cannot be opened: {why}")))?;
        let gateway = Gateway::start(settings, args, store, watched).await.map_err(ServeError::Start)?;
        let stopped = stop_signals().map_err(|why| ServeError::Start(format!("signals: {why}")))?;
        announce(&gateway);
        stopped.await;
        tracing::info!("stopping: no new connections; requests that have begun run to their end");
        gateway.stop().await;
        Ok(())
    })
}

/// A gateway that runs.
pub struct Gateway {
    address: std::net::SocketAddr,
    admin: Option<std::net::SocketAddr>,
    secure: bool,
    admin_secure: bool,
    live: Arc<Live>,
    ibid: Ibid,
    stop: watch::Sender<bool>,
    server: tokio::task::JoinHandle<()>,
    /// The admin port, and what ends it: it is there to the last.
    desk: Option<(oneshot::Sender<()>, tokio::task::JoinHandle<()>)>,
    tracer: Option<Tracer>,
    /// Two on one folder would take each other's unfinished answers for left ones, and remove them.
    _journal: Option<Lock>,
}

impl Gateway {
    /// Starts a gateway on a store.
    ///
    /// # Errors
    /// If an address cannot be bound, or the journal, a certificate or the store is not as it must be.
    pub async fn start(
        settings: Settings, args: ServeArgs, opened: Opened, watched: Arc<Watched>,
    ) -> Result<Self, String> {
        settings.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let Opened { store, sealed, members } = opened;
        check_promise(&settings, store.as_ref()).await?;
        watched.metrics().show(&settings.routes);
        let sweep_every = settings.store.sweep_every;
        let admin = settings.admin.clone();
        let live = Live::new(Snapshot::new(settings, None)?, args);
        let tracer = live.now().collector.is_some().then(|| Tracer::start(live.clone()));
        let observer: Arc<dyn Observer> =
            if tracer.is_some() { Arc::new(Watching(watched.clone())) } else { watched.clone() };
        let journal = live.now().settings.journal.as_deref().map(taken).transpose()?;
        let ibid = build(&live, store, observer)?;
        let admin = match admin {
            Some(admin) => Some(Admin::bind(&admin, ibid.clone(), members, sealed, live.clone(), &watched).await?),
            None => None,
        };
        let server = Server::bind(live.clone(), ibid.clone(), tracer.clone()).await?;
        let unnamed = |why: std::io::Error| format!("the listener has no address: {why}");
        let address = server.address().map_err(unnamed)?;
        let admin_address = admin.as_ref().map(Admin::address).transpose().map_err(unnamed)?;
        let admin_secure = admin.as_ref().is_some_and(Admin::is_secure);
        let (stop, stopping) = watch::channel(false);
        let (end, ended) = oneshot::channel();
        let admin = admin.map(|admin| (end, tokio::spawn(admin.run(stopping.clone(), ended))));
        tokio::spawn(sweep(ibid.clone(), sweep_every));
        let (nudge, nudged) = mpsc::channel(1);
        tokio::spawn(live.clone().watch(nudged));
        // From here on, not from when the task is first polled: until then a hangup would end the process.
        let hangup = signal(SignalKind::hangup()).map_err(|why| format!("signals: {why}"))?;
        tokio::spawn(nudge_on(hangup, nudge));
        tokio::spawn(reflection::keep_up(live.clone()));
        let secure = server.is_secure();
        let server = tokio::spawn(server.run(stopping));
        Ok(Self {
            address,
            admin: admin_address,
            secure,
            admin_secure,
            live,
            ibid,
            stop,
            server,
            desk: admin,
            tracer,
            _journal: journal,
        })
    }

    /// Where clients connect.
    pub fn address(&self) -> std::net::SocketAddr {
        self.address
    }

    /// Where operators connect.
    pub fn admin(&self) -> Option<std::net::SocketAddr> {
        self.admin
    }

    /// The layer's engine and store.
    pub fn ibid(&self) -> &Ibid {
        &self.ibid
    }

    /// The configuration in force.
    pub fn live(&self) -> &Arc<Live> {
        &self.live
    }

    /// Ends in good order.
    pub async fn stop(self) {
        let _ = self.stop.send(true);
        let _ = self.server.await;
        if let Some((end, desk)) = self.desk {
            let _ = end.send(());
            let _ = desk.await;
        }
        if let Some(tracer) = &self.tracer {
            tracer.flushed().await;
        }
    }
}

/// Takes the folder of the journal, which is made if it is missing, for this gateway.
fn taken(folder: &Path) -> Result<Lock, String> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    let taken = made.and_then(|()| Lock::take_folder(folder, "journal.lock"));
    taken.map_err(|why| match why.kind() {
        ErrorKind::WouldBlock => {
            format!("journal: {}: {why}; each gateway has a journal of its own, so name another", folder.display())
        }
        _ => format!("journal: {}: {why}", folder.display()),
    })
}

fn build(live: &Live, store: Arc<dyn Store>, observer: Arc<dyn Observer>) -> Result<Ibid, String> {
    let now = live.now();
    let settings = &now.settings;
    // The gateway sweeps itself, and logs what it finds.
    let mut builder = Ibid::builder(store)
        .sweep_every(None)
        .observer(observer)
        .trusted_proxies(settings.trusted_proxies.clone())
        .credentials(settings.credentials.clone())
        .max_running(settings.max_running)
        .max_late_answers((settings.max_upstream / 4).max(1))
        .buffer_memory(settings.buffer_memory)
        .body_timeout(settings.limits.body_timeout)
        // What is sealed is compressed before that.
        .compress(settings.seal.is_none() && settings.store.compresses())
        .quota(live.quota().clone());
    if let Some(secret) = settings.seal.as_ref().and_then(Seal::address_secret) {
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

/// Says what was found about the store. Only under `strict` does anything wanting stop the start.
async fn check_promise(settings: &Settings, store: &dyn Store) -> Result<(), String> {
    let promise = store.promise();
    tracing::info!(store = promise.store, durable = promise.durable, shared = promise.shared, "store");
    for wanting in &promise.wanting {
        tracing::warn!(store = promise.store, "{wanting}");
    }
    if settings.store.strict && !promise.wanting.is_empty() {
        return Err(format!(
            "store.strict is set, and the {} store is wanting: {}",
            promise.store,
            promise.wanting.join("; ")
        ));
    }
    let is_counted = settings.quota.new_keys.or(settings.quota.new_bytes).is_some();
    if is_counted && store.counters().is_none() {
        tracing::warn!(store = promise.store, "quota: this store keeps no counts, so every gateway counts on its own");
    }
    let patience = settings.store.timeout.max(PATIENCE);
    let trouble = match timeout(patience, store.get(&Address([0; 32]))).await {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(why)) => why.to_string(),
        Err(_) => format!("no answer within {patience:?}"),
    };
    if settings.store.strict {
        return Err(format!("store.strict is set, and the {} store cannot be used: {trouble}", promise.store));
    }
    tracing::warn!(store = promise.store, "the store cannot be used yet: {trouble}");
    Ok(())
}

async fn sweep(ibid: Ibid, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let mut all = Swept::default();
        while let Ok(swept) = ibid.engine().store().sweep(SWEEP).await {
            all.removed = all.removed.saturating_add(swept.removed);
            all.lapsed = all.lapsed.saturating_add(swept.lapsed);
            if !swept.more {
                break;
            }
            tokio::task::yield_now().await;
        }
        match all {
            Swept { removed: 0, lapsed: 0, .. } => {}
            Swept { removed, lapsed: 0, .. } => tracing::debug!(removed, "swept"),
            Swept { removed, lapsed, .. } => tracing::info!(removed, lapsed, "swept: some claims had lapsed"),
        }
    }
}

async fn nudge_on(mut hangup: Signal, nudge: mpsc::Sender<()>) {
    while hangup.recv().await.is_some() {
        let _ = nudge.send(()).await;
    }
}

/// Says on standard output where to connect: whoever started the process may read the ports from it.
fn announce(gateway: &Gateway) {
    let scheme = |secure: bool| if secure { "https" } else { "http" };
    let mut out = std::io::stdout().lock();
    if let Some(admin) = gateway.admin {
        let _ = writeln!(out, "ibid: admin on {}://{admin}", scheme(gateway.admin_secure));
    }
    let _ = writeln!(out, "ibid: listening on {}://{}", scheme(gateway.secure), gateway.address);
    let _ = out.flush();
}

/// Listens for SIGINT and SIGTERM from now on: call it before saying that the gateway is there, or whoever takes it by
/// its word may end it the hard way. The future returns on either.
pub(super) fn stop_signals() -> std::io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
