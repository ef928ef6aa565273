//! What an intent guard compares: the operation's name and the values of some fields.

use super::{BodyFormat, FingerprintHasher, FingerprintInput, content_type_format, form, json};
use super::{JsonPointer, media::MediaType};

impl FingerprintInput<'_> {
    /// Hashes method, path and the values of these fields of a JSON or form body. Returns `None` if a field is missing
    /// or null, or the body is of another type or could be read in two ways.
    pub(crate) fn intent(&self, fields: &[JsonPointer]) -> Option<[u8; 32]> {
        let found = &self.found;
        let content_type = self.content_type();
        if found.several_types || found.content_coding || MediaType::read(content_type).has_other_charset() {
            return None;
        }
        match content_type_format(content_type) {
            BodyFormat::Json => self.json_intent(fields),
            BodyFormat::Form => {
                let mut hasher = self.intent_hasher();
                for field in fields {
                    hasher.framed(b'f', field.to_string().as_bytes());
                    hasher.framed(b'v', &form::find(self.body, &field.form_name())?);
                }
                Some(hasher.stream.finish())
            }
            BodyFormat::Multipart | BodyFormat::Other => None,
        }
    }

    /// Like [`intent`](Self::intent), for a body that is JSON, whatever its type.
    pub(crate) fn json_intent(&self, fields: &[JsonPointer]) -> Option<[u8; 32]> {
        let mut hasher = self.intent_hasher();
        fields.iter().for_each(|field| hasher.framed(b'f', field.to_string().as_bytes()));
        json::hash_present_values(self.body, fields, &mut hasher.stream).then(|| hasher.stream.finish())
    }

    fn intent_hasher(&self) -> FingerprintHasher {
        let (mut hasher, path) = (FingerprintHasher::new(), self.uri.path());
        hasher.framed(b'm', self.method.as_str().as_bytes());
        hasher.framed(b'p', path.strip_suffix('/').unwrap_or(path).as_bytes());
        hasher
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, Method, Uri, header};

    use super::*;
    use crate::{fingerprint::FoundHeaders, sent_names::SentHeaders};

    fn intent(content_type: &'static str, path: &'static str, body: &str, fields: &[&str]) -> Option<[u8; 32]> {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        let (uri, found) = (Uri::from_static(path), FoundHeaders::of(&SentHeaders::of(&headers)));
        let fields: Vec<_> = fields.iter().map(|field| JsonPointer::parse(field).unwrap()).collect();
        let (method, body) = (&Method::POST, body.as_bytes());
        FingerprintInput { method, uri: &uri, headers: &headers, found, body, trailers: None }.intent(&fields)
    }

    #[test]
    fn only_the_named_fields_count_and_all_must_be_there() {
        let json = |body: &str| intent("application/json", "/pay", body, &["/order", "/item/amount"]);
        let one = json(r#"{"order":"o1","item":{"amount":5,"at":1},"note":"a"}"#);
        assert!(one.is_some());
        assert_eq!(one, json(r#"{"note":"b","item":{"at":2,"amount":5},"\u006frder":"o1"}"#));
        for other in [r#"{"order":"o2","item":{"amount":5}}"#, r#"{"order":"o1","item":{"amount":50}}"#] {
            assert_ne!(one, json(other), "{other}");
        }
        for missing in [
            r#"{"order":"o1"}"#,
            r#"{"order":null,"item":{"amount":5}}"#,
            r#"{"order":"o1","order":"o2","item":{"amount":5}}"#,
            "no json",
            "",
        ] {
            assert_eq!(json(missing), None, "{missing}");
        }
    }

    #[test]
    fn values_do_not_run_into_each_other() {
        let json = |body: &str| intent("application/json", "/pay", body, &["/a", "/b"]).unwrap();
        assert_ne!(json(r#"{"a":1,"b":23}"#), json(r#"{"a":12,"b":3}"#));
        assert_ne!(json(r#"{"a":"1","b":2}"#), json(r#"{"a":1,"b":2}"#));
        assert_eq!(json(r#"{"a":1.0,"b":2e1}"#), json(r#"{"a":1,"b":20}"#), "however a number is written");
    }

    #[test]
    fn a_form_is_read_by_its_names() {
        const FORM: &str = "application/x-www-form-urlencoded";
        let form = |body: &str| intent(FORM, "/pay", body, &["/order", "/card/number"]);
        let one = form("order=o+1&card%5Bnumber%5D=42&x=1");
        assert!(one.is_some());
        assert_eq!(one, form("x=2&card[number]=42&order=o%201"));
        assert_ne!(one, form("order=o+2&card[number]=42"));
        assert_eq!(form("order=o+1"), None);
        assert_eq!(form("order=1&order=2&card[number]=42"), None, "which of them counts is unclear");
        assert_eq!(intent("text/plain", "/pay", "order=1&card[number]=42", &["/order"]), None);
        assert_ne!(one, intent(FORM, "/refund", "order=o+1&card[number]=42", &["/order", "/card/number"]));
    }
}
