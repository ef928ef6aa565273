//! Content-Type as it is compared: the media type and its parameters, without those that change on every request or are
//! the default.
//!
//! ```text
//! Multipart/Form-Data; boundary=x7       =>   multipart/form-data
//! application/json;charset="UTF-8"       =>   application/json
//! text/csv; header=present               =>   text/csv;header=present
//! ```

use std::borrow::Cow;

pub(super) struct MediaType<'a> {
    essence: &'a [u8],
    /// The parameters, each as sent. Order and quotes stay, because servers interpret them differently.
    parameters: Vec<&'a [u8]>,
}

impl<'a> MediaType<'a> {
    pub(super) fn read(value: &'a [u8]) -> Self {
        let end = value.iter().position(|&byte| byte == b';').unwrap_or(value.len());
        let parameters = if end < value.len() { split_parameters(&value[end + 1..]) } else { Vec::new() };
        Self { essence: value[..end].trim_ascii(), parameters }
    }

    pub(super) fn is_multipart(&self) -> bool {
        self.essence.get(..10).is_some_and(|start| start.eq_ignore_ascii_case(b"multipart/"))
    }

    /// Whether it names a character set other than UTF-8, or several.
    pub(super) fn has_other_charset(&self) -> bool {
        let mut charsets = self.parameters.iter().filter(|parameter| parameter_value(parameter, b"charset").is_some());
        match (charsets.next(), charsets.next()) {
            (None, _) => false,
            (Some(only), None) => !is_utf8(only),
            (Some(_), Some(_)) => true,
        }
    }

    /// The text that is compared.
    pub(super) fn canonical(&self) -> Cow<'a, [u8]> {
        // gRPC treats both media types as the same.
        let is_plain_grpc = self.essence.eq_ignore_ascii_case(b"application/grpc+proto");
        let essence = if is_plain_grpc { &b"application/grpc"[..] } else { self.essence };
        if self.parameters.is_empty() && !essence.iter().any(u8::is_ascii_uppercase) {
            return Cow::Borrowed(essence);
        }
        let mut out = essence.to_ascii_lowercase();
        let keeps_charset = self.has_other_charset();
        for parameter in &self.parameters {
            let is_default = is_utf8(parameter) && !keeps_charset;
            let is_boundary = self.is_multipart() && parameter_value(parameter, b"boundary").is_some();
            if !is_default && !is_boundary {
                out.push(b';');
                out.extend_from_slice(parameter);
            }
        }
        Cow::Owned(out)
    }
}

/// Splits parameters at unquoted semicolons. Empty ones are skipped.
fn split_parameters(text: &[u8]) -> Vec<&[u8]> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    let at_semicolon = |byte: &u8| {
        let ends = *byte == b';' && !is_quoted;
        match *byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_quoted => is_escaped = true,
            b'"' => is_quoted = !is_quoted,
            _ => {}
        }
        ends
    };
    text.split(at_semicolon).map(<[u8]>::trim_ascii).filter(|piece| !piece.is_empty()).collect()
}

/// The value of the parameter, if it has this name.
fn parameter_value<'a>(parameter: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let equals = parameter.iter().position(|&byte| byte == b'=')?;
    let is_it = parameter[..equals].trim_ascii().eq_ignore_ascii_case(name);
    is_it.then(|| parameter[equals + 1..].trim_ascii())
}

fn is_utf8(parameter: &[u8]) -> bool {
    let Some(value) = parameter_value(parameter, b"charset") else { return false };
    let unquoted = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value);
    unquoted.eq_ignore_ascii_case(b"utf-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(value: &str) -> String {
        String::from_utf8(MediaType::read(value.as_bytes()).canonical().into_owned()).unwrap()
    }

    #[test]
    fn what_changes_on_every_send_and_what_is_the_default_is_left_out() {
        for (value, expected) in [
            ("application/json", "application/json"),
            ("Application/JSON ; Charset=\"UTF-8\";", "application/json"),
            ("multipart/form-data; boundary=\"a;b\"; x=1", "multipart/form-data;x=1"),
            ("application/grpc+proto", "application/grpc"),
            ("text/plain; boundary=x", "text/plain;boundary=x"),
            ("text/plain; charset=latin1", "text/plain;charset=latin1"),
            ("text/plain; charset=utf-8; charset=latin1", "text/plain;charset=utf-8;charset=latin1"),
            ("a/b; p=\"x\\\";y\"; q=2", "a/b;p=\"x\\\";y\";q=2"),
            ("", ""),
            (";;", ""),
        ] {
            assert_eq!(compared(value), expected, "{value}");
        }
    }

    #[test]
    fn another_character_set_is_seen() {
        for value in
            ["a/b; charset=latin1", "a/b; charset=utf-16", "a/b; charset=utf-8; charset=utf-8", "a/b; charset="]
        {
            assert!(MediaType::read(value.as_bytes()).has_other_charset(), "{value}");
        }
        for value in ["a/b", "a/b; charset=utf-8", "a/b; CHARSET=\"utf-8\"", "a/b; x=\"charset=latin1\""] {
            assert!(!MediaType::read(value.as_bytes()).has_other_charset(), "{value}");
        }
    }
}
