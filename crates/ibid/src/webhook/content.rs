//! The signed content, as a template such as `v0:{X-Slack-Request-Timestamp}:{body}`.
//!
//! Invariant: signed content can be parsed in only one way. Otherwise an attacker with one signed delivery could move
//! bytes between a header and the body under the same signature. So the body comes last, text follows every header, and
//! a header's value must not contain the first character of that text.

use std::{fmt, str::FromStr};

use http::HeaderName;

use crate::policy::InvalidSetting;

/// A template of the signed content: text and headers, then the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedContent {
    /// The parts before the body.
    pub(super) parts: Vec<SignedContentPart>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SignedContentPart {
    Text(String),
    /// A header, and the character that ends its value.
    Header(HeaderName, u8),
}

impl SignedContent {
    /// Only the body is signed.
    pub fn body() -> Self {
        Self { parts: Vec::new() }
    }

    /// The headers that are signed.
    pub fn headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.parts.iter().filter_map(|piece| match piece {
            SignedContentPart::Header(name, _) => Some(name),
            SignedContentPart::Text(_) => None,
        })
    }
}

impl FromStr for SignedContent {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        let wrong = |why: &str| {
            let example = "{X-Timestamp}.{body}";
            InvalidSetting::from(format!("{text:?} is not what can be signed: {why}; write it such as {example:?}"))
        };
        let Some(mut rest) = text.strip_suffix("{body}") else { return Err(wrong("it must end with {body}")) };
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            let (plain, behind) = rest.split_once('{').map_or((rest, None), |(plain, behind)| (plain, Some(behind)));
            if plain.contains('}') || !plain.bytes().all(|byte| (0x20..=0x7e).contains(&byte)) {
                return Err(wrong("a brace is not paired, or it is not visible ASCII"));
            }
            if !plain.is_empty() {
                pieces.push(SignedContentPart::Text(plain.into()));
            }
            let Some(behind) = behind else { break };
            let (name, behind) = behind.split_once('}').ok_or_else(|| wrong("a brace is not paired"))?;
            if name == "body" {
                return Err(wrong("{body} is there twice"));
            }
            let name = HeaderName::from_str(name).map_err(|_| wrong(&format!("{{{name}}} is no header")))?;
            let end = behind.bytes().next().filter(|end| *end != b'{');
            let end = end.ok_or_else(|| wrong("text has to stand between a header and what follows"))?;
            pieces.push(SignedContentPart::Header(name, end));
            rest = behind;
        }
        Ok(Self { parts: pieces })
    }
}

impl fmt::Display for SignedContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for piece in &self.parts {
            match piece {
                SignedContentPart::Text(text) => f.write_str(text)?,
                SignedContentPart::Header(name, _) => write!(f, "{{{name}}}")?,
            }
        }
        f.write_str("{body}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_taken_apart_in_one_way_is_read_and_written() {
        for text in ["{body}", "v0:{x-slack-request-timestamp}:{body}", "{a}.{b}.{body}", "x{body}"] {
            assert_eq!(text.parse::<SignedContent>().unwrap().to_string(), text);
        }
        assert_eq!("{body}".parse::<SignedContent>().unwrap(), SignedContent::body());
    }

    #[test]
    fn what_cannot_is_refused() {
        for text in [
            "",
            "body",
            "{a}",
            "{body}{body}",
            "{body}.{a}",
            "{a}{body}",
            "{a}{b}.{body}",
            "{a.{body}",
            "a}.{body}",
            "{}.{body}",
            "{a b}.{body}",
            "é{body}",
            "{body}.{body}",
            "{{a}.{body}",
        ] {
            assert!(text.parse::<SignedContent>().is_err(), "{text:?}");
        }
    }
}
