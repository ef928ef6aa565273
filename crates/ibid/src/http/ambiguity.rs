//! Refuses requests that the app might read differently than the layer.
//!
//! Some servers map `X_User_Id` and `X-User-Id` to the same variable; some use the first of two headers, some the last;
//! a proxy may remove headers that `Connection` lists. None of this is allowed for headers that determine key, caller
//! or fingerprint.

use http::{HeaderMap, Uri, header};

use crate::{
    fingerprint,
    key::KeySource,
    policy::{FingerprintPart, Policy},
    refusal::{Refusal, RefusalReason},
    scope::{Credentials, ScopePart},
    sent_names::SentNames,
};

/// Refuses ambiguous headers.
pub(super) fn check_headers(
    policy: &Policy, credentials: &Credentials, headers: &HeaderMap, sent: &SentNames,
) -> Result<(), Refusal> {
    let decides = |name: &str| is_decisive_header(policy, credentials, name);
    let any_repeated = headers.len() > headers.keys_len();
    for name in headers.keys().take_while(|_| any_repeated || sent.has_underscore) {
        if any_repeated && headers.get_all(name).iter().nth(1).is_some() && decides(name.as_str()) {
            return Err(ambiguous(format!("the header {name} is sent more than once")));
        }
        if name.as_str().contains('_') {
            let twin = name.as_str().replace('_', "-");
            if decides(&twin) {
                return Err(ambiguous(format!("the header {name} may be taken for {twin}; send only {twin}")));
            }
        }
    }
    if !sent.may_have(&header::CONNECTION) {
        return Ok(());
    }
    for line in headers.get_all(header::CONNECTION) {
        for token in line.to_str().unwrap_or_default().split(',') {
            let token = token.trim().to_ascii_lowercase();
            if decides(&token) || decides(&token.replace('_', "-")) {
                return Err(ambiguous(format!("Connection names {token}, which would remove it on the way")));
            }
        }
    }
    Ok(())
}

/// Refuses a path that has a second spelling. A signature does not cover the path, so an attacker with a copied
/// delivery could otherwise run it again under another spelling.
pub(super) fn check_path(path: &str) -> Result<(), Refusal> {
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        let plain = match byte {
            b'%' => {
                let mut digit = || {
                    let digit = bytes.next().filter(|digit| !digit.is_ascii_lowercase());
                    digit.and_then(|digit| char::from(digit).to_digit(16))
                };
                // Characters that need no escape must not be escaped.
                matches!((digit(), digit()), (Some(high), Some(low))
                    if matches!(high * 16 + low, 0..=0x20 | 0x23 | 0x25 | 0x3f | 0x7f..))
            }
            _ => byte.is_ascii(),
        };
        if !plain {
            let detail = "the path has a character in it that is escaped without need, or not escaped; send it plainly";
            return Err(ambiguous(detail.into()));
        }
    }
    Ok(())
}

/// Normalizes the path, so that all spellings that an app could treat as equal are the same: lower case, without
/// parameters, empty segments and a trailing slash. Returns `None` if the path is already normalized.
pub(super) fn normalized_uri(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    let mut plain = String::with_capacity(path.len());
    for segment in path.split(['/', '\\']) {
        let name = segment.split(';').next().unwrap_or_default();
        if !name.is_empty() {
            plain.push('/');
            plain.push_str(&name.to_ascii_lowercase());
        }
    }
    if plain.is_empty() {
        plain.push('/');
    }
    if plain == path {
        return None;
    }
    let mut parts = uri.clone().into_parts();
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    parts.path_and_query = format!("{plain}{query}").parse().ok();
    Uri::from_parts(parts).ok()
}

/// Whether a header determines key, caller or fingerprint. `name` is in lower case.
fn is_decisive_header(policy: &Policy, credentials: &Credentials, name: &str) -> bool {
    let is_scope = |part: &ScopePart| match part.part() {
        ScopePart::Header(header) => header == name,
        ScopePart::Credential => credentials.has(name),
        ScopePart::Jwt(_) => name == header::AUTHORIZATION,
        _ => false,
    };
    let is_compared = |part: &FingerprintPart| match part {
        FingerprintPart::Header(header) => header == name,
        FingerprintPart::Preconditions => {
            matches!(name, "if-match" | "if-none-match" | "if-unmodified-since" | "content-range")
        }
        FingerprintPart::Body | FingerprintPart::Type | FingerprintPart::Raw => {
            matches!(name, "content-type" | "content-encoding" | "grpc-encoding")
        }
        FingerprintPart::Method => fingerprint::METHOD_OVERRIDE_HEADERS.iter().any(|header| header == name),
        _ => false,
    };
    matches!(name, "host" | "forwarded")
        || name.starts_with("ibid-")
        || policy.key.from.iter().any(|source| matches!(source, KeySource::Header(header) if header == name))
        || policy.scope.iter().any(is_scope)
        || policy.signature.as_ref().is_some_and(|signature| signature.uses_header(name))
        || policy.fingerprint.iter().any(is_compared)
        || [&policy.label.tenant, &policy.label.user].into_iter().flatten().any(is_scope)
}

fn ambiguous(detail: String) -> Refusal {
    Refusal::new(RefusalReason::RequestAmbiguous, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sent_names::SentHeaders;

    fn reason(policy: &Policy, headers: &[(&'static str, &str)]) -> Option<RefusalReason> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        check_headers(policy, &Credentials::default(), &map, &SentHeaders::of(&map).names)
            .err()
            .map(|refusal| refusal.reason)
    }

    #[test]
    fn twins_repeats_and_nominations_are_refused() {
        let ietf = Policy::ietf();
        for bad in [
            &[("idempotency_key", "a")][..],
            &[("x_api_key", "a")],
            &[("api_key", "a")],
            &[("x_auth_token", "a")],
            &[("x-auth-token", "a"), ("x-auth-token", "b")],
            &[("host", "a"), ("host", "b")],
            &[("authorization", "a"), ("authorization", "b")],
            &[("connection", "close, Idempotency-Key")],
            &[("connection", "Ibid-Fence")],
            &[("ibid_fence", "7")],
            &[("if-match", "a"), ("if-match", "b")],
        ] {
            assert_eq!(reason(&ietf, bad), Some(RefusalReason::RequestAmbiguous), "{bad:?}");
        }
        assert_eq!(reason(&Policy::stripe(), &[("stripe_account", "1")]), Some(RefusalReason::RequestAmbiguous));
        assert_eq!(reason(&Policy::membership(), &[("x_user_id", "1")]), Some(RefusalReason::RequestAmbiguous));
    }

    #[test]
    fn a_path_with_a_second_spelling_is_refused() {
        for plain in ["/", "/hooks/a-b_c.d~e", "/a:b@c!d", "/a%20b", "/%C3%A9", "/100%25", "/a%23%3F"] {
            assert!(check_path(plain).is_ok(), "{plain}");
        }
        for twin in ["/%61", "/%7E", "/%c3%A9", "/\u{e9}", "/%21", "/%7B", "/%", "/%2", "/%zz", "/%2F"] {
            assert!(check_path(twin).is_err(), "{twin}");
        }
    }

    #[test]
    fn all_spellings_of_a_path_have_one_plain_form() {
        let plain = |path: &str| normalized_uri(&path.parse().unwrap()).map(|uri| uri.to_string());
        assert_eq!(plain("/hooks/a%20b?X=1"), None);
        for spelling in ["/Hooks/A", "/hooks/a/", "//hooks/a", "/hooks;x=1/a;y", "/;/hooks/a", "/hooks\\a"] {
            assert_eq!(plain(spelling).as_deref(), Some("/hooks/a"), "{spelling}");
        }
        assert_eq!(plain("http://h/A?B=/;").as_deref(), Some("http://h/a?B=/;"));
        assert_eq!(plain("/;").as_deref(), Some("/"));
    }

    #[test]
    fn other_headers_are_nobodys_business() {
        let ietf = Policy::ietf();
        let fine =
            [("accept", "a"), ("accept", "b"), ("x_other", "1"), ("connection", "keep-alive"), ("x_user_id", "1")];
        assert_eq!(reason(&ietf, &fine), None);
    }
}
