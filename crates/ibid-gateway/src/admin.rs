//! The admin port: whether the gateway is alive, whether it can do its work, and what it has done.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use ibid::{Ibid, StoreCall, store::Address};
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::watch,
    time::{Instant, timeout},
};

use crate::{
    live::Live,
    metrics::{self, Gauges, Metrics},
};

/// A store that takes longer to answer is not ready.
const PATIENCE: Duration = Duration::from_secs(1);

/// The admin port, bound.
pub struct Admin {
    listener: TcpListener,
    ibid: Ibid,
    live: Arc<Live>,
    metrics: Arc<Metrics>,
    gauges: Gauges,
}

impl Admin {
    /// Binds the address.
    ///
    /// # Errors
    /// If it cannot be bound.
    pub async fn bind(listen: SocketAddr, ibid: Ibid, live: Arc<Live>, metrics: Arc<Metrics>) -> Result<Self, String> {
        let listener = TcpListener::bind(listen).await;
        let listener = listener.map_err(|why| format!("admin.listen: {listen} cannot be bound: {why}"))?;
        let gauges = Gauges::new(ibid.engine().store().clone());
        Ok(Self { listener, ibid, live, metrics, gauges })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until the process ends; during a shutdown it says that the gateway is not ready.
    pub async fn run(self, stop: watch::Receiver<bool>) {
        let this = Arc::new(self);
        loop {
            let Ok((socket, _)) = this.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (this, stop) = (this.clone(), stop.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let (this, stopping) = (this.clone(), *stop.borrow());
                    async move { Ok::<_, Infallible>(this.answer(&request, stopping).await) }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(Duration::from_secs(10))
                    .serve_connection(TokioIo::new(socket), service)
                    .await;
            });
        }
    }

    async fn answer(&self, request: &Request<Incoming>, stopping: bool) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET is understood here\n");
        }
        match request.uri().path() {
            "/healthz" => plain(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(stopping).await,
            "/metrics" => self.metrics().await,
            _ => plain(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics here\n"),
        }
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        let stored = self.gauges.read().await;
        // Those of a configuration that was taken up since the last look, too.
        self.metrics.show(&self.live.now().settings.routes);
        let mut answer = plain(StatusCode::OK, &self.metrics.render(stored));
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
        answer
    }

    async fn ready(&self, stopping: bool) -> Response<Full<Bytes>> {
        let engine = self.ibid.engine();
        let nowhere = Address([0; 32]);
        let sent = Instant::now();
        let found = timeout(PATIENCE, engine.store().get(&nowhere)).await;
        engine.observer().asked(StoreCall::Get, sent.elapsed());
        let trouble = match found {
            Ok(Ok(_)) => None,
            Ok(Err(why)) => Some(why.to_string()),
            Err(_) => Some(format!("no answer within {PATIENCE:?}")),
        };
        let promise = engine.store().promise();
        let ready = trouble.is_none() && !stopping;
        let body = json!({
            "ready": ready,
            "stopping": stopping,
            "running": engine.running().count(),
            "store": {
                "name": promise.store,
                "durable": promise.durable,
                "shared": promise.shared,
                "wanting": promise.wanting,
                "trouble": trouble,
                "waiting": engine.later().waiting(),
            },
        });
        let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let mut answer = plain(status, &format!("{body}\n"));
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        answer
    }
}

fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::copy_from_slice(text.as_bytes())));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
