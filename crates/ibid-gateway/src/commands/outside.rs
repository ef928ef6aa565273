//! A store, opened by somebody who is not a gateway.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use ibid::{
    Notice, Observer,
    store::{Address, ErrorKind, Store, StoreError},
};
use ibid_stores::{Named, Opened, seal::Sealing};

use crate::{
    config::{self, ConfigError},
    records::NotFound,
};

/// How long one call may take: people wait longer than requests do.
const PATIENCE: Duration = Duration::from_secs(10);
/// A server that cannot be reached is tried for so long, with this pause between.
const CONNECTING: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(100);

/// Why a command on a store did not do what it was told. `Display` is the line for whoever told it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// There is nothing there, or something else than was thought. Nothing was changed.
    #[error("ibid: {0}")]
    NotSo(String),
    /// It cannot be asked for like this.
    #[error("ibid: {0}")]
    Usage(String),
    /// A setting is wrong.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// The store cannot be used.
    #[error("ibid: {0}")]
    Store(String),
    /// Nobody takes what is printed.
    #[error("ibid: cannot print: {0}")]
    Print(#[from] io::Error),
}

impl Failed {
    /// The exit code, after sysexits where it has one.
    pub fn code(&self) -> u8 {
        match self {
            Self::NotSo(_) | Self::Print(_) => 1,
            Self::Usage(_) | Self::Setting(_) => 64,
            Self::Store(_) => 69,
        }
    }
}

/// A call that failed.
impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        let then = match error.kind {
            ErrorKind::Ambiguous => "; look before you try again",
            _ => "",
        };
        Self::Store(format!("{error}{then}"))
    }
}

/// What was looked for is not there.
impl From<NotFound> for Failed {
    fn from(why: NotFound) -> Self {
        match why {
            NotFound::Store(error) => error.into(),
            why => Self::NotSo(why.to_string()),
        }
    }
}

/// Opens what the settings name, as it holds things, and makes sure that it answers.
pub(super) async fn open(settings: &config::Store) -> Result<Arc<dyn Store>, Failed> {
    Ok(open_sealed(settings, None).await?.store)
}

/// The same with its seal opened, if there are keys.
pub(super) async fn open_sealed(settings: &config::Store, sealing: Option<Sealing>) -> Result<Opened, Failed> {
    let layout = settings.layout().for_operators(PATIENCE).sealed(sealing);
    let url = &settings.url;
    let cannot = |why: &str| Failed::Store(format!("the store {url} cannot be opened: {why}"));
    match layout.decides() {
        Named::Memory(_) => {
            let why = "memory: lives in the process of its gateway, where no other command can reach it; \
                       ask that gateway (keys --admin URL), or name a store that is on a disk or on a server";
            return Err(Failed::Usage(why.into()));
        }
        // A gateway makes a store that is not there. Whoever wants to look at one has mistyped its path.
        Named::Embedded(path, _) if !path.is_dir() => return Err(cannot("there is no such folder")),
        _ => {}
    }
    let opened = layout.open(Arc::new(Aside)).await.map_err(|why| {
        let then = if why.contains("in use by") { "; ask that gateway instead (--admin URL), or stop it" } else { "" };
        cannot(&format!("{why}{then}"))
    })?;
    let nowhere = Address([0; 32]);
    let since = Instant::now();
    loop {
        match opened.store.get(&nowhere).await {
            Ok(_) => return Ok(opened),
            // It may still be connecting.
            Err(error) if error.kind == ErrorKind::NotApplied && since.elapsed() < CONNECTING => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(Failed::Store(format!("the store {url} cannot be used: {error}"))),
        }
    }
}

/// Runs a command that works on a store.
pub(super) fn block_on<T>(work: impl Future<Output = Result<T, Failed>>) -> Result<T, Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|why| Failed::Store(why.to_string()))?.block_on(work)
}

/// Says aside when one of two stores could not be reached.
struct Aside;

impl Observer for Aside {
    fn noticed(&self, notice: &Notice<'_>) {
        // What does not open is said by whoever looks at it.
        if !matches!(notice, Notice::Unreadable(_)) {
            eprintln!("ibid: {notice}");
        }
    }
}
