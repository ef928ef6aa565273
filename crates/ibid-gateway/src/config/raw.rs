//! The file as written: every key is optional, unknown keys are errors. [`validate`](super::validate) applies the
//! defaults.

use std::{net::SocketAddr, sync::LazyLock, time::Duration};

use http::{HeaderName, Method, StatusCode, header};
use ibid::{
    RefusalReason,
    fingerprint::{JsonNumbers, JsonPointer},
    json_rpc::{ToolPattern, ToolSelection},
    key::{KeyFormat, KeySource},
    policy::{
        FingerprintPart, HeaderTemplate, IntentGuard, InvalidSetting, LabelKeyDisplay, OnConcurrent, OnMatch,
        OnMismatch, OnStoreDown, OnUnknown, PolicyMode, RefusalFormat, Remember, ResolveProbe, ResponseEnvelope,
    },
    scope::ScopePart,
    webhook::{SignatureEncoding, SignedContent},
};
use serde_json::{Value as Json, json};
use toml::Value;

use super::{
    error::ConfigError,
    schema,
    secret::Collector,
    secret::{Secret, UpstreamUrl},
    settings::{ApiListen, LimitSettings, LogSettings, PemFile, QuotaSettings, Role},
    store::StoreSettings,
    toml_node::{FromToml, Scalar, TomlNode, tables},
    values::{
        AtLeastOne, ByteSize, DigestStatus, DocumentPath, GrpcCode, Listen, Origin, Positive, Preset, RefusalStatus,
        RememberItem, Upgrade,
    },
};
use crate::routes::{GrpcUnknown, Match};

/// Shorter than the 5 s after which many app servers (Node, uvicorn, Hypercorn) close idle connections.
const DEFAULT_UPSTREAM_IDLE: Duration = Duration::from_secs(4);
const DEFAULT_GUARD_WINDOW: Duration = Duration::from_secs(600);

tables! {
    pub(super) struct RawFile {
        pub(super) listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8080)),
        pub(super) upstream: Option<UpstreamUrl>,
        pub(super) upstream_ca: Option<PemFile>,
        pub(super) upstream_cert: Option<PemFile>,
        pub(super) upstream_key: Option<PemFile>,
        pub(super) max_upstream: usize as AtLeastOne = 1024,
        pub(super) upstream_idle: Duration = DEFAULT_UPSTREAM_IDLE,
        pub(super) upgrades: Option<Vec<Upgrade>>,
        pub(super) trusted_proxies: Option<Vec<String>>,
        pub(super) credentials: Option<Vec<HeaderName>>,
        pub(super) credential_schemes: Vec<String>,
        pub(super) max_running: usize as AtLeastOne = 10_000,
        pub(super) buffer_memory: u64 as ByteSize = 256 << 20,
        pub(super) accept_forgetting: bool,
        pub(super) journal: Option<String>,
        pub(super) descriptors: Option<String>,
        pub(super) grpc_unknown: Option<GrpcUnknown>,
        pub(super) openapi: Vec<DocumentPath>,
        pub(super) cors: RawCors,
        pub(super) tls: Option<RawTls>,
        pub(super) jwt: Option<RawJwt>,
        pub(super) quota: QuotaSettings,
        pub(super) limits: LimitSettings,
        pub(super) log: LogSettings,
        pub(super) trace: RawTrace,
        pub(super) admin: RawAdmin,
        pub(super) api: RawApi,
        pub(super) ext_proc: RawExtProc,
        pub(super) store: StoreSettings,
        pub(super) seal: Option<RawSeal>,
        pub(super) policy: Option<RawDials>,
        pub(super) route: Vec<RawDials>,
    }

    pub(super) struct RawCors {
        pub(super) origins: Vec<Origin>,
    }

    pub(super) struct RawTls {
        pub(super) cert: Option<PemFile>,
        pub(super) key: Option<PemFile>,
        pub(super) client_ca: Option<PemFile>,
    }

    pub(super) struct RawJwt {
        pub(super) secret: Option<Secret>,
        pub(super) pem: Option<PemFile>,
        pub(super) jwks: Option<Secret>,
        pub(super) ca: Option<PemFile>,
        pub(super) cert: Option<PemFile>,
        pub(super) key: Option<PemFile>,
        pub(super) issuer: Option<String>,
        pub(super) audience: Vec<String>,
        pub(super) from: Option<Vec<String>>,
        pub(super) leeway: Duration = Duration::from_secs(60),
        pub(super) refresh: Duration as Positive = Duration::from_secs(300),
    }

    pub(super) struct RawTrace {
        pub(super) otlp: Option<Collector>,
        pub(super) ca: Option<PemFile>,
        pub(super) cert: Option<PemFile>,
        pub(super) key: Option<PemFile>,
    }

    pub(super) struct RawAdmin {
        pub(super) listen: Option<SocketAddr> as Listen = Some(SocketAddr::from(([127, 0, 0, 1], 8081))),
        pub(super) token: Option<Secret>,
        pub(super) tokens: Vec<RawToken>,
        pub(super) audit: Option<String>,
        pub(super) hosts: Vec<String>,
        pub(super) tls: Option<RawTls>,
    }

    pub(super) struct RawApi {
        pub(super) listen: Option<ApiListen>,
        pub(super) token: Option<Secret>,
    }

    pub(super) struct RawExtProc {
        pub(super) listen: Option<SocketAddr>,
    }

    pub(super) struct RawToken {
        pub(super) role: Option<Role>,
        pub(super) user: Option<String>,
        pub(super) name: Option<String>,
        pub(super) token: Option<Secret>,
    }

    pub(super) struct RawSeal {
        pub(super) keys: Vec<RawSealKey>,
        pub(super) address_secret: Option<Secret>,
        pub(super) accept_plain: bool,
        pub(super) plain_addresses: bool,
    }

    pub(super) struct RawSealKey {
        pub(super) id: Option<String>,
        pub(super) key: Option<Secret>,
    }

    pub(super) struct RawDials {
        /// Only for routes.
        pub(super) route_match ("match"): Option<Match>,
        pub(super) preset: Option<&'static str> as Preset,
        pub(super) methods: Option<Vec<Method>>,
        pub(super) key: RawKey,
        pub(super) scope: Option<Vec<ScopePart>>,
        /// Only for webhooks.
        pub(super) secrets: Option<Vec<Secret>>,
        pub(super) unsigned: Option<bool>,
        pub(super) tolerance: Option<Duration>,
        pub(super) signature: Option<RawSignature>,
        pub(super) label: RawLabel,
        pub(super) fingerprint: Option<Vec<FingerprintPart>>,
        pub(super) json_ignore: Option<Vec<JsonPointer>>,
        pub(super) json_numbers: Option<JsonNumbers>,
        pub(super) on_mismatch: Option<OnMismatch>,
        pub(super) on_concurrent: Option<OnConcurrent>,
        pub(super) on_unknown: Option<OnUnknown>,
        pub(super) resolve: Option<ResolveProbe>,
        pub(super) on_store_down: Option<OnStoreDown>,
        pub(super) remember: Option<Remember>,
        pub(super) refusals: Option<RefusalFormat>,
        pub(super) unknown_status: Option<Vec<StatusCode>>,
        pub(super) remember_body: Option<bool>,
        pub(super) max_request: Option<u64> as ByteSize,
        pub(super) max_response: Option<u64> as ByteSize,
        pub(super) digest_status: Option<DigestStatus>,
        pub(super) ttl: Option<Duration>,
        pub(super) lease: Option<Duration>,
        pub(super) timeout: Option<Duration>,
        pub(super) wait_timeout: Option<Duration>,
        pub(super) late_answer: Option<Duration>,
        pub(super) first_headers: Option<RawHeaders>,
        pub(super) replay_headers: Option<RawHeaders>,
        pub(super) drop_headers: Option<Vec<HeaderName>>,
        pub(super) status: PerReason<RefusalStatus>,
        pub(super) grpc_status: PerReason<GrpcCode>,
        pub(super) envelope: Option<ResponseEnvelope>,
        pub(super) guard: Option<RawGuard>,
        /// Only for agents.
        pub(super) tools: Option<ToolSelection>,
        pub(super) remember_tool_errors: Option<bool>,
        pub(super) upstream: Option<UpstreamUrl>,
        pub(super) mode: Option<PolicyMode>,
    }

    pub(super) struct RawKey {
        pub(super) from: Option<Vec<KeySource>>,
        pub(super) required: Option<bool>,
        pub(super) format: Option<KeyFormat>,
        pub(super) max_length: Option<usize>,
    }

    #[derive(Clone)]
    pub(super) struct RawGuard {
        pub(super) fields: Vec<JsonPointer>,
        pub(super) window: Duration = DEFAULT_GUARD_WINDOW,
        pub(super) on_match: OnMatch = OnMatch::Reject,
    }

    pub(super) struct RawLabel {
        pub(super) tenant: Option<ScopePart>,
        pub(super) user: Option<ScopePart>,
        pub(super) key: Option<LabelKeyDisplay>,
    }

    pub(super) struct RawSignature {
        pub(super) header: Option<HeaderName>,
        pub(super) prefix: String,
        pub(super) encoding: SignatureEncoding = SignatureEncoding::Hex,
        pub(super) content: SignedContent = SignedContent::body(),
        pub(super) timestamp: Option<HeaderName>,
    }
}

impl From<RawGuard> for Option<IntentGuard> {
    fn from(guard: RawGuard) -> Self {
        let RawGuard { fields, window, on_match } = guard;
        Some(IntentGuard { fields, window, on_match })
    }
}

#[derive(Clone)]
pub(super) struct RawHeaders(Vec<(HeaderName, HeaderTemplate)>);

impl From<RawHeaders> for Vec<(HeaderName, HeaderTemplate)> {
    fn from(headers: RawHeaders) -> Self {
        headers.0
    }
}

/// A value per refusal; keys have `_` for `-`.
pub(super) struct PerReason<T>(pub(super) Vec<(RefusalReason, T)>);

impl<T> Default for PerReason<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// A keyword or a list of statuses.
impl FromToml for Remember {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        if let Value::String(text) = node.value {
            return node.parse_text(text, |text| text.parse().map_err(|why: InvalidSetting| why.to_string()));
        }
        let (mut include, mut exclude) = (Vec::new(), Vec::new());
        for item in node.items("\"all\" \"final\" \"success\" or a list such as [\"2xx\", 404, \"!409\"]")? {
            match item.read() {
                Some(RememberItem::Included(range)) => include.push(range),
                Some(RememberItem::Excluded(range)) => exclude.push(range),
                None => {}
            }
        }
        Ok(Self::List { include, exclude })
    }

    fn schema() -> Json {
        json!({ "anyOf": [schema::choices(&["all", "final", "success"]), schema::list(RememberItem::schema())] })
    }
}

/// A keyword or a list of names.
impl FromToml for ToolSelection {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        match node.value {
            Value::String(text) if text == "annotations" => Ok(Self::Annotations),
            _ => Vec::<ToolPattern>::from_toml(node).map(Self::Named),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [schema::choices(&["annotations"]), schema::list(ToolPattern::schema())] })
    }
}

impl FromToml for RawHeaders {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        let mut headers: Vec<(HeaderName, HeaderTemplate)> = Vec::new();
        for (name, value) in node.members("a table such as { X-Replayed = \"true\" }")? {
            let name = HeaderName::from_text(name).map_err(|what| node.error(what))?;
            if UNSETTABLE_HEADERS.contains(&name) {
                return Err(node.error(format!("{:?} frames the message and cannot be set", name.as_str())));
            }
            if headers.iter().any(|(known, _)| *known == name) {
                return Err(node.error(format!("{:?} is there twice", name.as_str())));
            }
            headers.extend(value.read().map(|value| (name, value)));
        }
        Ok(Self(headers))
    }

    fn schema() -> Json {
        json!({ "type": "object", "additionalProperties": HeaderTemplate::schema() })
    }
}

impl<T: Scalar> FromToml for PerReason<T> {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        let mut values = Vec::new();
        for (name, value) in node.members("a table such as { in_progress = ... }")? {
            match RefusalReason::from_name(name).filter(|_| !name.contains('-')) {
                Some(reason) => values.extend(value.read().map(|value| (reason, value))),
                None => value.report_unknown_key(name, &REASON_KEYS),
            }
        }
        Ok(Self(values))
    }

    fn schema() -> Json {
        schema::table(REASON_KEYS.iter().map(|name| (*name, <T as FromToml>::schema())).collect())
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
