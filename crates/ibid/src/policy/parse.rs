//! Parses and formats settings as in a configuration file.

use std::{fmt, str::FromStr};

use http::{Method, StatusCode};

use super::{
    FingerprintPart, InvalidSetting, LabelKeyDisplay, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, PolicyMode,
    RefusalFormat, Remember, ResolveProbe, ResponseEnvelope, StatusRange,
};

use crate::fingerprint::JsonNumbers;

/// Implements parsing and formatting for a setting with a fixed set of values. One variant may hold a value, which
/// follows a prefix and is read by a function: `"header:" "NAME" => Header by parse_name`.
macro_rules! words {
    ($type:ty, $what:literal, { $($word:literal => $value:ident),+ $(,)? } $(, $prefix:literal $name:literal => $held:ident by $parse:expr)?) => {
        impl std::str::FromStr for $type {
            type Err = $crate::policy::InvalidSetting;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($word => return Ok(Self::$value),)+
                    _ => {}
                }
                $(if let Some(held) = text.strip_prefix($prefix).map($parse).transpose()?.flatten() {
                    return Ok(Self::$held(held));
                })?
                let allowed = [$(concat!("\"", $word, "\""),)+ $(concat!("\"", $prefix, $name, "\""))?].join(" ");
                Err(format!("{text:?} is no {}; allowed are {allowed}", $what).into())
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$value => f.write_str($word),)+
                    $(Self::$held(held) => write!(f, "{}{held}", $prefix),)?
                }
            }
        }
    };
}
pub(crate) use words;

words!(OnMismatch, "on_mismatch", { "reject" => Reject, "new" => New, "ignore" => Ignore });
words!(JsonNumbers, "json_numbers", { "as-written" => AsWritten, "decimal" => Decimal });
words!(OnConcurrent, "on_concurrent", { "reject" => Reject, "wait" => Wait });
words!(OnUnknown, "on_unknown", { "hold" => Hold, "retry" => Retry });
words!(OnStoreDown, "on_store_down", { "closed" => Closed, "open" => Open });
words!(ResponseEnvelope, "envelope", { "none" => None, "metadata" => Metadata });
words!(
    RefusalFormat, "refusals",
    {
        "problem" => Problem, "stripe" => Stripe, "acp" => Acp, "ucp" => Ucp, "iceberg" => Iceberg,
        "json-rpc" => JsonRpc,
    }
);
words!(PolicyMode, "mode", { "enforce" => Enforce, "shadow" => Shadow, "off" => Off });
words!(LabelKeyDisplay, "label key", { "clear" => Clear, "masked" => Masked });
words!(
    FingerprintPart, "part of a fingerprint",
    {
        "method" => Method, "path" => Path, "query" => Query, "type" => Type, "body" => Body, "raw" => Raw,
        "preconditions" => Preconditions,
    },
    "header:" "NAME" => Header by |name: &str| Ok::<_, InvalidSetting>(name.parse().ok())
);

impl FromStr for StatusRange {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        if let [digit @ b'1'..=b'5', b'x', b'x'] = text.as_bytes() {
            return Ok(Self::Class(digit - b'0'));
        }
        let wrong = |_| format!("{text:?} is no status; allowed are a code such as 404, or a class such as \"2xx\"");
        Ok(Self::Code(StatusCode::from_str(text).map_err(wrong)?))
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
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        match text {
            "all" => Ok(Self::All),
            "final" => Ok(Self::Final),
            "success" => Ok(Self::Success),
            _ => Err(format!(
                "{text:?} is no remember; allowed are \"all\" \"final\" \"success\" or a list such as \
                 [\"2xx\", 404, \"!409\"]"
            )
            .into()),
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
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        let wrong =
            || format!("{text:?} is no probe; write a safe method and a path, such as \"GET /payments?key={{key}}\"");
        let (method, target) = text.split_once(' ').ok_or_else(wrong)?;
        let method = [Method::GET, Method::HEAD].into_iter().find(|safe| safe == method).ok_or_else(wrong)?;
        let uri = http::Uri::from_str(&target.replace("{key}", "k")).map_err(|_| wrong())?;
        let is_path = target.starts_with('/') && uri.path_and_query().is_some();
        if is_path { Ok(Self { method, target: target.into() }) } else { Err(wrong().into()) }
    }
}

impl fmt::Display for ResolveProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.target)
    }
}
