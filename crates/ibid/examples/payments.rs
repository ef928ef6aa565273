//! A payments API whose requests are safe to retry: `cargo run -p ibid --example payments 3000`.

use std::sync::Arc;

use axum::{Json, Router, http::StatusCode, routing::post};
use ibid::{Ibid, Policy, store::Memory};
use serde_json::{Value, json};

/// Knows nothing of keys. Runs once per key, however often the request is sent.
async fn pay(Json(order): Json<Value>) -> (StatusCode, Json<Value>) {
    (StatusCode::CREATED, Json(json!({ "amount": order["amount"], "status": "charged" })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port = std::env::args().nth(1).unwrap_or_else(|| "3000".into());
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let app = Router::new().route("/payments", post(pay)).layer(ibid.layer(Policy::ietf())?);

    let listener = tokio::net::TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    ibid.drained().await; // what still runs is finished, even if its client has gone
    Ok(())
}
