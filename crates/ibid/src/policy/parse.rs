//! Parses and formats settings as in a configuration file.

use std::{fmt, str::FromStr};

use http::{HeaderName, Method, StatusCode};

use super::{
    FingerprintPart, LabelKeyDisplay, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, PolicyMode, RefusalFormat,
    Remember, ResolveProbe, ResponseEnvelope, StatusRange,
};

/// Implements parsing and formatting for a setting with a fixed set of values.
macro_rules! words {
    ($type:ty, $what:literal, { $($word:literal => $value:path),+ $(,)? }) => {
        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok($value),)+
                    _ => Err(format!(concat!("{:?} is no ", $what, "; allowed are ", $("\"", $word, "\" ",)+), text).trim_end().into()),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word,)+ })
            }
        }
    };
}

words!(OnMismatch, "on_mismatch", { "reject" => OnMismatch::Reject, "new" => OnMismatch::New, "ignore" => OnMismatch::Ignore });
words!(OnConcurrent, "on_concurrent", { "reject" => OnConcurrent::Reject, "wait" => OnConcurrent::Wait });
words!(OnUnknown, "on_unknown", { "hold" => OnUnknown::Hold, "retry" => OnUnknown::Retry });
words!(OnStoreDown, "on_store_down", { "closed" => OnStoreDown::Closed, "open" => OnStoreDown::Open });
words!(ResponseEnvelope, "envelope", { "none" => ResponseEnvelope::None, "metadata" => ResponseEnvelope::Metadata });
words!(RefusalFormat, "refusals", { "problem" => RefusalFormat::Problem, "stripe" => RefusalFormat::Stripe });
words!(PolicyMode, "mode", { "enforce" => PolicyMode::Enforce, "shadow" => PolicyMode::Shadow, "off" => PolicyMode::Off });
words!(LabelKeyDisplay, "label key", { "clear" => LabelKeyDisplay::Clear, "masked" => LabelKeyDisplay::Masked });

impl FromStr for FingerprintPart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "method" => Self::Method,
            "path" => Self::Path,
            "query" => Self::Query,
            "type" => Self::Type,
            "body" => Self::Body,
            "raw" => Self::Raw,
            "preconditions" => Self::Preconditions,
            _ => match text.strip_prefix("header:").map(HeaderName::from_str) {
                Some(Ok(name)) => Self::Header(name),
                _ => {
                    return Err(format!(
                        "{text:?} is no part of a fingerprint; allowed are \"method\" \"path\" \"query\" \"type\" \
                         \"body\" \"raw\" \"preconditions\" \"header:NAME\""
                    ));
                }
            },
        })
    }
}

impl fmt::Display for FingerprintPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Method => f.write_str("method"),
            Self::Path => f.write_str("path"),
            Self::Query => f.write_str("query"),
            Self::Type => f.write_str("type"),
            Self::Body => f.write_str("body"),
            Self::Raw => f.write_str("raw"),
            Self::Preconditions => f.write_str("preconditions"),
            Self::Header(name) => write!(f, "header:{name}"),
        }
    }
}

impl FromStr for StatusRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let class = |text: &str| match text.as_bytes() {
            [digit @ b'1'..=b'5', b'x', b'x'] => Some(Self::Class(digit - b'0')),
            _ => None,
        };
        let code = |text: &str| StatusCode::from_str(text).ok().map(Self::Code);
        class(text)
            .or_else(|| code(text))
            .ok_or_else(|| format!("{text:?} is no status; allowed are a code such as 404, or a class such as \"2xx\""))
    }
}

impl fmt::Display for StatusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Class(class) => write!(f, "{class}xx"),
            Self::Code(code) => write!(f, "{}", code.as_u16()),
        }
    }
}

impl FromStr for Remember {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "final" => Ok(Self::Final),
            "success" => Ok(Self::Success),
            _ => Err(format!(
                "{text:?} is no remember; allowed are \"all\" \"final\" \"success\" or a list such as \
                 [\"2xx\", 404, \"!409\"]"
            )),
        }
    }
}

impl fmt::Display for Remember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Final => f.write_str("final"),
            Self::Success => f.write_str("success"),
            Self::List { include, exclude } => {
                let included = include.iter().map(ToString::to_string);
                let excluded = exclude.iter().map(|range| format!("!{range}"));
                f.write_str(&included.chain(excluded).collect::<Vec<_>>().join(" "))
            }
        }
    }
}

impl FromStr for ResolveProbe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is no probe; write a safe method and a path, such as \"GET /payments?key={{key}}\"");
        let (method, target) = text.split_once(' ').ok_or_else(wrong)?;
        let method = Method::from_str(method).map_err(|_| wrong())?;
        let uri = http::Uri::from_str(&target.replace("{key}", "k")).map_err(|_| wrong())?;
        if !matches!(method, Method::GET | Method::HEAD) || !target.starts_with('/') || uri.path_and_query().is_none() {
            return Err(wrong());
        }
        Ok(Self { method, target: target.into() })
    }
}

impl fmt::Display for ResolveProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.target)
    }
}
