//! Canonical forms of `application/x-www-form-urlencoded`, through the fingerprint: a form keeps its fingerprint however its
//! characters are escaped, and in whatever order plain names come that occur once; another value has another one.

use http::{HeaderMap, HeaderValue, Method, Uri, header};
use ibid::{Policy, store::Fingerprint};

type Pair = (Vec<u8>, Option<Vec<u8>>);

/// See the module.
pub fn check(body: &[u8]) {
    let print = fingerprint(body);
    assert_eq!(print, fingerprint(body));
    let Some(pairs) = decode(body) else { return };
    assert_eq!(fingerprint(&escape_all(&pairs)), print, "escaped otherwise");
    let mut names: Vec<_> = pairs.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
    names.sort_unstable();
    let plain = |name: &Vec<u8>| {
        !name.is_empty() && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(byte))
    };
    if names.windows(2).all(|two| two[0] != two[1]) && names.iter().all(plain) {
        let reversed: Vec<Pair> = pairs.iter().rev().cloned().collect();
        assert_eq!(fingerprint(&escape_all(&reversed)), print, "in another order");
    }
    let mut changed = pairs;
    if let Some((_, Some(value))) = changed.last_mut() {
        value.push(b'x');
        assert_ne!(fingerprint(&escape_all(&changed)), print, "another value");
    }
}

fn fingerprint(body: &[u8]) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
    Fingerprint::of(&Policy::ietf(), &Method::POST, &Uri::from_static("/p"), &headers, body)
}

/// The pairs, as slowly and simply as possible; `None` if servers could read the form differently.
fn decode(body: &[u8]) -> Option<Vec<Pair>> {
    if body.is_empty() || body.contains(&b';') {
        return None;
    }
    body.split(|byte| *byte == b'&')
        .map(|piece| {
            let mut halves = piece.splitn(2, |byte| *byte == b'=');
            let name = unescape(halves.next()?)?;
            let value = halves.next().map(unescape);
            if piece.is_empty() || value == Some(None) { None } else { Some((name, value.flatten())) }
        })
        .collect()
}

fn unescape(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut rest = text.iter();
    while let Some(byte) = rest.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = [*rest.next()?, *rest.next()?];
                if !digits.iter().all(u8::is_ascii_hexdigit) {
                    return None;
                }
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            other => *other,
        });
    }
    Some(out)
}

/// Writes every character as an escape.
fn escape_all(pairs: &[Pair]) -> Vec<u8> {
    let escape = |text: &[u8]| text.iter().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let pieces: Vec<String> = pairs
        .iter()
        .map(|(name, value)| match value {
            Some(value) => format!("{}={}", escape(name), escape(value)),
            None => escape(name),
        })
        .collect();
    pieces.join("&").into_bytes()
}
