//! Asks the upstreams by gRPC reflection for their methods, before the gateway listens and while it runs.
//!
//! Invariant: the gateway does not listen until every upstream has answered, so no call passes through for lack of an
//! answer.

use std::{
    collections::BTreeSet,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use ibid::{
    grpc::{self, ReflectionError},
    http::Protocol,
};
use ibid_tools::CommandError;
use tower_service::Service;

use crate::{
    config::{Env, GatewaySettings, ServeArgs},
    proxy::UpstreamRequestBody,
    snapshot::ConfigSnapshot,
    upstream::{Affinity, ReusePolicy, SendFailure, UpstreamBody, UpstreamClient},
    watch::{LiveConfig, ReloadOutcome},
};

const REFLECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two attempts before the gateway can start.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two queries while the gateway runs: an app may restart with other methods.
const REFRESH_INTERVAL: Duration = Duration::from_secs(30);

/// Returns the settings with the methods that reflection found. Waits until all upstreams are reachable.
pub(crate) async fn load_methods(
    settings: GatewaySettings, args: &ServeArgs, env: &Env<'_>,
) -> Result<GatewaySettings, CommandError> {
    if !settings.uses_reflection() {
        return Ok(settings);
    }
    let told = loop {
        match fetch_descriptors(&settings).await {
            Ok(told) => break told,
            Err((url, ReflectionError::Unreachable(why))) => {
                tracing::warn!(upstream = url, "waiting for the upstream to say which gRPC methods it has: {why}");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            Err((url, why)) => {
                return Err(CommandError::Conflict(format!("descriptors: the upstream {url} was asked: {why}")));
            }
        }
    };
    Ok(GatewaySettings::load_with_reflection(args, env, Some(told))?)
}

/// Reloads the configuration when the upstreams' methods change.
pub(crate) async fn refresh_methods(live: Arc<LiveConfig>) {
    loop {
        tokio::time::sleep(REFRESH_INTERVAL).await;
        let snapshot = live.now().clone();
        if !snapshot.settings.uses_reflection() {
            continue;
        }
        // An upstream that is down or does not answer keeps its known methods.
        match fetch_descriptors_from(&snapshot).await {
            Ok(told) if snapshot.settings.reflected_descriptors.as_ref() != Some(&told) => {
                let reload = live.reload_with_reflection(&Env::process(), &snapshot, told);
                if matches!(reload, ReloadOutcome::Applied(_)) {
                    tracing::info!("the upstreams have other gRPC methods than before");
                }
                live.log_outcome(reload);
            }
            Ok(_) => {}
            Err((url, why)) => tracing::debug!(upstream = url, "gRPC methods stay as they were: {why}"),
        }
    }
}

async fn fetch_descriptors(settings: &GatewaySettings) -> Result<Bytes, (String, ReflectionError)> {
    let snapshot = ConfigSnapshot::new(settings.clone(), None);
    let snapshot = snapshot.map_err(|why| (settings.upstream.clone(), ReflectionError::Refused(why)))?;
    fetch_descriptors_from(&snapshot).await
}

/// Queries the upstreams of all gRPC routes in turn, or that of `[policy]` if there are none. Concatenated descriptor
/// sets are a valid descriptor set.
async fn fetch_descriptors_from(snapshot: &ConfigSnapshot) -> Result<Bytes, (String, ReflectionError)> {
    let settings = &snapshot.settings;
    let is_named = settings.routes.iter().any(|route| route.protocol == Protocol::Grpc && !route.is_default_policy);
    let calls =
        settings.routes.iter().filter(|route| route.protocol == Protocol::Grpc && route.is_default_policy != is_named);
    let urls: BTreeSet<&String> = calls.map(|route| route.upstream.as_ref().unwrap_or(&settings.upstream)).collect();
    let mut all = BytesMut::new();
    for url in urls {
        let mut server = ReflectionService(snapshot.upstreams(Protocol::Grpc)[url].clone());
        let told = tokio::time::timeout(REFLECTION_TIMEOUT, grpc::fetch_descriptors(&mut server)).await;
        let late = |_| ReflectionError::Unreachable(format!("no answer within {REFLECTION_TIMEOUT:?}"));
        all.extend_from_slice(&told.map_err(late).flatten().map_err(|why| (url.clone(), why))?);
    }
    Ok(all.freeze())
}

struct ReflectionService(Arc<UpstreamClient<UpstreamRequestBody>>);

impl Service<Request<Full<Bytes>>> for ReflectionService {
    type Response = Response<UpstreamBody>;
    type Error = SendFailure;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, SendFailure>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), SendFailure>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
        let upstream = self.0.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let Ok(whole) = body.collect().await;
            let request = Request::from_parts(head, UpstreamRequestBody::complete(whole.to_bytes(), None));
            upstream.send(request, ReusePolicy::PassThrough, &Affinity::default()).await
        })
    }
}
