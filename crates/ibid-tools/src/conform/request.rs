//! One request and its response, as sent and as shown.
//!
//! Invariant: the shown text contains no control characters from the server, and no value of a header that the user
//! gave.

use bytes::Bytes;
use http::Response;

use super::connection::ExchangeError;

const MAX_BODY_SHOWN: usize = 300;

#[derive(Debug, Clone)]
pub(super) struct RawRequest {
    pub(super) method: String,
    pub(super) target: String,
    /// Key headers: any number, with any bytes.
    pub(super) keys: Vec<(String, Vec<u8>)>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) connection: String,
    pub(super) body: Option<Bytes>,
}

#[derive(Debug, Clone)]
pub(super) struct RawExchange {
    pub(super) request: String,
    pub(super) response: Result<Response<Bytes>, ExchangeError>,
}

impl RawRequest {
    pub(super) fn has_header(&self, name: &str) -> bool {
        self.headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name))
    }

    pub(super) fn with_headers(mut self, headers: &[(String, String)]) -> Self {
        self.headers.retain(|(name, _)| !headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name)));
        self.headers.extend_from_slice(headers);
        self
    }

    pub(super) fn to_bytes(&self, host: &str) -> Vec<u8> {
        let mut bytes = format!(
            "{} {} HTTP/1.1\r\nhost: {host}\r\nuser-agent: ibid-conform/{}\r\nconnection: {}\r\n",
            self.method,
            self.target,
            env!("CARGO_PKG_VERSION"),
            self.connection
        )
        .into_bytes();
        if !self.has_header("accept") {
            bytes.extend(b"accept: */*\r\n");
        }
        for (name, value) in &self.headers {
            bytes.extend(format!("{name}: {value}\r\n").into_bytes());
        }
        for (name, value) in &self.keys {
            bytes.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        if let Some(body) = &self.body {
            if !self.has_header("content-type") {
                bytes.extend(b"content-type: application/json\r\n");
            }
            bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).into_bytes());
            bytes.extend(body);
        } else {
            let length = if self.method == "GET" { "" } else { "content-length: 0\r\n" };
            bytes.extend(format!("{length}\r\n").into_bytes());
        }
        bytes
    }

    /// Describes the request without the values of headers that may be secret.
    pub(super) fn redacted(&self) -> String {
        let mut shown = format!("{} {}", self.method, self.target);
        for (name, _) in self.headers.iter().filter(|(name, _)| !name.eq_ignore_ascii_case("content-type")) {
            shown.push_str(&format!(", {name}: ****"));
        }
        for (name, value) in &self.keys {
            shown.push_str(&format!(", {name}: {}", printable(value)));
        }
        if self.connection != "close" {
            shown.push_str(&format!(", connection: {}", self.connection));
        }
        if let Some(body) = &self.body {
            shown.push_str(&format!(", body {}", printable(body)));
        }
        shown
    }
}

impl RawExchange {
    pub(super) fn status(&self) -> Option<u16> {
        self.response.as_ref().ok().map(|answer| answer.status().as_u16())
    }

    /// The response, if it is a success.
    pub(super) fn success(&self) -> Option<&Response<Bytes>> {
        self.response.as_ref().ok().filter(|answer| answer.status().is_success())
    }

    pub(super) fn describe_response(&self) -> String {
        let answer = match &self.response {
            Ok(answer) => answer,
            Err(broken) => return broken.to_string(),
        };
        let told = ["content-type", "location", "etag", "retry-after", "link", "set-cookie"];
        let mut came = answer.status().as_u16().to_string();
        for (name, value) in answer.headers() {
            if told.contains(&name.as_str()) || name.as_str().contains("idempoten") {
                came.push_str(&format!(", {name}: {}", printable(value.as_bytes())));
            }
        }
        if !answer.body().is_empty() {
            came.push_str(&format!(", body {}", printable(answer.body())));
        }
        came
    }
}

pub(super) fn header_of<'a>(answer: &'a Response<Bytes>, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

/// Makes foreign bytes safe for a terminal: no control characters, limited length.
fn printable(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(MAX_BODY_SHOWN)];
    let text: String = cut
        .utf8_chunks()
        .flat_map(|chunk| {
            let invalid = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}"));
            let valid = chunk.valid().chars().map(|character| match character {
                control if control.is_control() => control.escape_default().to_string(),
                other => other.to_string(),
            });
            valid.chain(invalid).collect::<Vec<_>>()
        })
        .collect();
    match bytes.len() - cut.len() {
        0 => text,
        more => format!("{text}… and {more} bytes more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_send_cannot_move_a_terminals_cursor() {
        assert_eq!(printable(b"a\x1b[2J\xff\n\xc3\xa9"), "a\\u{1b}[2J\\xff\\n\u{e9}");
        assert!(printable(&[b'x'; 1000]).ends_with("… and 700 bytes more"));
    }

    #[test]
    fn secrets_are_not_shown_and_keys_are_sent_as_they_are() {
        let request = RawRequest {
            method: "POST".into(),
            target: "/pay".into(),
            keys: vec![("Idempotency-Key".into(), b"a\x01".to_vec())],
            headers: vec![("Authorization".into(), "Bearer s3cret".into())],
            connection: "close".into(),
            body: Some("{}".into()),
        };
        assert_eq!(request.redacted(), "POST /pay, Authorization: ****, Idempotency-Key: a\\u{1}, body {}");
        let bytes = request.to_bytes("h");
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("Authorization: Bearer s3cret\r\nIdempotency-Key: a\u{1}\r\n"), "{text}");
        assert!(text.ends_with("content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"), "{text}");
    }
}
