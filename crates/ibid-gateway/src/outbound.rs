//! A client for the servers that the gateway itself calls: the issuer of tokens and the collector of traces.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Limited};

use crate::{
    config::ClientTls,
    proxy::UpstreamRequestBody,
    tls,
    upstream::{Affinity, ReusePolicy, UpstreamClient, UpstreamSettings},
};

pub(crate) struct OutboundClient(Arc<UpstreamClient<UpstreamRequestBody>>);

impl OutboundClient {
    /// Connects on first use. `origin` is scheme, host and port. `table` and `key` name the setting, for errors.
    pub(crate) fn new(
        origin: &str, (table, key): (&str, &str), tls: &ClientTls, connect_timeout: Duration,
    ) -> Result<Self, String> {
        let tls = tls::client_config(&format!("{table}."), tls)?;
        let settings = UpstreamSettings { max_connections: 1, connect_timeout, tls, ..UpstreamSettings::default() };
        let client = origin.parse().and_then(|target| UpstreamClient::new(target, settings));
        client.map(Self).map_err(|why| format!("{table}.{key}: {why}"))
    }

    /// Sends a request and reads the whole response.
    pub(crate) async fn send(&self, request: Request<Bytes>, max_bytes: usize) -> Result<Response<Bytes>, String> {
        let request = request.map(|body| UpstreamRequestBody::complete(body, None));
        let answer = self.0.send(request, ReusePolicy::PassThrough, &Affinity::default()).await;
        let (parts, body) = answer.map_err(|why| why.to_string())?.into_parts();
        let body = Limited::new(body, max_bytes).collect().await;
        let body = body.map_err(|why| format!("its body cannot be read: {why}"))?;
        Ok(Response::from_parts(parts, body.to_bytes()))
    }
}
