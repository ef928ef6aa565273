//! Stores for [`ibid`], named by URL.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = ibid_stores::open("memory:?max_size=64MiB").await?;
//! assert_eq!(store.promise().store, "memory");
//! # Ok::<_, ibid_stores::UrlError>(()) }).unwrap();
//! ```
//!
//! A [`StoreConfig`] is a whole configuration: one store, or two as one, with finished answers kept near,
//! sealed if there are keys.

pub mod embedded;
pub mod local_cache;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
pub mod seal;
pub mod tiered;

pub use lock::ProcessLock;
pub use remote::RemoteOptions;
pub use store_config::{OpenedStore, StoreConfig, StoreConfigError, StoreMember, StoreOptions, StoreRole};
pub use url::{ServerUrl, StoreKind, StoreUrl, UrlError, open, parse_size};

#[cfg(any(feature = "redis", feature = "postgres"))]
mod breaker;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod certificates;
mod lock;
mod remote;
mod store_config;
mod url;
