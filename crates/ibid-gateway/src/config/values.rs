//! The syntax of single values: durations, sizes, codes, keywords.

use std::{fmt, net::SocketAddr, str::FromStr, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode, uri::PathAndQuery};
use ibid::{
    fingerprint::{JsonNumbers, JsonPointer},
    grpc::GrpcStatusCode,
    json_rpc::ToolPattern,
    key::{KeyFormat, KeySource},
    policy::{
        FingerprintPart, HeaderTemplate, InvalidSetting, LabelKeyDisplay, OnConcurrent, OnMatch, OnMismatch,
        OnStoreDown, OnUnknown, PolicyMode, RefusalFormat, ResolveProbe, ResponseEnvelope, StatusRange,
    },
    presets,
    quota::QuotaLimit,
    scope::ScopePart,
    webhook::{SignatureEncoding, SignedContent},
};
use ibid_tools::format::{self, ALLOWED_DURATION, MAX_DURATION};

use super::{
    error::{closest_match, quote_list},
    toml_node::Scalar,
};
use crate::routes::Match;

/// The preset of a `[policy]` that covers nothing: only routes are covered.
pub(super) const PRESET_OFF: &str = "off";

/// The names of all presets that cover requests.
fn preset_names() -> impl Iterator<Item = &'static str> {
    presets::PRESET_NAMES.into_iter().chain(presets::AGENT_PRESET_NAMES).chain(presets::WEBHOOK_PRESET_NAMES)
}

/// Declares the syntax of settings whose type is another one.
macro_rules! syntax {
    ($($(#[$doc:meta])* $name:ident($inner:ty) $(or $other:ty)?;)+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub(super) struct $name(pub(super) $inner);

        impl From<$name> for $inner {
            fn from(value: $name) -> Self {
                value.0
            }
        }

        $(impl From<$name> for $other {
            fn from(value: $name) -> Self {
                Some(value.0)
            }
        })?
    )+};
}

syntax! {
    /// `"64KiB"`, in bytes.
    ByteSize(u64) or Option<u64>;
    /// `"1GiB/24h"`.
    ByteLimit(QuotaLimit) or Option<QuotaLimit>;
    /// From 8 KiB to 16 MiB.
    HeaderBytes(u64);
    AtLeastOne(usize);
    /// A duration that is not zero.
    Positive(Duration);
    GrpcCode(u8);
    /// `original` or a status code.
    DigestStatus(Option<StatusCode>);
    /// A status that clients interpret as a refusal.
    RefusalStatus(StatusCode);
    Preset(&'static str) or Option<&'static str>;
    Origin(HeaderValue);
    /// A protocol that a connection may be upgraded to, in lower case.
    Upgrade(String);
    DocumentPath(String);
    /// An address to listen on, or `off`.
    Listen(Option<SocketAddr>);
}

/// Declares scalars: the allowed values, and how text, numbers and booleans are read.
macro_rules! scalars {
    ($($type:ty: $allowed:expr, |$text:ident| $parse:expr
        $(, number |$number:ident| $from_number:expr)? $(, switch |$switch:ident| $from_bool:expr)?
        $(, choices $choices:expr)?;)+) => {$(
        impl Scalar for $type {
            const ALLOWED: &'static str = $allowed;

            fn from_text($text: &str) -> Result<Self, String> {
                $parse
            }

            $(fn from_number($number: i64) -> Option<Result<Self, String>> {
                Some($from_number)
            })?

            $(fn from_bool($switch: bool) -> Option<Self> {
                $from_bool
            })?

            $(fn choices() -> Vec<&'static str> {
                $choices
            })?
        }
    )+};
}

/// The error `found "x"; allowed is …`.
fn found<T: Scalar>(value: Option<T>, text: impl fmt::Debug) -> Result<T, String> {
    value.ok_or_else(|| format!("found {text:?}; allowed is {}", T::ALLOWED))
}

/// The error `"x" is no NAME; allowed is …`.
fn named<T: Scalar>(name: &str, value: Option<T>, text: impl fmt::Debug) -> Result<T, String> {
    value.ok_or_else(|| format!("{text:?} is no {name}; allowed is {}", T::ALLOWED))
}

scalars! {
    String: "text", |text| Ok(text.into());
    bool: "true or false", |text| found(text.parse().ok(), text), switch |switch| Some(switch);
    usize: "a whole number", |text| found(text.parse().ok(), text), number |number| found(number.try_into().ok(), number);
    Duration: ALLOWED_DURATION, |text| {
        named("duration", format::parse_duration(text).filter(|duration| *duration <= MAX_DURATION), text)
    };
    SocketAddr: "an address and a port such as \"127.0.0.1:8080\"", |text| named("address", text.parse().ok(), text);
    Listen: "an address and a port such as \"127.0.0.1:8081\", or \"off\"", |text| match text {
        "off" => Ok(Self(None)),
        address => named("address", address.parse().ok().map(Some).map(Self), text),
    }, switch |switch| (!switch).then_some(Self(None));
    ByteSize: "bytes, or a size such as \"64KiB\" \"1MiB\" \"1GiB\" \"10KB\"",
        |text| named("size", ibid_stores::parse_size(text).map(Self), text),
        number |number| named("size", number.try_into().ok().map(Self), number);
    HeaderBytes: ByteSize::ALLOWED, |text| Self::check(ByteSize::from_text(text)?),
        number |number| ByteSize::from_number(number)?.and_then(Self::check);
    AtLeastOne: usize::ALLOWED, |text| Self::check(usize::from_text(text)?),
        number |number| usize::from_number(number)?.and_then(Self::check);
    Positive: ALLOWED_DURATION, |text| match Duration::from_text(text)? {
        Duration::ZERO => Err("it is zero; it must be longer, such as \"30s\"".into()),
        duration => Ok(Self(duration)),
    };
    QuotaLimit: "so many in so long, such as \"100000/24h\" or \"200/s\"",
        |text| named("limit", parse_limit(text, |most| most.parse().ok()), text);
    ByteLimit: "so many bytes in so long, such as \"1GiB/24h\"",
        |text| named("limit of bytes", parse_limit(text, ibid_stores::parse_size).map(Self), text);
    DocumentPath: "a path such as \"/swagger/v1/swagger.json\", without a query", |text| {
        let is_path = text.starts_with('/')
            && !text.contains(['?', '#'])
            && text.parse::<PathAndQuery>().is_ok_and(|parsed| parsed.path() == text);
        named("path", is_path.then(|| Self(text.into())), text)
    };
    Upgrade: "a protocol such as \"websocket\"", |text| {
        let in_a_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~/".contains(&byte);
        let name = text.to_ascii_lowercase();
        if name == "h2c" || name.starts_with("http/") || name.starts_with("tls/") {
            let why = "requests inside such a connection would reach the app uncovered";
            return Err(format!("{text:?} is not allowed: {why}"));
        }
        named("protocol", (!text.is_empty() && text.bytes().all(in_a_token)).then_some(Self(name)), text)
    };
    StatusCode: "a status code such as 409", |text| {
        let code = text.parse().ok().filter(|code| (100..=599).contains(code));
        let code = code.and_then(|code: u16| Self::from_u16(code).ok());
        code.ok_or_else(|| format!("{text:?} is no status code; allowed is 100 to 599"))
    }, number |number| Self::from_text(&number.to_string()).map_err(|wrong| wrong.replacen('"', "", 2));
    RefusalStatus: "a status code from 400 to 599", |text| {
        let code = StatusCode::from_text(text).ok().filter(|code| code.as_u16() >= 400);
        code.map(Self).ok_or_else(|| format!("{text} is no status of a refusal; allowed is 400 to 599"))
    }, number |number| Self::from_text(&number.to_string());
    DigestStatus: "\"original\" or a status code such as 200", |text| match text {
        "original" => Ok(Self(None)),
        code => named("digest_status", StatusCode::from_text(code).ok().map(Some).map(Self), text),
    }, number |number| StatusCode::from_number(number)?.map(Some).map(Self);
    RememberItem: "a code such as 404, or a class such as \"2xx\", with ! before it to exclude it",
        |text| match text.strip_prefix('!') {
            Some(excluded) => excluded.parse().map(Self::Excluded),
            None => text.parse().map(Self::Included),
        }
        .map_err(|why: InvalidSetting| why.to_string()),
        number |number| StatusCode::from_number(number)?.map(StatusRange::Code).map(Self::Included);
    GrpcCode: "a gRPC code such as \"ALREADY_EXISTS\", or its number", |text| {
        let code = GrpcStatusCode::from_name(text).map(GrpcStatusCode::number).or_else(|| text.parse().ok());
        match code {
            Some(0) => Err("\"OK\" is no refusal; allowed is any other gRPC code".into()),
            Some(code @ 1..=16) => Ok(Self(code)),
            _ => Err(match closest_match(text, Self::choices()) {
                Some(close) => format!("{text:?} is no gRPC code, did you mean {close:?}?"),
                None => format!("{text:?} is no gRPC code; allowed are {} or 1 to 16", quote_list(Self::choices())),
            }),
        }
    }, number |number| {
        let code = u8::try_from(number).ok().filter(|code| (1..=16).contains(code));
        code.map(Self).ok_or_else(|| format!("{number} is no gRPC code of a refusal; allowed is 1 to 16"))
    }, choices GrpcStatusCode::all().skip(1).map(GrpcStatusCode::name).collect();
    Preset: "the name of a preset", |text| {
        let unknown = || match closest_match(text, preset_names()) {
            Some(close) => format!("{text:?} is no preset, did you mean {close:?}?"),
            None => format!("{text:?} is no preset; allowed are {}", quote_list(preset_names())),
        };
        Self::choices().into_iter().find(|name| *name == text).map(Self).ok_or_else(unknown)
    }, choices preset_names().chain([PRESET_OFF]).collect();
    Method: "a method such as \"POST\"", |text| {
        let upper = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
        let method = Self::from_str(text).ok().filter(|_| upper);
        method.ok_or_else(|| format!("{text:?} is no method; write one in upper case, such as \"POST\""))
    };
    HeaderName: "a header's name", |text| Self::from_str(text).map_err(|_| format!("{text:?} is no header's name"));
    JsonPointer: "a JSON pointer such as \"/meta/sent_at\"", |text| match text.starts_with('/') {
        true => Self::parse(text).map_err(|why| format!("{text:?}: {why}")),
        false => Err(format!("{text:?} is no JSON pointer; write one such as \"/meta/sent_at\"")),
    };
    Origin: "an origin such as \"https://shop.example.com\"", |text| {
        let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        let fits = host.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', '?', '#', '@', ' ']));
        let origin = HeaderValue::from_str(text).ok().filter(|_| fits && !text.contains(char::is_uppercase));
        let allowed = "allowed is a scheme and a host in lower case, such as \"https://shop.example.com\"";
        origin.map(Self).ok_or_else(|| format!("{text:?} is no origin; {allowed}"))
    };
}

/// An item of the list `remember`: `404`, `"2xx"` or, to exclude it, `"!409"`.
#[derive(Debug, Clone, Copy)]
pub(super) enum RememberItem {
    Included(StatusRange),
    Excluded(StatusRange),
}

impl HeaderBytes {
    fn check(ByteSize(bytes): ByteSize) -> Result<Self, String> {
        match (8 << 10..=16 << 20).contains(&bytes) {
            true => Ok(Self(bytes)),
            false => Err(format!("found {bytes} bytes; allowed is \"8KiB\" to \"16MiB\"")),
        }
    }
}

impl AtLeastOne {
    fn check(number: usize) -> Result<Self, String> {
        if number == 0 { Err("expected at least 1, got 0".into()) } else { Ok(Self(number)) }
    }
}

/// Parses `100/24h` or `100/h`.
fn parse_limit(text: &str, parse_most: impl Fn(&str) -> Option<u64>) -> Option<QuotaLimit> {
    let (most, per) = text.split_once('/')?;
    let most = parse_most(most.trim()).filter(|most| (1..=1 << 50).contains(most))?;
    let per = per.trim();
    let per = if per.starts_with(|c: char| c.is_ascii_digit()) { per.to_owned() } else { format!("1{per}") };
    let per = format::parse_duration(&per).filter(|per| !per.is_zero() && *per <= MAX_DURATION)?;
    Some(QuotaLimit { most, per })
}

/// For types whose own `FromStr` names the allowed values.
macro_rules! parsed {
    ($($type:ty: $allowed:literal),+ $(,)?) => {
        scalars! { $($type: $allowed, |text| text.parse::<$type>().map_err(|why| why.to_string());)+ }
    };
}

parsed! {
    ScopePart: "part of a scope such as \"credential\"",
    JsonNumbers: "\"as-written\" \"decimal\"",
    OnMismatch: "\"reject\" \"new\" \"ignore\"",
    OnConcurrent: "\"reject\" \"wait\"",
    OnMatch: "\"reject\" \"hold\" \"count\"",
    OnUnknown: "\"hold\" \"retry\"",
    OnStoreDown: "\"closed\" \"open\"",
    ResponseEnvelope: "\"none\" \"metadata\"",
    RefusalFormat: "\"problem\" \"stripe\" \"acp\" \"ucp\" \"iceberg\" \"json-rpc\"",
    ToolPattern: "the name of a tool, such as \"create_order\" or \"create_*\"",
    PolicyMode: "\"enforce\" \"shadow\" \"off\"",
    LabelKeyDisplay: "\"clear\" \"masked\"",
    KeyFormat: "a key format such as \"uuid4\"",
    KeySource: "a source of keys such as \"header:Idempotency-Key\"",
    FingerprintPart: "a part of the fingerprint such as \"body\"",
    ResolveProbe: "a method and a path, such as \"GET /payments?key={key}\"",
    HeaderTemplate: "a header's value",
    SignedContent: "what is signed, such as \"{X-Timestamp}.{body}\"",
    SignatureEncoding: "\"hex\" \"base64\"",
    Match: "METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"",
}
