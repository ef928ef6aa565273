//! The file as written: every key is optional, unknown keys are errors. [`validate`](super::validate) applies the
//! defaults.

use std::{fmt, marker::PhantomData, net::SocketAddr, sync::LazyLock, time::Duration};

use http::{HeaderName, Method, StatusCode, header};
use ibid::{
    FingerprintPart, HeaderTemplate, JsonPointer, KeyFormat, KeySource, LabelKeyDisplay, OnConcurrent, OnMismatch,
    OnStoreDown, OnUnknown, PolicyMode, QuotaLimit, RefusalFormat, RefusalReason, Remember, ResolveProbe,
    ResponseEnvelope, ScopePart,
    webhook::{SignatureEncoding, SignedContent},
};
use serde::{
    Deserialize,
    de::{Deserializer, Error, MapAccess, SeqAccess, Visitor},
};

use super::{
    collector::Collector,
    scalar::{List, Scalar, Single},
    secret::{RedactedStoreUrl, Secret, UpstreamUrl},
    settings::{LogFormat, LogLevel, Role},
    values::{
        ByteLimit, ByteSize, DigestStatus, DocumentPath, GrpcCode, Listen, Origin, Preset, RememberItem, Upgrade,
    },
};
use crate::routes::{GrpcUnknown, Match};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawFile {
    pub(super) listen: Option<Single<SocketAddr>>,
    pub(super) upstream: Option<Single<UpstreamUrl>>,
    pub(super) upstream_ca: Option<Single<String>>,
    pub(super) upstream_cert: Option<Single<Secret>>,
    pub(super) upstream_key: Option<Single<Secret>>,
    pub(super) max_upstream: Option<Single<usize>>,
    pub(super) upstream_idle: Option<Single<Duration>>,
    pub(super) upgrades: Option<List<Upgrade>>,
    pub(super) trusted_proxies: Option<List<String>>,
    pub(super) credentials: Option<List<HeaderName>>,
    pub(super) credential_schemes: Option<List<String>>,
    pub(super) max_running: Option<Single<usize>>,
    pub(super) buffer_memory: Option<Single<ByteSize>>,
    pub(super) accept_forgetting: Option<Single<bool>>,
    pub(super) journal: Option<Single<String>>,
    pub(super) descriptors: Option<Single<String>>,
    pub(super) grpc_unknown: Option<Single<GrpcUnknown>>,
    pub(super) openapi: Option<List<DocumentPath>>,
    pub(super) cors: RawCors,
    pub(super) tls: Option<RawTls>,
    pub(super) jwt: Option<RawJwt>,
    pub(super) quota: RawQuota,
    pub(super) limits: RawLimits,
    pub(super) log: RawLog,
    pub(super) trace: RawTrace,
    pub(super) admin: RawAdmin,
    pub(super) store: RawStore,
    pub(super) seal: Option<RawSeal>,
    pub(super) policy: Option<RawDials>,
    pub(super) route: Vec<RawDials>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawCors {
    pub(super) origins: Option<List<Origin>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawTls {
    pub(super) cert: Option<Single<Secret>>,
    pub(super) key: Option<Single<Secret>>,
    pub(super) client_ca: Option<Single<Secret>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawJwt {
    pub(super) secret: Option<Single<Secret>>,
    pub(super) pem: Option<Single<Secret>>,
    pub(super) jwks: Option<Single<Secret>>,
    pub(super) ca: Option<Single<Secret>>,
    pub(super) cert: Option<Single<Secret>>,
    pub(super) key: Option<Single<Secret>>,
    pub(super) issuer: Option<Single<String>>,
    pub(super) audience: Option<List<String>>,
    pub(super) from: Option<List<String>>,
    pub(super) leeway: Option<Single<Duration>>,
    pub(super) refresh: Option<Single<Duration>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawQuota {
    pub(super) new_keys: Option<Single<QuotaLimit>>,
    pub(super) new_bytes: Option<Single<ByteLimit>>,
    pub(super) rate: Option<Single<QuotaLimit>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLimits {
    pub(super) header_timeout: Option<Single<Duration>>,
    pub(super) body_timeout: Option<Single<Duration>>,
    pub(super) idle_timeout: Option<Single<Duration>>,
    pub(super) write_timeout: Option<Single<Duration>>,
    pub(super) pool_timeout: Option<Single<Duration>>,
    pub(super) reply_timeout: Option<Single<Duration>>,
    pub(super) tunnel_timeout: Option<Single<Duration>>,
    pub(super) max_headers: Option<Single<usize>>,
    pub(super) max_header_bytes: Option<Single<ByteSize>>,
    pub(super) max_connections: Option<Single<usize>>,
    pub(super) shutdown: Option<Single<Duration>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawTrace {
    pub(super) otlp: Option<Single<Collector>>,
    pub(super) ca: Option<Single<Secret>>,
    pub(super) cert: Option<Single<Secret>>,
    pub(super) key: Option<Single<Secret>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLog {
    pub(super) format: Option<Single<LogFormat>>,
    pub(super) level: Option<Single<LogLevel>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawAdmin {
    pub(super) listen: Option<Single<Listen>>,
    pub(super) token: Option<Single<Secret>>,
    pub(super) tokens: Vec<RawToken>,
    pub(super) audit: Option<Single<String>>,
    pub(super) hosts: Option<List<String>>,
    pub(super) tls: Option<RawTls>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawToken {
    pub(super) role: Option<Single<Role>>,
    pub(super) user: Option<Single<String>>,
    pub(super) name: Option<Single<String>>,
    pub(super) token: Option<Single<Secret>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawStore {
    pub(super) url: Option<Single<RedactedStoreUrl>>,
    pub(super) fallback: Option<Single<RedactedStoreUrl>>,
    pub(super) cache: Option<Single<RedactedStoreUrl>>,
    pub(super) prefix: Option<Single<String>>,
    pub(super) timeout: Option<Single<Duration>>,
    pub(super) wait_replicas: Option<Single<usize>>,
    pub(super) local_cache: Option<Single<ByteSize>>,
    pub(super) compress: Option<Single<bool>>,
    pub(super) rls_user: Option<Single<String>>,
    pub(super) sweep_every: Option<Single<Duration>>,
    pub(super) strict: Option<Single<bool>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSeal {
    pub(super) keys: Vec<RawSealKey>,
    pub(super) address_secret: Option<Single<Secret>>,
    pub(super) accept_plain: Option<Single<bool>>,
    pub(super) plain_addresses: Option<Single<bool>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSealKey {
    pub(super) id: Option<Single<String>>,
    pub(super) key: Option<Single<Secret>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawDials {
    /// Only for routes.
    #[serde(rename = "match")]
    pub(super) route_match: Option<Single<Match>>,
    pub(super) preset: Option<Single<Preset>>,
    pub(super) methods: Option<List<Method>>,
    pub(super) key: RawKey,
    pub(super) scope: Option<List<ScopePart>>,
    /// Only for webhooks.
    pub(super) secrets: Option<List<Secret>>,
    pub(super) unsigned: Option<Single<bool>>,
    pub(super) tolerance: Option<Single<Duration>>,
    pub(super) signature: Option<RawSignature>,
    pub(super) label: RawLabel,
    pub(super) fingerprint: Option<List<FingerprintPart>>,
    pub(super) json_ignore: Option<List<JsonPointer>>,
    pub(super) on_mismatch: Option<Single<OnMismatch>>,
    pub(super) on_concurrent: Option<Single<OnConcurrent>>,
    pub(super) on_unknown: Option<Single<OnUnknown>>,
    pub(super) resolve: Option<Single<ResolveProbe>>,
    pub(super) on_store_down: Option<Single<OnStoreDown>>,
    pub(super) remember: Option<RawRemember>,
    pub(super) refusals: Option<Single<RefusalFormat>>,
    pub(super) unknown_status: Option<List<StatusCode>>,
    pub(super) remember_body: Option<Single<bool>>,
    pub(super) max_request: Option<Single<ByteSize>>,
    pub(super) max_response: Option<Single<ByteSize>>,
    pub(super) digest_status: Option<Single<DigestStatus>>,
    pub(super) ttl: Option<Single<Duration>>,
    pub(super) lease: Option<Single<Duration>>,
    pub(super) timeout: Option<Single<Duration>>,
    pub(super) wait_timeout: Option<Single<Duration>>,
    pub(super) late_answer: Option<Single<Duration>>,
    pub(super) first_headers: Option<RawHeaders>,
    pub(super) replay_headers: Option<RawHeaders>,
    pub(super) drop_headers: Option<List<HeaderName>>,
    pub(super) status: PerReason<RefusalStatus>,
    pub(super) grpc_status: PerReason<GrpcCode>,
    pub(super) envelope: Option<Single<ResponseEnvelope>>,
    pub(super) upstream: Option<Single<UpstreamUrl>>,
    pub(super) mode: Option<Single<PolicyMode>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawKey {
    pub(super) from: Option<List<KeySource>>,
    pub(super) required: Option<Single<bool>>,
    pub(super) format: Option<Single<KeyFormat>>,
    pub(super) max_length: Option<Single<usize>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLabel {
    pub(super) tenant: Option<Single<ScopePart>>,
    pub(super) user: Option<Single<ScopePart>>,
    pub(super) key: Option<Single<LabelKeyDisplay>>,
}

/// The signature of custom webhooks.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSignature {
    pub(super) header: Option<Single<HeaderName>>,
    pub(super) prefix: Option<Single<String>>,
    pub(super) encoding: Option<Single<SignatureEncoding>>,
    pub(super) content: Option<Single<SignedContent>>,
    pub(super) timestamp: Option<Single<HeaderName>>,
}

/// A keyword or a list of statuses.
#[derive(Debug)]
pub(super) struct RawRemember(pub(super) Remember);

#[derive(Debug)]
pub(super) struct RawHeaders(pub(super) Vec<(HeaderName, HeaderTemplate)>);

/// A value per refusal; keys have `_` for `-`.
#[derive(Debug)]
pub(super) struct PerReason<T>(pub(super) Vec<(RefusalReason, T)>);

/// A status that clients interpret as a refusal.
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

impl<'de> Deserialize<'de> for RawRemember {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RememberVisitor;

        impl<'de> Visitor<'de> for RememberVisitor {
            type Value = RawRemember;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"all\" \"final\" \"success\" or a list such as [\"2xx\", 404, \"!409\"]")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<RawRemember, E> {
                text.parse().map(RawRemember).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RawRemember, A::Error> {
                let (mut include, mut exclude) = (Vec::new(), Vec::new());
                while let Some(Single(listed)) = list.next_element::<Single<RememberItem>>()? {
                    match listed {
                        RememberItem::Included(range) => include.push(range),
                        RememberItem::Excluded(range) => exclude.push(range),
                    }
                }
                Ok(RawRemember(Remember::List { include, exclude }))
            }
        }

        deserializer.deserialize_any(RememberVisitor)
    }
}

impl<'de> Deserialize<'de> for RawHeaders {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeadersVisitor;

        impl<'de> Visitor<'de> for HeadersVisitor {
            type Value = RawHeaders;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table such as { X-Replayed = \"true\" }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<RawHeaders, A::Error> {
                let mut headers: Vec<(HeaderName, HeaderTemplate)> = Vec::new();
                while let Some(Single(name)) = table.next_key::<Single<HeaderName>>()? {
                    if UNSETTABLE_HEADERS.contains(&name) {
                        return Err(A::Error::custom(format!(
                            "{:?} frames the message and cannot be set",
                            name.as_str()
                        )));
                    }
                    if headers.iter().any(|(known, _)| *known == name) {
                        return Err(A::Error::custom(format!("{:?} is there twice", name.as_str())));
                    }
                    let Single(value) = table.next_value()?;
                    headers.push((name, value));
                }
                Ok(RawHeaders(headers))
            }
        }

        deserializer.deserialize_any(HeadersVisitor)
    }
}

/// Headers of the transport, and headers that are never replayed. No dial may set them.
pub(crate) const UNSETTABLE_HEADERS: [HeaderName; 9] = [
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

/// The names of the refusals as keys of dials.
static REASON_KEYS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| RefusalReason::all().map(|reason| &*reason.name().replace('-', "_").leak()).collect());

impl<'de, T: Scalar> Deserialize<'de> for PerReason<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PerReasonVisitor<T>(PhantomData<T>);

        impl<'de, T: Scalar> Visitor<'de> for PerReasonVisitor<T> {
            type Value = PerReason<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table such as { in_progress = ... }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<PerReason<T>, A::Error> {
                let mut values = Vec::new();
                while let Some(name) = table.next_key::<String>()? {
                    let known = RefusalReason::from_name(&name).filter(|_| !name.contains('-'));
                    let reason = known.ok_or_else(|| A::Error::unknown_field(&name, &REASON_KEYS))?;
                    let Single(value) = table.next_value()?;
                    values.push((reason, value));
                }
                Ok(PerReason(values))
            }
        }

        deserializer.deserialize_any(PerReasonVisitor(PhantomData))
    }
}
