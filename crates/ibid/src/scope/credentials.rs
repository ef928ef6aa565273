//! The headers that identify the caller under the scope `credential`.

use http::{HeaderMap, HeaderName, header};

use super::{frame, scope_missing, single_header};
use crate::{
    policy::{InvalidSetting, require},
    refusal::Refusal,
    sent_names::SentHeaders,
};

/// Authorization schemes whose value is the same on every request.
const STABLE_SCHEMES: [&str; 2] = ["Bearer", "Basic"];

/// The headers that carry credentials, and the Authorization schemes that the scope `credential` accepts.
///
/// The scope contains all these headers, because an app may decide by any of them. The defaults are Authorization,
/// X-Api-Key, Api-Key and X-Auth-Token.
///
/// A scheme that signs each request (SigV4, Digest, OAuth 1, Hawk) sends a different value on every retry, so every
/// retry would look like a new caller. Therefore only Basic, Bearer and [added](Self::and_schemes) schemes are
/// accepted. A value without a scheme (`Authorization: TOKEN`) is accepted as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Sorted, so that the order in the configuration does not matter.
    headers: Vec<HeaderName>,
    schemes: Vec<String>,
}

impl Credentials {
    /// Replaces the default headers.
    ///
    /// # Errors
    /// If the list is empty or contains Cookie: the scope `cookie:NAME` reads cookies.
    pub fn new(headers: impl IntoIterator<Item = HeaderName>) -> Result<Self, InvalidSetting> {
        let mut headers: Vec<_> = headers.into_iter().collect();
        headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        headers.dedup();
        require(!headers.is_empty(), "", "it is empty; name at least one header, such as \"Authorization\"")?;
        let message =
            "Cookie is no credential header; name the session's cookie: scope = [\"host\", \"cookie:session\"]";
        require(!headers.contains(&header::COOKIE), "", message)?;
        Ok(Self { headers, schemes: Vec::new() })
    }

    /// Accepts further Authorization schemes. Their value must be the same on every retry.
    ///
    /// # Errors
    /// Names the invalid scheme.
    pub fn and_schemes<S: Into<String>>(
        mut self, schemes: impl IntoIterator<Item = S>,
    ) -> Result<Self, InvalidSetting> {
        for scheme in schemes {
            let scheme = scheme.into();
            let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            let message = format!("{scheme:?} is no scheme of Authorization; write one such as \"Token\"");
            require(!scheme.is_empty() && scheme.bytes().all(is_token), "", message)?;
            self.schemes.push(scheme);
        }
        Ok(self)
    }

    /// The headers, sorted by name.
    pub fn headers(&self) -> &[HeaderName] {
        &self.headers
    }

    /// The schemes that were added to Basic and Bearer.
    pub fn schemes(&self) -> &[String] {
        &self.schemes
    }

    /// Whether the list contains a header. `name` is in lower case.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.headers.iter().any(|header| header == name)
    }

    /// Appends name and value of every header that is present. An empty header counts as missing.
    pub(super) fn append(&self, sent: &SentHeaders<'_>, out: &mut Vec<u8>) -> Result<(), Refusal> {
        for name in self.headers.iter().filter(|name| sent.names.may_have(name)) {
            let Some(value) = single_header(sent, name)?.filter(|value| !value.is_empty()) else { continue };
            if name == header::AUTHORIZATION {
                self.check_scheme(value)?;
            }
            frame(out, b'n', name.as_str().as_bytes());
            frame(out, b'v', value);
        }
        Ok(())
    }

    fn check_scheme(&self, value: &[u8]) -> Result<(), Refusal> {
        // The most frequent scheme first.
        if value.first_chunk().is_some_and(|start: &[u8; 7]| start.eq_ignore_ascii_case(b"bearer ")) {
            return Ok(());
        }
        let Some(end) = value.iter().position(|byte| matches!(byte, b' ' | b'\t')) else { return Ok(()) };
        let scheme = &value[..end];
        let mut accepted = STABLE_SCHEMES.into_iter().chain(self.schemes.iter().map(String::as_str));
        if accepted.any(|known| known.as_bytes().eq_ignore_ascii_case(scheme)) {
            return Ok(());
        }
        let shown: String = String::from_utf8_lossy(scheme).chars().take(32).collect();
        Err(scope_missing(format!(
            "the Authorization scheme {shown:?} may send another value on every retry, so that a retry would count as \
             another caller; if its value stays the same, the operator can set credential_schemes = [{shown:?}], else \
             use another scope, such as \"jwt:sub\" or \"header:X-User-Id\""
        )))
    }
}

impl Default for Credentials {
    fn default() -> Self {
        let others = ["api-key", "x-api-key", "x-auth-token"].map(HeaderName::from_static);
        Self::new(others.into_iter().chain([header::AUTHORIZATION])).expect("none of them is Cookie")
    }
}

/// The cookies of a request as (name, value). The name is empty without `=`.
pub(crate) fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    let lines = headers.get_all(header::COOKIE).into_iter();
    let pairs = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    pairs.map(<[u8]>::trim_ascii).filter(|pair| !pair.is_empty()).map(name_and_value)
}

/// The cookies that a response sets, as (name, value).
pub(crate) fn cookies_set(headers: &HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    let lines = headers.get_all(header::SET_COOKIE).into_iter();
    lines.filter_map(|line| line.as_bytes().split(|byte| *byte == b';').next()).map(name_and_value)
}

fn name_and_value(pair: &[u8]) -> (&[u8], &[u8]) {
    match pair.iter().position(|byte| *byte == b'=') {
        Some(at) => (pair[..at].trim_ascii(), pair[at + 1..].trim_ascii()),
        None => (b"", pair.trim_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::RefusalReason;

    fn of(credentials: &Credentials, headers: &[(&'static str, &str)]) -> Result<Vec<u8>, Refusal> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let mut out = Vec::new();
        credentials.append(&SentHeaders::of(&map), &mut out).map(|()| out)
    }

    #[test]
    fn every_credential_header_counts() {
        let usual = Credentials::default();
        let bearer = ("authorization", "Bearer a");
        let all = [
            of(&usual, &[]).unwrap(),
            of(&usual, &[bearer]).unwrap(),
            of(&usual, &[bearer, ("x-api-key", "1")]).unwrap(),
            of(&usual, &[bearer, ("x-api-key", "2")]).unwrap(),
            of(&usual, &[bearer, ("api-key", "1")]).unwrap(),
            of(&usual, &[("x-api-key", "1")]).unwrap(),
            of(&usual, &[("api-key", "1")]).unwrap(),
            of(&usual, &[("x-auth-token", "1")]).unwrap(),
            of(&usual, &[("x-auth-token", "2")]).unwrap(),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{at}");
        }
        assert_eq!(of(&usual, &[("authorization", ""), ("x-other", "1")]).unwrap(), all[0]);
        assert_eq!(
            of(&usual, &[("api-key", "1"), ("api-key", "1")]).unwrap_err().reason,
            RefusalReason::RequestAmbiguous
        );
    }

    #[test]
    fn other_headers_can_be_named_in_any_order() {
        let names = || ["x-b", "x-a"].map(HeaderName::from_static);
        let (one, other) = (Credentials::new(names()).unwrap(), Credentials::new(names().into_iter().rev()).unwrap());
        assert_eq!(one, other);
        assert_eq!(of(&one, &[("authorization", "Digest a=1")]).unwrap(), b"");
        assert_ne!(of(&one, &[("x-a", "1")]).unwrap(), of(&one, &[("x-b", "1")]).unwrap());
        assert!(Credentials::new([]).is_err());
        assert!(Credentials::new([header::COOKIE]).unwrap_err().to_string().contains("cookie:session"));
    }

    /// Examples from the specifications of these schemes.
    #[test]
    fn a_scheme_that_signs_each_request_is_refused_unless_it_is_named() {
        let signed = [
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders=host;range;x-amz-date, \
             Signature=fe5f80f77d5fa3beca038a248ff027d0445342fe2855ddc963176630326f1024",
            "Digest username=\"Mufasa\", realm=\"http-auth@example.org\", uri=\"/dir/index.html\", nc=00000001, \
             response=\"753927fa0e85d155564e2e272a28d1802ca10daf449\"",
            "OAuth realm=\"Photos\", oauth_nonce=\"wIjqoxnSmSsxzH\", oauth_signature=\"74KNZJeDHnMBp0EMJ9ZHt%2FXKycU%3D\"",
            "Hawk id=\"dh37fgj492je\", ts=\"1353832234\", nonce=\"j4h3g2\", mac=\"6R4rV5iE+NPoym+WwjeHzjAGXUtLNIxmo1vpMofpLAE=\"",
            "Negotiate YIIZ",
            "Token abc",
        ];
        let usual = Credentials::default();
        for value in signed {
            let scheme = value.split(' ').next().unwrap();
            let refusal = of(&usual, &[("authorization", value)]).unwrap_err();
            assert_eq!(refusal.reason, RefusalReason::ScopeMissing, "{value}");
            assert!(refusal.detail.contains(&format!("credential_schemes = [\"{scheme}\"]")), "{}", refusal.detail);
            assert!(!refusal.detail.contains("Credential=") && !refusal.detail.contains("nonce"), "{}", refusal.detail);
            let named = Credentials::default().and_schemes([scheme.to_lowercase()]).unwrap();
            assert!(of(&named, &[("authorization", value)]).is_ok(), "{value}");
        }
        for value in ["Bearer a", "bearer a", "BASIC YTpi", "Basic\tYTpi", "sk_live_1"] {
            assert!(of(&usual, &[("authorization", value)]).is_ok(), "{value}");
        }
        for bad in ["", "a b", "é"] {
            assert!(Credentials::default().and_schemes([bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn cookies_are_read_as_they_are_sent_and_set() {
        let mut headers = HeaderMap::new();
        headers.append("cookie", "a=1; b = x=y ;; c".parse().unwrap());
        headers.append("cookie", "d=\"q\"".parse().unwrap());
        let expected: Vec<(&[u8], &[u8])> = vec![(b"a", b"1"), (b"b", b"x=y"), (b"", b"c"), (b"d", b"\"q\"")];
        assert_eq!(cookies(&headers).collect::<Vec<_>>(), expected);
        headers.append("set-cookie", "lb=node-1; Path=/; HttpOnly".parse().unwrap());
        headers.append("set-cookie", "b=x=y".parse().unwrap());
        let expected: Vec<(&[u8], &[u8])> = vec![(b"lb", b"node-1"), (b"b", b"x=y")];
        assert_eq!(cookies_set(&headers).collect::<Vec<_>>(), expected);
    }
}
