//! The tables `[store]` and `[seal]` (the encryption of records and the secret of addresses): defaults, contradictions, and
//! how commands read them without the rest of the file.

use std::{fmt, path::PathBuf, time::Duration};

use data_encoding::BASE64;
use ibid::scope::AddressSecret;
use ibid_stores::{
    StoreConfig, StoreConfigError, StoreKind, StoreOptions,
    seal::{SealKey, SealOptions, Sealer},
};

use super::{
    args::{config_path, read_override},
    env::Env,
    error::ConfigError,
    raw, read_table,
    secret::{RedactedStoreUrl, Secret},
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

const ALLOWED_KEY: &str = "allowed are 32 random bytes in base64, as `openssl rand -base64 32` prints them";

/// How records are sealed. `Debug` shows no key and no secret.
#[derive(Debug, Clone)]
pub struct SealSettings {
    /// The first key seals; all keys open. Empty: only addresses are keyed.
    keys: Vec<SealKey>,
    /// Base64 of 32 bytes.
    address_secret: Secret,
    /// Whether a reader of the store can test guesses of keys.
    pub(super) plain_addresses: bool,
    pub(super) rules: SealOptions,
    /// Shared with the stores and the journal that use it.
    sealing: Option<Sealer>,
}

impl SealSettings {
    /// Reads only the `[seal]` table of the file that `choice` names. `None` if there is no such table.
    pub fn load(choice: &StoreSelection, env: &Env<'_>) -> Result<Option<Self>, ConfigError> {
        let Some(path) = config_path(choice.config.as_ref(), env)? else { return Ok(None) };
        let read = || {
            let (seal, file) = read_table(&path, env, "seal")?;
            let compress = file.get("store").and_then(|store| store.get("compress")).and_then(toml::Value::as_bool);
            seal.map(|seal| build_seal(seal, compress.unwrap_or(true))).transpose()
        };
        read().map_err(|why: ConfigError| why.in_file(Some(&path)))
    }

    /// The sealer of stores and the journal; `None` if only addresses are keyed. A reload changes its keys, not the
    /// sealer.
    pub fn sealing(&self) -> Option<Sealer> {
        self.sealing.clone()
    }

    /// The secret that keys addresses, unless addresses are plain.
    pub fn address_secret(&self) -> Option<AddressSecret> {
        (!self.plain_addresses)
            .then(|| AddressSecret::new(decode_key(&self.address_secret).expect("checked when it was read")))
    }

    /// Describes the keys by name, and the options, for people.
    pub fn description(&self) -> String {
        let mut parts = Vec::new();
        if let [first, others @ ..] = &self.keys[..] {
            let others = others.iter().map(|key| format!(", {} (opens)", key.id()));
            parts.push(format!("keys {} (seals, opens){}", first.id(), others.collect::<String>()));
            let plain = if self.rules.accept_plain { "accepted" } else { "refused" };
            parts.push(format!("what is not sealed is {plain}"));
        }
        parts.push(format!("addresses are {}", if self.plain_addresses { "plain" } else { "keyed" }));
        parts.join("; ")
    }

    /// Takes over the open sealer of `before`. [`activate_keys`](Self::activate_keys) installs the keys of this
    /// configuration.
    pub(crate) fn reuse_sealing(&mut self, before: &Self) {
        if self.sealing.is_some() {
            self.sealing.clone_from(&before.sealing);
        }
    }

    pub(crate) fn activate_keys(&self) {
        if let (Some(sealing), [first, others @ ..]) = (&self.sealing, &self.keys[..]) {
            sealing.rekey(first.clone(), others.to_vec(), self.rules);
        }
    }

    /// Whether the two differ in a setting that is only read at start-up.
    pub(super) fn needs_restart(old: Option<&Self>, new: Option<&Self>) -> bool {
        let fixed = |seal: &Self| (seal.address_secret.clone(), seal.plain_addresses, seal.keys.is_empty());
        old.map(fixed) != new.map(fixed)
    }

    /// Returns one sentence per group of answers that the change forgets.
    pub(super) fn forgotten_answers(old: Option<&Self>, new: Option<&Self>) -> Vec<String> {
        let keyed =
            |seal: Option<&Self>| seal.filter(|seal| !seal.plain_addresses).map(|seal| seal.address_secret.clone());
        let sealed =
            |seal: Option<&Self>| seal.filter(|seal| !seal.keys.is_empty()).map(|seal| seal.address_secret.clone());
        let rekeyed = match (keyed(old), keyed(new)) {
            (None, Some(_)) => Some("keys addresses that were plain"),
            (Some(_), None) => Some("no longer keys addresses"),
            (old, new) => (old != new).then_some("changed"),
        };
        let lost = match (rekeyed, sealed(old), sealed(new)) {
            (Some(what), ..) => {
                let lost = "every address is another, and nothing that is remembered will be found again";
                format!("seal.address_secret {what}: {lost}")
            }
            (None, Some(old), Some(new)) if old != new => {
                "seal.address_secret changed: remembered requests will not be recognised again".into()
            }
            (None, Some(_), None) => "seal.keys removed: what is sealed will not be opened again".into(),
            (None, None, Some(_)) if new.is_some_and(|new| !new.rules.accept_plain) => {
                "seal.keys added, and seal.accept_plain is off: what is remembered in clear will be refused".into()
            }
            _ => return Vec::new(),
        };
        vec![lost]
    }
}

/// Compares the settings, not the sealer.
impl PartialEq for SealSettings {
    fn eq(&self, other: &Self) -> bool {
        let read = |seal: &Self| (seal.keys.clone(), seal.address_secret.clone(), seal.plain_addresses, seal.rules);
        read(self) == read(other)
    }
}

pub(super) fn build_seal(file: raw::RawSeal, compress: bool) -> Result<SealSettings, ConfigError> {
    let wrong = |name: &str, what: &str| ConfigError::at(format!("seal.{name}"), what);
    let raw::RawSeal { keys: written, address_secret, accept_plain, plain_addresses } = file;
    let mut keys: Vec<SealKey> = Vec::new();
    for (at, written) in written.into_iter().enumerate() {
        let wrong = |name: &str, what: &str| wrong(&format!("keys[{}].{name}", at + 1), what);
        let id = written.id.ok_or_else(|| wrong("id", "missing; name the key, such as \"2026-11\""))?;
        let missing = "missing; write one such as \"file:seal-2026-11.key\" or \"env:IBID_SEAL_KEY\"";
        let key = written.key.ok_or_else(|| wrong("key", missing))?;
        let bytes = decode_key(&key).map_err(|what| wrong("key", &what))?;
        let key = SealKey::new(&id, bytes).map_err(|what| wrong("id", &what.to_string()))?;
        if let Some(known) = keys.iter().find(|known| known.id() == id) {
            return Err(wrong("id", &format!("{:?} is there twice; each key has its own", known.id())));
        }
        if let Some(known) = keys.iter().find(|known| known.has_key_bytes(&bytes)) {
            return Err(wrong("key", &format!("it is the same as that of {:?}; each id has its own", known.id())));
        }
        keys.push(key);
    }
    let address_secret = address_secret.ok_or_else(|| {
        let what = "missing; addresses, tags and fingerprints are keyed with it, and it never changes";
        wrong("address_secret", &format!("{what}; {ALLOWED_KEY}"))
    })?;
    let secret = decode_key(&address_secret).map_err(|what| wrong("address_secret", &what))?;
    if let Some(key) = keys.iter().find(|key| key.has_key_bytes(&secret)) {
        let what = format!("it is the same as the key {:?}, which will change one day; it needs its own", key.id());
        return Err(wrong("address_secret", &what));
    }
    let rules = SealOptions { accept_plain, compress };
    if keys.is_empty() && (accept_plain || plain_addresses) {
        let name = if accept_plain { "accept_plain" } else { "plain_addresses" };
        return Err(wrong(name, &format!("without seal.keys nothing is sealed; leave {name:?} out, or add a key")));
    }
    let sealing = match &keys[..] {
        [] => None,
        [first, others @ ..] => Some(Sealer::new(first.clone(), others.to_vec(), &secret, rules)),
    };
    Ok(SealSettings { keys, address_secret, plain_addresses, rules, sealing })
}

/// The error message reveals only the length of the value.
fn decode_key(written: &Secret) -> Result<[u8; 32], String> {
    let bytes = BASE64.decode(written.expose().trim().as_bytes());
    let bytes = bytes.map_err(|_| format!("it is no base64; {ALLOWED_KEY}"))?;
    let bytes = <[u8; 32]>::try_from(bytes).map_err(|bytes| format!("it has {} bytes; {ALLOWED_KEY}", bytes.len()))?;
    if bytes.iter().all(|byte| *byte == bytes[0]) {
        return Err(format!("all its bytes are the same; {ALLOWED_KEY}"));
    }
    Ok(bytes)
}
