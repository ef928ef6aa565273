//! The file as it is written: every key optional, no key unknown. What is left out is decided in
//! [`finish`](super::finish).

use std::{fmt, marker::PhantomData, net::SocketAddr, sync::LazyLock, time::Duration};

use http::{HeaderName, Method, StatusCode, header};
use ibid::{
    Envelope, KeyFormat, KeySource, LabelKey, Limit, Mode, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Part,
    Pointer, Probe, Reason, Refusals, Remember, ScopePart, Template,
    webhook::{Content, Encoding},
};
use serde::{
    Deserialize,
    de::{Deserializer, Error, MapAccess, SeqAccess, Visitor},
};

use super::{
    collector::Collector,
    scalar::{List, One, Scalar},
    secret::{Secret, StoreUrl, Upstream},
    settings::{LogFormat, LogLevel, Role},
    values::{ByteLimit, DigestStatus, DocumentPath, GrpcCode, Listed, Listen, Origin, Preset, Size, Upgrade},
};
use crate::routes::{GrpcUnknown, Match};

/// The whole file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct File {
    pub(super) listen: Option<One<SocketAddr>>,
    pub(super) upstream: Option<One<Upstream>>,
    pub(super) upstream_ca: Option<One<String>>,
    pub(super) upstream_cert: Option<One<Secret>>,
    pub(super) upstream_key: Option<One<Secret>>,
    pub(super) max_upstream: Option<One<usize>>,
    pub(super) upstream_idle: Option<One<Duration>>,
    pub(super) upgrades: Option<List<Upgrade>>,
    pub(super) trusted_proxies: Option<List<String>>,
    pub(super) credentials: Option<List<HeaderName>>,
    pub(super) credential_schemes: Option<List<String>>,
    pub(super) max_running: Option<One<usize>>,
    pub(super) buffer_memory: Option<One<Size>>,
    pub(super) accept_forgetting: Option<One<bool>>,
    pub(super) journal: Option<One<String>>,
    pub(super) descriptors: Option<One<String>>,
    pub(super) grpc_unknown: Option<One<GrpcUnknown>>,
    pub(super) openapi: Option<List<DocumentPath>>,
    pub(super) cors: Cors,
    pub(super) tls: Option<Tls>,
    pub(super) jwt: Option<Jwt>,
    pub(super) quota: Quota,
    pub(super) limits: Limits,
    pub(super) log: Log,
    pub(super) trace: Trace,
    pub(super) admin: Admin,
    pub(super) store: Store,
    pub(super) seal: Option<Seal>,
    pub(super) policy: Option<Dials>,
    pub(super) route: Vec<Dials>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Cors {
    pub(super) origins: Option<List<Origin>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Tls {
    pub(super) cert: Option<One<Secret>>,
    pub(super) key: Option<One<Secret>>,
    pub(super) client_ca: Option<One<Secret>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Jwt {
    pub(super) secret: Option<One<Secret>>,
    pub(super) pem: Option<One<Secret>>,
    pub(super) jwks: Option<One<Secret>>,
    pub(super) ca: Option<One<Secret>>,
    pub(super) cert: Option<One<Secret>>,
    pub(super) key: Option<One<Secret>>,
    pub(super) issuer: Option<One<String>>,
    pub(super) audience: Option<List<String>>,
    pub(super) from: Option<List<String>>,
    pub(super) leeway: Option<One<Duration>>,
    pub(super) refresh: Option<One<Duration>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Quota {
    pub(super) new_keys: Option<One<Limit>>,
    pub(super) new_bytes: Option<One<ByteLimit>>,
    pub(super) rate: Option<One<Limit>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Limits {
    pub(super) header_timeout: Option<One<Duration>>,
    pub(super) body_timeout: Option<One<Duration>>,
    pub(super) idle_timeout: Option<One<Duration>>,
    pub(super) write_timeout: Option<One<Duration>>,
    pub(super) pool_timeout: Option<One<Duration>>,
    pub(super) reply_timeout: Option<One<Duration>>,
    pub(super) tunnel_timeout: Option<One<Duration>>,
    pub(super) max_headers: Option<One<usize>>,
    pub(super) max_header_bytes: Option<One<Size>>,
    pub(super) max_connections: Option<One<usize>>,
    pub(super) shutdown: Option<One<Duration>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Trace {
    pub(super) otlp: Option<One<Collector>>,
    pub(super) ca: Option<One<Secret>>,
    pub(super) cert: Option<One<Secret>>,
    pub(super) key: Option<One<Secret>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Log {
    pub(super) format: Option<One<LogFormat>>,
    pub(super) level: Option<One<LogLevel>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Admin {
    pub(super) listen: Option<One<Listen>>,
    pub(super) token: Option<One<Secret>>,
    pub(super) tokens: Vec<Token>,
    pub(super) audit: Option<One<String>>,
    pub(super) hosts: Option<List<String>>,
    pub(super) tls: Option<Tls>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Token {
    pub(super) role: Option<One<Role>>,
    pub(super) user: Option<One<String>>,
    pub(super) name: Option<One<String>>,
    pub(super) token: Option<One<Secret>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Store {
    pub(super) url: Option<One<StoreUrl>>,
    pub(super) fallback: Option<One<StoreUrl>>,
    pub(super) cache: Option<One<StoreUrl>>,
    pub(super) prefix: Option<One<String>>,
    pub(super) timeout: Option<One<Duration>>,
    pub(super) wait_replicas: Option<One<usize>>,
    pub(super) near: Option<One<Size>>,
    pub(super) compress: Option<One<bool>>,
    pub(super) rls_user: Option<One<String>>,
    pub(super) sweep_every: Option<One<Duration>>,
    pub(super) strict: Option<One<bool>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Seal {
    pub(super) keys: Vec<SealKey>,
    pub(super) address_secret: Option<One<Secret>>,
    pub(super) accept_plain: Option<One<bool>>,
    pub(super) plain_addresses: Option<One<bool>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SealKey {
    pub(super) id: Option<One<String>>,
    pub(super) key: Option<One<Secret>>,
}

/// The dials of `[policy]` or of one `[[route]]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Dials {
    /// Of routes only.
    #[serde(rename = "match")]
    pub(super) at: Option<One<Match>>,
    pub(super) preset: Option<One<Preset>>,
    pub(super) methods: Option<List<Method>>,
    pub(super) key: Key,
    pub(super) scope: Option<List<ScopePart>>,
    /// Of webhooks only.
    pub(super) secrets: Option<List<Secret>>,
    pub(super) unsigned: Option<One<bool>>,
    pub(super) tolerance: Option<One<Duration>>,
    pub(super) signature: Option<Signature>,
    pub(super) label: Label,
    pub(super) fingerprint: Option<List<Part>>,
    pub(super) json_ignore: Option<List<Pointer>>,
    pub(super) on_mismatch: Option<One<OnMismatch>>,
    pub(super) on_concurrent: Option<One<OnConcurrent>>,
    pub(super) on_unknown: Option<One<OnUnknown>>,
    pub(super) resolve: Option<One<Probe>>,
    pub(super) on_store_down: Option<One<OnStoreDown>>,
    pub(super) remember: Option<Remembered>,
    pub(super) refusals: Option<One<Refusals>>,
    pub(super) unknown_status: Option<List<StatusCode>>,
    pub(super) remember_body: Option<One<bool>>,
    pub(super) max_request: Option<One<Size>>,
    pub(super) max_response: Option<One<Size>>,
    pub(super) digest_status: Option<One<DigestStatus>>,
    pub(super) ttl: Option<One<Duration>>,
    pub(super) lease: Option<One<Duration>>,
    pub(super) timeout: Option<One<Duration>>,
    pub(super) wait_timeout: Option<One<Duration>>,
    pub(super) late_answer: Option<One<Duration>>,
    pub(super) first_headers: Option<Headers>,
    pub(super) replay_headers: Option<Headers>,
    pub(super) drop_headers: Option<List<HeaderName>>,
    pub(super) status: PerReason<RefusalStatus>,
    pub(super) grpc_status: PerReason<GrpcCode>,
    pub(super) envelope: Option<One<Envelope>>,
    pub(super) upstream: Option<One<Upstream>>,
    pub(super) mode: Option<One<Mode>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Key {
    pub(super) from: Option<List<KeySource>>,
    pub(super) required: Option<One<bool>>,
    pub(super) format: Option<One<KeyFormat>>,
    pub(super) max_length: Option<One<usize>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Label {
    pub(super) tenant: Option<One<ScopePart>>,
    pub(super) user: Option<One<ScopePart>>,
    pub(super) key: Option<One<LabelKey>>,
}

/// How the sender of custom webhooks signs.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Signature {
    pub(super) header: Option<One<HeaderName>>,
    pub(super) prefix: Option<One<String>>,
    pub(super) encoding: Option<One<Encoding>>,
    pub(super) content: Option<One<Content>>,
    pub(super) timestamp: Option<One<HeaderName>>,
}

/// A word, or a list of statuses.
#[derive(Debug)]
pub(super) struct Remembered(pub(super) Remember);

/// Names and values.
#[derive(Debug)]
pub(super) struct Headers(pub(super) Vec<(HeaderName, Template)>);

/// A value per refusal, `_` for `-`.
#[derive(Debug)]
pub(super) struct PerReason<T>(pub(super) Vec<(Reason, T)>);

/// A status that a client understands as a refusal.
#[derive(Debug)]
pub(super) struct RefusalStatus(pub(super) StatusCode);

impl<T> Default for PerReason<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl Scalar for RefusalStatus {
    const ALLOWED: &'static str = "a status code from 400 to 599";

    fn from_text(text: &str) -> Result<Self, String> {
        let code = StatusCode::from_text(text).ok().filter(|code| code.as_u16() >= 400);
        code.map(Self).ok_or_else(|| format!("{text} is no status of a refusal; allowed is 400 to 599"))
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        Some(Self::from_text(&number.to_string()))
    }
}

impl<'de> Deserialize<'de> for Remembered {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading;

        impl<'de> Visitor<'de> for Reading {
            type Value = Remembered;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"all\" \"final\" \"success\" or a list such as [\"2xx\", 404, \"!409\"]")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Remembered, E> {
                text.parse().map(Remembered).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Remembered, A::Error> {
                let (mut include, mut exclude) = (Vec::new(), Vec::new());
                while let Some(One(listed)) = list.next_element::<One<Listed>>()? {
                    match listed {
                        Listed::Included(range) => include.push(range),
                        Listed::Excluded(range) => exclude.push(range),
                    }
                }
                Ok(Remembered(Remember::List { include, exclude }))
            }
        }

        deserializer.deserialize_any(Reading)
    }
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading;

        impl<'de> Visitor<'de> for Reading {
            type Value = Headers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table such as { X-Replayed = \"true\" }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<Headers, A::Error> {
                let mut headers: Vec<(HeaderName, Template)> = Vec::new();
                while let Some(One(name)) = table.next_key::<One<HeaderName>>()? {
                    if FRAMING.contains(&name) {
                        return Err(A::Error::custom(format!(
                            "{:?} frames the message and cannot be set",
                            name.as_str()
                        )));
                    }
                    if headers.iter().any(|(known, _)| *known == name) {
                        return Err(A::Error::custom(format!("{:?} is there twice", name.as_str())));
                    }
                    let One(value) = table.next_value()?;
                    headers.push((name, value));
                }
                Ok(Headers(headers))
            }
        }

        deserializer.deserialize_any(Reading)
    }
}

/// Headers that say how a message is sent, or that are never replayed.
pub(crate) const FRAMING: [HeaderName; 9] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::CONTENT_ENCODING,
    header::DATE,
    header::SET_COOKIE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// The refusals as dials spell them.
static REASONS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| Reason::all().map(|reason| &*reason.name().replace('-', "_").leak()).collect());

impl<'de, T: Scalar> Deserialize<'de> for PerReason<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading<T>(PhantomData<T>);

        impl<'de, T: Scalar> Visitor<'de> for Reading<T> {
            type Value = PerReason<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table such as { in_progress = ... }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<PerReason<T>, A::Error> {
                let mut values = Vec::new();
                while let Some(name) = table.next_key::<String>()? {
                    let known = Reason::from_name(&name).filter(|_| !name.contains('-'));
                    let reason = known.ok_or_else(|| A::Error::unknown_field(&name, &REASONS))?;
                    let One(value) = table.next_value()?;
                    values.push((reason, value));
                }
                Ok(PerReason(values))
            }
        }

        deserializer.deserialize_any(Reading(PhantomData))
    }
}
