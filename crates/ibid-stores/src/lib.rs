//! Stores for [`ibid`], named by URL.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = ibid_stores::open("memory:?max_size=64MiB").await?;
//! assert_eq!(store.promise().store, "memory");
//! # Ok::<_, ibid_stores::UrlError>(()) }).unwrap();
//! ```
//!
//! A [`Layout`] is a whole configuration: one store, or two as one, with finished answers kept near,
//! sealed if there are keys.

pub mod embedded;
pub mod near;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
pub mod seal;
pub mod tiered;

pub use layout::{Contradiction, Layout, Member, Opened, Parts, Role};
pub use lock::Lock;
pub use remote::Remote;
pub use url::{Kind, Named, ServerUrl, UrlError, open, parse_size};

#[cfg(any(feature = "redis", feature = "postgres"))]
mod breaker;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod certificates;
mod layout;
mod lock;
mod remote;
mod url;
