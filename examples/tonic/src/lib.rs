//! A shop as a tonic server. With the layer its unary calls are safe to retry; bare it can stand behind the gateway.
//!
//! [`Shop`] knows nothing of either: it runs what it is told to, and counts.

use std::{error::Error, future::Future};

use axum::middleware::map_response;
use ibid::{Ibid, Policy, grpc::UnaryMethods};
use tokio::net::TcpListener;
use tonic::{
    codec::CompressionEncoding,
    service::Routes,
    transport::{Server, server::TcpIncoming},
};
use tonic_reflection::server::Builder;

use self::proto::orders_server::OrdersServer;
pub use self::shop::Shop;

mod script;
mod shop;
mod trailers;

/// What `proto/shop.proto` was made into.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod proto {
    tonic::include_proto!("shop");
}

/// The services as a `FileDescriptorSet`: for reflection, and to know which methods are unary.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shop.bin"));

/// Serves the shop until `stop`; its unary calls run once per key if there is an `ibid` to see to it.
///
/// # Errors
/// If the server fails.
pub async fn serve(
    listener: TcpListener, shop: Shop, ibid: Option<&Ibid>, stop: impl Future<Output = ()>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let routes = routes(shop).await?;
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    match ibid {
        Some(ibid) => {
            let layer = ibid.grpc_layer(UnaryMethods::from_descriptor_set(DESCRIPTORS)?, Policy::platform())?;
            let server = Server::builder().layer(layer).add_routes(routes);
            server.serve_with_incoming_shutdown(incoming, stop).await?;
            ibid.drained().await; // what still runs is finished, even if its client has gone
        }
        None => Server::builder().add_routes(routes).serve_with_incoming_shutdown(incoming, stop).await?,
    }
    Ok(())
}

async fn routes(shop: Shop) -> Result<Routes, Box<dyn Error + Send + Sync>> {
    let orders =
        OrdersServer::new(shop).accept_compressed(CompressionEncoding::Gzip).send_compressed(CompressionEncoding::Gzip);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<OrdersServer<Shop>>().await;
    let reflection = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let services = Routes::new(orders)
        .add_service(health)
        .add_service(reflection().build_v1()?)
        // What most clients still ask for first.
        .add_service(reflection().build_v1alpha()?);
    Ok(services.into_axum_router().layer(map_response(trailers::add_trailers)).into())
}
