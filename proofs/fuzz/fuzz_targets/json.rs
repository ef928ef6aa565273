//! Canonical JSON, through the fingerprint of a request: a body that has a canonical form is JSON, and keeps its
//! fingerprint when it is spaced otherwise; one that has none is compared byte by byte.
#![no_main]

use http::{HeaderMap, HeaderValue, Method, Uri, header};
use ibid::{Policy, store::Fingerprint};
use libfuzzer_sys::fuzz_target;
use serde::{Deserialize, de::IgnoredAny};

const SPACES: [&[u8]; 5] = [b"", b" ", b"\n", b"\t\r", b"  \n "];

fuzz_target!(|body: &[u8]| {
    let print = fingerprint(body);
    assert_eq!(print, fingerprint(body));
    // Spacing behind it does not count for JSON, and does for anything else.
    let is_canonical = fingerprint(&[body, b" "].concat()) == print;
    let mut reader = serde_json::Deserializer::from_slice(body);
    reader.disable_recursion_limit();
    // What nests deeper is refused, or this would run out of stack.
    let deep = body.iter().filter(|byte| matches!(byte, b'[' | b'{')).count() > 2000;
    if !deep {
        let is_json = IgnoredAny::deserialize(&mut reader).is_ok() && reader.end().is_ok();
        assert!(!is_canonical || is_json, "it has a canonical form, and is no JSON");
    }
    for seed in 0..3 {
        let respaced = respaced(body, seed);
        assert!(!is_canonical || fingerprint(&respaced) == print, "{:?}", String::from_utf8_lossy(&respaced));
    }
});

fn fingerprint(body: &[u8]) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Fingerprint::of(&Policy::ietf(), &Method::POST, &Uri::from_static("/p"), &headers, body)
}

/// The same tokens with other white space between them.
fn respaced(body: &[u8], seed: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() * 2);
    let (mut quoted, mut escaped, mut turn) = (false, false, seed);
    for byte in body {
        if quoted {
            out.push(*byte);
            (escaped, quoted) = (*byte == b'\\' && !escaped, *byte != b'"' || escaped);
        } else if !b" \t\r\n".contains(byte) {
            let structural = b"{}[]:,".contains(byte);
            let space = if structural { SPACES[turn % SPACES.len()] } else { b"" };
            turn = turn.wrapping_mul(31).wrapping_add(usize::from(*byte) + 7);
            out.extend_from_slice(space);
            out.push(*byte);
            if structural {
                out.extend_from_slice(SPACES[turn % SPACES.len()]);
            }
            quoted = *byte == b'"';
        }
    }
    out
}
