//! Secrets, and addresses of other servers.

use std::{fmt, path::PathBuf};

use http::{
    Uri,
    uri::{Authority, Scheme},
};
use ibid_stores::StoreUrl;

use super::{
    env::{Env, ValueResolver},
    toml_node::Scalar,
};

/// Text that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// The URL of a store. Shown without its password.
#[derive(Clone, PartialEq, Eq)]
pub struct RedactedStoreUrl(String);

/// Scheme, host and port of an app, such as `http://127.0.0.1:3000`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UpstreamUrl(pub(super) String);

impl Secret {
    /// Returns the text. Compare it in constant time, and never print it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Reads `env:NAME` or `file:PATH`. Rejects a literal secret, which would be visible in the list of processes.
    ///
    /// # Errors
    /// Returns the problem, never the secret.
    pub fn from_source(source: &str, env: &Env<'_>) -> Result<Self, String> {
        let lookup = ValueResolver::new(env, PathBuf::new(), None);
        match lookup.resolve(source)? {
            Some(text) => Self::from_text(&text).map_err(|what| format!("{source:?}: {what}")),
            None => {
                Err("it is not taken as it is, because others could see it; write it as env:NAME or file:PATH".into())
            }
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("****")
    }
}

impl Scalar for Secret {
    const ALLOWED: &'static str = "text that is not empty";

    fn from_text(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("it is empty".into());
        }
        Ok(Self(text.into()))
    }
}

impl RedactedStoreUrl {
    /// Returns the URL with its password.
    pub fn expose(&self) -> &str {
        &self.0
    }

    pub fn store_url(&self) -> StoreUrl {
        self.0.parse().expect("checked when it was read")
    }
}

/// Omits everything between the user's name and the last `@`, and the query, which may contain a password.
impl fmt::Display for RedactedStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((scheme, rest)) = self.0.split_once("://") else { return f.write_str(&self.0) };
        let (rest, query) = rest.split_once('?').map_or((rest, ""), |(rest, _)| (rest, "?****"));
        match rest.rsplit_once('@') {
            None => write!(f, "{scheme}://{rest}{query}"),
            Some((user, rest)) => match user.split_once(':') {
                None => write!(f, "{scheme}://{user}@{rest}{query}"),
                Some((user, _)) => write!(f, "{scheme}://{user}:****@{rest}{query}"),
            },
        }
    }
}

impl fmt::Debug for RedactedStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedactedStoreUrl({self})")
    }
}

impl Scalar for RedactedStoreUrl {
    const ALLOWED: &'static str = "a store's URL such as \"embedded:ibid-data\"";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse::<StoreUrl>().map_err(|why| why.to_string())?;
        Ok(Self(text.into()))
    }
}

impl Scalar for UpstreamUrl {
    const ALLOWED: &'static str = "a URL without a path, such as \"http://127.0.0.1:3000\"";

    /// The error never contains a URL that may have a password.
    fn from_text(text: &str) -> Result<Self, String> {
        if text.contains('@') {
            return Err(format!("a URL with a user's name or password is no upstream; allowed is {}", Self::ALLOWED));
        }
        let wrong = |why: &str| format!("{text:?} is no upstream{why}; allowed is {}", Self::ALLOWED);
        let uri: Uri = text.parse().map_err(|_| wrong(""))?;
        let (scheme, authority): (&Scheme, &Authority) = match (uri.scheme(), uri.authority()) {
            (Some(scheme), Some(authority)) if !authority.host().is_empty() => (scheme, authority),
            _ => return Err(wrong(", it lacks \"http://\"")),
        };
        if !["http", "https", "h2c"].contains(&scheme.as_str()) {
            return Err(wrong(", its scheme is none of \"http\" \"https\" \"h2c\""));
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(wrong(", it has a path"));
        }
        if authority.as_str() != authority.host() && authority.port_u16().is_none_or(|port| port == 0) {
            return Err(wrong(", its port is none"));
        }
        Ok(Self(format!("{scheme}://{}", authority.as_str().to_ascii_lowercase())))
    }
}

impl UpstreamUrl {
    pub(super) fn host_and_port(&self) -> (String, u16) {
        let uri: Uri = self.0.parse().expect("checked when it was read");
        let authority = uri.authority().expect("checked when it was read");
        let usual = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        (host.to_owned(), authority.port_u16().unwrap_or(usual))
    }
}

/// The usual port of collectors for OTLP over HTTP.
const DEFAULT_OTLP_PORT: u16 = 4318;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    pub is_secure: bool,
    address: String,
    pub path: String,
}

impl Collector {
    pub fn origin(&self) -> String {
        format!("{}://{}", if self.is_secure { "https" } else { "http" }, self.address)
    }

    /// Takes the path of `url` as it is, instead of adding `/v1/traces`.
    pub(super) fn with_full_path(self, url: &str) -> Self {
        let path = url.parse::<Uri>().map_or_else(|_| "/".to_owned(), |uri| uri.path().to_owned());
        Self { path, ..self }
    }
}

impl Scalar for Collector {
    const ALLOWED: &'static str = "a URL such as \"http://127.0.0.1:4318\"";

    fn from_text(text: &str) -> Result<Self, String> {
        if text.contains('@') {
            return Err(format!("found a URL with a user's name or password; allowed is {}", Self::ALLOWED));
        }
        let wrong = |why: &str| format!("found {text:?}; {why}; allowed is {}", Self::ALLOWED);
        let uri: Uri = text.parse().map_err(|_| wrong("it is no URL"))?;
        let secure = uri.scheme_str() == Some("https");
        let authority = uri.authority().filter(|_| secure || uri.scheme_str() == Some("http"));
        let authority = authority.filter(|authority| !authority.host().is_empty());
        let Some(authority) = authority else { return Err(wrong("it names no host")) };
        if uri.query().is_some() {
            return Err(wrong("it has a query"));
        }
        let address = format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(DEFAULT_OTLP_PORT));
        Ok(Self { is_secure: secure, address, path: format!("{}/v1/traces", uri.path().trim_end_matches('/')) })
    }
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.origin(), self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_never_shown() {
        for (url, shown) in [
            ("memory:", "memory:"),
            ("embedded:/var/lib/ibid", "embedded:/var/lib/ibid"),
            ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
            ("redis://:s3cret@host/0", "redis://:****@host/0"),
            ("postgres://ibid:p@ss:w@host/db", "postgres://ibid:****@host/db"),
            ("postgres://ibid@host/db?password=x", "postgres://ibid@host/db?****"),
        ] {
            let url = RedactedStoreUrl(url.into());
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), format!("RedactedStoreUrl({shown})"));
        }
        assert_eq!(format!("{:?}", Secret::from_text("s3cret").unwrap()), "****");
        assert!(!RedactedStoreUrl::from_text("mysql://u:s3cret@h").unwrap_err().contains("s3cret"));
        assert!(!UpstreamUrl::from_text("http://u:s3cret@h").unwrap_err().contains("s3cret"));
    }

    #[test]
    fn upstreams_are_a_scheme_a_host_and_a_port() {
        for (text, upstream) in [
            ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
            ("https://App.Example.com/", "https://app.example.com"),
            ("h2c://[::1]:50051", "h2c://[::1]:50051"),
        ] {
            assert_eq!(UpstreamUrl::from_text(text).unwrap().0, upstream);
        }
        for text in [
            "127.0.0.1:3000",
            "localhost",
            "ftp://a",
            "http://a/b",
            "http://a?b",
            "http://",
            "",
            "http://a:",
            "http://a:99999",
            "http://a:0",
        ] {
            assert!(UpstreamUrl::from_text(text).is_err(), "{text}");
        }
        assert_eq!(UpstreamUrl("h2c://[::1]:50051".into()).host_and_port(), ("::1".into(), 50051));
        assert_eq!(UpstreamUrl("https://a".into()).host_and_port(), ("a".into(), 443));
    }
}

#[cfg(test)]
mod collector_tests {
    use super::*;

    #[test]
    fn a_collector_has_an_address_and_a_path() {
        for (text, shown) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://collector", "http://collector:4318/v1/traces"),
            ("http://[::1]:80/otlp/", "http://[::1]:80/otlp/v1/traces"),
            ("https://collector", "https://collector:4318/v1/traces"),
        ] {
            assert_eq!(Collector::from_text(text).unwrap().to_string(), shown);
        }
        for wrong in ["collector:4318", "http://u:p@collector", "https://h?a=1", "", "grpc://h"] {
            let why = Collector::from_text(wrong).unwrap_err();
            assert!(why.contains("allowed is a URL") && !why.contains("u:p"), "{why}");
        }
    }
}
