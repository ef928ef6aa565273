//! Makes responses readable for browsers on other origins.
//!
//! A replay was recorded for one origin and may be requested by another, so its `Access-Control-*` headers are set
//! anew. Refusals never reach the app, so they get theirs here too.

use http::{HeaderMap, HeaderName, HeaderValue, Method, header, request::Parts};

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

    pub(super) fn is_preflight(request: &Parts) -> bool {
        request.method == Method::OPTIONS
            && request.headers.contains_key(header::ORIGIN)
            && request.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
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

/// Completes the app's preflight response, or builds one if the app has none.
pub(super) fn complete_preflight(
    headers: &mut HeaderMap, origin: &HeaderValue, asked: &Preflight, keys: impl Iterator<Item = HeaderName>,
) -> bool {
    let app_allows = headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    if !app_allows {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, asked.method.clone());
        if let Some(wanted) = &asked.headers {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        add_to_list(headers, &header::VARY, ["origin".to_owned()].into_iter());
    }
    let keys = keys.map(|name| name.as_str().to_owned());
    add_to_list(headers, &header::ACCESS_CONTROL_ALLOW_HEADERS, keys);
    !app_allows
}

/// The headers of a preflight request.
#[derive(Debug, Clone)]
pub(super) struct Preflight {
    method: HeaderValue,
    headers: Option<HeaderValue>,
}

impl Preflight {
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let method = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD)?.clone();
        Some(Self { method, headers: headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned() })
    }

    /// The method of the announced request.
    pub(super) fn method(&self) -> Option<Method> {
        Method::from_bytes(self.method.as_bytes()).ok()
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
