//! Parses PostgreSQL URLs.
//!
//! Invariant: neither `Debug` nor errors contain a password.

use std::{fmt, str::FromStr, time::Duration};

use tokio_postgres::{Config, config::SslMode};

use super::tls::{PostgresTls, TlsVerification};
use crate::{certificates::TlsPaths, url::percent_decode};

/// Number of connections if the URL sets none.
const DEFAULT_POOL_SIZE: usize = 4;
const MAX_POOL_SIZE: usize = 64;
/// Maximum time until a vanished peer is detected.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(super) struct PostgresUrl {
    pub(super) config: Config,
    pub(super) tls: PostgresTls,
    /// The URL names a pooler that may use another connection for each statement: no named statements, no session
    /// state, no LISTEN.
    pub(super) unnamed_statements: bool,
    /// Maximum number of connections, besides the listening one.
    pub(super) pool_size: usize,
    redacted: String,
}

impl PostgresUrl {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://"));
        let Some(rest) = rest else { return Err("a PostgreSQL URL begins with postgres:// or postgresql://".into()) };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (mut unnamed_statements, mut pool_size) = (false, DEFAULT_POOL_SIZE);
        let (mut root, mut verify) = (None, TlsVerification::Nothing);
        let (mut cert, mut key) = (None, None);
        let mut theirs = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let wrong = |then: &str| format!("{name} is {}; {then}", show_value(value));
            match (name, value) {
                ("statements", "unnamed") | ("pgbouncer", "true") => unnamed_statements = true,
                ("statements", "named") | ("pgbouncer", "false") => unnamed_statements = false,
                ("statements", _) => return Err(wrong("allowed are named and unnamed")),
                ("pgbouncer", _) => return Err(wrong("allowed are true and false")),
                ("pool", _) => {
                    let number = value.parse().ok().filter(|number| (1..=MAX_POOL_SIZE).contains(number));
                    pool_size = number.ok_or_else(|| wrong(&format!("write a number from 1 to {MAX_POOL_SIZE}")))?;
                }
                ("sslrootcert", _) => root = Some(percent_decode(value, name)?),
                ("sslcert", _) => cert = Some(percent_decode(value, name)?),
                ("sslkey", _) => key = Some(percent_decode(value, name)?),
                ("sslmode", "verify-full" | "verify-ca") => {
                    verify = if value == "verify-ca" { TlsVerification::Chain } else { TlsVerification::Full };
                    theirs.push("sslmode=require");
                }
                ("sslmode", "disable" | "prefer" | "require") => theirs.push(pair),
                ("sslmode", _) => {
                    return Err(wrong("allowed are disable, prefer, require, verify-ca and verify-full"));
                }
                _ => theirs.push(pair),
            }
        }
        if verify == TlsVerification::Nothing && root.is_some() {
            verify = TlsVerification::Chain;
        }
        let plain = format!("postgres://{rest}?{}", theirs.join("&"));
        let mut config = Config::from_str(&plain).map_err(|error| root_cause(&error))?;
        if config.get_hosts().is_empty() {
            return Err("it names no host; write postgres://USER@HOST/DATABASE".into());
        }
        if cert.is_some() != key.is_some() {
            return Err("sslcert and sslkey go together: a client certificate needs both".into());
        }
        let own = cert.zip(key).map(|(cert, key)| (cert.into(), key.into()));
        for (name, given) in [("sslrootcert", root.is_some()), ("sslcert", own.is_some())] {
            if config.get_ssl_mode() == SslMode::Disable && given {
                return Err(format!(
                    "{name} is given, and sslmode=disable says that there is no TLS; drop one of them"
                ));
            }
        }
        if config.get_application_name().is_none() {
            config.application_name("ibid");
        }
        if !theirs.iter().any(|pair| pair.starts_with("keepalives_idle=")) {
            config.keepalives_idle(KEEPALIVE_TIMEOUT);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(KEEPALIVE_TIMEOUT);
        }
        let tls = PostgresTls { verify, paths: TlsPaths { ca: root.map(Into::into), client_cert: own } };
        Ok(Self { config, tls, unnamed_statements, pool_size, redacted: redact(rest) })
    }

    /// The name of the first host, for a simulation.
    #[cfg(feature = "simulation")]
    pub(super) fn host_name(&self) -> Option<&str> {
        match self.config.get_hosts() {
            [tokio_postgres::config::Host::Tcp(name), ..] => Some(name),
            _ => None,
        }
    }
}

impl fmt::Display for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted)
    }
}

impl fmt::Debug for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgresUrl({self})")
    }
}

/// Shows hosts and database only: credentials and options may contain a password.
fn redact(rest: &str) -> String {
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    format!("postgres://{place}")
}

/// Shows an option's value, unless it is probably the rest of a password with a `?` in it.
fn show_value(value: &str) -> String {
    if value.contains('@') { "not readable (in a password, escape ? as %3F)".into() } else { format!("{value:?}") }
}

/// Describes an invalid URL. The driver names options, but never their values.
fn root_cause(error: &tokio_postgres::Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |&cause| cause.source());
    causes.last().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(url: &str) -> String {
        PostgresUrl::parse(url).unwrap_err()
    }

    #[test]
    fn its_own_options_are_read_and_the_drivers_passed_on() {
        let url = "postgresql://u:p@h1:5433,h2/db?statements=unnamed&pool=7&sslmode=verify-full&connect_timeout=3";
        let place = PostgresUrl::parse(url).unwrap();
        assert!(place.unnamed_statements && place.pool_size == 7 && place.tls.verify == TlsVerification::Full);
        assert_eq!(place.config.get_ssl_mode(), SslMode::Require);
        assert_eq!(place.config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(place.config.get_hosts().len(), 2);
        let place = PostgresUrl::parse("postgres://h/db?pgbouncer=true&sslrootcert=/etc/a%20b.pem").unwrap();
        assert!(place.unnamed_statements && place.pool_size == DEFAULT_POOL_SIZE);
        assert_eq!((place.tls.verify, place.tls.paths.ca), (TlsVerification::Chain, Some("/etc/a b.pem".into())));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_allowed() {
        assert!(why("postgres://h/db?pool=0").contains("from 1 to 64"));
        assert!(why("postgres://h/db?sslmode=sometimes").contains("verify-full"));
        assert!(why("postgres://h/db?statements=few").contains("named and unnamed"));
        assert!(why("postgres://h/db?pgbouncer=1").contains("true and false"));
        assert!(why("postgres://h/db?colour=red").contains("colour"));
        assert!(why("postgres:///db").contains("no host"));
        assert!(why("mysql://h").contains("begins with"));
        assert!(why("postgres://h/db?sslmode=disable&sslrootcert=x").contains("drop one"));
        assert!(why("postgres://h/db?sslmode=disable&sslcert=x&sslkey=y").contains("drop one"));
        assert!(why("postgres://h/db?sslcert=x").contains("go together"));
    }

    #[test]
    fn no_password_is_ever_shown() {
        for url in [
            "postgres://u:s3cret@h/db",
            "postgres://u:s3cret@h/db?password=s3cret",
            "postgres://u:s3cret@h:port/db",
            "postgres://u:s3cret@h/db?pool=s3&port=x",
        ] {
            let said = match PostgresUrl::parse(url) {
                Ok(place) => format!("{place} {place:?} {:?}", place.config),
                Err(why) => why,
            };
            assert!(!said.contains("s3cret"), "{said}");
        }
    }
}
