use sha2::{Digest, Sha256};

use super::*;

fn of(policy: &Policy, target: &'static str, content_type: &'static str, body: &str) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, content_type.parse().unwrap());
    Fingerprint::of(policy, &Method::POST, &Uri::from_static(target), &headers, body.as_bytes())
}

#[test]
fn json_is_compared_by_content_and_numbers_as_written() {
    let policy = Policy::ietf();
    let json = |body| of(&policy, "/p", "application/json; charset=utf-8", body);
    assert_eq!(json(r#"{"a":1,"b":2}"#), json(r#" { "b" : 2, "a" : 1 } "#));
    assert_ne!(json(r#"{"a":9007199254740992}"#), json(r#"{"a":9007199254740993}"#));
    assert_ne!(json(r#"{"a":1}"#), json(r#"{"a":1.0}"#));
    assert_ne!(json(r#"{"a":1,"a":2}"#), json(r#"{"a":2,"a":1}"#));
    let api = |body| of(&policy, "/p", "application/vnd.api+json", body);
    assert_eq!(api("{ }"), api("{}"));
    assert_ne!(api("{}"), json("{}"));
}

#[test]
fn kinds_paths_and_queries_are_told_apart() {
    let policy = Policy::ietf();
    let base = of(&policy, "/p?x=1", "application/json", "{}");
    assert_ne!(base, of(&policy, "/p?x=2", "application/json", "{}"));
    assert_ne!(base, of(&policy, "/q?x=1", "application/json", "{}"));
    assert_ne!(base, of(&policy, "/p?x=1", "text/plain", "{}"));
    assert_eq!(of(&Policy::appsportal(), "/p", "text/plain", "a"), Fingerprint::NONE);
}

#[test]
fn the_parts_that_differ_are_named() {
    let policy = Policy::ietf();
    let of = |method: Method, target: &'static str, condition: &'static str, body: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
        headers.insert(header::IF_MATCH, condition.parse().unwrap());
        let uri = Uri::from_static(target);
        let input = FingerprintInput {
            method: &method,
            uri: &uri,
            headers: &headers,
            found: FoundHeaders::of(&SentHeaders::of(&headers)),
            body: body.as_bytes(),
            trailers: None,
        };
        input.fingerprint(Fingerprint::VERSION, &policy).unwrap()
    };
    let (print, first) = of(Method::POST, "/p?x=1", "a", r#"{"a":1,"b":2}"#);
    let again = of(Method::POST, "/p?x=1", "a", r#"{"b":2, "a":1}"#);
    assert_eq!((print, first), again, "the same request in another order");
    for (second, differing) in [
        (of(Method::PUT, "/p?x=1", "a", r#"{"a":1,"b":2}"#), &["method"][..]),
        (of(Method::POST, "/q?x=1", "a", r#"{"a":1,"b":2}"#), &["path"]),
        (of(Method::POST, "/p?x=2", "a", r#"{"a":1,"b":2}"#), &["query"]),
        (of(Method::POST, "/p?x=1", "a", r#"{"a":1,"b":3}"#), &["body"]),
        (of(Method::POST, "/p?x=1", "b", r#"{"a":1,"b":2}"#), &["headers"]),
        (of(Method::PUT, "/q?x=2", "b", "{}"), &PartDigests::NAMES),
    ] {
        assert_ne!(print, second.0);
        assert_eq!(first.differing(&second.1), differing);
    }
}

#[test]
fn ignored_members_do_not_count() {
    let mut policy = Policy::ietf();
    policy.json_ignore = vec![JsonPointer::parse("/ts").unwrap()];
    assert_eq!(
        of(&policy, "/", "application/json", r#"{"a":1,"ts":1}"#),
        of(&policy, "/", "application/json", r#"{"a":1,"ts":2}"#)
    );
}

#[test]
fn forms_and_multipart_are_compared_by_content() {
    let policy = Policy::ietf();
    let form = |body| of(&policy, "/", "application/x-www-form-urlencoded", body);
    assert_eq!(form("a=1&b=x%20y"), form("b=x+y&a=1"));
    assert_ne!(form("a=1&a=2"), form("a=2&a=1"));
    let part = "Content-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n";
    let one = of(&policy, "/", "multipart/form-data; boundary=AAA", &format!("--AAA\r\n{part}--AAA--\r\n"));
    let two = of(&policy, "/", "multipart/form-data; boundary=BBB", &format!("--BBB\r\n{part}--BBB--\r\n"));
    assert_eq!(one, two);
}

#[test]
fn encoded_bodies_are_compared_as_sent() {
    let policy = Policy::ietf();
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    headers.insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
    let of = |body: &[u8]| Fingerprint::of(&policy, &Method::POST, &Uri::from_static("/"), &headers, body);
    assert_ne!(of(b"{}"), of(b"{ }"));
}

/// The fingerprint of a POST to `/p` with these headers.
fn with(policy: &Policy, headers: &[(&'static str, &str)], body: &[u8]) -> Fingerprint {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(*name, value.parse().unwrap());
    }
    Fingerprint::of(policy, &Method::POST, &Uri::from_static("/p"), &map, body)
}

#[test]
fn the_media_type_counts() {
    let policy = Policy::ietf();
    let of = |content_type: &str, body: &[u8]| with(&policy, &[("content-type", content_type)], body);
    let patch: &[u8] = br#"[{"op":"remove","path":"/a"}]"#;
    assert_ne!(of("application/json-patch+json", patch), of("application/merge-patch+json", patch));
    assert_ne!(of("text/plain", b"a=1"), of("text/csv", b"a=1"));
    assert_ne!(of("text/plain; charset=latin1", b"\xe9"), of("text/plain; charset=utf-8", b"\xe9"));
    assert_ne!(of("application/json; charset=utf-16le", b"1"), of("application/json", b"1"));
    assert_ne!(of("text/csv; header=present", b"a"), of("text/csv; header=absent", b"a"));
    assert_eq!(of("Application/Json; charset=\"UTF-8\"", b"{ }"), of("application/json", b"{}"));
    assert_ne!(with(&policy, &[], b"{}"), of("application/json", b"{}"));
    assert!(!Policy::leads().fingerprint.contains(&FingerprintPart::Type));
    let by_body = |content_type: &str| with(&Policy::leads(), &[("content-type", content_type)], b"a=%e9");
    let form = "application/x-www-form-urlencoded";
    assert_ne!(by_body(form), by_body(&format!("{form}; charset=latin1")), "a character set changes what a body says");
    assert_eq!(by_body(form), by_body(&format!("{form}; charset=utf-8")));
}

#[test]
fn content_codings_count_where_only_bodies_are_compared_too() {
    for policy in [Policy::ietf(), Policy::platform(), Policy::leads()] {
        let json = ("content-type", "application/json");
        let of = |coding: &str| with(&policy, &[json, ("content-encoding", coding)], b"{}");
        assert_ne!(of("gzip"), of("br"));
        assert_ne!(of("gzip"), of("identity"));
        assert_eq!(of("identity"), with(&policy, &[json], b"{}"));
    }
}

#[test]
fn a_header_that_replaces_the_method_counts_as_the_method() {
    let policy = Policy::platform();
    let plain = with(&policy, &[], b"");
    for name in ["x-http-method-override", "x-http-method", "x-method-override"] {
        let put = with(&policy, &[(name, "PUT")], b"");
        assert_ne!(put, plain, "{name}");
        assert_ne!(put, with(&policy, &[(name, "DELETE")], b""), "{name}");
        assert_eq!(with(&Policy::leads(), &[(name, "PUT")], b""), with(&Policy::leads(), &[], b""), "{name}");
    }
}

#[test]
fn preconditions_count() {
    let policy = Policy::ietf();
    let of = |name: &HeaderName, value: &str| {
        let headers = HeaderMap::from_iter([(name.clone(), value.parse().unwrap())]);
        Fingerprint::of(&policy, &Method::POST, &Uri::from_static("/p"), &headers, b"")
    };
    for name in &PRECONDITION_HEADERS {
        assert_ne!(of(name, "1"), with(&policy, &[], b""), "{name}");
        assert_ne!(of(name, "1"), of(name, "2"), "{name}");
    }
}

#[test]
fn one_trailing_slash_of_the_path_does_not_count() {
    let policy = Policy::ietf();
    let at = |target| of(&policy, target, "text/plain", "");
    assert_eq!(at("/items"), at("/items/"));
    assert_eq!(at("/items?x=1"), at("/items/?x=1"));
    for other in ["/items//", "/item", "/items/a", "/items?x=1", "/Items", "/"] {
        assert_ne!(at("/items"), at(other), "{other}");
    }
}

#[test]
fn trailers_count_with_the_body() {
    let (uri, headers) = (Uri::from_static("/p"), HeaderMap::new());
    let of = |policy: &Policy, trailers: &[(&'static str, &'static str)]| {
        let trailers: HeaderMap =
            trailers.iter().map(|(n, v)| (HeaderName::from_static(n), v.parse().unwrap())).collect();
        let input = FingerprintInput {
            method: &Method::POST,
            uri: &uri,
            headers: &headers,
            found: FoundHeaders::default(),
            body: b"body",
            trailers: Some(&trailers),
        };
        input.fingerprint(Fingerprint::VERSION, policy).unwrap().0
    };
    let mut raw = Policy::ietf();
    raw.fingerprint = vec![FingerprintPart::Raw];
    for policy in [Policy::ietf(), raw] {
        assert_eq!(of(&policy, &[]), Fingerprint::of(&policy, &Method::POST, &uri, &headers, b"body"));
        assert_ne!(of(&policy, &[]), of(&policy, &[("x-a", "1")]));
        assert_ne!(of(&policy, &[("x-a", "2")]), of(&policy, &[("x-a", "1")]));
        assert_eq!(of(&policy, &[("x-a", "1"), ("x-b", "2")]), of(&policy, &[("x-b", "2"), ("x-a", "1")]));
    }
}

#[test]
fn raw_compares_the_bytes_as_sent() {
    let mut policy = Policy::ietf();
    policy.fingerprint = vec![FingerprintPart::Raw];
    assert_eq!(policy.check(), Ok(()));
    assert_ne!(of(&policy, "/", "application/json", "{}"), of(&policy, "/", "application/json", "{ }"));
    assert_eq!(of(&policy, "/", "application/json", "{}"), of(&policy, "/", "text/plain", "{}"));
    policy.fingerprint.push(FingerprintPart::Body);
    assert!(policy.check().unwrap_err().to_string().starts_with("fingerprint has \"body\" and \"raw\""));
}

#[test]
fn forms_and_multipart_bodies_that_servers_read_differently_differ() {
    let policy = Policy::ietf();
    let form = |body| of(&policy, "/", "application/x-www-form-urlencoded", body);
    assert_ne!(form("a=%zz"), form("a=%25zz"));
    assert_ne!(form("i[][n]=a&i[][p]=1&i[][n]=b"), form("i[][n]=a&i[][n]=b&i[][p]=1"));
    assert_ne!(form("a"), form("a="));
    let part = "Content-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n";
    let multi = |body: &str| of(&policy, "/", "multipart/form-data; boundary=AAA", body);
    let plain = format!("--AAA\r\n{part}--AAA--\r\n");
    for other in [
        format!("preamble\r\n{plain}"),
        format!("\r\n{plain}"),
        format!("{plain}epilogue"),
        plain.trim_end().to_owned(),
        plain.replace("\r\n1", "\r\n1\n--AAA"),
    ] {
        assert_ne!(multi(&plain), multi(&other), "{other:?}");
    }
    let named = |name: &str| multi(&plain.replace("\"a\"", &format!("\"a\"; filename=\"{name}\"")));
    assert_ne!(named(r"a\\b"), named(r"a\b"), "an escape to some parsers, two characters to others");
    let mixed = |boundary: &str| {
        with(&policy, &[("content-type", &format!("multipart/mixed; boundary={boundary}"))], b"--A--B")
    };
    assert_ne!(mixed("A"), mixed("B"), "the same bytes have other parts under another boundary");
}

#[test]
fn a_stored_fingerprint_is_compared_by_its_own_version() {
    let policy = Policy::ietf();
    let (uri, mut headers) = (Uri::from_static("/p/"), HeaderMap::new());
    headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    let by = |version, body: &[u8]| Fingerprint::of_version(version, &policy, &Method::POST, &uri, &headers, body);
    let own = by(Fingerprint::VERSION, b"{}").unwrap();
    let compare = |stored: Fingerprint| own.compare(&stored, |version| by(version, b"{}"));
    assert_eq!(compare(own), FingerprintComparison::Same);
    assert_eq!(compare(by(1, b"{ }").unwrap()), FingerprintComparison::Same);
    assert_eq!(compare(by(1, b"{\"a\":1}").unwrap()), FingerprintComparison::Different);
    assert_eq!(compare(by(Fingerprint::VERSION, b"[]").unwrap()), FingerprintComparison::Different);
    assert_eq!(compare(Fingerprint::NONE), FingerprintComparison::Different);
    assert_eq!(Fingerprint::NONE.compare(&own, |_| None), FingerprintComparison::Different);
    for version in [2, 99] {
        assert_eq!(compare(Fingerprint { version, ..own }), FingerprintComparison::UnknownVersion);
        assert_eq!(by(version, b""), None);
    }
}

#[test]
fn plain_bytes_are_the_same_in_a_layer_that_compares_nothing_else() {
    let policy = Policy::leads();
    assert_eq!(policy.fingerprint, [FingerprintPart::Body]);
    let own = with(&policy, &[("content-type", "text/plain")], b"text");
    assert_eq!(own.digest, Fingerprint::of_bytes(b"text").digest);
    let by = |version| Some(Fingerprint { version, ..own }).filter(|_| version == 1);
    assert_eq!(own.compare(&Fingerprint::of_bytes(b"text"), by), FingerprintComparison::Same);
    assert_eq!(own.compare(&Fingerprint::of_bytes(b"other"), by), FingerprintComparison::Different);
}

/// The cost of a small request is mostly that of the hash, whose unit is a block of 64 bytes.
#[test]
fn a_small_request_takes_few_blocks() {
    let (policy, uri) = (Policy::ietf(), Uri::from_static("/orders"));
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    let body = format!("{{\"note\":\"{}\"}}", "x".repeat(289));
    assert_eq!(body.len(), 300);
    let expected = [body.as_bytes(), b"M", b"p\x07/orders", b"Y"].concat();
    // The hash appends at least nine bytes.
    assert_eq!((expected.len() + 9).div_ceil(64), 5);
    let made = Fingerprint::of(&policy, &Method::POST, &uri, &headers, body.as_bytes());
    assert_eq!(made.digest, <[u8; 32]>::from(Sha256::digest(&expected)));
}

#[test]
fn frames_cannot_be_imitated() {
    let policy = Policy::ietf();
    let text = |target: &'static str, body: &str| of(&policy, target, "text/plain", body);
    assert_ne!(text("/p", "a"), text("/p", "a\0m\x04POST"));
    assert_ne!(text("/p", r#"{"a":1}"#), of(&policy, "/p", "application/json", r#"{"a":1}"#));
    let long = "x".repeat(127);
    let bodies = ["", "r", &long, &format!("{long}x"), &format!("{long}\u{1}"), &format!("\u{1}{long}")];
    for (i, one) in bodies.iter().enumerate() {
        for other in &bodies[..i] {
            assert_ne!(text("/p", one), text("/p", other), "{one} {other}");
        }
    }
    let json = |target: &'static str| of(&policy, target, "application/json", "1");
    assert_ne!(json("/p?q"), json("/p"));
    assert_eq!(json("/p?"), json("/p"));
    assert_ne!(of(&policy, "/p", "application/json", "1"), of(&policy, "/p", "application/json", "12"));
    let put = |content_type: &'static str, body: &str| {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, content_type.parse().unwrap())]);
        Fingerprint::of(&policy, &Method::PUT, &Uri::from_static("/p"), &headers, body.as_bytes())
    };
    assert_ne!(put("application/json", "1"), of(&policy, "/p", "application/json", "1"));
    assert_ne!(put("application/json", "1"), put("application/merge-patch+json", "1"));
    assert_eq!(put("application/json", "1"), put("Application/JSON; charset=utf-8", "1"));
}
