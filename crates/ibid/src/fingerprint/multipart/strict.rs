//! Accepts only multipart bodies that every server splits in the same way.
//!
//! Some parsers look for the boundary anywhere, some only after a line end, and some of those accept a bare `\n`. Some
//! treat `\\` in a quoted file name as an escape and some do not. The boundary is not part of the fingerprint, so a
//! body that depends on any of this could have the same fingerprint as one that does not.

use super::{boundary, find_sequence};

/// The content that counts besides the parts.
pub(in crate::fingerprint) struct StrictMultipart<'a> {
    /// Header blocks of parts that contain a backslash, as sent.
    pub(in crate::fingerprint) escaped: Vec<&'a [u8]>,
    /// Whether a line end follows the last boundary.
    pub(in crate::fingerprint) ends_with_line: bool,
}

/// Returns `None` if servers could split the body differently: there is text before the first boundary or after the
/// last, a boundary is padded, or the boundary occurs within a part.
pub(in crate::fingerprint) fn parse_strict<'a>(content_type: &str, body: &'a [u8]) -> Option<StrictMultipart<'a>> {
    let marker = [b"--", &boundary(content_type)?[..]].concat();
    let mut escaped = Vec::new();
    let mut at = 0;
    loop {
        let after = body.get(at..)?.strip_prefix(&marker[..])?;
        if let Some(end) = after.strip_prefix(b"--") {
            return (end.is_empty() || end == b"\r\n")
                .then_some(StrictMultipart { escaped, ends_with_line: !end.is_empty() });
        }
        let part = after.strip_prefix(b"\r\n")?;
        let headers = part.windows(4).position(|four| four == b"\r\n\r\n").map(|end| &part[..end])?;
        if headers.contains(&b'\\') {
            escaped.push(headers);
        }
        let start = body.len() - part.len();
        let next = start + find_sequence(part, &marker)?;
        if !body[..next].ends_with(b"\r\n") {
            return None;
        }
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Option<(usize, bool)> {
        parse_strict("multipart/form-data; boundary=XyZ", text.as_bytes())
            .map(|body| (body.escaped.len(), body.ends_with_line))
    }

    const A: &str = "Content-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n";

    #[test]
    fn an_ordinary_body_is_taken_apart_in_one_way() {
        assert_eq!(body(&format!("--XyZ\r\n{A}--XyZ\r\n{A}--XyZ--\r\n")), Some((0, true)));
        assert_eq!(body(&format!("--XyZ\r\n{A}--XyZ--")), Some((0, false)));
        assert_eq!(body("--XyZ--\r\n"), Some((0, true)));
        let dashes = A.replace('1', "--\r\n-Xy\r\n--Xy");
        assert_eq!(body(&format!("--XyZ\r\n{dashes}--XyZ--\r\n")), Some((0, true)));
    }

    #[test]
    fn header_blocks_with_a_backslash_are_told() {
        let escaped = "Content-Disposition: form-data; name=\"a\"; filename=\"a\\\\b\"\r\n\r\n1\r\n";
        assert_eq!(body(&format!("--XyZ\r\n{A}--XyZ\r\n{escaped}--XyZ--\r\n")), Some((1, true)));
    }

    #[test]
    fn a_body_that_parsers_disagree_about_is_not() {
        for text in [
            format!("preamble\r\n--XyZ\r\n{A}--XyZ--\r\n"),
            format!("\r\n--XyZ\r\n{A}--XyZ--\r\n"),
            format!("--XyZ\r\n{A}--XyZ--\r\nepilogue"),
            format!("--XyZ\r\n{A}--XyZ--epilogue"),
            format!("--XyZ \r\n{A}--XyZ--\r\n"),
            format!("--XyZ\r\n{A}--XyZ-- \r\n"),
            format!("--XyZ\r\n{}--XyZ--\r\n", A.replace('1', "1\n--XyZ\n2")),
            format!("--XyZ\r\n{}--XyZ--\r\n", A.replace('1', "x--XyZ")),
            format!("--XyZ\r\n{A}--XyZ2\r\n--XyZ--\r\n"),
            format!("--XyZ\r\n{A}"),
            String::new(),
        ] {
            assert_eq!(body(&text), None, "{text:?}");
        }
    }
}
