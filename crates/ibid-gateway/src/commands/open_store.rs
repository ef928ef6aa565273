//! A store, opened by somebody who is not a gateway.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use ibid::{
    EngineEvent, Observer,
    store::{Address, ErrorKind, Store, StoreError},
};
use ibid_stores::{OpenedStore, StoreUrl, seal::Sealer};

use crate::{
    config::{self, ConfigError},
    records::RecordLookupError,
};

/// How long one call may take: people wait longer than requests do.
const STORE_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A server that cannot be reached is tried for so long, with this pause between.
const CONNECT_RETRY_PERIOD: Duration = Duration::from_secs(2);
const CONNECT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Why a command on a store did not do what it was told. `Display` is the line for whoever told it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// There is nothing there, or something else than was thought. Nothing was changed.
    #[error("ibid: {0}")]
    Conflict(String),
    /// It cannot be asked for like this.
    #[error("ibid: {0}")]
    Usage(String),
    /// A setting is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store cannot be used.
    #[error("ibid: {0}")]
    Store(String),
    /// Nobody takes what is printed.
    #[error("ibid: cannot print: {0}")]
    Output(#[from] io::Error),
}

impl CommandError {
    /// The exit code, after sysexits where it has one.
    pub fn code(&self) -> u8 {
        match self {
            Self::Conflict(_) | Self::Output(_) => 1,
            Self::Usage(_) | Self::Config(_) => 64,
            Self::Store(_) => 69,
        }
    }
}

/// A call that failed.
impl From<StoreError> for CommandError {
    fn from(error: StoreError) -> Self {
        let then = match error.kind {
            ErrorKind::Ambiguous => "; look before you try again",
            _ => "",
        };
        Self::Store(format!("{error}{then}"))
    }
}

/// What was looked for is not there.
impl From<RecordLookupError> for CommandError {
    fn from(why: RecordLookupError) -> Self {
        match why {
            RecordLookupError::Store(error) => error.into(),
            why => Self::Conflict(why.to_string()),
        }
    }
}

/// Opens what the settings name, as it holds things, and makes sure that it answers.
pub(super) async fn open_store(settings: &config::StoreSettings) -> Result<Arc<dyn Store>, CommandError> {
    Ok(open_sealed_store(settings, None).await?.store)
}

/// The same with its seal opened, if there are keys.
pub(super) async fn open_sealed_store(
    settings: &config::StoreSettings, sealing: Option<Sealer>,
) -> Result<OpenedStore, CommandError> {
    let layout = settings.store_config().for_operators(STORE_CALL_TIMEOUT).with_sealer(sealing);
    let url = &settings.url;
    let cannot = |why: &str| CommandError::Store(format!("the store {url} cannot be opened: {why}"));
    match layout.authority() {
        StoreUrl::Memory(_) => {
            let why = "memory: lives in the process of its gateway, where no other command can reach it; \
                       ask that gateway (keys --admin URL), or name a store that is on a disk or on a server";
            return Err(CommandError::Usage(why.into()));
        }
        // A gateway makes a store that is not there. Whoever wants to look at one has mistyped its path.
        StoreUrl::Embedded(path, _) if !path.is_dir() => return Err(cannot("there is no such folder")),
        _ => {}
    }
    let opened = layout.open(Arc::new(StderrObserver)).await.map_err(|why| {
        let then = if why.contains("in use by") { "; ask that gateway instead (--admin URL), or stop it" } else { "" };
        cannot(&format!("{why}{then}"))
    })?;
    let nowhere = Address([0; 32]);
    let since = Instant::now();
    loop {
        match opened.store.get(&nowhere).await {
            Ok(_) => return Ok(opened),
            // It may still be connecting.
            Err(error) if error.kind == ErrorKind::NotApplied && since.elapsed() < CONNECT_RETRY_PERIOD => {
                tokio::time::sleep(CONNECT_RETRY_PAUSE).await;
            }
            Err(error) => return Err(CommandError::Store(format!("the store {url} cannot be used: {error}"))),
        }
    }
}

/// Runs a command that works on a store.
pub(super) fn block_on<T>(work: impl Future<Output = Result<T, CommandError>>) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|why| CommandError::Store(why.to_string()))?.block_on(work)
}

/// Says aside when one of two stores could not be reached.
struct StderrObserver;

impl Observer for StderrObserver {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        // What does not open is said by whoever looks at it.
        if !matches!(notice, EngineEvent::RecordUnreadable(_)) {
            eprintln!("ibid: {notice}");
        }
    }
}
