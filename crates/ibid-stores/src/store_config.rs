//! Complete store configuration: one store or two tiered stores, with an optional local cache of completed answers.
//!
//! | settings | result |
//! |---|---|
//! | `url` | a single store |
//! | `url = redis://…`, `fallback = postgres://…` | PostgreSQL is the authority; either store works without the other |
//! | `url = postgres://…`, `cache = redis://…` | PostgreSQL is the authority; Redis only makes it faster |
//!
//! Invariant: every [`StoreConfig`] can be opened. [`StoreConfig::new`] rejects contradicting settings and names the
//! key that is wrong.

use std::{fmt, sync::Arc, time::Duration};

use ibid::{Observer, store::Store};

#[cfg(all(feature = "redis", feature = "postgres"))]
use self::postgres_generation::PostgresGeneration;
#[cfg(feature = "seal")]
use crate::seal::{SealedStore, Sealer};
use crate::{
    RemoteOptions, StoreKind, StoreSetupError, StoreUrl,
    local_cache::{AnswerCache, LocalCache},
};
#[cfg(all(feature = "redis", feature = "postgres"))]
use crate::{
    ServerUrl,
    postgres::Postgres,
    redis::Redis,
    tiered::{TieredMode, TieredStore},
};

#[cfg(all(feature = "redis", feature = "postgres"))]
mod postgres_generation;

/// Default size of the local cache for remote stores, in bytes.
const DEFAULT_LOCAL_CACHE_BYTES: u64 = 64 << 20;

/// Store settings as written in a configuration.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The store, or the front store if `fallback` is set.
    pub url: StoreUrl,
    /// Authority behind a Redis `url`. Claims use it alone while Redis is unreachable.
    pub fallback: Option<StoreUrl>,
    /// Redis in front of a PostgreSQL `url`. It never decides a claim.
    pub cache: Option<StoreUrl>,
    /// Prefix of Redis key names.
    pub prefix: String,
    /// Deadline of one call to a server.
    pub timeout: Duration,
    /// Number of Redis replicas that must acknowledge a write.
    pub wait_replicas: u32,
    /// Maximum bytes of completed answers cached in this process. `None` uses the default of the store.
    pub local_cache: Option<u64>,
}

/// Validated configuration of stores that are not open yet.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    stores: StoreTopology,
    remote: RemoteOptions,
    /// Maximum bytes of cached answers, or `None` without a local cache. 0 keeps shared waiting only.
    local_cache: Option<u64>,
    #[cfg(feature = "seal")]
    sealer: Option<Sealer>,
}

#[derive(Debug, Clone)]
enum StoreTopology {
    Single(StoreUrl),
    #[cfg(all(feature = "redis", feature = "postgres"))]
    Tiered {
        front: ServerUrl,
        authority: ServerUrl,
        mode: TieredMode,
    },
}

/// The stores of an opened [`StoreConfig`].
#[derive(Debug, Clone)]
pub struct OpenedStore {
    /// The complete store, including local cache and encryption.
    pub store: Arc<dyn Store>,
    #[cfg(feature = "seal")]
    /// The encrypting layer, used to re-encrypt stored data under another key. `None` if encryption is off.
    pub sealed: Option<Arc<SealedStore>>,
    /// The underlying stores, for status reports. The authority comes last.
    pub members: Vec<StoreMember>,
}

/// One underlying store, without local cache and encryption.
#[derive(Debug, Clone)]
pub struct StoreMember {
    /// The underlying store.
    pub store: Arc<dyn Store>,
    /// The store's role in the configuration.
    pub role: StoreRole,
}

/// The role of a store within a [`StoreConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreRole {
    /// Decides every claim. A single store is always the authority.
    Authority,
    /// Is called first, and decides alone while the authority is unreachable: a Redis with a `fallback`.
    Front,
    /// Is called first, and never decides: a `cache`.
    Cache,
}

/// A combination of settings that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {message}")]
pub struct StoreConfigError {
    /// The setting that is wrong.
    pub key: &'static str,
    /// The value found and the values allowed.
    pub message: String,
}

impl StoreConfig {
    /// Validates the settings.
    ///
    /// # Errors
    /// Returns an error if settings contradict each other.
    pub fn new(parts: StoreOptions) -> Result<Self, StoreConfigError> {
        let StoreOptions { url, fallback, cache, prefix, timeout, wait_replicas, local_cache } = parts;
        let kind = url.kind();
        let wrong = |key: &'static str, message: String| Err(StoreConfigError { key, message });
        if wait_replicas > 0 && kind != StoreKind::Redis {
            let what = format!(
                "found {wait_replicas}; only a redis store.url has replicas to wait for, and store.url is {}",
                with_article(kind)
            );
            return wrong("wait_replicas", what);
        }
        let instead = |has: &str, may: &str| match kind {
            StoreKind::Redis | StoreKind::Postgres => {
                format!("{has}; store.url is {}, which may have a {may}", with_article(kind))
            }
            StoreKind::Memory | StoreKind::Embedded => format!("{has}; store.url is {}", with_article(kind)),
        };
        if fallback.is_some() && kind != StoreKind::Redis {
            return wrong("fallback", instead("only a redis store.url has a fallback", "cache"));
        }
        if cache.is_some() && kind != StoreKind::Postgres {
            return wrong("cache", instead("only a postgres store.url has a cache", "fallback"));
        }
        let stores = match (url, fallback, cache) {
            #[cfg(all(feature = "redis", feature = "postgres"))]
            (StoreUrl::Redis(first), Some(StoreUrl::Postgres(last)), _) => {
                StoreTopology::Tiered { front: first, authority: last, mode: TieredMode::Loose }
            }
            #[cfg(all(feature = "redis", feature = "postgres"))]
            (StoreUrl::Postgres(last), _, Some(StoreUrl::Redis(first))) => {
                StoreTopology::Tiered { front: first, authority: last, mode: TieredMode::Strict }
            }
            (_, Some(other), _) => {
                let such_as = "allowed is one such as \"postgres://ibid@127.0.0.1/ibid\"";
                return wrong("fallback", format!("found {}; {such_as}", with_article(other.kind())));
            }
            (_, _, Some(other)) => {
                let such_as = "allowed is one such as \"redis://127.0.0.1:6379/0\"";
                return wrong("cache", format!("found {}; {such_as}", with_article(other.kind())));
            }
            (url, None, None) => StoreTopology::Single(url),
        };
        let local_cache = match local_cache {
            Some(0) | None if !kind.is_shared() => None,
            wanted => Some(wanted.unwrap_or(DEFAULT_LOCAL_CACHE_BYTES)),
        };
        Ok(Self {
            stores,
            remote: RemoteOptions { prefix, timeout, wait_replicas, answer_cache: None },
            local_cache,
            #[cfg(feature = "seal")]
            sealer: None,
        })
    }

    #[cfg(feature = "seal")]
    /// Encrypts everything that the stores persist. The local cache holds plain text, in this process only.
    #[must_use]
    pub fn with_sealer(mut self, sealing: Option<Sealer>) -> Self {
        self.sealer = sealing;
        self
    }

    /// Adapts the configuration for administrative tools: no local cache, and a timeout of at least `patience`.
    #[must_use]
    pub fn for_operators(mut self, patience: Duration) -> Self {
        self.local_cache = None;
        self.remote.timeout = self.remote.timeout.max(patience);
        self
    }

    /// Opens the stores. `observer` receives an event when a store falls back to the other one, and when a sealed
    /// record cannot be decrypted.
    ///
    /// # Errors
    /// Returns the reason if a store cannot be opened. An unreachable server is not an error; see [`StoreUrl::open`].
    pub async fn open(&self, observer: Arc<dyn Observer>) -> Result<OpenedStore, StoreSetupError> {
        let answers = self.local_cache.map(|bytes| AnswerCache::new(usize::try_from(bytes).unwrap_or(usize::MAX)));
        // An empty cache needs no invalidations.
        let invalidated = answers.clone().filter(|_| self.local_cache != Some(0));
        let with = RemoteOptions { answer_cache: invalidated, ..self.remote.clone() };
        let (store, members): (Arc<dyn Store>, _) = match &self.stores {
            StoreTopology::Single(named) => {
                let store = named.open(&with).await?;
                (store.clone(), vec![StoreMember { store, role: StoreRole::Authority }])
            }
            #[cfg(all(feature = "redis", feature = "postgres"))]
            StoreTopology::Tiered { front: first, authority: last, mode } => {
                // Every forget goes to the authority, so only its notifications are needed.
                let first = Redis::open(first.expose(), self.remote.clone()).await;
                let first = Arc::new(first.map_err(|why| format!("the Redis store: {why}"))?);
                let last = Postgres::open(last.expose(), with).await;
                let last = Arc::new(last.map_err(|why| format!("the PostgreSQL store: {why}"))?);
                let generations = Arc::new(PostgresGeneration::new(first.clone(), last.clone()));
                let role = if *mode == TieredMode::Loose { StoreRole::Front } else { StoreRole::Cache };
                let members = vec![
                    StoreMember { store: first.clone(), role },
                    StoreMember { store: last.clone(), role: StoreRole::Authority },
                ];
                let tiered = TieredStore::new(first, last, *mode, observer.clone(), Some(generations));
                tiered.follow_generation().await;
                (Arc::new(tiered), members)
            }
        };
        let mut opened = OpenedStore::plain(store);
        #[cfg(feature = "seal")]
        if let Some(sealer) = &self.sealer {
            opened = OpenedStore::sealed(SealedStore::new(opened.store, sealer.clone(), observer));
        }
        #[cfg(not(feature = "seal"))]
        let _ = observer;
        opened.members = members;
        if let Some(answers) = answers {
            opened.store = Arc::new(LocalCache::new(opened.store, answers));
        }
        Ok(opened)
    }

    /// Returns the URL of the authority.
    pub fn authority(&self) -> StoreUrl {
        match &self.stores {
            StoreTopology::Single(named) => named.clone(),
            #[cfg(all(feature = "redis", feature = "postgres"))]
            StoreTopology::Tiered { authority: last, .. } => StoreUrl::Postgres(last.clone()),
        }
    }

    /// Returns the maximum bytes of completed answers cached in this process.
    pub fn local_cache_bytes(&self) -> u64 {
        self.local_cache.unwrap_or(0)
    }

    /// Describes the guarantees in one line.
    pub fn guarantee_summary(&self) -> String {
        match &self.stores {
            StoreTopology::Single(named) => match self.remote.wait_replicas {
                0 => named.guarantee_summary().into(),
                n => format!("{}; {n} {} must have it first", named.guarantee_summary(), if n == 1 { "replica" } else { "replicas" }),
            },
            #[cfg(all(feature = "redis", feature = "postgres"))]
            StoreTopology::Tiered { mode: TieredMode::Strict, .. } => {
                format!("{}; losing Redis changes speed only", self.authority().guarantee_summary())
            }
            #[cfg(all(feature = "redis", feature = "postgres"))]
            StoreTopology::Tiered { mode: TieredMode::Loose, .. } => "at most one run per key, except in windows, which are counted: one \
                 gateway sees only Redis and another only PostgreSQL; Redis loses what PostgreSQL has not seen, or is left \
                 alone without it"
                .into(),
        }
    }
}

impl StoreRole {
    /// Returns the role's name in the admin API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Authority => "authority",
            Self::Front => "front",
            Self::Cache => "cache",
        }
    }
}

impl OpenedStore {
    /// Wraps a single store without encryption.
    pub fn plain(store: Arc<dyn Store>) -> Self {
        let members = vec![StoreMember { store: store.clone(), role: StoreRole::Authority }];
        Self {
            members,
            store,
            #[cfg(feature = "seal")]
            sealed: None,
        }
    }

    #[cfg(feature = "seal")]
    /// Wraps a single encrypted store.
    pub fn sealed(sealed: SealedStore) -> Self {
        let sealed = Arc::new(sealed);
        Self { sealed: Some(sealed.clone()), ..Self::plain(sealed) }
    }
}

/// Prefixes the kind with its article: `an embedded store`.
fn with_article(kind: StoreKind) -> impl fmt::Display {
    let article = if kind == StoreKind::Embedded { "an" } else { "a" };
    format!("{article} {kind} store")
}
