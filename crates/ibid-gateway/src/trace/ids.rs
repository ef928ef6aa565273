//! Where a span stands: W3C Trace Context, version 00.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::random;

/// A span of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub(super) trace: [u8; 16],
    pub(super) span: [u8; 8],
}

impl Place {
    /// The first span of a trace of its own.
    pub(super) fn first() -> Self {
        Self { trace: random(), span: [0; 8] }.child()
    }

    /// Another span of the same trace.
    pub(super) fn child(self) -> Self {
        let [span @ .., _, _, _, _, _, _, _, _] = random();
        Self { span, ..self }
    }

    /// What the caller says about itself, and whether it wants to be traced. Two such headers say nothing.
    pub(super) fn of_caller(headers: &HeaderMap, name: &HeaderName) -> Option<(Self, bool)> {
        let mut all = headers.get_all(name).iter();
        let only = all.next()?;
        if all.next().is_some() { None } else { Self::read(only) }
    }

    /// Later versions may say more behind what this one says.
    pub(super) fn read(header: &HeaderValue) -> Option<(Self, bool)> {
        let text = header.to_str().ok()?;
        let mut parts = text.splitn(4, '-');
        let [version] = hex(parts.next()?)?;
        let place = Self { trace: hex(parts.next()?)?, span: hex(parts.next()?)? };
        let rest = parts.next()?;
        let [flags] = match version {
            0 => hex(rest)?,
            255 => return None,
            _ => hex(rest.split('-').next()?)?,
        };
        let said = place.trace != [0; 16] && place.span != [0; 8];
        said.then_some((place, flags & 1 == 1))
    }

    /// As it is written, sampled.
    pub(super) fn header(self) -> HeaderValue {
        let text = format!("00-{}-{}-01", written(&self.trace), written(&self.span));
        HeaderValue::from_str(&text).expect("hex digits and dashes")
    }
}

/// Lower-case digits, two for each byte.
pub(super) fn written(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let lower = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 2 * N || !text.bytes().all(lower) {
        return None;
    }
    let mut bytes = [0; N];
    for (nth, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * nth..2 * nth + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let place = Place::first();
        assert_eq!(Place::read(&place.header()), Some((place, true)));
        assert_eq!(place.child().trace, place.trace);
        assert_ne!(place.child().span, place.span);
    }

    #[test]
    fn what_is_no_traceparent_says_nothing() {
        const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
        const SPAN: &str = "b7ad6b7169203331";
        let read = |text: &str| Place::read(&HeaderValue::from_str(text).unwrap());
        assert!(read(&format!("00-{TRACE}-{SPAN}-01")).is_some_and(|(_, sampled)| sampled));
        assert!(read(&format!("00-{TRACE}-{SPAN}-00")).is_some_and(|(_, sampled)| !sampled));
        assert!(read(&format!("01-{TRACE}-{SPAN}-03-more")).is_some_and(|(_, sampled)| sampled));
        for wrong in [
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}{SPAN}-01"),
            "00-é".to_owned(),
            String::new(),
        ] {
            assert_eq!(HeaderValue::from_bytes(wrong.as_bytes()).ok().and_then(|it| Place::read(&it)), None, "{wrong}");
        }
    }

    #[test]
    fn two_callers_are_none() {
        let name = HeaderName::from_static("traceparent");
        let mut headers = HeaderMap::new();
        assert_eq!(Place::of_caller(&headers, &name), None);
        let place = Place::first();
        headers.append(&name, place.header());
        assert_eq!(Place::of_caller(&headers, &name), Some((place, true)));
        headers.append(&name, Place::first().header());
        assert_eq!(Place::of_caller(&headers, &name), None);
    }
}
