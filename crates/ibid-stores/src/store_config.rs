//! A whole configuration of stores: one, or two as one, with finished answers kept near.
//!
//! | written | is |
//! |---|---|
//! | `url` | that store |
//! | `url = redis://…`, `fallback = postgres://…` | PostgreSQL decides; either goes on without the other |
//! | `url = postgres://…`, `cache = redis://…` | PostgreSQL decides; Redis only makes it faster |
//!
//! Invariant: a layout that was made can be opened. What contradicts itself is told when it is made, with the key that
//! is wrong.

use std::{fmt, sync::Arc, time::Duration};

use ibid::{Observer, store::Store};

#[cfg(all(feature = "redis", feature = "postgres"))]
use self::postgres_generation::PostgresGeneration;
use crate::{
    RemoteOptions, StoreKind, StoreUrl,
    local_cache::{AnswerCache, LocalCache},
    seal::{SealedStore, Sealer},
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

/// How much of finished answers is kept near a store on another machine, if nobody says.
const DEFAULT_LOCAL_CACHE_BYTES: u64 = 64 << 20;

/// What a configuration says, as it is written.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The store.
    pub url: StoreUrl,
    /// Decides, and stands in for a Redis that is away.
    pub fallback: Option<StoreUrl>,
    /// Makes a PostgreSQL faster.
    pub cache: Option<StoreUrl>,
    /// What names start with, in Redis.
    pub prefix: String,
    /// The deadline of one call to a server.
    pub timeout: Duration,
    /// How many replicas of a Redis must have what was written.
    pub wait_replicas: u32,
    /// How many bytes of finished answers are kept in this process. None: what is usual for the store.
    pub local_cache: Option<u64>,
}

/// Stores that were checked, and not opened yet.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    stores: StoreTopology,
    remote: RemoteOptions,
    local_cache: LocalCacheMode,
    sealer: Option<Sealer>,
}

#[derive(Debug, Clone)]
enum StoreTopology {
    Single(StoreUrl),
    /// `last` decides.
    #[cfg(all(feature = "redis", feature = "postgres"))]
    Tiered {
        front: ServerUrl,
        authority: ServerUrl,
        mode: TieredMode,
    },
}

/// What is put around the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LocalCacheMode {
    Disabled,
    /// So many bytes of copies. None at all still gathers those who wait for the same key in this process.
    MaxBytes(u64),
}

/// A layout that was opened.
#[derive(Debug, Clone)]
pub struct OpenedStore {
    /// All of it, for whoever uses it.
    pub store: Arc<dyn Store>,
    /// The seal in it, for whoever brings what it holds under another key. `None` if nothing is sealed.
    pub sealed: Option<Arc<SealedStore>>,
    /// The stores that it consists of, for whoever reports the state of each. The one that decides comes last.
    pub members: Vec<StoreMember>,
}

/// One of the stores that a layout consists of, without the copies and the seal around it.
#[derive(Debug, Clone)]
pub struct StoreMember {
    /// The store itself.
    pub store: Arc<dyn Store>,
    /// What it does beside the others.
    pub role: StoreRole,
}

/// What a store does in its layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreRole {
    /// It decides. A single store always does.
    Authority,
    /// It is asked first, and decides alone while the authority cannot be reached: a Redis with a `fallback`.
    Front,
    /// It is asked first, and never decides: a `cache`.
    Cache,
}

/// Two settings that cannot both be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {message}")]
pub struct StoreConfigError {
    /// The key that is wrong.
    pub key: &'static str,
    /// What was found, and what is allowed.
    pub message: String,
}

impl StoreConfig {
    /// Puts the parts together.
    ///
    /// # Errors
    /// What contradicts what.
    pub fn new(parts: StoreOptions) -> Result<Self, StoreConfigError> {
        let StoreOptions { url, fallback, cache, prefix, timeout, wait_replicas, local_cache: near } = parts;
        let kind = url.kind();
        let wrong = |key: &'static str, what: String| Err(StoreConfigError { key, message: what });
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
        let near = match near {
            Some(0) | None if !kind.is_shared() => LocalCacheMode::Disabled,
            near => LocalCacheMode::MaxBytes(near.unwrap_or(DEFAULT_LOCAL_CACHE_BYTES)),
        };
        Ok(Self {
            stores,
            remote: RemoteOptions { prefix, timeout, wait_replicas, answer_cache: None },
            local_cache: near,
            sealer: None,
        })
    }

    /// The same, holding nothing in clear. Of two stores neither does; copies near, in this process, are in clear.
    #[must_use]
    pub fn with_sealer(mut self, sealing: Option<Sealer>) -> Self {
        self.sealer = sealing;
        self
    }

    /// The same, for somebody who looks in from outside: nothing is kept near, and a call may take its time.
    #[must_use]
    pub fn for_operators(mut self, patience: Duration) -> Self {
        self.local_cache = LocalCacheMode::Disabled;
        self.remote.timeout = self.remote.timeout.max(patience);
        self
    }

    /// Opens it. `observer` is told when one of two stores stands in for the other, and what does not open.
    ///
    /// # Errors
    /// Why a store cannot be opened. A server that cannot be reached is no error; see [`StoreUrl::open`].
    pub async fn open(&self, observer: Arc<dyn Observer>) -> Result<OpenedStore, String> {
        let (copies, told) = match self.local_cache {
            LocalCacheMode::Disabled => (None, None),
            // Copies of nothing need not be told what was forgotten.
            LocalCacheMode::MaxBytes(0) => (Some(AnswerCache::new(0)), None),
            LocalCacheMode::MaxBytes(bytes) => {
                let copies = AnswerCache::new(usize::try_from(bytes).unwrap_or(usize::MAX));
                (Some(copies.clone()), Some(copies))
            }
        };
        let with = RemoteOptions { answer_cache: told, ..self.remote.clone() };
        let (store, members): (Arc<dyn Store>, _) = match &self.stores {
            StoreTopology::Single(named) => {
                let store = named.open(&with).await?;
                (store.clone(), vec![StoreMember { store, role: StoreRole::Authority }])
            }
            #[cfg(all(feature = "redis", feature = "postgres"))]
            StoreTopology::Tiered { front: first, authority: last, mode } => {
                // Every forget goes to the one that decides, and is told from there.
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
        let mut opened = match &self.sealer {
            None => OpenedStore::plain(store),
            Some(sealing) => OpenedStore::sealed(SealedStore::new(store, sealing.clone(), observer)),
        };
        opened.members = members;
        if let Some(copies) = copies {
            opened.store = Arc::new(LocalCache::new(opened.store, copies));
        }
        Ok(opened)
    }

    /// The store whose word counts.
    pub fn authority(&self) -> StoreUrl {
        match &self.stores {
            StoreTopology::Single(named) => named.clone(),
            #[cfg(all(feature = "redis", feature = "postgres"))]
            StoreTopology::Tiered { authority: last, .. } => StoreUrl::Postgres(last.clone()),
        }
    }

    /// How many bytes of finished answers are kept in this process.
    pub fn local_cache_bytes(&self) -> u64 {
        match self.local_cache {
            LocalCacheMode::Disabled => 0,
            LocalCacheMode::MaxBytes(bytes) => bytes,
        }
    }

    /// What it promises, in one line.
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
    /// As the admin API names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Authority => "authority",
            Self::Front => "front",
            Self::Cache => "cache",
        }
    }
}

impl OpenedStore {
    /// A store in which nothing is sealed.
    pub fn plain(store: Arc<dyn Store>) -> Self {
        Self { members: vec![StoreMember { store: store.clone(), role: StoreRole::Authority }], store, sealed: None }
    }

    /// A store in which everything is.
    pub fn sealed(sealed: SealedStore) -> Self {
        let sealed = Arc::new(sealed);
        Self { sealed: Some(sealed.clone()), ..Self::plain(sealed) }
    }
}

/// `an embedded store`.
fn with_article(kind: StoreKind) -> impl fmt::Display {
    let article = if kind == StoreKind::Embedded { "an" } else { "a" };
    format!("{article} {kind} store")
}
