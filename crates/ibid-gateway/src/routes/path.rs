//! Path normalisation, and every other way in which an app may read a path.
//!
//! Only route matching uses these forms. The original bytes go upstream.

use std::borrow::Cow;

use data_encoding::HEXLOWER_PERMISSIVE;

/// Maximum number of readings of one path. No known path has as many.
const MAX_READINGS: usize = 256;

#[derive(Debug)]
pub(super) struct PathReadings {
    /// The [normalised](normalise) path comes first.
    pub(super) paths: Vec<Vec<u8>>,
    /// Whether a reading has a dot segment, so that the path may resolve to any path.
    pub(super) has_dot_segments: bool,
}

/// Decodes escaped unreserved characters and writes all other escapes in upper case. A percent sign that begins no escape
/// becomes one, because it could begin another together with a decoded character: `%a%41` must not become `%aA`. Case and
/// a trailing slash are significant. Borrows if nothing changes.
pub fn normalise(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return Cow::Borrowed(path);
    }
    let mut out = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let escaped = decode_escape(&rest.as_bytes()[at..]);
        match escaped {
            Some(byte) if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') => {
                out.push(byte.into());
            }
            Some(byte) => out.push_str(&format!("%{byte:02X}")),
            None => out.push_str("%25"),
        }
        rest = &rest[at + escaped.map_or(1, |_| 3)..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Whether all apps read the path in the same way, apart from case and a trailing slash.
pub(super) fn has_single_reading(path: &str) -> bool {
    let mut before = b' ';
    path.bytes().all(|byte| {
        let odd = matches!(byte, b'%' | b'\\' | b';') || before == b'/' && matches!(byte, b'/' | b'.');
        before = byte;
        !odd
    })
}

/// Returns every way in which an app may read a path, apart from case and a trailing slash. Apps differ in whether, and
/// in which order, they decode escapes, treat backslashes as slashes, merge slashes, strip segment parameters and
/// remove dot segments.
pub(super) fn readings(path: &str) -> PathReadings {
    // No app decodes twice, so each reading records whether it is decoded.
    let mut found = vec![(normalise(path).into_owned().into_bytes(), false)];
    let mut at = 0;
    while at < found.len() && found.len() < MAX_READINGS {
        let (path, is_decoded) = found[at].clone();
        let steps = [
            // Every escape, including escaped slashes.
            (percent_encoding::percent_decode(&path).collect(), true),
            (backslashes_to_slashes(&path), is_decoded),
            (merge_slashes(&path), is_decoded),
            (strip_parameters(&path), is_decoded),
            (remove_dot_segments(&path), is_decoded),
        ];
        for step in steps.into_iter().skip(usize::from(is_decoded)) {
            if !found.contains(&step) {
                found.push(step);
            }
        }
        at += 1;
    }
    let has_dots = found.len() >= MAX_READINGS || found.iter().any(|(path, _)| segments(path).any(is_dot_segment));
    let mut paths: Vec<Vec<u8>> = Vec::with_capacity(found.len());
    for (path, _) in found {
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    PathReadings { paths, has_dot_segments: has_dots }
}

fn segments(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
}

fn is_dot_segment(segment: &[u8]) -> bool {
    matches!(segment, b"." | b"..")
}

fn backslashes_to_slashes(path: &[u8]) -> Vec<u8> {
    path.iter().map(|byte| if *byte == b'\\' { b'/' } else { *byte }).collect()
}

fn merge_slashes(path: &[u8]) -> Vec<u8> {
    let mut out = path.to_vec();
    out.dedup_by(|next, before| *next == b'/' && *before == b'/');
    out
}

/// `/a;x=1/b` → `/a/b`.
fn strip_parameters(path: &[u8]) -> Vec<u8> {
    let names = segments(path).map(|segment| segment.split(|byte| *byte == b';').next().unwrap_or_default());
    names.collect::<Vec<_>>().join(&b'/')
}

/// Follows RFC 3986, section 5.2.4.
fn remove_dot_segments(path: &[u8]) -> Vec<u8> {
    let mut kept: Vec<&[u8]> = Vec::new();
    let all: Vec<&[u8]> = segments(path).skip(1).collect();
    for (at, segment) in all.iter().enumerate() {
        if !is_dot_segment(segment) {
            kept.push(segment);
            continue;
        }
        if *segment == b".." {
            kept.pop();
        }
        if at + 1 == all.len() {
            kept.push(b"");
        }
    }
    [b"/", &kept.join(&b'/')[..]].concat()
}

/// Decodes the `%XX` at the start of `text`.
fn decode_escape(text: &[u8]) -> Option<u8> {
    let mut byte = [0];
    HEXLOWER_PERMISSIVE.decode_mut(text.get(1..3)?, &mut byte).ok()?;
    Some(byte[0])
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
            ("/%", "/%25"),
            ("/%4", "/%254"),
            ("/%zz%41", "/%25zzA"),
            ("/%%41", "/%25A"),
            ("/%a%41", "/%25aA"),
            ("/é%41", "/éA"),
        ] {
            assert_eq!((normalise(path), normalise(normal)), (normal.into(), normal.into()));
        }
        assert!(matches!(normalise("/payments/1"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_plain_path_has_one_reading_and_an_odd_one_may_have_more() {
        for path in ["/", "/a", "/a/", "/a/b..c", "/a.b", "/A-b_c~d:e@f"] {
            assert!(has_single_reading(path), "{path}");
            assert_eq!(readings(path).paths, [path.as_bytes()]);
        }
        for path in ["//", "/a//b", "/./a", "/a/..", "/a/%2e", "/a\\b", "/a%5cb", "/a;b", "/a%20b"] {
            assert!(!has_single_reading(path), "{path}");
        }
    }

    #[test]
    fn dot_segments_are_found_in_every_disguise() {
        for path in ["/./a", "/a/..", "/a/%2e%2E/b", "/a/.%2e", "/a%5C..%5Cb", "/a/..;/b", "/a/.;x", "/a/..%3bx/b"] {
            assert!(readings(path).has_dot_segments, "{path}");
        }
        for path in ["//", "/a%2Fb", "/a/...", "/a/..b", "/a/.well-known", "/%252e%252e/", "/a%20b", "/a;..", "/a\\b"] {
            assert!(!readings(path).has_dot_segments, "{path}");
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
            assert_eq!(remove_dot_segments(path.as_bytes()), clean.as_bytes());
        }
    }

    #[test]
    fn readings_include_what_different_apps_would_see() {
        for (path, seen) in [
            ("/a//../b", &["/a//../b", "/a/b", "/b"][..]),
            ("/x%2f..%5Cpayments", &["/x%2F..%5Cpayments", "/payments", "/x/..\\payments"]),
            ("/payments/.", &["/payments/"]),
            ("/payments;x=1", &["/payments;x=1", "/payments"]),
            ("/;/payments", &["//payments", "/payments"]),
            ("/x/..;/payments", &["/payments", "/x/../payments"]),
            // Some apps strip parameters first, others decode first.
            ("/a;x%2Fb", &["/a", "/a/b", "/a;x/b"]),
            ("/a%3Bx", &["/a%3Bx", "/a;x", "/a"]),
            ("/@scope%2fname", &["/@scope%2Fname", "/@scope/name"]),
        ] {
            let found = readings(path).paths;
            for seen in seen {
                assert!(found.contains(&seen.as_bytes().to_vec()), "{path} as {seen}: {found:?}");
            }
        }
        assert!(!readings("/a%252Fb").paths.contains(&b"/a/b".to_vec()), "nobody decodes twice");
    }

    #[test]
    fn the_readings_of_the_oddest_paths_are_few() {
        for path in ["/a;x//..;y%2f%5c../\\b;%2e%2e//.%3b/c//", "/..;/..;/%2e%2e;/;;//\\..\\%5c%2f..;%2f/x"] {
            let count = readings(path).paths.len();
            assert!(count < MAX_READINGS / 2, "{path}: {count}");
        }
    }
}
