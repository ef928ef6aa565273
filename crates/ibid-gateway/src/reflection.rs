//! Which gRPC methods the upstreams have, as they say themselves: asked before the gateway listens, and again while it runs.
//!
//! Invariant: nothing is let through for want of an answer. Until the upstreams have said it, the gateway does not listen.

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
    grpc::{ReflectionError, reflected},
    http::Protocol,
};
use tower_service::Service;

use crate::{
    commands::serve::ServeError,
    config::{Env, ServeArgs, Settings},
    live::{Live, Reload, Snapshot},
    proxy::Body,
    upstream::{Affinity, Care, Failure, Upstream, UpstreamBody},
};

/// How long one upstream may take to say it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two tries, while the gateway cannot start without.
const AGAIN: Duration = Duration::from_secs(1);
/// Between two looks, while it runs: an app may come back with other methods.
const KEEP_UP: Duration = Duration::from_secs(30);

/// These settings, with the methods of upstreams that are to be asked for them. Waits for upstreams that are not there yet.
pub(crate) async fn known(settings: Settings, args: &ServeArgs, env: &Env<'_>) -> Result<Settings, ServeError> {
    if !settings.reflects() {
        return Ok(settings);
    }
    let told = loop {
        match ask(&settings).await {
            Ok(told) => break told,
            Err((url, ReflectionError::Unreachable(why))) => {
                tracing::warn!(upstream = url, "waiting for the upstream to say which gRPC methods it has: {why}");
                tokio::time::sleep(AGAIN).await;
            }
            Err((url, why)) => {
                return Err(ServeError::Start(format!("descriptors: the upstream {url} was asked: {why}")));
            }
        }
    };
    Settings::load_knowing(args, env, Some(told)).map_err(|why| ServeError::Settings(why.to_string()))
}

/// Takes up what the upstreams say later.
pub(crate) async fn keep_up(live: Arc<Live>) {
    loop {
        tokio::time::sleep(KEEP_UP).await;
        let snapshot = live.now().clone();
        if !snapshot.settings.reflects() {
            continue;
        }
        // One that is away, or that says nothing, has not changed its mind.
        match ask_on(&snapshot).await {
            Ok(told) if snapshot.settings.reflected.as_ref() != Some(&told) => {
                let reload = live.reload_knowing(&Env::process(), &snapshot, told);
                if matches!(reload, Reload::Taken(_)) {
                    tracing::info!("the upstreams have other gRPC methods than before");
                }
                live.say(reload);
            }
            Ok(_) => {}
            Err((url, why)) => tracing::debug!(upstream = url, "gRPC methods stay as they were: {why}"),
        }
    }
}

async fn ask(settings: &Settings) -> Result<Bytes, (String, ReflectionError)> {
    let snapshot = Snapshot::new(settings.clone(), None);
    let snapshot = snapshot.map_err(|why| (settings.upstream.clone(), ReflectionError::Refused(why)))?;
    ask_on(&snapshot).await
}

/// All upstreams of gRPC routes, or where there is none that of `[policy]`, one after the other. Descriptor sets one behind the other are a descriptor set.
async fn ask_on(snapshot: &Snapshot) -> Result<Bytes, (String, ReflectionError)> {
    let settings = &snapshot.settings;
    let is_named = settings.routes.iter().any(|route| route.protocol == Protocol::Grpc && !route.is_policy);
    let calls = settings.routes.iter().filter(|route| route.protocol == Protocol::Grpc && route.is_policy != is_named);
    let urls: BTreeSet<&String> = calls.map(|route| route.upstream.as_ref().unwrap_or(&settings.upstream)).collect();
    let mut all = BytesMut::new();
    for url in urls {
        let mut server = Asked(snapshot.upstreams(Protocol::Grpc)[url].clone());
        let told = tokio::time::timeout(PATIENCE, reflected(&mut server)).await;
        let late = |_| ReflectionError::Unreachable(format!("no answer within {PATIENCE:?}"));
        all.extend_from_slice(&told.map_err(late).flatten().map_err(|why| (url.clone(), why))?);
    }
    Ok(all.freeze())
}

struct Asked(Arc<Upstream<Body>>);

impl Service<Request<Full<Bytes>>> for Asked {
    type Response = Response<UpstreamBody>;
    type Error = Failure;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Failure>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
        let upstream = self.0.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let Ok(whole) = body.collect().await;
            let request = Request::from_parts(head, Body::whole(whole.to_bytes(), None));
            upstream.send(request, Care::Plain, &Affinity::default()).await
        })
    }
}
