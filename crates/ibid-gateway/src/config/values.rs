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

use super::{
    error::{closest_match, quote_list},
    scalar::Scalar,
};
use crate::routes::Match;

/// `"64KiB"`, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct ByteSize(pub(super) u64);

#[derive(Debug, Clone, Copy)]
pub(super) struct GrpcCode(pub(super) u8);

/// `original` or a status code.
#[derive(Debug, Clone, Copy)]
pub(super) struct DigestStatus(pub(super) Option<StatusCode>);

/// The name of an existing preset.
#[derive(Debug, Clone, Copy)]
pub(super) struct Preset(pub(super) &'static str);

/// The preset of a `[policy]` that covers nothing: only routes are covered.
pub(super) const PRESET_OFF: &str = "off";

/// The origin of a web page.
#[derive(Debug, Clone)]
pub(super) struct Origin(pub(super) HeaderValue);

/// A protocol that a connection may be upgraded to, in lower case.
#[derive(Debug, Clone)]
pub(super) struct Upgrade(pub(super) String);

/// The path of an OpenAPI document.
#[derive(Debug, Clone)]
pub(super) struct DocumentPath(pub(super) String);

/// An address to listen on, or `off`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listen(pub(super) Option<SocketAddr>);

pub(super) const ALLOWED_DURATION: &str = "a duration such as \"500ms\" \"30s\" \"5m\" \"24h\" \"7d\"";
const ALLOWED_SIZE: &str = "bytes, or a size such as \"64KiB\" \"1MiB\" \"1GiB\" \"10KB\"";
const ALLOWED_STATUS: &str = "a status code such as 409";

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

impl Scalar for Duration {
    const ALLOWED: &'static str = ALLOWED_DURATION;

    fn from_text(text: &str) -> Result<Self, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let millis = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => 0,
        };
        let duration = number.parse::<u64>().ok().filter(|_| millis > 0).and_then(|number| number.checked_mul(millis));
        let wrong = || format!("{text:?} is no duration; allowed is {ALLOWED_DURATION}");
        // At most a hundred years, because stores compute in microseconds.
        duration.map(Self::from_millis).filter(|found| found.as_secs() <= 100 * 366 * 86_400).ok_or_else(wrong)
    }
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

impl Scalar for DocumentPath {
    const ALLOWED: &'static str = "a path such as \"/swagger/v1/swagger.json\", without a query";

    fn from_text(text: &str) -> Result<Self, String> {
        let is_path = text.starts_with('/')
            && !text.contains(['?', '#'])
            && text.parse::<PathAndQuery>().is_ok_and(|parsed| parsed.path() == text);
        if is_path { Ok(Self(text.into())) } else { Err(format!("{text:?} is no path; allowed is {}", Self::ALLOWED)) }
    }
}

impl Scalar for ByteSize {
    const ALLOWED: &'static str = ALLOWED_SIZE;

    fn from_text(text: &str) -> Result<Self, String> {
        let size = ibid_stores::parse_size(text);
        size.map(Self).ok_or_else(|| format!("{text:?} is no size; allowed is {ALLOWED_SIZE}"))
    }

    fn from_number(number: i64) -> Option<Result<Self, String>> {
        let size = number.try_into().map(Self);
        Some(size.map_err(|_| format!("{number} is no size; allowed is {ALLOWED_SIZE}")))
    }
}

impl Scalar for StatusCode {
    const ALLOWED: &'static str = ALLOWED_STATUS;

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
        let item = match text.strip_prefix('!') {
            Some(excluded) => excluded.parse().map(Self::Excluded),
            None => text.parse().map(Self::Included),
        };
        item.map_err(|why| why.to_string())
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

impl GrpcCode {
    pub(crate) fn name(code: u8) -> &'static str {
        GrpcStatusCode::from_number(code.into()).name()
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

impl Scalar for QuotaLimit {
    const ALLOWED: &'static str = "so many in so long, such as \"100000/24h\" or \"200/s\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no limit; allowed is {}", Self::ALLOWED);
        let (most, per) = text.split_once('/').ok_or_else(wrong)?;
        let most = most.trim().parse().ok().filter(|most| (1..=1 << 50).contains(most)).ok_or_else(wrong)?;
        let per = per.trim();
        let per = if per.starts_with(|c: char| c.is_ascii_digit()) { per.to_owned() } else { format!("1{per}") };
        let per = Duration::from_text(&per).ok().filter(|per| !per.is_zero()).ok_or_else(wrong)?;
        Ok(Self { most, per })
    }
}

/// `"1GiB/24h"`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ByteLimit(pub(super) QuotaLimit);

impl Scalar for ByteLimit {
    const ALLOWED: &'static str = "so many bytes in so long, such as \"1GiB/24h\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no limit of bytes; allowed is {}", Self::ALLOWED);
        let (most, per) = text.split_once('/').ok_or_else(wrong)?;
        let most = ibid_stores::parse_size(most.trim()).ok_or_else(wrong)?;
        QuotaLimit::from_text(&format!("{most}/{per}")).map(Self).map_err(|_| wrong())
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

impl Scalar for SocketAddr {
    const ALLOWED: &'static str = "an address and a port such as \"127.0.0.1:8080\"";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("{text:?} is no address; allowed is {}", Self::ALLOWED))
    }
}

/// For types whose own `FromStr` names the allowed values.
macro_rules! parsed {
    ($($type:ty: $allowed:literal),+ $(,)?) => {$(
        impl Scalar for $type {
            const ALLOWED: &'static str = $allowed;

            fn from_text(text: &str) -> Result<Self, String> {
                text.parse::<Self>().map_err(|why| why.to_string())
            }
        }
    )+};
}

parsed! {
    OnMismatch: "\"reject\" \"new\" \"ignore\"",
    OnConcurrent: "\"reject\" \"wait\"",
    OnUnknown: "\"hold\" \"retry\"",
    OnStoreDown: "\"closed\" \"open\"",
    ResponseEnvelope: "\"none\" \"metadata\"",
    RefusalFormat: "\"problem\" \"stripe\"",
    PolicyMode: "\"enforce\" \"shadow\" \"off\"",
    LabelKeyDisplay: "\"clear\" \"masked\"",
    ScopePart: "part of a scope such as \"credential\"",
    KeyFormat: "a key format such as \"uuid4\"",
    KeySource: "a source of keys such as \"header:Idempotency-Key\"",
    FingerprintPart: "a part of the fingerprint such as \"body\"",
    ResolveProbe: "a method and a path, such as \"GET /payments?key={key}\"",
    HeaderTemplate: "a header's value",
    SignedContent: "what is signed, such as \"{X-Timestamp}.{body}\"",
    SignatureEncoding: "\"hex\" \"base64\"",
    Match: "METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"",
}
