//! Fetches keys from a URL, by a timer and when a token names an unknown key.
//!
//! Only one fetch runs at a time, with a minimum interval, so that tokens with invented key ids cannot flood the
//! issuer.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use super::KeySet;
use crate::{config::JwtSettings, outbound::OutboundClient};

const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum interval between two fetches, unless the timer's is shorter.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(10);
const MAX_JWKS_BYTES: usize = 1 << 20;

pub(super) struct RemoteJwks {
    url: String,
    path: Uri,
    issuer: OutboundClient,
    pub(super) refresh_interval: Duration,
    /// When the last fetch ended. Locked during a fetch.
    last_fetch: Mutex<Option<Instant>>,
}

impl RemoteJwks {
    pub(super) fn new(url: &str, settings: &JwtSettings) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|why| format!("jwt.jwks: {why}"))?;
        let (Some(scheme), Some(authority)) = (uri.scheme(), uri.authority()) else {
            return Err("jwt.jwks: it is no URL".into());
        };
        let origin = format!("{scheme}://{authority}");
        let issuer = OutboundClient::new(&origin, ("jwt", "jwks"), &settings.tls, FETCH_TIMEOUT)?;
        let path = uri.into_parts().path_and_query.map_or(Uri::from_static("/"), Uri::from);
        Ok(Self {
            url: url.split('?').next().unwrap_or_default().into(),
            path,
            issuer,
            refresh_interval: settings.refresh,
            last_fetch: Mutex::new(None),
        })
    }

    /// Fetches the keys unless the last fetch is too recent. The known keys stay in force if the fetch fails.
    pub(super) async fn refresh(&self, keys: &ArcSwap<KeySet>) {
        let mut last = self.last_fetch.lock().await;
        if last.is_some_and(|last| last.elapsed() < MIN_FETCH_INTERVAL.min(self.refresh_interval)) {
            return;
        }
        let fetched = timeout(FETCH_TIMEOUT, self.fetch()).await;
        *last = Some(Instant::now());
        match fetched.unwrap_or_else(|_| Err(format!("no answer within {FETCH_TIMEOUT:?}"))) {
            Ok(fetched) => {
                tracing::debug!(url = self.url, keys = fetched.len(), "keys of tokens fetched");
                keys.store(Arc::new(fetched));
            }
            Err(why) if keys.load().is_empty() => {
                tracing::error!(url = self.url, "the keys of tokens cannot be fetched, and none are known yet: {why}");
            }
            Err(why) => {
                tracing::warn!(url = self.url, "the keys of tokens cannot be fetched; the known ones stay: {why}")
            }
        }
    }

    async fn fetch(&self) -> Result<KeySet, String> {
        let mut request = Request::get(self.path.clone()).body(Bytes::new()).expect("a request");
        request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let answer = self.issuer.send(request, MAX_JWKS_BYTES).await?;
        match answer.status() {
            StatusCode::OK => KeySet::from_jwks(answer.body()),
            status => Err(format!("the answer is {status}")),
        }
    }
}
