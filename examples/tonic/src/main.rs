//! `ibid-example-tonic --listen 127.0.0.1:50051 --ibid memory:`

use std::{error::Error, fs, net::SocketAddr, path::PathBuf};

use clap::Parser;
use ibid::Ibid;
use ibid_example_tonic::{DESCRIPTORS, Shop, serve};
use tokio::net::TcpListener;

/// A shop over gRPC, whose calls can be told how to behave.
#[derive(Parser)]
struct TonicArgs {
    /// Where to listen; port 0 is any that is free.
    #[arg(long, default_value = "127.0.0.1:50051")]
    listen: SocketAddr,
    /// Runs unary calls once per key, remembered in this store: memory: or embedded:FOLDER. Without it the server is
    /// bare, to stand behind the gateway.
    #[arg(long, value_name = "STORE")]
    ibid: Option<String>,
    /// Writes the services' descriptors for the gateway into this file, and ends.
    #[arg(long, value_name = "FILE")]
    write_descriptors: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let args = TonicArgs::parse();
    if let Some(file) = args.write_descriptors {
        return Ok(fs::write(file, DESCRIPTORS)?);
    }
    let ibid = match &args.ibid {
        Some(url) => Some(Ibid::new(ibid_stores::open(url).await?)),
        None => None,
    };
    let listener = TcpListener::bind(args.listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
    serve(listener, Shop::default(), ibid.as_ref(), stop).await
}
