use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Buf;
use http::{Method, Request, Response, request::Parts};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    BoxError, LayerState, RequestBody, ResponseBody, ResponseFuture, Routing, app::ServiceApp, context::RequestSender,
    service,
};

/// Adds idempotency to a service. Created by [`Ibid::layer`](super::Ibid::layer).
#[derive(Clone)]
pub struct IbidLayer {
    pub(super) shared: Arc<LayerState>,
    pub(super) routing: Arc<dyn Routing>,
}

/// A service with idempotency.
#[derive(Clone)]
pub struct IbidService<S> {
    inner: S,
    shared: Arc<LayerState>,
    routing: Arc<dyn Routing>,
}

impl<S> Layer<S> for IbidLayer {
    type Service = IbidService<S>;

    fn layer(&self, inner: S) -> IbidService<S> {
        IbidService { inner, shared: self.shared.clone(), routing: self.routing.clone() }
    }
}

impl<S, B, RB> Service<Request<B>> for IbidService<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<RB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, RB>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Calls the instance that was polled ready, and keeps the clone.
        let fresh = self.inner.clone();
        let inner = mem::replace(&mut self.inner, fresh);
        let (parts, body) = request.into_parts();
        let (sender, route) = (RequestSender::from_extensions(&parts.extensions), self.routing.route(&parts));
        let request = Request::from_parts(parts, body);
        let key_headers = |method: &Method, parts: &Parts| self.routing.key_headers(method, parts);
        service::call(&self.shared, ServiceApp(inner), request, sender, route, &key_headers)
    }
}

impl fmt::Debug for IbidLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IbidLayer")
    }
}

impl<S: fmt::Debug> fmt::Debug for IbidService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IbidService").field("inner", &self.inner).finish()
    }
}
