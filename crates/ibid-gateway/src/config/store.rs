//! The `[store]` table: defaults, contradictions, and how commands read it without the rest of the file.

use std::{fmt, path::PathBuf, time::Duration};

use ibid_stores::{StoreConfig, StoreConfigError, StoreKind, StoreOptions};

use super::{
    args::{config_path, read_override},
    env::Env,
    error::ConfigError,
    read_table,
    secret::RedactedStoreUrl,
    toml_node::{Scalar, tables},
    values::{ByteSize, Positive},
};

pub const DEFAULT_STORE: &str = "embedded:ibid-data";
const DEFAULT_PREFIX: &str = "idempotency";
/// Maximum of `wait_replicas`. A larger number is a mistake.
const MAX_WAIT_REPLICAS: usize = 100;

tables! {
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct StoreSettings {
        /// Shown without its password.
        pub url: RedactedStoreUrl = RedactedStoreUrl::from_text(DEFAULT_STORE).expect("it is valid"),
        /// With a Redis: the PostgreSQL authority, which also serves while Redis is down.
        pub fallback: Option<RedactedStoreUrl>,
        /// With a PostgreSQL: the Redis front, which makes it faster.
        pub cache: Option<RedactedStoreUrl>,
        /// Prefix of the names of its keys.
        pub prefix: String = DEFAULT_PREFIX.into(),
        pub timeout: Duration as Positive = Duration::from_millis(500),
        /// Number of Redis replicas that must acknowledge a write.
        pub wait_replicas: usize,
        /// Maximum bytes of completed answers in this process's cache. `None`: the store's default.
        pub local_cache: Option<u64> as ByteSize,
        /// Whether records are compressed. `None`: the store's default.
        pub compress: Option<bool>,
        /// For `ibid migrate`: the SQL expression of the user whose rows row-level security shows.
        pub rls_user: Option<String>,
        /// Interval between two removals of expired entries.
        pub sweep_every: Duration as Positive = Duration::from_secs(60),
        /// Whether a warning of the store's guarantees prevents the start.
        pub strict: bool,
    }
}

/// The store that a command works on. Flags override variables, and variables the file.
#[derive(Clone, Default, clap::Args)]
pub struct StoreSelection {
    /// The store, such as redis://127.0.0.1:6379/0 [env: IBID_STORE]
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// The gateway's configuration file; only its tables store and seal are read [env: IBID_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Omits the store, whose URL may contain a password.
impl fmt::Debug for StoreSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let store = self.store.as_ref().map(|_| "****");
        f.debug_struct("StoreSelection").field("config", &self.config).field("store", &store).finish()
    }
}

impl StoreSettings {
    /// Reads only the `[store]` table, so that an operator of the store does not need the gateway's secrets.
    pub fn load(choice: &StoreSelection, env: &Env<'_>) -> Result<Self, ConfigError> {
        let path = config_path(choice.config.as_ref(), env)?;
        let url: Option<RedactedStoreUrl> = read_override(&choice.store, "store", env)?;
        if path.is_none() && url.is_none() {
            let what = "missing; name the store by --store, by IBID_STORE, or by the gateway's --config";
            return Err(ConfigError::new("--store", "", what));
        }
        let read = || {
            let file = path.as_deref().map(|path| read_table::<Self>(path, env, "store")).transpose()?;
            let store = file.and_then(|(store, _)| store).unwrap_or_default();
            Self { url: url.unwrap_or(store.url), ..store }.check()
        };
        read().map_err(|why| why.in_file(path.as_deref()))
    }

    pub fn store_config(&self) -> StoreConfig {
        self.try_store_config().expect("checked when it was read")
    }

    fn try_store_config(&self) -> Result<StoreConfig, StoreConfigError> {
        StoreConfig::new(StoreOptions {
            url: self.url.store_url(),
            fallback: self.fallback.as_ref().map(RedactedStoreUrl::store_url),
            cache: self.cache.as_ref().map(RedactedStoreUrl::store_url),
            prefix: self.prefix.clone(),
            timeout: self.timeout,
            wait_replicas: self.wait_replicas as u32,
            local_cache: self.local_cache,
        })
    }

    /// Checks the settings against each other.
    pub(super) fn check(self) -> Result<Self, ConfigError> {
        let wrong = |name: &str, what: String| Err(ConfigError::at(format!("store.{name}"), what));
        let prefix = &self.prefix;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':');
        if prefix.is_empty() || prefix.len() > 64 || !prefix.bytes().all(plain) {
            let allowed = "allowed are 1 to 64 letters, digits, \"_\" \"-\" \".\" \":\"";
            return wrong("prefix", format!("{prefix:?} is no prefix; {allowed}"));
        }
        if self.wait_replicas > MAX_WAIT_REPLICAS {
            let what = format!("found {}; allowed is 0 to {MAX_WAIT_REPLICAS}", self.wait_replicas);
            return wrong("wait_replicas", what);
        }
        if let Some(user) = &self.rls_user {
            if user.trim().is_empty() || user.contains(';') {
                let allowed = "allowed is an SQL expression such as \"auth.uid()\"";
                return wrong("rls_user", format!("found {user:?}; {allowed}"));
            }
            if self.authority_url().store_url().kind() != StoreKind::Postgres {
                return wrong("rls_user", "only a postgres store has row-level security".into());
            }
        }
        match self.try_store_config() {
            Ok(_) => Ok(self),
            Err(StoreConfigError { key, message }) => wrong(key, message),
        }
    }

    /// Whether records that are not sealed are compressed. PostgreSQL compresses by itself, and its SQL functions can
    /// only read uncompressed records.
    pub fn compresses(&self) -> bool {
        self.compress.unwrap_or_else(|| self.authority_url().store_url().kind() != StoreKind::Postgres)
    }

    pub fn authority_url(&self) -> &RedactedStoreUrl {
        self.fallback.as_ref().unwrap_or(&self.url)
    }
}
