//! Makes responses readable for browsers on other origins.
//!
//! A replay was recorded for one origin and may be requested by another, so its `Access-Control-*` headers are set
//! anew. Refusals never reach the app, so they get theirs here too.

use http::{HeaderMap, HeaderName, HeaderValue, Method, header, request::Parts};

use super::KeyHeaderLookup;
use crate::policy::InvalidSetting;

/// Origins whose scripts may read responses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cors {
    origins: Vec<HeaderValue>,
}

impl Cors {
    /// Parses origins such as `https://shop.example.com`.
    ///
    /// # Errors
    /// Names the invalid origin.
    pub fn parse<'a>(origins: impl IntoIterator<Item = &'a str>) -> Result<Self, InvalidSetting> {
        let origin = |text: &str| {
            let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            let plain = rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', '?', '#', '@', ' ']));
            let value = HeaderValue::from_str(text).ok().filter(|_| plain);
            value.ok_or_else(|| format!("{text:?} is no origin; write one such as \"https://shop.example.com\""))
        };
        Ok(Self { origins: origins.into_iter().map(origin).collect::<Result<_, _>>()? })
    }

    /// The request's origin, if its scripts may read the response.
    pub(super) fn origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        headers.get(header::ORIGIN).filter(|origin| self.origins.contains(origin)).cloned()
    }
}

/// Makes a response readable for this origin, including the exposed headers. If the app set no CORS headers,
/// credentials are allowed as in preflights, which is safe because the origins are listed. Otherwise the app's setting
/// stays.
pub(super) fn set_cors_headers(
    headers: &mut HeaderMap, origin: &HeaderValue, exposed: impl Iterator<Item = HeaderName>,
) {
    if !headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    }
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    add_to_list(headers, &header::VARY, ["origin".to_owned()].into_iter());
    add_to_list(headers, &header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed.map(|name| name.as_str().to_owned()));
}

/// Completes the app's response to a preflight.
pub(super) struct PreflightPatch {
    origin: HeaderValue,
    method: HeaderValue,
    headers: Option<HeaderValue>,
    key_headers: Vec<HeaderName>,
}

impl PreflightPatch {
    /// Returns `None` unless the request is a preflight of a listed origin, for a request that a route covers.
    pub(super) fn of(cors: &Cors, key_headers: &KeyHeaderLookup<'_>, parts: &Parts) -> Option<Box<Self>> {
        let origin = cors.origin(&parts.headers).filter(|_| parts.method == Method::OPTIONS)?;
        let method = parts.headers.get(header::ACCESS_CONTROL_REQUEST_METHOD)?.clone();
        let key_headers = key_headers(&Method::from_bytes(method.as_bytes()).ok()?, parts)?;
        let headers = parts.headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        Some(Box::new(Self { origin, method, headers, key_headers }))
    }

    /// Returns whether the app does not answer preflights, so that these headers are the whole response.
    pub(super) fn complete(self, headers: &mut HeaderMap) -> bool {
        let app_allows = headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN);
        if !app_allows {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, self.origin);
            headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, self.method);
            if let Some(wanted) = self.headers {
                headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
            }
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
            add_to_list(headers, &header::VARY, ["origin".to_owned()].into_iter());
        }
        let keys = self.key_headers.iter().map(|name| name.as_str().to_owned());
        add_to_list(headers, &header::ACCESS_CONTROL_ALLOW_HEADERS, keys);
        !app_allows
    }
}

fn add_to_list(headers: &mut HeaderMap, list: &HeaderName, names: impl Iterator<Item = String>) {
    let mut all: Vec<String> = Vec::new();
    for line in headers.get_all(list) {
        let items = line.to_str().unwrap_or_default().split(',');
        all.extend(items.map(|item| item.trim().to_owned()).filter(|item| !item.is_empty()));
    }
    let before = all.len();
    for name in names {
        if !all.iter().any(|item| item == "*" || item.eq_ignore_ascii_case(&name)) {
            all.push(name);
        }
    }
    if all.len() > before {
        headers.insert(list, HeaderValue::from_str(&all.join(", ")).expect("names of headers"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_exact() {
        let cors = Cors::parse(["https://shop.example.com"]).unwrap();
        let with = |origin: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ORIGIN, origin.parse().unwrap());
            cors.origin(&headers).is_some()
        };
        assert!(with("https://shop.example.com"));
        assert!(!with("https://shop.example.com.evil.org"));
        assert!(!with("http://shop.example.com"));
        assert!(Cors::parse(["*"]).is_err());
        assert!(Cors::parse(["https://a/b"]).is_err());
    }

    #[test]
    fn lists_grow_without_repeating() {
        let mut headers = HeaderMap::new();
        headers.insert(header::VARY, "Accept, Origin".parse().unwrap());
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, "X-A".parse().unwrap());
        set_cors_headers(
            &mut headers,
            &"https://a".parse().unwrap(),
            ["x-a", "x-b"].map(HeaderName::from_static).into_iter(),
        );
        assert_eq!(headers[header::VARY], "Accept, Origin");
        assert_eq!(headers[header::ACCESS_CONTROL_EXPOSE_HEADERS], "X-A, x-b");
    }
}
