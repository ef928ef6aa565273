//! Store backends for [`ibid`], selected by URL.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = ibid_stores::open("memory:?max_size=64MiB").await?;
//! assert_eq!(store.guarantees().store, "memory");
//! # Ok::<_, ibid_stores::UrlError>(()) }).unwrap();
//! ```
//!
//! [`StoreConfig`] describes a complete setup: one store or two tiered stores, an optional local cache of completed
//! answers, and optional encryption.

#[cfg(feature = "embedded")]
pub mod embedded;
pub mod local_cache;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "seal")]
pub mod seal;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulation;
pub mod tiered;

#[cfg(any(feature = "redis", feature = "postgres"))]
#[doc(hidden)]
pub use certificates::AnyNameVerifier;
#[cfg(unix)]
pub use lock::ProcessLock;
pub use remote::RemoteOptions;
pub use store_config::{OpenedStore, StoreConfig, StoreConfigError, StoreMember, StoreOptions, StoreRole};
pub use url::{ServerUrl, StoreKind, StoreSetupError, StoreUrl, UrlError, open, parse_size};

#[cfg(all(feature = "embedded", not(unix)))]
compile_error!("the feature \"embedded\" of ibid-stores needs Unix");

#[cfg(any(feature = "redis", feature = "postgres"))]
mod breaker;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod certificates;
#[cfg(unix)]
mod lock;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod notifications;
mod remote;
mod store_config;
mod url;
