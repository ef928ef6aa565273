//! A store from its URL. Each scheme that is built in has one row in [`SCHEMES`]; this is where further stores plug in.

use std::{path::PathBuf, str::FromStr, sync::Arc};

use ibid::store::{Memory, MemoryLimits, Store};

use crate::embedded::{Durability, Embedded, Options};

/// A store URL that names no store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UrlError {
    /// Not built in.
    #[error("{url:?} names no store of this build; built in are {}", built_in())]
    Scheme {
        /// What was asked for, without a password.
        url: String,
    },
    /// A store that is built in was asked for in a way that it does not know.
    #[error("{url:?}: {why}")]
    Option {
        /// What was asked for.
        url: String,
        /// What is allowed.
        why: String,
    },
    /// It is there, and cannot be opened.
    #[error("{url:?} cannot be opened: {why}")]
    Open {
        /// What was asked for.
        url: String,
        /// Why.
        why: String,
    },
}

/// A store that a URL names: checked, not opened yet.
#[derive(Debug, Clone)]
pub enum Named {
    /// In this process.
    Memory(MemoryLimits),
    /// On this machine's disk.
    Embedded(PathBuf, Options),
}

/// Schemes that are built in, and how each reads what follows it.
const SCHEMES: [(&str, Read); 2] = [("memory", memory), ("embedded", embedded)];

type Read = fn(&Url<'_>) -> Result<Named, String>;

/// A URL, taken apart.
struct Url<'a> {
    /// Behind the scheme's colon, without the query.
    rest: &'a str,
    options: Vec<(&'a str, &'a str)>,
}

/// Opens the store that a URL names.
///
/// # Errors
/// If no store of this build has that name, or it cannot be opened.
pub fn open(url: &str) -> Result<Arc<dyn Store>, UrlError> {
    let named: Named = url.parse()?;
    named.open().map_err(|why| UrlError::Open { url: shown(url), why })
}

impl FromStr for Named {
    type Err = UrlError;

    fn from_str(url: &str) -> Result<Self, UrlError> {
        let Some((scheme, rest)) = url.split_once(':') else { return Err(UrlError::Scheme { url: shown(url) }) };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let options = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect();
        match SCHEMES.iter().find(|(name, _)| *name == scheme) {
            Some((_, read)) => read(&Url { rest, options }).map_err(|why| UrlError::Option { url: shown(url), why }),
            None => Err(UrlError::Scheme { url: shown(url) }),
        }
    }
}

impl Named {
    /// Opens it.
    ///
    /// # Errors
    /// Why it cannot be opened.
    pub fn open(&self) -> Result<Arc<dyn Store>, String> {
        Ok(match self {
            Self::Memory(limits) => Arc::new(Memory::new(*limits)),
            Self::Embedded(path, options) => {
                Arc::new(Embedded::open(path, options.clone()).map_err(|error| error.to_string())?)
            }
        })
    }

    /// What it promises, in one line.
    pub fn promise(&self) -> &'static str {
        match self {
            Self::Memory(_) => "at most one run per key and process; forgotten on restart",
            Self::Embedded(_, Options { durability: Durability::Power, .. }) => {
                "at most one run per key; survives SIGKILL and power loss; one machine"
            }
            Self::Embedded(_, Options { durability: Durability::Crash, .. }) => {
                "at most one run per key; survives SIGKILL, not power loss; one machine"
            }
        }
    }

    /// Whether a restart forgets it.
    pub fn is_memory(&self) -> bool {
        matches!(self, Self::Memory(_))
    }
}

fn memory(url: &Url<'_>) -> Result<Named, String> {
    if !url.rest.is_empty() {
        return Err("the memory store has no path; write memory: or memory:?max_size=1GiB".into());
    }
    let mut limits = MemoryLimits::default();
    for (name, value) in &url.options {
        match *name {
            "max_size" => {
                limits.max_bytes =
                    parse_size(value).ok_or_else(|| format!("max_size is {value:?}; write a size such as 64MiB"))?
            }
            _ => return Err(format!("{name:?} is no option of the memory store; allowed is max_size")),
        }
    }
    Ok(Named::Memory(limits))
}

/// Below this not even a few segments fit.
const LEAST: u64 = 16 << 20;

fn embedded(url: &Url<'_>) -> Result<Named, String> {
    if url.rest.is_empty() {
        return Err("the embedded store needs a path; write embedded:/var/lib/ibid".into());
    }
    let mut options = Options::default();
    for (name, value) in &url.options {
        match *name {
            "durability" => {
                options.durability = match *value {
                    "power" => Durability::Power,
                    "crash" => Durability::Crash,
                    _ => return Err(format!("durability is {value:?}; allowed are power and crash")),
                }
            }
            "max_size" => {
                options.max_size = parse_size(value)
                    .filter(|size| *size >= LEAST)
                    .ok_or_else(|| format!("max_size is {value:?}; write a size of at least 16MiB, such as 10GiB"))?
            }
            _ => {
                return Err(format!(
                    "{name:?} is no option of the embedded store; allowed are durability and max_size"
                ));
            }
        }
    }
    Ok(Named::Embedded(url.rest.into(), options))
}

/// Bytes, or `64KiB`, `1MiB`, `2GiB`, `10KB`, `1MB`, `1GB`.
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

fn built_in() -> String {
    SCHEMES.map(|(name, _)| format!("{name}:")).join(" ")
}

/// The URL without what stands between `//` and `@`: it may hold a password.
fn shown(url: &str) -> String {
    match (url.find("//"), url.rfind('@')) {
        (Some(from), Some(to)) if from + 2 <= to => format!("{}****{}", &url[..from + 2], &url[to..]),
        _ => url.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(url: &str) -> String {
        open(url).unwrap_err().to_string()
    }

    #[test]
    fn memory_is_built_in() {
        assert_eq!(open("memory:").unwrap().promise().store, "memory");
        assert!(open("memory:?max_size=1MiB").is_ok());
    }

    #[test]
    fn what_is_not_built_in_is_said_plainly() {
        assert_eq!(
            why("mysql://u:secret@h/db"),
            r#""mysql://****@h/db" names no store of this build; built in are memory: embedded:"#
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

    #[test]
    fn embedded_is_built_in() {
        let path = std::env::temp_dir().join(format!("ibid-url-{}", std::process::id()));
        let store = open(&format!("embedded:{}?durability=crash&max_size=64MiB", path.display())).unwrap();
        assert_eq!((store.promise().store, store.promise().durable), ("embedded", true));
        assert!(why(&format!("embedded:{}", path.display())).contains("in use by process"));
        drop(store);
        std::fs::remove_dir_all(path).unwrap();
        assert!(why("embedded:").contains("needs a path"));
        assert!(why("embedded:x?durability=none").contains("allowed are power and crash"));
        assert!(why("embedded:x?max_size=1MiB").contains("at least 16MiB"));
        assert!(why("embedded:x?size=1").contains("allowed are durability and max_size"));
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64KiB"), Some(65_536));
        assert_eq!(parse_size("12"), Some(12));
        assert_eq!(parse_size("1XB"), None);
        assert_eq!(parse_size(""), None);
    }
}
