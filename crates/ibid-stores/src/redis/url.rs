//! Parses Redis URLs.
//!
//! Invariant: neither `Debug` nor errors show any part that may be a password. A password with an unescaped `/` or `@`
//! can end up anywhere in a URL, so errors name the invalid part without repeating it.

use std::{fmt, path::PathBuf};

use crate::{
    certificates::TlsPaths,
    url::{percent_decode, query_pairs},
};

/// A server, by host name or IP address.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RedisHost {
    pub(super) name: String,
    pub(super) port: u16,
}

#[derive(Clone)]
pub(super) struct RedisUrl {
    pub(super) deployment: RedisDeployment,
    /// The server, the sentinels, or some nodes of the cluster.
    pub(super) hosts: Vec<RedisHost>,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
    /// Certificate files, or `None` without TLS.
    pub(super) tls: Option<TlsPaths>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RedisDeployment {
    Single,
    /// The primary's name at the sentinels.
    Sentinel(String),
    Cluster,
}

const SCHEMES: &str = "redis://, rediss://, redis+sentinel://, redis+cluster://, the latter two also with +tls, and all \
                       with valkey instead of redis";
const OPTIONS: &str = "tls, ca, cert and key";

impl RedisUrl {
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| format!("write one of {SCHEMES}"))?;
        let scheme = scheme.replacen("valkeys", "rediss", 1).replacen("valkey", "redis", 1);
        let (single, sentinel, cluster) =
            (RedisDeployment::Single, RedisDeployment::Sentinel(String::new()), RedisDeployment::Cluster);
        let mut shape = match scheme.as_str() {
            "redis" | "rediss" => single,
            "redis+sentinel" | "redis+sentinel+tls" | "rediss+sentinel" => sentinel,
            "redis+cluster" | "redis+cluster+tls" | "rediss+cluster" => cluster,
            _ => return Err(format!("this is no Redis URL; write one of {SCHEMES}")),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) =
            authority.rsplit_once('@').map_or((None, authority), |(login, hosts)| (Some(login), hosts));
        let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            Some((user, password)) => (decode_part(user, "the user")?, decode_part(password, "the password")?),
            None => (None, None),
        };
        if user.is_some() && password.is_none() {
            return Err(
                "there is a user but no password; write redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST \
                        for the default user"
                    .into(),
            );
        }
        let port = if matches!(shape, RedisDeployment::Sentinel(_)) { 26_379 } else { 6379 };
        let hosts: Vec<RedisHost> =
            hosts.split(',').map(|host| RedisHost::parse(host, port)).collect::<Result<_, _>>()?;
        if shape == RedisDeployment::Single && hosts.len() > 1 {
            return Err(
                "several hosts are given; one server has one: write redis+sentinel:// or redis+cluster://".into()
            );
        }
        let database = match &mut shape {
            RedisDeployment::Single => parse_database(path)?,
            RedisDeployment::Sentinel(master) => {
                let (name, number) = path.split_once('/').unwrap_or((path, ""));
                *master = decode_part(name, "the primary's name")?.ok_or_else(|| {
                    "the name of the primary is missing; write redis+sentinel://HOST:PORT,HOST:PORT/NAME".to_owned()
                })?;
                parse_database(number)?
            }
            RedisDeployment::Cluster if parse_database(path)? != 0 => {
                return Err("a cluster has database 0 only".into());
            }
            RedisDeployment::Cluster => 0,
        };
        let says_tls = scheme.starts_with("rediss") || scheme.ends_with("+tls");
        let tls = parse_tls_paths(query, says_tls)?;
        Ok(Self { deployment: shape, hosts, user, password, database, tls })
    }
}

/// Parses the TLS options. Returns `None` without TLS.
fn parse_tls_paths(query: &str, says_tls: bool) -> Result<Option<TlsPaths>, String> {
    let mut with_tls = says_tls;
    let (mut ca, mut cert, mut key) = (None, None, None);
    for (name, value) in query_pairs(query) {
        let file = || Ok::<_, String>(decode_part(value, "a file's name")?.map(PathBuf::from));
        match name {
            "tls" if value == "true" => with_tls = true,
            "tls" if value == "false" && !says_tls => {}
            "tls" => return Err("tls is true or false, and not false where the scheme says TLS".into()),
            "ca" => ca = file()?,
            "cert" => cert = file()?,
            "key" => key = file()?,
            _ => {
                return Err(format!("there is an option that the Redis store does not know; allowed are {OPTIONS}"));
            }
        }
    }
    if !with_tls && (ca.is_some() || cert.is_some() || key.is_some()) {
        return Err("ca, cert and key need TLS; write rediss://, or tls=true".into());
    }
    if cert.is_some() != key.is_some() {
        return Err("cert and key go together: a client certificate needs both".into());
    }
    Ok(with_tls.then_some(TlsPaths { ca, client_cert: cert.zip(key) }))
}

impl RedisHost {
    pub(super) fn new(name: &str, port: u16) -> Self {
        Self { name: name.to_owned(), port }
    }

    /// Parses `name`, `name:port` or `[v6]:port`.
    fn parse(text: &str, default_port: u16) -> Result<Self, String> {
        let (name, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
            Some(Some((name, port))) => (name, port.strip_prefix(':')),
            Some(None) => return Err("an IPv6 address is not closed; write [::1]:6379".into()),
            None => text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port))),
        };
        let name_is_odd = name.is_empty() || name.chars().any(|c| c.is_whitespace() || c.is_control() || c == '@');
        if name_is_odd {
            return Err("a host is missing or not readable; write redis://HOST:PORT".into());
        }
        let port = port.map_or(Ok(default_port), str::parse).map_err(|_| {
            "a port is not a number from 1 to 65535 (in a password, escape / as %2F, @ as %40, : as %3A)".to_owned()
        })?;
        Ok(Self::new(name, port))
    }
}

fn parse_database(text: &str) -> Result<i64, String> {
    if text.is_empty() {
        return Ok(0);
    }
    text.parse::<u16>().map(i64::from).map_err(|_| "the database is not a number; write redis://HOST:PORT/0".into())
}

/// Percent-decodes the text. Returns `None` if it is empty.
fn decode_part(text: &str, what: &str) -> Result<Option<String>, String> {
    percent_decode(text, what).map(|text| Some(text).filter(|text| !text.is_empty()))
}

impl fmt::Display for RedisHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisUrl")
            .field("shape", &self.deployment)
            .field("hosts", &self.hosts)
            .field("user", &self.user.as_ref().map(|_| "****"))
            .field("password", &self.password.as_ref().map(|_| "****"))
            .field("database", &self.database)
            .field("tls", &self.tls)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(place: &RedisUrl) -> Vec<String> {
        place.hosts.iter().map(RedisHost::to_string).collect()
    }

    #[test]
    fn one_server() {
        let place = RedisUrl::parse("redis://us%3Aer:p%40ss%2F%25@db.example:7000/3").unwrap();
        assert_eq!((hosts(&place), place.database), (vec!["db.example:7000".into()], 3));
        assert_eq!((place.user.as_deref(), place.password.as_deref()), (Some("us:er"), Some("p@ss/%")));
        assert_eq!(place.tls, None);
        let place = RedisUrl::parse("redis://:secret@[::1]").unwrap();
        assert_eq!(
            (hosts(&place), place.user, place.password.as_deref()),
            (vec!["[::1]:6379".into()], None, Some("secret"))
        );
    }

    #[test]
    fn sentinels_and_clusters() {
        let place = RedisUrl::parse("redis+sentinel://a,b:26380/my%20master/2").unwrap();
        assert_eq!((place.deployment.clone(), place.database), (RedisDeployment::Sentinel("my master".into()), 2));
        assert_eq!(hosts(&place), ["a:26379", "b:26380"]);
        let place = RedisUrl::parse("redis+cluster://u:p@a:1,b:2,[fe80::1]:3").unwrap();
        assert_eq!((place.deployment.clone(), hosts(&place).len()), (RedisDeployment::Cluster, 3));
        assert_eq!(RedisUrl::parse("valkey+cluster://a").unwrap().deployment, RedisDeployment::Cluster);
        assert_eq!(RedisUrl::parse("valkey://a/4").unwrap().database, 4);
    }

    #[test]
    fn tls_by_scheme_or_option() {
        for url in [
            "rediss://h",
            "valkeys://h",
            "valkey+cluster+tls://h",
            "redis+cluster+tls://h",
            "rediss+sentinel://h/m",
            "redis+sentinel://h/m?tls=true",
        ] {
            assert_eq!(RedisUrl::parse(url).unwrap().tls, Some(TlsPaths::default()), "{url}");
        }
        let place = RedisUrl::parse("rediss://h?ca=/a%20b/ca.pem&cert=c.pem&key=k.pem").unwrap();
        let files = TlsPaths { ca: Some("/a b/ca.pem".into()), client_cert: Some(("c.pem".into(), "k.pem".into())) };
        assert_eq!(place.tls, Some(files));
    }

    #[test]
    fn what_is_wrong_is_said_without_a_password() {
        let wrong = [
            "http://u:hunter2@h",
            "redis://u:hun%ter2@h",
            "redis://u:hun/ter2@h",
            "redis://hunter2@h",
            "redis://u:hunter2@h:x",
            "redis://u:hunter2@h,i",
            "redis://u:hunter2@h/x",
            "redis://u:hunter2@h?hunter2=1",
            "redis://u:hunter2@h?ca=x",
            "rediss://u:hunter2@h?cert=x",
            "rediss://u:hunter2@h?tls=false",
            "redis+sentinel://u:hunter2@h",
            "redis+cluster://u:hunter2@h/1",
            "redis://u:hunter2@",
            "redis://u:hunter2@[::1",
        ];
        for url in wrong {
            let why = RedisUrl::parse(url).unwrap_err();
            assert!(!why.contains("hun") && !why.contains("ter2"), "{url}: {why}");
        }
        let place = RedisUrl::parse("redis://u:hunter2@h").unwrap();
        assert!(!format!("{place:?}").contains("hunter2"));
    }
}
