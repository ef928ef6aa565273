//! A client that speaks TLS: whom it trusts, and what it shows.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use ibid_testkit::certificates::{Authority, Vouched};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::faults::kit::within;

/// What a client got to see.
pub(crate) struct Seen {
    /// The server's certificate.
    pub(crate) server: Vec<u8>,
    pub(crate) answer: Response<Bytes>,
}

/// Sends a request to `localhost`; nothing if no connection, or no answer, comes of it.
pub(crate) async fn over_tls(
    addr: SocketAddr, trusts: &Authority, shows: Option<&Vouched>, request: Request<Full<Bytes>>,
) -> Option<Seen> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(trusts));
    let config = match shows {
        None => config.with_no_client_auth(),
        Some(shown) => config.with_client_auth_cert(vec![certificate(&shown.der)], key(shown)).unwrap(),
    };
    let tcp = TcpStream::connect(addr).await.expect("somebody listens");
    let name = ServerName::try_from("localhost").unwrap();
    let stream = within("the handshake", TlsConnector::from(Arc::new(config)).connect(name, tcp)).await.ok()?;
    let server = stream.get_ref().1.peer_certificates().unwrap()[0].to_vec();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.ok()?;
    tokio::spawn(connection);
    // TLS 1.3 tells a client only after its handshake that its certificate was not good.
    let (parts, body) = within("an answer", sender.send_request(request)).await.ok()?.into_parts();
    let body = within("its body", body.collect()).await.ok()?.to_bytes();
    Some(Seen { server, answer: Response::from_parts(parts, body) })
}

pub(crate) fn roots(authority: &Authority) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(certificate(&authority.der())).unwrap();
    roots
}

pub(crate) fn certificate(der: &[u8]) -> CertificateDer<'static> {
    CertificateDer::from(der.to_vec())
}

pub(crate) fn key(of: &Vouched) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from(PrivatePkcs8KeyDer::from(of.key_der.clone()))
}

pub(crate) fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}
