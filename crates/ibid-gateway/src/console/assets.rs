//! Static files of the console, compiled into the binary. Nothing is loaded from other hosts.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};

/// Name, content type and bytes.
type Asset = (&'static str, &'static str, &'static [u8]);

#[rustfmt::skip]
const ASSETS: [Asset; 6] = [
    ("console.css", "text/css; charset=utf-8", include_bytes!("../../assets/console.css")),
    ("console.js", "text/javascript; charset=utf-8", include_bytes!("../../assets/console.js")),
    ("htmx.js", "text/javascript; charset=utf-8", include_bytes!("../../assets/vendor/htmx-2.0.11.min.js")),
    ("uplot.js", "text/javascript; charset=utf-8", include_bytes!("../../assets/vendor/uplot-1.6.32.min.js")),
    ("uplot.css", "text/css; charset=utf-8", include_bytes!("../../assets/vendor/uplot-1.6.32.min.css")),
    ("icon.svg", "image/svg+xml", include_bytes!("../../assets/icon.svg")),
];

/// Serves a file with an ETag, so that browsers revalidate it.
pub(super) fn serve_asset(name: &str, asked: &HeaderMap) -> Option<Response> {
    let (_, kind, bytes) = ASSETS.iter().find(|(known, ..)| *known == name)?;
    let tag = etag(bytes);
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::ETAG, tag.clone()),
    ];
    Some(match asked.get(header::IF_NONE_MATCH) == Some(&tag) {
        true => (StatusCode::NOT_MODIFIED, headers).into_response(),
        false => (headers, Bytes::from_static(bytes)).into_response(),
    })
}

fn etag(bytes: &[u8]) -> HeaderValue {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    HeaderValue::from_str(&format!("\"{:016x}\"", hasher.finish())).expect("hex in quotes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_the_browser_has_is_not_sent_again() {
        let first = serve_asset("console.css", &HeaderMap::new()).unwrap();
        assert_eq!(first.status(), StatusCode::OK);
        let asked = HeaderMap::from_iter([(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone())]);
        assert_eq!(serve_asset("console.css", &asked).unwrap().status(), StatusCode::NOT_MODIFIED);
        assert_eq!(serve_asset("console.js", &asked).unwrap().status(), StatusCode::OK, "another file");
        assert!(serve_asset("../console.css", &asked).is_none());
    }

    #[test]
    fn our_own_files_name_no_other_place() {
        for (name, _, bytes) in ASSETS.iter().filter(|(name, ..)| name.starts_with("console.")) {
            let text = std::str::from_utf8(bytes).unwrap();
            assert!(!text.contains("//") || !text.contains("http"), "{name}");
            assert!(!text.contains("url(") && !text.contains("@import"), "{name}");
        }
    }
}
