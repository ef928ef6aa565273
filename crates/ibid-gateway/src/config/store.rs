//! The `[store]` table: defaults, contradictions, and how commands read it without the rest of the file.

use std::{
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use ibid_stores::{StoreConfig, StoreConfigError, StoreKind, StoreOptions};
use serde::Deserialize;

use super::{
    args::{non_empty_variable, override_value},
    deserializer,
    env::{Env, ValueResolver},
    error::ConfigError,
    raw,
    secret::RedactedStoreUrl,
    validate::{ErrorForKey, parse_default, require_non_zero, value_or},
};

/// The store if none is configured.
pub const DEFAULT_STORE: &str = "embedded:ibid-data";
const DEFAULT_PREFIX: &str = "idempotency";
/// Maximum of `wait_replicas`. A larger number is a mistake.
const MAX_WAIT_REPLICAS: usize = 100;

/// Where records are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreSettings {
    /// Shown without its password.
    pub url: RedactedStoreUrl,
    /// With a Redis: the PostgreSQL authority, which also serves while Redis is down.
    pub fallback: Option<RedactedStoreUrl>,
    /// With a PostgreSQL: the Redis front, which makes it faster.
    pub cache: Option<RedactedStoreUrl>,
    /// Prefix of the names of its keys.
    pub prefix: String,
    /// Timeout of one store call.
    pub timeout: Duration,
    /// Number of Redis replicas that must acknowledge a write.
    pub wait_replicas: u32,
    /// Maximum bytes of completed answers in this process's cache. `None`: the store's default.
    pub local_cache: Option<u64>,
    /// Whether records are compressed. `None`: the store's default.
    pub compress: Option<bool>,
    /// For `ibid migrate`: the SQL expression of the user whose rows row-level security shows.
    pub rls_user: Option<String>,
    /// Interval between two removals of expired entries.
    pub sweep_every: Duration,
    /// Whether a warning of the store's guarantees prevents the start.
    pub strict: bool,
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

impl StoreSelection {
    /// The path of the configuration file, if one is named.
    pub(super) fn config_path(&self, env: &Env<'_>) -> Result<Option<PathBuf>, ConfigError> {
        match &self.config {
            Some(path) => Ok(Some(path.clone())),
            None => Ok(non_empty_variable(env, "IBID_CONFIG")?.map(PathBuf::from)),
        }
    }
}

impl StoreSettings {
    /// Reads only the `[store]` table, so that an operator of the store does not need the gateway's secrets.
    ///
    /// # Errors
    /// Returns the first invalid setting as one line, or that no store is named.
    pub fn load(choice: &StoreSelection, env: &Env<'_>) -> Result<Self, ConfigError> {
        let path = choice.config_path(env)?;
        let mut file = match &path {
            None => raw::RawStore::default(),
            Some(path) => {
                let folder = path.parent().unwrap_or(Path::new("")).to_owned();
                read_table(&super::read_file(path)?, path, &ValueResolver::new(env, folder, None))?
            }
        };
        override_value(&mut file.url, &choice.store, "store", env)?;
        if path.is_none() && file.url.is_none() {
            let what = "missing; name the store by --store, by IBID_STORE, or by the gateway's --config";
            return Err(ConfigError::new("--store", "", what));
        }
        let origin = path.map(|path| path.display().to_string()).unwrap_or_default();
        build_store(file, &|key, what| ConfigError::new(&origin, key, what))
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
            wait_replicas: self.wait_replicas,
            local_cache: self.local_cache,
        })
    }

    /// Whether records that are not sealed are compressed. PostgreSQL compresses by itself, and its SQL functions can
    /// only read uncompressed records.
    pub fn compresses(&self) -> bool {
        self.compress.unwrap_or_else(|| self.authority_url().store_url().kind() != StoreKind::Postgres)
    }

    /// The URL of the authority.
    pub fn authority_url(&self) -> &RedactedStoreUrl {
        self.fallback.as_ref().unwrap_or(&self.url)
    }
}

pub(super) fn build_store(file: raw::RawStore, wrong: ErrorForKey<'_>) -> Result<StoreSettings, ConfigError> {
    let prefix = value_or(file.prefix, DEFAULT_PREFIX.into());
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':');
    if prefix.is_empty() || prefix.len() > 64 || !prefix.bytes().all(plain) {
        let what = format!("{prefix:?} is no prefix; allowed are 1 to 64 letters, digits, \"_\" \"-\" \".\" \":\"");
        return Err(wrong("store.prefix", &what));
    }
    let wait_replicas = value_or(file.wait_replicas, 0);
    if wait_replicas > MAX_WAIT_REPLICAS {
        return Err(wrong(
            "store.wait_replicas",
            &format!("found {wait_replicas}; allowed is 0 to {MAX_WAIT_REPLICAS}"),
        ));
    }
    let store = StoreSettings {
        url: value_or::<RedactedStoreUrl>(file.url, parse_default(DEFAULT_STORE)),
        fallback: file.fallback.map(|written| written.0),
        cache: file.cache.map(|written| written.0),
        prefix,
        timeout: require_non_zero("store.timeout", file.timeout, Duration::from_millis(500), wrong)?,
        wait_replicas: wait_replicas as u32,
        local_cache: file.local_cache.map(|written| written.0.0),
        compress: file.compress.map(|written| written.0),
        rls_user: file.rls_user.map(|written| written.0),
        sweep_every: require_non_zero("store.sweep_every", file.sweep_every, Duration::from_secs(60), wrong)?,
        strict: value_or(file.strict, false),
    };
    if let Some(user) = &store.rls_user {
        let such_as = "allowed is an SQL expression such as \"auth.uid()\"";
        if user.trim().is_empty() || user.contains(';') {
            return Err(wrong("store.rls_user", &format!("found {user:?}; {such_as}")));
        }
        if store.authority_url().store_url().kind() != StoreKind::Postgres {
            return Err(wrong("store.rls_user", "only a postgres store has row-level security"));
        }
    }
    match store.try_store_config() {
        Ok(_) => Ok(store),
        Err(StoreConfigError { key, message: what }) => Err(wrong(&format!("store.{key}"), &what)),
    }
}

/// Reads only the `[store]` table of a file.
fn read_table(text: &str, path: &Path, lookup: &ValueResolver<'_>) -> Result<raw::RawStore, ConfigError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct StoreTable {
        store: raw::RawStore,
    }
    let origin = path.display().to_string();
    let mut table: toml::Table = text.parse().map_err(|why| super::syntax_error(&origin, text, &why))?;
    // Ignores the other tables: they may name variables that only the gateway has.
    table.retain(|key, _| key == "store");
    let read = StoreTable::deserialize(deserializer::TomlNode { value: &toml::Value::Table(table), lookup });
    read.map(|only| only.store).map_err(|wrong| {
        let (key, what) = wrong.into_key_and_message();
        ConfigError::new(origin, key, what)
    })
}
