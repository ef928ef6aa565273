//! Certificates that a store's URL names: read again when their files change, so that new connections use them without a
//! restart.
//!
//! Invariant: what is in use is made of files that were read together and that fit. Files that do not (one of a pair was
//! replaced before the other) are refused, which is said once, and what was in use stays. Connections that are open
//! are not touched.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use rustls::ClientConfig;
use sha2::{Digest, Sha256};

/// How often the files are looked at between connections, so that whoever replaced them learns what became of it.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// Where they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TlsPaths {
    /// Of those who may vouch for the server; else the system's.
    pub(crate) ca: Option<PathBuf>,
    /// Of the certificate that the server is shown, and of its private key.
    pub(crate) client_cert: Option<(PathBuf, PathBuf)>,
}

/// What is in them, or why it cannot be read.
pub(crate) struct TlsMaterial {
    pub(crate) ca: Option<TlsFile>,
    pub(crate) cert: Option<TlsFile>,
    pub(crate) key: Option<TlsFile>,
}

/// One file, and what is in it.
pub(crate) struct TlsFile {
    path: PathBuf,
    contents: io::Result<Vec<u8>>,
}

/// Makes TLS of what is in the files.
type BuildTlsConfig = dyn Fn(&TlsMaterial) -> Result<ClientConfig, String> + Send + Sync;

/// How TLS is done now.
pub(crate) struct ReloadingTlsConfig {
    /// Whose they are, in the log.
    store: &'static str,
    paths: TlsPaths,
    build_config: Box<BuildTlsConfig>,
    state: Mutex<LoadedTlsConfig>,
}

struct LoadedTlsConfig {
    /// Of what was looked at last, good or not. Written by who looks.
    content_hash: [u8; 32],
    config: Arc<ClientConfig>,
}

impl ReloadingTlsConfig {
    /// Reads the files, and goes on looking at them for as long as somebody has this.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(crate) fn open(
        store: &'static str, files: TlsPaths,
        make: impl Fn(&TlsMaterial) -> Result<ClientConfig, String> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, String> {
        let contents = files.read();
        let state = Mutex::new(LoadedTlsConfig { content_hash: contents.hash(), config: Arc::new(make(&contents)?) });
        let this = Arc::new(Self { store, paths: files, build_config: Box::new(make), state });
        if !this.paths.is_empty() {
            tokio::spawn(poll_for_changes(Arc::downgrade(&this)));
        }
        Ok(this)
    }

    /// What a connection that is made now uses.
    pub(crate) async fn now(&self) -> Arc<ClientConfig> {
        if !self.paths.is_empty() {
            let files = self.paths.clone();
            // It fails only if the runtime ends.
            if let Ok(contents) = tokio::task::spawn_blocking(move || files.read()).await {
                self.apply_changes(&contents);
            }
        }
        self.state.lock().config.clone()
    }

    fn apply_changes(&self, contents: &TlsMaterial) {
        let hash = contents.hash();
        let mut state = self.state.lock();
        if state.content_hash == hash {
            return;
        }
        state.content_hash = hash;
        match (self.build_config)(contents) {
            Ok(config) => {
                state.config = Arc::new(config);
                tracing::info!(store = self.store, "changed certificates are taken up: new connections use them");
            }
            Err(why) => tracing::error!(
                store = self.store,
                %why,
                "changed certificates cannot be used; new connections use those from before"
            ),
        }
    }
}

async fn poll_for_changes(certificates: Weak<ReloadingTlsConfig>) {
    loop {
        tokio::time::sleep(RELOAD_INTERVAL).await;
        let Some(certificates) = certificates.upgrade() else { return };
        certificates.now().await;
    }
}

impl TlsPaths {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn read(&self) -> TlsMaterial {
        let read = |path: &PathBuf| TlsFile { path: path.clone(), contents: std::fs::read(path) };
        TlsMaterial {
            ca: self.ca.as_ref().map(read),
            cert: self.client_cert.as_ref().map(|(cert, _)| read(cert)),
            key: self.client_cert.as_ref().map(|(_, key)| read(key)),
        }
    }
}

impl TlsMaterial {
    /// Tells contents apart without keeping a private key for it.
    fn hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for content in [&self.ca, &self.cert, &self.key].into_iter().flatten() {
            match &content.contents {
                Ok(bytes) => {
                    hash.update((bytes.len() as u64).to_le_bytes());
                    hash.update(bytes);
                }
                Err(why) => {
                    hash.update(u64::MAX.to_le_bytes());
                    hash.update(why.to_string());
                }
            }
        }
        hash.finalize().into()
    }
}

impl TlsFile {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// # Errors
    /// Why there is nothing, as the system says it.
    pub(crate) fn bytes(&self) -> Result<&[u8], &io::Error> {
        self.contents.as_deref()
    }
}

impl fmt::Debug for ReloadingTlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReloadingTlsConfig")
            .field("store", &self.store)
            .field("files", &self.paths)
            .finish_non_exhaustive()
    }
}
