//! Paths as they are matched: one spelling per path, and which paths an app could understand in another way.
//!
//! Only the gateway's matching sees these forms. The original bytes go upstream.

use std::borrow::Cow;

/// One spelling per path: unreserved characters decoded, the hex digits of all others upper case. Case and a trailing
/// slash are significant. Borrows if there is nothing to do.
pub fn normalise(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return Cow::Borrowed(path);
    }
    let mut out = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        match encoded(rest) {
            Some(byte) if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') => {
                out.push(byte.into());
                rest = &rest[3..];
            }
            Some(byte) => {
                out.push_str(&format!("%{byte:02X}"));
                rest = &rest[3..];
            }
            None => {
                out.push('%');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Whether an app could understand this path as another one: dot segments, `//`, backslashes and encoded slashes.
pub fn suspicious(path: &str) -> bool {
    if path.contains("//") || path.contains('\\') {
        return true;
    }
    let path = normalise(path);
    path.contains("%2F") || path.contains("%5C") || path.split('/').any(|segment| matches!(segment, "." | ".."))
}

/// Every way in which an app might clean this path. Apps differ in whether they decode slashes, take backslashes for
/// slashes, merge slashes before or after they remove dot segments (if they do), and keep a trailing slash. At most 28
/// readings.
pub(super) fn readings(path: &str) -> Vec<String> {
    let path = normalise(path);
    let mut readings = Vec::with_capacity(28);
    for decodes in [false, true] {
        let decoded = if decodes { path.replace("%2F", "/").replace("%5C", "\\") } else { path.clone().into_owned() };
        for backslash in [false, true] {
            let slashed = if backslash { decoded.replace('\\', "/") } else { decoded.clone() };
            for cleaned in [without_dots(&slashed), without_dots(&merged(&slashed)), merged(&without_dots(&slashed))] {
                let shorter = cleaned.strip_suffix('/').filter(|path| !path.is_empty()).map(str::to_owned);
                readings.extend(shorter);
                readings.push(cleaned);
            }
            readings.push(slashed);
        }
    }
    readings.sort_unstable();
    readings.dedup();
    readings
}

fn merged(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for next in path.chars() {
        if !(next == '/' && out.ends_with('/')) {
            out.push(next);
        }
    }
    out
}

/// As RFC 3986, section 5.2.4.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    for (at, segment) in segments.iter().enumerate() {
        let last = at + 1 == segments.len();
        match *segment {
            "." | ".." => {
                if *segment == ".." {
                    kept.pop();
                }
                if last {
                    kept.push("");
                }
            }
            other => kept.push(other),
        }
    }
    format!("/{}", kept.join("/"))
}

/// The byte that `%XX` at the start of `text` stands for.
fn encoded(text: &str) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    match text.as_bytes() {
        [b'%', high, low, ..] => u8::try_from(digit(*high)? << 4 | digit(*low)?).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreserved_characters_are_decoded_and_all_others_kept() {
        for (path, normal) in [
            ("/a/b", "/a/b"),
            ("/%61%2D%7e", "/a-~"),
            ("/a%2fb%c3%A9", "/a%2Fb%C3%A9"),
            ("/a%20b", "/a%20b"),
            ("/%", "/%"),
            ("/%4", "/%4"),
            ("/%zz%41", "/%zzA"),
            ("/%%41", "/%A"),
            ("/é%41", "/éA"),
        ] {
            assert_eq!(normalise(path), normal);
        }
        assert!(matches!(normalise("/payments/1"), Cow::Borrowed(_)));
    }

    #[test]
    fn paths_with_a_second_reading_are_suspicious() {
        for path in [
            "//",
            "/a//b",
            "/./a",
            "/a/..",
            "/a/%2e%2E/b",
            "/a/.%2e",
            "/a\\b",
            "/a%5cb",
            "/a%2Fb",
            "/a/.",
            "/a%5C..%5Cb",
        ] {
            assert!(suspicious(path), "{path}");
        }
        for path in ["/", "/a", "/a/", "/a/...", "/a/..b", "/a.b", "/a/.well-known", "/%252e%252e/", "/a%20b"] {
            assert!(!suspicious(path), "{path}");
        }
    }

    #[test]
    fn dot_segments_are_removed_as_the_rfc_says() {
        for (path, clean) in [
            ("/a/b/c/./../../g", "/a/g"),
            ("/..", "/"),
            ("/a/..", "/"),
            ("/a/.", "/a/"),
            ("/../../x", "/x"),
            ("/a//../b", "/a/b"),
        ] {
            assert_eq!(without_dots(path), clean);
        }
    }

    #[test]
    fn readings_include_what_different_apps_would_see() {
        let of = |path| readings(path);
        assert!(of("/a//../b").contains(&"/a/b".to_owned()));
        assert!(of("/a//../b").contains(&"/b".to_owned()));
        assert!(of("/x%2f..%5Cpayments").contains(&"/payments".to_owned()));
        assert!(of("/payments/.").contains(&"/payments".to_owned()));
        assert!(of("/payments\\..\\x").contains(&"/payments/../x".to_owned()));
    }
}
