//! A client for the servers that the gateway and its commands call: the issuer of tokens, the collector of traces, and
//! another gateway's admin port.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Limited};

use rustls::ClientConfig;

use crate::{
    config::ClientTls,
    proxy::UpstreamRequestBody,
    tls,
    upstream::{Affinity, ReusePolicy, SendFailure, SetupError, UpstreamClient, UpstreamSettings},
};

pub(crate) struct OutboundClient(Arc<UpstreamClient<UpstreamRequestBody>>);

#[derive(Debug, thiserror::Error)]
pub(crate) enum OutboundError {
    /// The server cannot have received the request.
    #[error("{0}")]
    NotSent(String),
    #[error("{0}")]
    ResponseLost(String),
}

impl OutboundClient {
    /// Connects on first use. `origin` is scheme, host and port. `table` and `key` name the setting, for errors.
    pub(crate) fn new(
        origin: &str, (table, key): (&str, &str), tls: &ClientTls, connect_timeout: Duration,
    ) -> Result<Self, String> {
        let tls = tls::client_config(&format!("{table}."), tls)?;
        Self::with_tls(origin, tls, connect_timeout).map_err(|why| format!("{table}.{key}: {why}"))
    }

    /// Like [`new`](Self::new). Without a TLS configuration, the system's CAs are trusted.
    pub(crate) fn with_tls(
        origin: &str, tls: Option<Arc<ClientConfig>>, connect_timeout: Duration,
    ) -> Result<Self, SetupError> {
        let settings = UpstreamSettings { max_connections: 1, connect_timeout, tls, ..UpstreamSettings::default() };
        UpstreamClient::new(origin.parse()?, settings).map(Self)
    }

    pub(crate) async fn send(
        &self, request: Request<Bytes>, max_bytes: usize,
    ) -> Result<Response<Bytes>, OutboundError> {
        let request = request.map(|body| UpstreamRequestBody::complete(body, None));
        let answer = self.0.send(request, ReusePolicy::PassThrough, &Affinity::default()).await;
        let (parts, body) = answer?.into_parts();
        let body = Limited::new(body, max_bytes).collect().await;
        let body = body.map_err(|why| OutboundError::ResponseLost(format!("its body cannot be read: {why}")))?;
        Ok(Response::from_parts(parts, body.to_bytes()))
    }
}

impl From<SendFailure> for OutboundError {
    fn from(why: SendFailure) -> Self {
        match why {
            SendFailure::NeverWritten(why) => Self::NotSent(why.to_string()),
            SendFailure::MaybeWritten(why) => Self::ResponseLost(why.to_string()),
        }
    }
}
