//! The ceiling: a bare hyper HTTP/1 server that reads a POST's body and answers 201 with a fixed JSON body.
//!
//! `bare-upstream [--listen 127.0.0.1:0] [--answer 300] [--threads 0]`; prints `listening ADDR`.
//! `GET /count` answers how many POSTs were executed.

use std::{convert::Infallible, error::Error, process::ExitCode, sync::Arc};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use ibid_bench::server::{AppFlags, CountingApp, runtime};
use tokio::net::TcpListener;

fn main() -> ExitCode {
    let run = || -> Result<(), Box<dyn Error>> {
        let flags = AppFlags::parse(std::env::args().skip(1))?;
        runtime(flags.threads)?.block_on(serve(flags))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bare-upstream: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(flags: AppFlags) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(flags.listen).await?;
    println!("listening {}", listener.local_addr()?);
    let app = Arc::new(CountingApp::new(flags.response_bytes));
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let app = Arc::clone(&app);
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(Arc::clone(&app), request));
            // A client that hangs up is no concern of a benchmark's server; the client reports it.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(app: Arc<CountingApp>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let counting = request.method() != Method::POST;
    let mut body = request.into_body();
    while let Some(Ok(_)) = body.frame().await {}
    if counting {
        return Ok(Response::new(Full::from(app.executions().to_string())));
    }
    let mut response = Response::new(Full::new(app.execute()));
    *response.status_mut() = StatusCode::CREATED;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}
