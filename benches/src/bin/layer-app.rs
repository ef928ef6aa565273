//! The axum app of the layer rows: the same handler on `/plain` and, behind the layer with the memory store and the
//! `ietf` policy, on `/guarded`. For gRPC, served by tonic, they are `/bench.Orders/Plain` and `/bench.Orders/Guarded`;
//! `/bench.Orders/Covered` is a second plain method, for a gateway to cover.
//!
//! `layer-app [--listen 127.0.0.1:0] [--answer 300] [--threads 0]`; prints `listening ADDR`.
//! `GET /count` answers how many times the handler ran.

use std::{error::Error, process::ExitCode, sync::Arc};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::{get, post},
};
use ibid::{Ibid, Policy, grpc::UnaryMethods, store::Memory};
use ibid_bench::{
    calls,
    server::{AppFlags, CountingApp, runtime},
};
use tokio::net::TcpListener;

fn main() -> ExitCode {
    let run = || -> Result<(), Box<dyn Error>> {
        let flags = AppFlags::parse(std::env::args().skip(1))?;
        runtime(flags.threads)?.block_on(serve(flags))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("layer-app: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(flags: AppFlags) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(flags.listen).await?;
    println!("listening {}", listener.local_addr()?);
    let app = Arc::new(CountingApp::new(flags.response_bytes));
    let router = Router::new().merge(plain()).merge(guarded()).route("/count", get(count)).with_state(app);
    Ok(axum::serve(without_nagle(listener), router).await?)
}

/// axum leaves Nagle's algorithm on; the other contenders do not.
fn without_nagle(listener: TcpListener) -> impl axum::serve::Listener<Addr = std::net::SocketAddr> {
    use axum::serve::ListenerExt;
    listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    })
}

fn plain() -> Router<Arc<CountingApp>> {
    Router::new()
        .route("/plain", post(create))
        .route("/bench.Orders/Plain", post(calls::create))
        .route("/bench.Orders/Covered", post(calls::create))
}

/// The same handler under the layer.
fn guarded() -> Router<Arc<CountingApp>> {
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let calls = ibid.grpc_layer(UnaryMethods::methods(["bench.Orders/Guarded"]), Policy::ietf()).expect("a preset");
    let calls = Router::new().route("/bench.Orders/Guarded", post(calls::create)).route_layer(calls);
    Router::new()
        .route("/guarded", post(create))
        .route_layer(ibid.layer(Policy::ietf()).expect("a preset"))
        .merge(calls)
}

/// Reads the whole body, as an app would.
async fn create(State(app): State<Arc<CountingApp>>, _body: Bytes) -> impl IntoResponse {
    (StatusCode::CREATED, [(CONTENT_TYPE, "application/json")], app.execute())
}

async fn count(State(app): State<Arc<CountingApp>>) -> String {
    app.executions().to_string()
}
