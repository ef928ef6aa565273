//! The collector of traces.

use std::fmt;

use http::Uri;

use super::toml_node::Scalar;

/// The usual port of collectors for OTLP over HTTP.
const DEFAULT_OTLP_PORT: u16 = 4318;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    secure: bool,
    address: String,
    path: String,
}

impl Collector {
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    pub fn origin(&self) -> String {
        format!("{}://{}", if self.secure { "https" } else { "http" }, self.address)
    }

    pub fn path(&self) -> &str {
        &self.path
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
        Ok(Self { secure, address, path: format!("{}/v1/traces", uri.path().trim_end_matches('/')) })
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
