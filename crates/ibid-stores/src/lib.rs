//! Stores for [`ibid`], named by URL.
//!
//! ```
//! let store = ibid_stores::open("memory:?max_size=64MiB")?;
//! assert_eq!(store.promise().store, "memory");
//! # Ok::<_, ibid_stores::UrlError>(())
//! ```

pub mod embedded;

pub use url::{Named, UrlError, open, parse_size};

mod url;
