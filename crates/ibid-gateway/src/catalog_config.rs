//! Adds the lifetime of keys to the configuration that an Iceberg REST catalog sends its clients, which send no keys
//! without it.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use ibid::{Ibid, RefusalReason, http::ResponseBody};
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    openapi_document::{Answer, BodyRead, REPLACED_HEADERS, document_type, is_yaml, read_body},
    proxy::RequestFailure,
    server::client_body::ClientBody,
};

/// The end of the path of a catalog's configuration. Catalogs have a base path in front of it.
pub(crate) const CONFIG_PATH: &str = "/v1/config";
const LIFETIME_MEMBER: &str = "idempotency-key-lifetime";

/// A request for the configuration of a catalog.
pub(crate) struct CatalogConfigRequest {
    pub(crate) lifetime: Duration,
    pub(crate) ibid: Ibid,
    /// Maximum time for the app to send the body.
    pub(crate) timeout: Duration,
    /// The refusal if the body is late or breaks off.
    pub(crate) failure: RequestFailure,
}

impl CatalogConfigRequest {
    /// Forwards the request to the catalog and adds the lifetime to its configuration.
    pub(crate) async fn answer<F>(
        self, mut request: Request<ClientBody>, send: impl FnOnce(Request<ClientBody>) -> F,
    ) -> Answer
    where
        F: Future<Output = Answer>,
    {
        let headers = request.headers_mut();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        // They refer to the configuration without the lifetime.
        headers.remove(header::IF_NONE_MATCH);
        headers.remove(header::IF_MODIFIED_SINCE);
        let answer = send(request).await;
        let is_json = document_type(answer.headers()).is_ok_and(|found| is_yaml(&found) == Some(false));
        if answer.status() != StatusCode::OK || !is_json {
            return answer;
        }
        let (mut head, body) = answer.into_parts();
        let (given, trailers, memory) = match timeout(self.timeout, read_body(&self.ibid, body)).await {
            Ok(Ok(BodyRead::Whole(given, trailers, memory))) => (given, trailers, memory),
            Ok(Ok(BodyRead::Begun(_, body))) => return Response::from_parts(head, body),
            Ok(Err(why)) => return self.failed(RefusalReason::UpstreamLost, &why),
            Err(_) => {
                return self.failed(RefusalReason::UpstreamTimeout, "the body did not end within limits.reply_timeout");
            }
        };
        let Some(changed) = with_lifetime(&given, self.lifetime) else {
            let body = ResponseBody::begun(given, Some(memory), ResponseBody::whole("", trailers));
            return Response::from_parts(head, body);
        };
        REPLACED_HEADERS.iter().chain([&header::ETAG]).for_each(|name| drop(head.headers.remove(name)));
        head.headers.insert(header::CONTENT_LENGTH, changed.len().into());
        Response::from_parts(head, ResponseBody::whole(changed, None))
    }

    fn failed(&self, reason: RefusalReason, why: &str) -> Answer {
        self.failure.refuse(reason, why).0.map(ResponseBody::untouched)
    }
}

/// Sets the lifetime in a configuration. `None` if it is no JSON object.
fn with_lifetime(config: &[u8], lifetime: Duration) -> Option<Bytes> {
    let mut config: BTreeMap<String, Value> = serde_json::from_slice(config).ok()?;
    config.insert(LIFETIME_MEMBER.into(), iso_duration(lifetime).into());
    serde_json::to_vec(&config).ok().map(Bytes::from)
}

/// Formats a duration as in ISO 8601: `PT24H`, `PT1H30M`, `PT0.500S`.
fn iso_duration(duration: Duration) -> String {
    let (seconds, millis) = (duration.as_secs(), duration.subsec_millis());
    let mut written = "PT".to_owned();
    for (number, unit) in [(seconds / 3600, 'H'), (seconds / 60 % 60, 'M')] {
        if number > 0 {
            written.push_str(&format!("{number}{unit}"));
        }
    }
    match (seconds % 60, millis) {
        (0, 0) if written.len() > 2 => {}
        (seconds, 0) => written.push_str(&format!("{seconds}S")),
        (seconds, millis) => written.push_str(&format!("{seconds}.{millis:03}S")),
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_are_written_as_iso_8601_has_them() {
        for (millis, written) in [
            (86_400_000, "PT24H"),
            (1_800_000, "PT30M"),
            (5_400_000, "PT1H30M"),
            (90_000, "PT1M30S"),
            (500, "PT0.500S"),
            (3_601_050, "PT1H1.050S"),
            (0, "PT0S"),
        ] {
            assert_eq!(iso_duration(Duration::from_millis(millis)), written);
        }
    }

    #[test]
    fn the_lifetime_is_added_or_replaced_in_an_object_only() {
        let day = Duration::from_secs(86_400);
        let changed = with_lifetime(br#"{"defaults":{},"idempotency-key-lifetime":"PT1M"}"#, day).unwrap();
        assert_eq!(&changed[..], br#"{"defaults":{},"idempotency-key-lifetime":"PT24H"}"#);
        for other in ["[]", "null", "{", ""] {
            assert_eq!(with_lifetime(other.as_bytes(), day), None, "{other}");
        }
    }
}
