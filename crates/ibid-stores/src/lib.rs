//! Stores for [`ibid`], named by URL.
//!
//! ```
//! let store = ibid_stores::open("memory:?max_size=64MiB")?;
//! assert_eq!(store.promise().store, "memory");
//! # Ok::<_, ibid_stores::UrlError>(())
//! ```

pub mod embedded;
pub mod near;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
pub mod tiered;

pub use remote::Remote;
pub use url::{Named, UrlError, open, parse_size};

#[cfg(any(feature = "redis", feature = "postgres"))]
mod breaker;
mod remote;
mod url;
