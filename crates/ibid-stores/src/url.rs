//! Parses store URLs and opens the stores they name. [`STORES`] lists them.
//!
//! Invariant: neither `Debug` nor errors reveal the password in a URL.

#[cfg(feature = "embedded")]
use std::path::PathBuf;
use std::{fmt, str::FromStr, sync::Arc};

use ibid::store::{Memory, Store};

use crate::RemoteOptions;
#[cfg(feature = "embedded")]
use crate::embedded::{Durability, Embedded, EmbeddedOptions};
#[cfg(feature = "postgres")]
use crate::postgres::{self, Postgres};
#[cfg(feature = "redis")]
use crate::redis::{self, Redis};

/// A store URL that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UrlError {
    /// This build does not support the URL's scheme.
    #[error("{url:?} names no store of this build; built in are {}", supported_schemes())]
    UnknownScheme {
        /// The URL, without its password.
        url: String,
    },
    /// The URL has an unknown or invalid option.
    #[error("{url:?}: {why}")]
    Option {
        /// The URL, without its password.
        url: String,
        /// What is wrong and which values are allowed.
        why: String,
    },
    /// The store cannot be opened.
    #[error("{url:?} cannot be opened: {source}")]
    OpenFailed {
        /// The URL, without its password.
        url: String,
        /// The cause of the failure.
        source: StoreSetupError,
    },
}

/// Why a store cannot be set up: what is wrong with a setting, file or database, and what is allowed. It contains no
/// password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StoreSetupError(String);

impl From<String> for StoreSetupError {
    fn from(why: String) -> Self {
        Self(why)
    }
}

impl From<StoreSetupError> for String {
    fn from(error: StoreSetupError) -> Self {
        error.0
    }
}

/// A parsed and validated store URL. The store is not open yet.
#[derive(Debug, Clone)]
pub enum StoreUrl {
    /// In this process's memory, with this many bytes at most.
    Memory(u64),
    /// In files on this machine.
    #[cfg(feature = "embedded")]
    Embedded(PathBuf, EmbeddedOptions),
    /// A Redis server, a primary behind sentinels, or a cluster.
    #[cfg(feature = "redis")]
    Redis(ServerUrl),
    /// A PostgreSQL database.
    #[cfg(feature = "postgres")]
    Postgres(ServerUrl),
}

/// The kind of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    /// `memory:` URLs.
    Memory,
    /// `embedded:` URLs.
    Embedded,
    /// `redis://`, `rediss://`, `valkey://`, `valkeys://` and their sentinel and cluster variants.
    Redis,
    /// `postgres://` URLs.
    Postgres,
}

/// URL of a server. `Debug` hides its password.
#[derive(Clone, PartialEq, Eq)]
pub struct ServerUrl(String);

/// A kind of store: the schemes of its URLs, as messages list them and as they are recognized, and its parser.
struct StoreScheme {
    listed: &'static str,
    matches: fn(&str) -> bool,
    parse: fn(&str) -> Result<StoreUrl, String>,
}

/// The stores of this build. A new store is a row here and a variant of [`StoreUrl`].
const STORES: &[StoreScheme] = &[
    StoreScheme { listed: "memory:", matches: |scheme| scheme == "memory", parse: parse_memory_url },
    #[cfg(feature = "embedded")]
    StoreScheme { listed: "embedded:", matches: |scheme| scheme == "embedded", parse: parse_embedded_url },
    #[cfg(feature = "redis")]
    StoreScheme {
        listed: "redis:// rediss:// redis+sentinel:// redis+cluster:// valkey:// valkeys://",
        // The Redis store itself validates the variant and its options.
        matches: |scheme| matches!(scheme.split('+').next(), Some("redis" | "rediss" | "valkey" | "valkeys")),
        parse: |url| {
            require_double_slash(url, "redis://127.0.0.1:6379/0").and_then(|()| redis::check_url(url))?;
            Ok(StoreUrl::Redis(ServerUrl(url.into())))
        },
    },
    #[cfg(feature = "postgres")]
    StoreScheme {
        listed: "postgres://",
        matches: |scheme| matches!(scheme, "postgres" | "postgresql"),
        parse: |url| {
            require_double_slash(url, "postgres://ibid@127.0.0.1/ibid").and_then(|()| postgres::check_url(url))?;
            Ok(StoreUrl::Postgres(ServerUrl(url.into())))
        },
    },
];

/// Opens the store that a URL names, with default [`RemoteOptions`].
///
/// # Errors
/// Returns an error if the URL is invalid or the store cannot be opened. An unreachable server is not an error: see
/// [`StoreUrl::open`].
pub async fn open(url: &str) -> Result<Arc<dyn Store>, UrlError> {
    let named: StoreUrl = url.parse()?;
    let opened = named.open(&RemoteOptions::default()).await;
    opened.map_err(|source| UrlError::OpenFailed { url: redact_url(url), source })
}

impl FromStr for StoreUrl {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        let scheme = url.split_once(':').map(|(scheme, _)| scheme);
        let store = scheme.and_then(|scheme| STORES.iter().find(|store| (store.matches)(scheme)));
        let store = store.ok_or_else(|| UrlError::UnknownScheme { url: redact_url(url) })?;
        (store.parse)(url).map_err(|why| UrlError::Option { url: redact_url(url), why })
    }
}

impl StoreUrl {
    /// Opens the store. Memory and embedded stores ignore `with`.
    ///
    /// An unreachable server is not an error: the store reports it in its [guarantees](Store::guarantees), and works
    /// once the server is reachable.
    ///
    /// # Errors
    /// Returns the reason if the store cannot be opened.
    pub async fn open(&self, with: &RemoteOptions) -> Result<Arc<dyn Store>, StoreSetupError> {
        #[cfg(not(any(feature = "redis", feature = "postgres")))]
        let _ = with;
        Ok(match self {
            Self::Memory(max_bytes) => Arc::new(Memory::new(*max_bytes)),
            #[cfg(feature = "embedded")]
            Self::Embedded(path, options) => {
                Arc::new(Embedded::open(path, options.clone()).map_err(|error| error.to_string())?)
            }
            #[cfg(feature = "redis")]
            Self::Redis(url) => Arc::new(Redis::open(url.expose(), with.clone()).await?),
            #[cfg(feature = "postgres")]
            Self::Postgres(url) => Arc::new(Postgres::open(url.expose(), with.clone()).await?),
        })
    }

    /// Returns the approximate maximum size of a record in bytes, if the store has one.
    pub fn max_record_size(&self) -> Option<u64> {
        match self {
            #[cfg(feature = "embedded")]
            Self::Embedded(_, options) => Some(options.max_record_size()),
            _ => None,
        }
    }

    /// Returns the kind of the store.
    pub fn kind(&self) -> StoreKind {
        match self {
            Self::Memory(_) => StoreKind::Memory,
            #[cfg(feature = "embedded")]
            Self::Embedded(..) => StoreKind::Embedded,
            #[cfg(feature = "redis")]
            Self::Redis(_) => StoreKind::Redis,
            #[cfg(feature = "postgres")]
            Self::Postgres(_) => StoreKind::Postgres,
        }
    }

    /// Describes the store's guarantees in one line.
    pub fn guarantee_summary(&self) -> &'static str {
        match self {
            Self::Memory(_) => "at most one run per key and process; forgotten on restart",
            #[cfg(feature = "embedded")]
            Self::Embedded(_, EmbeddedOptions { durability: Durability::Power, .. }) => {
                "at most one run per key; survives SIGKILL and power loss; one machine"
            }
            #[cfg(feature = "embedded")]
            Self::Embedded(_, EmbeddedOptions { durability: Durability::Crash, .. }) => {
                "at most one run per key; survives SIGKILL, not power loss; one machine"
            }
            #[cfg(feature = "redis")]
            Self::Redis(_) => {
                "at most one run per key; what a crash loses depends on AOF; an asynchronous failover can forget a claim"
            }
            #[cfg(feature = "postgres")]
            Self::Postgres(_) => {
                "at most one run per key; survives a crash; an asynchronous failover can lose the last commits"
            }
        }
    }
}

impl StoreKind {
    /// Returns `true` if several gateways can share the store.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::Redis | Self::Postgres)
    }
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Embedded => "embedded",
            Self::Redis => "redis",
            Self::Postgres => "postgres",
        })
    }
}

impl ServerUrl {
    /// Returns the URL including its password.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&redact_url(&self.0))
    }
}

#[cfg(any(feature = "redis", feature = "postgres"))]
fn require_double_slash(url: &str, such_as: &str) -> Result<(), String> {
    if url.contains("://") { Ok(()) } else { Err(format!("it lacks \"//\"; write one such as {such_as}")) }
}

/// Percent-decodes a part of a URL. Errors name the part as `what`, and never repeat it: it may be a password.
#[cfg(any(feature = "redis", feature = "postgres"))]
pub(crate) fn percent_decode(text: &str, what: &str) -> Result<String, String> {
    let is_escape =
        |rest: &str| matches!(rest.as_bytes(), [high, low, ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit());
    if !text.split('%').skip(1).all(is_escape) {
        return Err(format!("{what} holds a % that is not followed by two hex digits; write % as %25"));
    }
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8();
    Ok(decoded.map_err(|_| format!("{what} is not UTF-8 once decoded"))?.into_owned())
}

/// Splits the path and the options of a URL without a host.
fn split_local_url(url: &str) -> (&str, impl Iterator<Item = (&str, &str)>) {
    let (_, rest) = url.split_once(':').unwrap_or_default();
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    (path, query_pairs(query))
}

/// Returns the names and values of a query. An option without a value has an empty one.
pub(crate) fn query_pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

fn parse_memory_url(url: &str) -> Result<StoreUrl, String> {
    let (path, options) = split_local_url(url);
    if !path.is_empty() {
        return Err("the memory store has no path; write memory: or memory:?max_size=1GiB".into());
    }
    let mut max_bytes = Memory::DEFAULT_MAX_BYTES;
    for (name, value) in options {
        match name {
            "max_size" => {
                max_bytes =
                    parse_size(value).ok_or_else(|| format!("max_size is {value:?}; write a size such as 64MiB"))?
            }
            _ => return Err(format!("{name:?} is no option of the memory store; allowed is max_size")),
        }
    }
    Ok(StoreUrl::Memory(max_bytes))
}

/// Minimum size of an embedded store in bytes: room for a few segments.
#[cfg(feature = "embedded")]
const MIN_EMBEDDED_SIZE: u64 = 16 << 20;

#[cfg(feature = "embedded")]
fn parse_embedded_url(url: &str) -> Result<StoreUrl, String> {
    let (path, pairs) = split_local_url(url);
    if path.is_empty() {
        return Err("the embedded store needs a path; write embedded:/var/lib/ibid".into());
    }
    let mut options = EmbeddedOptions::default();
    for (name, value) in pairs {
        match name {
            "durability" => {
                options.durability = match value {
                    "power" => Durability::Power,
                    "crash" => Durability::Crash,
                    _ => return Err(format!("durability is {value:?}; allowed are power and crash")),
                }
            }
            "max_size" => {
                options.max_size = parse_size(value)
                    .filter(|size| *size >= MIN_EMBEDDED_SIZE)
                    .ok_or_else(|| format!("max_size is {value:?}; write a size of at least 16MiB, such as 10GiB"))?
            }
            _ => {
                return Err(format!(
                    "{name:?} is no option of the embedded store; allowed are durability and max_size"
                ));
            }
        }
    }
    Ok(StoreUrl::Embedded(path.into(), options))
}

/// Parses a size in bytes: a plain number, or with a unit, such as `64KiB`, `1MiB`, `2GiB`, `10KB`, `1MB`, `1GB`.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim_start() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

fn supported_schemes() -> String {
    STORES.iter().map(|store| store.listed).collect::<Vec<_>>().join(" ")
}

/// Hides the parts that may be secret: everything before the last `@`, and the query. Local paths are shown.
fn redact_url(url: &str) -> String {
    // Text that is not a URL may be a misplaced password.
    let Some((scheme, rest)) = url.split_once(':') else { return "****".into() };
    if matches!(scheme, "memory" | "embedded") {
        return url.into();
    }
    let Some(rest) = rest.strip_prefix("//") else {
        let is_known = STORES.iter().any(|store| (store.matches)(scheme));
        return if is_known { format!("{scheme}:****") } else { "****".into() };
    };
    // A password may contain a question mark.
    let (hidden, rest) = rest.rsplit_once('@').map_or(("", rest), |(_, rest)| ("****@", rest));
    let (rest, query) = rest.split_once('?').map_or((rest, ""), |(rest, _)| (rest, "?****"));
    format!("{scheme}://{hidden}{rest}{query}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(url: &str) -> String {
        url.parse::<StoreUrl>().unwrap_err().to_string()
    }

    #[tokio::test]
    async fn memory_is_built_in() {
        assert_eq!(open("memory:").await.unwrap().guarantees().store, "memory");
        assert!(open("memory:?max_size=1MiB").await.is_ok());
    }

    #[test]
    fn what_is_not_built_in_is_said_plainly() {
        let built_in = supported_schemes();
        assert_eq!(
            why("mysql://u:secret@h/db"),
            format!(r#""mysql://****@h/db" names no store of this build; built in are {built_in}"#)
        );
        assert!(why("memory").contains("built in are memory: embedded:"));
        assert_eq!(
            why("memory:?size=1"),
            r#""memory:?size=1": "size" is no option of the memory store; allowed is max_size"#
        );
        assert_eq!(
            why("memory:?max_size=1TB"),
            r#""memory:?max_size=1TB": max_size is "1TB"; write a size such as 64MiB"#
        );
        assert!(why("memory:/tmp").contains("has no path"));
    }

    #[tokio::test]
    async fn embedded_is_built_in() {
        let path = std::env::temp_dir().join(format!("ibid-url-{}", std::process::id()));
        let store = open(&format!("embedded:{}?durability=crash&max_size=64MiB", path.display())).await.unwrap();
        assert_eq!((store.guarantees().store, store.guarantees().durable), ("embedded", true));
        let second = open(&format!("embedded:{}", path.display())).await.unwrap_err().to_string();
        assert!(second.contains("in use by process"), "{second}");
        drop(store);
        std::fs::remove_dir_all(path).unwrap();
        assert!(why("embedded:").contains("needs a path"));
        assert!(why("embedded:x?durability=none").contains("allowed are power and crash"));
        assert!(why("embedded:x?max_size=1MiB").contains("at least 16MiB"));
        assert!(why("embedded:x?size=1").contains("allowed are durability and max_size"));
    }

    #[cfg(all(feature = "redis", feature = "postgres"))]
    #[test]
    fn servers_are_built_in() {
        for (url, kind) in [
            ("redis://127.0.0.1:6379/0", StoreKind::Redis),
            ("rediss://u:p@cache.example/1", StoreKind::Redis),
            ("redis+sentinel://a:26379,b:26379/main", StoreKind::Redis),
            ("redis+cluster://a:7000,b:7000", StoreKind::Redis),
            ("valkey://127.0.0.1:6379/0", StoreKind::Redis),
            ("valkeys://u:p@cache.example/1", StoreKind::Redis),
            ("postgres://ibid@127.0.0.1/ibid", StoreKind::Postgres),
            ("postgresql://ibid@127.0.0.1/ibid", StoreKind::Postgres),
        ] {
            let named: StoreUrl = url.parse().unwrap_or_else(|why| panic!("{why}"));
            assert_eq!(named.kind(), kind, "{url}");
            assert!(named.kind().is_shared());
        }
        assert!(why("redis:127.0.0.1").contains(r#"lacks "//"; write one such as redis://127.0.0.1:6379/0"#));
        assert!(why("postgres:ibid").contains(r#"lacks "//"; write one such as postgres://"#));
        assert!(why("redisx://h").contains("names no store"));
    }

    #[cfg(all(feature = "redis", feature = "postgres"))]
    #[test]
    fn a_password_is_shown_by_nothing() {
        for url in [
            "redis://:s3cret@127.0.0.1:6379/0",
            "postgres://ibid:s3?cr@et@127.0.0.1/ibid",
            "postgres://127.0.0.1/ibid?password=s3cret",
        ] {
            let named: StoreUrl = url.parse().unwrap();
            let shown = format!("{named:?}");
            assert!(shown.contains("127.0.0.1") && !shown.contains("s3") && !shown.contains("cr"), "{shown}");
        }
        for url in [
            "mysql://u:s3cret@h?password=s3cret",
            "redis:s3cret@h",
            "redis:?password=s3cret",
            "redis:s3cret",
            "s3cret",
            "s3cret:s3cret",
            "postgres://ibid:a?pool=s3cret@h/db",
            "postgres://ibid:a?sslmode=s3cret@h/db",
            "postgres://ibid:a?sslcert=s3cret%@h/db",
        ] {
            assert!(!why(url).contains("s3cret"), "{}", why(url));
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64KiB"), Some(65_536));
        assert_eq!(parse_size("12"), Some(12));
        assert_eq!(parse_size("1XB"), None);
        assert_eq!(parse_size(""), None);
    }
}
