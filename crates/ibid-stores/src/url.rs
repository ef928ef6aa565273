//! A store from its URL. Each scheme that is built in has one row in [`SCHEMES`]; this is where further stores plug in.

use std::sync::Arc;

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
}

type Open = fn(&Url<'_>) -> Result<Arc<dyn Store>, String>;

const SCHEMES: [(&str, Open); 2] = [("memory", memory), ("embedded", embedded)];

/// A URL, taken apart.
struct Url<'a> {
    /// Behind the scheme's colon, without the query.
    rest: &'a str,
    options: Vec<(&'a str, &'a str)>,
}

/// Opens the store that a URL names.
///
/// # Errors
/// If no store of this build has that name, or it does not know an option.
pub fn open(url: &str) -> Result<Arc<dyn Store>, UrlError> {
    let Some((scheme, rest)) = url.split_once(':') else { return Err(UrlError::Scheme { url: shown(url) }) };
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let options =
        query.split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let parsed = Url { rest, options: options.collect() };
    match SCHEMES.iter().find(|(name, _)| *name == scheme) {
        Some((_, open)) => open(&parsed).map_err(|why| UrlError::Option { url: shown(url), why }),
        None => Err(UrlError::Scheme { url: shown(url) }),
    }
}

fn memory(url: &Url<'_>) -> Result<Arc<dyn Store>, String> {
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
    Ok(Arc::new(Memory::new(limits)))
}

/// Below this not even a few segments fit.
const LEAST: u64 = 16 << 20;

fn embedded(url: &Url<'_>) -> Result<Arc<dyn Store>, String> {
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
    let store = Embedded::open(url.rest, options).map_err(|error| error.to_string())?;
    Ok(Arc::new(store))
}

/// Bytes, or `64KiB`, `1MiB`, `2GiB`, `10KB`, `1MB`, `1GB`.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit {
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
