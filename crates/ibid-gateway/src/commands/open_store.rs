//! Opens a store outside of a gateway.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ibid::{
    Observer,
    observe::EngineEvent,
    store::{Address, ErrorKind, Store},
};
use ibid_stores::{OpenedStore, StoreUrl, seal::Sealer};
use ibid_tools::CommandError;

use crate::{
    config::{self, ConfigError},
    records::RecordLookupError,
};

/// Timeout of one store call. People wait longer than requests do.
const STORE_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to retry the first connection, and the pause between two attempts.
const CONNECT_RETRY_PERIOD: Duration = Duration::from_secs(2);
const CONNECT_RETRY_PAUSE: Duration = Duration::from_millis(100);

impl From<ConfigError> for CommandError {
    fn from(why: ConfigError) -> Self {
        Self::Config(why.to_string())
    }
}

impl From<RecordLookupError> for CommandError {
    fn from(why: RecordLookupError) -> Self {
        match why {
            RecordLookupError::Store(error) => error.into(),
            why => Self::Conflict(why.to_string()),
        }
    }
}

/// Opens the store of the settings, and checks that it answers. Unseals if there are keys.
pub(super) async fn open_store(
    settings: &config::StoreSettings, sealing: Option<Sealer>,
) -> Result<OpenedStore, CommandError> {
    let layout = settings.store_config().for_operators(STORE_CALL_TIMEOUT).with_sealer(sealing);
    let url = &settings.url;
    let cannot = |why: &str| CommandError::Unavailable(format!("the store {url} cannot be opened: {why}"));
    match layout.authority() {
        StoreUrl::Memory(_) => {
            let why = "memory: lives in the process of its gateway, where no other command can reach it; \
                       ask that gateway (keys --admin URL), or name a store that is on a disk or on a server";
            return Err(CommandError::Usage(why.into()));
        }
        // A gateway creates a missing store. Here a missing store means a mistyped path.
        StoreUrl::Embedded(path, _) if !path.is_dir() => return Err(cannot("there is no such folder")),
        _ => {}
    }
    let opened = layout.open(Arc::new(StderrObserver)).await.map_err(|why| {
        let then = if why.to_string().contains("in use by") {
            "; ask that gateway instead (--admin URL), or stop it"
        } else {
            ""
        };
        cannot(&format!("{why}{then}"))
    })?;
    let nowhere = Address([0; 32]);
    let since = Instant::now();
    loop {
        match opened.store.get(&nowhere).await {
            Ok(_) => return Ok(opened),
            // The store may still be connecting.
            Err(error) if error.kind == ErrorKind::NotApplied && since.elapsed() < CONNECT_RETRY_PERIOD => {
                tokio::time::sleep(CONNECT_RETRY_PAUSE).await;
            }
            Err(error) => return Err(CommandError::Unavailable(format!("the store {url} cannot be used: {error}"))),
        }
    }
}

/// Runs a command that works on a store.
pub(super) fn block_on<T>(work: impl Future<Output = Result<T, CommandError>>) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|why| CommandError::Unavailable(why.to_string()))?.block_on(work)
}

/// Reports to standard error that one of two stores could not be reached.
struct StderrObserver;

impl Observer for StderrObserver {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        // The command reports unreadable records itself.
        if !matches!(notice, EngineEvent::RecordUnreadable(_)) {
            eprintln!("ibid: {notice}");
        }
    }
}
