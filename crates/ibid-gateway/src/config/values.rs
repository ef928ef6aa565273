//! The syntax of single values: durations, sizes, codes, keywords.

use std::{net::SocketAddr, str::FromStr, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode, uri::PathAndQuery};
use ibid::{
    FingerprintPart, HeaderTemplate, JsonPointer, KeyFormat, KeySource, LabelKeyDisplay, OnConcurrent, OnMismatch,
    OnStoreDown, OnUnknown, PolicyMode, QuotaLimit, RefusalFormat, ResolveProbe, ResponseEnvelope, ScopePart,
    StatusRange,
    grpc::GrpcStatusCode,
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
    /// The name of an existing preset.
    Preset(&'static str) or Option<&'static str>;
    /// The origin of a web page.
    Origin(HeaderValue);
    /// A protocol that a connection may be upgraded to, in lower case.
    Upgrade(String);
    /// The path of an OpenAPI document.
    DocumentPath(String);
    /// An address to listen on, or `off`.
    Listen(Option<SocketAddr>);
}

/// For types whose error is `"x" is no NAME; allowed is …`.
macro_rules! scalars {
    ($($type:ty: $name:literal, $allowed:expr => |$text:ident| $parse:expr;)+) => {$(
        impl Scalar for $type {
            const ALLOWED: &'static str = $allowed;

            fn from_text($text: &str) -> Result<Self, String> {
                let parse = || -> Option<Self> { $parse };
                parse().ok_or_else(|| format!("{:?} is no {}; allowed is {}", $text, $name, Self::ALLOWED))
            }
        }
    )+};
}

scalars! {
    Duration: "duration", ALLOWED_DURATION => |text| format::parse_duration(text).filter(|duration| *duration <= MAX_DURATION);
    SocketAddr: "address", "an address and a port such as \"127.0.0.1:8080\"" => |text| text.parse().ok();
    QuotaLimit: "limit", "so many in so long, such as \"100000/24h\" or \"200/s\"" => |text| {
        let (most, per) = text.split_once('/')?;
        let most = most.trim().parse().ok().filter(|most| (1..=1 << 50).contains(most))?;
        let per = per.trim();
        let per = if per.starts_with(|c: char| c.is_ascii_digit()) { per.to_owned() } else { format!("1{per}") };
        let per = format::parse_duration(&per).filter(|per| !per.is_zero() && *per <= MAX_DURATION)?;
        Some(Self { most, per })
    };
    ByteLimit: "limit of bytes", "so many bytes in so long, such as \"1GiB/24h\"" => |text| {
        let (most, per) = text.split_once('/')?;
        let most = ibid_stores::parse_size(most.trim())?;
        QuotaLimit::from_text(&format!("{most}/{per}")).ok().map(Self)
    };
    DocumentPath: "path", "a path such as \"/swagger/v1/swagger.json\", without a query" => |text| {
        let is_path = text.starts_with('/')
            && !text.contains(['?', '#'])
            && text.parse::<PathAndQuery>().is_ok_and(|parsed| parsed.path() == text);
        is_path.then(|| Self(text.into()))
    };
}

impl Scalar for String {
    const ALLOWED: &'static str = "text";

    fn from_text(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }
}

impl Scalar for bool {
    const ALLOWED: &'static str = "true or false";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("found {text:?}; allowed is {}", Self::ALLOWED))
    }

    fn from_bool(switch: bool) -> Option<Self> {
        Some(switch)
    }
}

impl Scalar for usize {
    const ALLOWED: &'static str = "a whole number";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("found {text:?}; allowed is {}", Self::ALLOWED))
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        Some(number.try_into().map_err(|_| format!("found {number}; allowed is {}", Self::ALLOWED)))
    }
}

impl Scalar for ByteSize {
    const ALLOWED: &'static str = "bytes, or a size such as \"64KiB\" \"1MiB\" \"1GiB\" \"10KB\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let size = ibid_stores::parse_size(text);
        size.map(Self).ok_or_else(|| format!("{text:?} is no size; allowed is {}", Self::ALLOWED))
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        let size = number.try_into().map(Self);
        Some(size.map_err(|_| format!("{number} is no size; allowed is {}", Self::ALLOWED)))
    }
}

/// For types that are read like another one, and then checked.
macro_rules! checked {
    ($($type:ident: $inner:ty => |$value:ident| $check:expr;)+) => {$(
        impl $type {
            fn check(value: $inner) -> Result<Self, String> {
                let check = |$value: $inner| -> Result<_, String> { $check };
                check(value).map(Self)
            }
        }

        impl Scalar for $type {
            const ALLOWED: &'static str = <$inner as Scalar>::ALLOWED;

            fn from_text(text: &str) -> Result<Self, String> {
                <$inner as Scalar>::from_text(text).and_then(Self::check)
            }

            fn from_number(number: i64) -> Option<Result<Self, String>> {
                <$inner as Scalar>::from_number(number).map(|value| value.and_then(Self::check))
            }
        }
    )+};
}

checked! {
    AtLeastOne: usize => |number| match number {
        0 => Err("found 0; allowed is 1 and more".into()),
        number => Ok(number),
    };
    Positive: Duration => |duration| match duration.is_zero() {
        true => Err("it is zero; it must be longer, such as \"30s\"".into()),
        false => Ok(duration),
    };
    HeaderBytes: ByteSize => |size| match size.0 {
        bytes @ 0x2000..=0x100_0000 => Ok(bytes),
        bytes => Err(format!("found {bytes} bytes; allowed is \"8KiB\" to \"16MiB\"")),
    };
}

impl Scalar for Upgrade {
    const ALLOWED: &'static str = "a protocol such as \"websocket\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let in_a_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~/".contains(&byte);
        if text.is_empty() || !text.bytes().all(in_a_token) {
            return Err(format!("{text:?} is no protocol; allowed is {}", Self::ALLOWED));
        }
        let name = text.to_ascii_lowercase();
        if name == "h2c" || name.starts_with("http/") || name.starts_with("tls/") {
            return Err(format!(
                "{text:?} is not allowed: requests inside such a connection would reach the app uncovered"
            ));
        }
        Ok(Self(name))
    }
}

impl Scalar for StatusCode {
    const ALLOWED: &'static str = "a status code such as 409";

    fn from_text(text: &str) -> Result<Self, String> {
        let code = text.parse().ok().filter(|code| (100..=599).contains(code));
        let code = code.and_then(|code: u16| Self::from_u16(code).ok());
        code.ok_or_else(|| format!("{text:?} is no status code; allowed is 100 to 599"))
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        Some(Self::from_text(&number.to_string()).map_err(|wrong| wrong.replacen('"', "", 2)))
    }
}

/// An item of the list `remember`: `404`, `"2xx"` or, to exclude it, `"!409"`.
#[derive(Debug, Clone, Copy)]
pub(super) enum RememberItem {
    Included(StatusRange),
    Excluded(StatusRange),
}

impl Scalar for RememberItem {
    const ALLOWED: &'static str = "a code such as 404, or a class such as \"2xx\", with ! before it to exclude it";

    fn from_text(text: &str) -> Result<Self, String> {
        match text.strip_prefix('!') {
            Some(excluded) => excluded.parse().map(Self::Excluded),
            None => text.parse().map(Self::Included),
        }
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        Some(<StatusCode as Scalar>::from_number(number)?.map(StatusRange::Code).map(Self::Included))
    }
}

impl Scalar for DigestStatus {
    const ALLOWED: &'static str = "\"original\" or a status code such as 200";

    fn from_text(text: &str) -> Result<Self, String> {
        if text == "original" {
            return Ok(Self(None));
        }
        let wrong = |_| format!("{text:?} is no digest_status; allowed is {}", Self::ALLOWED);
        StatusCode::from_text(text).map(Some).map(Self).map_err(wrong)
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        Some(<StatusCode as Scalar>::from_number(number)?.map(Some).map(Self))
    }
}

impl Scalar for GrpcCode {
    const ALLOWED: &'static str = "a gRPC code such as \"ALREADY_EXISTS\", or its number";

    fn from_text(text: &str) -> Result<Self, String> {
        let code = GrpcStatusCode::from_name(text).map(GrpcStatusCode::number).or_else(|| text.parse().ok());
        match code {
            Some(0) => Err("\"OK\" is no refusal; allowed is any other gRPC code".into()),
            Some(code @ 1..=16) => Ok(Self(code)),
            _ => Err(format!(
                "{text:?} is no gRPC code; allowed are {} or 1 to 16",
                quote_list(GrpcStatusCode::all().skip(1).map(GrpcStatusCode::name))
            )),
        }
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        let code = u8::try_from(number).ok().filter(|code| (1..=16).contains(code));
        Some(code.map(Self).ok_or_else(|| format!("{number} is no gRPC code of a refusal; allowed is 1 to 16")))
    }
}

impl Scalar for Preset {
    const ALLOWED: &'static str = "the name of a preset";

    fn from_text(text: &str) -> Result<Self, String> {
        let names = || ibid::presets::PRESET_NAMES.into_iter().chain(ibid::presets::WEBHOOK_PRESET_NAMES);
        let wrong = || match closest_match(text, names()) {
            Some(close) => {
                format!("{text:?} is no preset, did you mean {close:?}? allowed are {}", quote_list(names()))
            }
            None => format!("{text:?} is no preset; allowed are {}", quote_list(names())),
        };
        names().chain([PRESET_OFF]).find(|name| *name == text).map(Self).ok_or_else(wrong)
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

impl Scalar for Method {
    const ALLOWED: &'static str = "a method such as \"POST\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let upper = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
        let method = Self::from_str(text).ok().filter(|_| upper);
        method.ok_or_else(|| format!("{text:?} is no method; write one in upper case, such as \"POST\""))
    }
}

impl Scalar for HeaderName {
    const ALLOWED: &'static str = "a header's name";

    fn from_text(text: &str) -> Result<Self, String> {
        Self::from_str(text).map_err(|_| format!("{text:?} is no header's name"))
    }
}

impl Scalar for JsonPointer {
    const ALLOWED: &'static str = "a JSON pointer such as \"/meta/sent_at\"";

    fn from_text(text: &str) -> Result<Self, String> {
        if !text.starts_with('/') {
            return Err(format!("{text:?} is no JSON pointer; write one such as \"/meta/sent_at\""));
        }
        Self::parse(text).map_err(|why| format!("{text:?}: {why}"))
    }
}

impl Scalar for Origin {
    const ALLOWED: &'static str = "an origin such as \"https://shop.example.com\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        let fits = host.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', '?', '#', '@', ' ']));
        let origin = HeaderValue::from_str(text).ok().filter(|_| fits && !text.contains(char::is_uppercase));
        origin.map(Self).ok_or_else(|| format!("{text:?} is no origin; allowed is a scheme and a host in lower case, such as \"https://shop.example.com\""))
    }
}

impl Scalar for Listen {
    const ALLOWED: &'static str = "an address and a port such as \"127.0.0.1:8081\", or \"off\"";

    fn from_text(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        let address = text.parse().map(Some).map(Self);
        address.map_err(|_| format!("{text:?} is no address; allowed is {}", Self::ALLOWED))
    }

    fn from_bool(switch: bool) -> Option<Self> {
        (!switch).then_some(Self(None))
    }
}

/// For types whose own `FromStr` names the allowed values.
macro_rules! parsed {
    ($($type:ty: $allowed:literal),+ $(,)?) => {$(
        impl Scalar for $type {
            const ALLOWED: &'static str = $allowed;

            fn from_text(text: &str) -> Result<Self, String> {
                text.parse()
            }
        }
    )+};
}

parsed! {
    ScopePart: "part of a scope such as \"credential\"",
    OnMismatch: "\"reject\" \"new\" \"ignore\"",
    OnConcurrent: "\"reject\" \"wait\"",
    OnUnknown: "\"hold\" \"retry\"",
    OnStoreDown: "\"closed\" \"open\"",
    ResponseEnvelope: "\"none\" \"metadata\"",
    RefusalFormat: "\"problem\" \"stripe\"",
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
