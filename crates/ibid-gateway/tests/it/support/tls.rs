//! A client that speaks TLS, and a server: whom they trust, and what they show.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
    server::WebPkiClientVerifier,
};
use testbed::certificates::{CertificateAuthority, IssuedCertificate};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::support::within;

/// What a client got to see.
pub(crate) struct TlsExchange {
    /// The server's certificate.
    pub(crate) server: Vec<u8>,
    pub(crate) answer: Response<Bytes>,
}

/// Sends a request to `localhost`; nothing if no connection, or no answer, comes of it.
pub(crate) async fn send_over_tls(
    addr: SocketAddr, trusts: &CertificateAuthority, shows: Option<&IssuedCertificate>, request: Request<Full<Bytes>>,
) -> Option<TlsExchange> {
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
    Some(TlsExchange { server, answer: Response::from_parts(parts, body) })
}

/// A server that lets in whom the authority vouches for, and answers by the path and the certificate that it was shown.
pub(crate) async fn strict_server(
    server: &IssuedCertificate, clients: &CertificateAuthority,
    answer: impl Fn(&str, &[u8]) -> (StatusCode, Bytes) + Send + Sync + 'static,
) -> SocketAddr {
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots(clients)), provider()).build().expect("a verifier");
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate(&server.der)], key(server))
        .unwrap();
    let (tls, answer) = (TlsAcceptor::from(Arc::new(config)), Arc::new(answer));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("it is bound");
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (tls, answer) = (tls.clone(), answer.clone());
            tokio::spawn(async move {
                let Ok(stream) = tls.accept(tcp).await else { return };
                let shown = stream.get_ref().1.peer_certificates().map(|shown| shown[0].to_vec()).unwrap_or_default();
                let service = service_fn(move |request: Request<Incoming>| {
                    let (status, body) = answer(request.uri().path(), &shown);
                    async move {
                        let _ = request.into_body().collect().await;
                        let mut answer = Response::new(Full::new(body));
                        *answer.status_mut() = status;
                        Ok::<_, std::convert::Infallible>(answer)
                    }
                });
                let io = TokioIo::new(stream);
                let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
            });
        }
    });
    addr
}

pub(crate) fn roots(authority: &CertificateAuthority) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(certificate(&authority.der())).unwrap();
    roots
}

pub(crate) fn certificate(der: &[u8]) -> CertificateDer<'static> {
    CertificateDer::from(der.to_vec())
}

pub(crate) fn key(of: &IssuedCertificate) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from(PrivatePkcs8KeyDer::from(of.key_der.clone()))
}

pub(crate) fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}
