//! Stands in for the bare proxy and for `ibid serve` in the harness's own tests, which judge the harness alone.
//!
//! With `serve` as first argument it replays by key from a map that never forgets; it is no idempotency gateway. One
//! upstream connection is pinned to each client connection.

#![allow(clippy::disallowed_types, reason = "an example without dependencies of its own")]

use std::{
    collections::HashMap,
    error::Error,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http1::SendRequest, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

type StubError = Box<dyn Error + Send + Sync>;
type StubUpstream = tokio::sync::Mutex<SendRequest<Full<Bytes>>>;
type StubAnswers = Mutex<HashMap<HeaderValue, (http::response::Parts, Bytes)>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), StubError> {
    let args: Vec<String> = std::env::args().collect();
    let replaying = args.get(1).is_some_and(|arg| arg == "serve");
    let at = args.iter().position(|arg| arg == "--upstream").ok_or("--upstream http://ADDR is needed")?;
    let upstream = args.get(at + 1).and_then(|url| url.strip_prefix("http://")).ok_or("not http://ADDR")?.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("stub listening on http://{}", listener.local_addr()?);
    let answers = Arc::new(StubAnswers::default());
    loop {
        let (client, _) = listener.accept().await?;
        client.set_nodelay(true)?;
        let answers = replaying.then(|| Arc::clone(&answers));
        let stream = TcpStream::connect(&upstream).await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            let upstream = Arc::new(StubUpstream::new(sender));
            let service = service_fn(move |request| answer(answers.clone(), Arc::clone(&upstream), request));
            http1::Builder::new().serve_connection(TokioIo::new(client), service).await
        });
    }
}

async fn answer(
    answers: Option<Arc<StubAnswers>>, upstream: Arc<StubUpstream>, request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, StubError> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let key = parts.headers.get("idempotency-key").cloned();
    if let (Some(answers), Some(key)) = (&answers, &key) {
        let known = answers.lock().map_err(|_| "poisoned")?.get(key).cloned();
        if let Some((parts, body)) = known {
            return Ok(Response::from_parts(parts, Full::new(body)));
        }
    }
    let response = upstream.lock().await.send_request(Request::from_parts(parts, Full::new(body))).await?;
    let (parts, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    if let (Some(answers), Some(key)) = (answers, key) {
        answers.lock().map_err(|_| "poisoned")?.insert(key, (parts.clone(), body.clone()));
    }
    Ok(Response::from_parts(parts, Full::new(body)))
}
