//! W3C Trace Context, version 00.

use data_encoding::HEXLOWER;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::random_id;

/// Identifies a span in its trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    pub(super) trace_id: [u8; 16],
    pub(super) span_id: [u8; 8],
}

impl SpanContext {
    pub(super) fn new_root() -> Self {
        Self { trace_id: random_id(), span_id: [0; 8] }.child()
    }

    pub(super) fn child(self) -> Self {
        let [span @ .., _, _, _, _, _, _, _, _] = random_id();
        Self { span_id: span, ..self }
    }

    /// Parses the caller's header; also returns whether the trace is sampled. Ignored if the header occurs twice.
    pub(super) fn from_headers(headers: &HeaderMap, name: &HeaderName) -> Option<(Self, bool)> {
        let mut all = headers.get_all(name).iter();
        let only = all.next()?;
        if all.next().is_some() { None } else { Self::parse(only) }
    }

    /// Accepts later versions, which may append fields.
    pub(super) fn parse(header: &HeaderValue) -> Option<(Self, bool)> {
        let text = header.to_str().ok()?;
        let mut parts = text.splitn(4, '-');
        let [version] = hex_decode(parts.next()?)?;
        let place = Self { trace_id: hex_decode(parts.next()?)?, span_id: hex_decode(parts.next()?)? };
        let rest = parts.next()?;
        let [flags] = match version {
            0 => hex_decode(rest)?,
            255 => return None,
            _ => hex_decode(rest.split('-').next()?)?,
        };
        let said = place.trace_id != [0; 16] && place.span_id != [0; 8];
        said.then_some((place, flags & 1 == 1))
    }

    /// The header value, marked as sampled.
    pub(super) fn to_header(self) -> HeaderValue {
        let text = format!("00-{}-{}-01", HEXLOWER.encode(&self.trace_id), HEXLOWER.encode(&self.span_id));
        HeaderValue::from_str(&text).expect("hex digits and dashes")
    }
}

fn hex_decode<const N: usize>(text: &str) -> Option<[u8; N]> {
    HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let place = SpanContext::new_root();
        assert_eq!(SpanContext::parse(&place.to_header()), Some((place, true)));
        assert_eq!(place.child().trace_id, place.trace_id);
        assert_ne!(place.child().span_id, place.span_id);
    }

    #[test]
    fn what_is_no_traceparent_says_nothing() {
        const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
        const SPAN: &str = "b7ad6b7169203331";
        let read = |text: &str| SpanContext::parse(&HeaderValue::from_str(text).unwrap());
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
            assert_eq!(
                HeaderValue::from_bytes(wrong.as_bytes()).ok().and_then(|it| SpanContext::parse(&it)),
                None,
                "{wrong}"
            );
        }
    }

    #[test]
    fn two_callers_are_none() {
        let name = HeaderName::from_static("traceparent");
        let mut headers = HeaderMap::new();
        assert_eq!(SpanContext::from_headers(&headers, &name), None);
        let place = SpanContext::new_root();
        headers.append(&name, place.to_header());
        assert_eq!(SpanContext::from_headers(&headers, &name), Some((place, true)));
        headers.append(&name, SpanContext::new_root().to_header());
        assert_eq!(SpanContext::from_headers(&headers, &name), None);
    }
}
