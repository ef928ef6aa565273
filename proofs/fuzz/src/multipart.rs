//! Canonical `multipart/form-data`, through the fingerprint: the boundary does not count, everything in the parts does. The
//! input is tried as a body, too, which must be handled whatever it is.

use http::{HeaderMap, HeaderValue, Method, Uri, header};
use ibid::{Policy, store::Fingerprint};

/// The most parts of a body that is compared by its parts.
const MAX_PARTS: usize = 1024;
const BOUNDARIES: [&str; 2] = ["----ibid7MA4YWxkTrZu0gW", "x"];

/// See the module.
pub fn check(input: &[u8]) {
    let raw = fingerprint("x", input);
    assert_eq!(raw, fingerprint("x", input));
    let parts: Vec<&[u8]> = input.split(|byte| *byte == 0xff).collect();
    // Content that contains a delimiter would be split there. Bodies of more parts are compared as sent.
    if parts.len() > MAX_PARTS || BOUNDARIES.iter().any(|boundary| contains(input, format!("--{boundary}").as_bytes()))
    {
        return;
    }
    let prints = BOUNDARIES.map(|boundary| fingerprint(boundary, &body(boundary, &parts)));
    assert_eq!(prints[0], prints[1], "another boundary");
    let longer = [input, b"y"].concat();
    let changed: Vec<&[u8]> = longer.split(|byte| *byte == 0xff).collect();
    assert_ne!(fingerprint("x", &body("x", &changed)), prints[1], "another content");
}

fn fingerprint(boundary: &str, body: &[u8]) -> Fingerprint {
    let mut headers = HeaderMap::new();
    let kind = format!("multipart/form-data; boundary=\"{boundary}\"");
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(&kind).expect("visible characters"));
    Fingerprint::of(&Policy::ietf(), &Method::POST, &Uri::from_static("/p"), &headers, body)
}

fn body(boundary: &str, parts: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for (nth, part) in parts.iter().enumerate() {
        let disposition = format!("Content-Disposition: form-data; name=\"part{nth}\"; filename=\"f{nth}\"");
        out.extend_from_slice(format!("--{boundary}\r\n{disposition}\r\n\r\n").as_bytes());
        out.extend_from_slice(part);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
    out
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
