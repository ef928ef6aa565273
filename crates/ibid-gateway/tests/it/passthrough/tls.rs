//! TLS on either side, HTTP/1.1 or HTTP/2 as ALPN says.

use std::{
    convert::Infallible,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use bytes::Bytes;
use http::{Request, Response, Version};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use tempfile::TempDir;
use testbed::{client::post, process::GatewayProcess, upstream::TestUpstream};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::support::{BIN, assert_ran, assert_refused, assert_replay, policy, start_gateway, within};

/// A certificate for `localhost` that vouches for itself, in files as an operator has them.
struct SelfSignedCertificate {
    folder: TempDir,
    der: CertificateDer<'static>,
    key: Vec<u8>,
}

impl SelfSignedCertificate {
    fn new() -> SelfSignedCertificate {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("cert.pem"), made.cert.pem()).expect("written");
        std::fs::write(folder.path().join("key.pem"), made.signing_key.serialize_pem()).expect("written");
        SelfSignedCertificate { folder, der: made.cert.der().clone(), key: made.signing_key.serialize_der() }
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::join(self.folder.path(), name)
    }

    fn server(&self, alpn: &[&str]) -> TlsAcceptor {
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.clone()));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![self.der.clone()], key)
            .expect("the key fits");
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }

    fn client(&self, alpn: &[&str]) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).expect("a certificate");
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsConnector::from(Arc::new(config))
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Sends the same payment `times` times on one TLS connection; the protocol, and per answer its version, status, body
/// and whether it was a replay.
async fn pay_over_tls(
    addr: SocketAddr, tls: TlsConnector, times: usize,
) -> (Vec<u8>, Vec<(Version, u16, Bytes, bool)>) {
    let tcp = TcpStream::connect(addr).await.expect("the gateway listens");
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = within("the handshake", tls.connect(name, tcp)).await.expect("a TLS connection");
    let alpn = stream.get_ref().1.alpn_protocol().unwrap_or_default().to_vec();
    let io = TokioIo::new(stream);
    let request = |uri: &str| {
        let builder = Request::builder().method("POST").uri(uri).header("idempotency-key", "k-1");
        builder.header("content-type", "application/json").body(Full::new(Bytes::from_static(b"{}"))).expect("valid")
    };
    let mut answers = Vec::new();
    let answered = async |response: Response<Incoming>| {
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("a whole answer").to_bytes();
        (parts.version, parts.status.as_u16(), body, parts.headers.contains_key("idempotent-replayed"))
    };
    if alpn == b"h2" {
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.expect("HTTP/2");
        tokio::spawn(connection);
        for _ in 0..times {
            let response = within("an answer", sender.send_request(request("https://shop.example/pay"))).await;
            answers.push(answered(response.expect("an answer")).await);
        }
    } else {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.expect("HTTP/1.1");
        tokio::spawn(connection);
        for _ in 0..times {
            let mut request = request("/pay");
            request.headers_mut().insert("host", "shop.example".parse().expect("a value"));
            let response = within("an answer", sender.send_request(request)).await;
            answers.push(answered(response.expect("an answer")).await);
        }
    }
    (alpn, answers)
}

#[tokio::test]
async fn clients_connect_with_tls_and_choose_the_protocol() {
    let certificate = SelfSignedCertificate::new();
    let upstream = TestUpstream::start().await;
    let (cert, key) = (certificate.path("cert.pem"), certificate.path("key.pem"));
    let config = format!("[tls]\ncert = {cert:?}\nkey = {key:?}\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    assert!(gateway.logs().iter().any(|line| line.starts_with("ibid: listening on https://")), "{:?}", gateway.logs());
    let clients = [
        (&["h2", "http/1.1"][..], Version::HTTP_2),
        (&["http/1.1"], Version::HTTP_11),
        (&["h2"], Version::HTTP_2),
        (&[], Version::HTTP_11),
    ];
    for (before, (alpn, version)) in clients.into_iter().enumerate() {
        let (chosen, answers) = pay_over_tls(gateway.addr(), certificate.client(alpn), 2).await;
        let expected: &[u8] = match (alpn.is_empty(), version) {
            (true, _) => b"",
            (false, Version::HTTP_2) => b"h2",
            _ => b"http/1.1",
        };
        assert_eq!(chosen, expected, "{alpn:?}");
        for (n, (spoken, status, body, replayed)) in answers.iter().enumerate() {
            assert_eq!((*spoken, *status), (version, 201), "{alpn:?}");
            assert_eq!(body, r#"{"id":1,"run":1}"#, "one payment, whatever it came over");
            assert_eq!(*replayed, before + n > 0, "{alpn:?}");
        }
    }
    assert_eq!(upstream.executions(), 1);
    let seen = upstream.last();
    assert_eq!(seen.headers.get_all("x-forwarded-proto"), ["https"]);
    assert_eq!(seen.headers.get_all("host"), ["shop.example"]);
}

#[tokio::test]
async fn a_client_without_tls_gets_nothing_from_a_tls_listener() {
    let certificate = SelfSignedCertificate::new();
    let upstream = TestUpstream::start().await;
    let (cert, key) = (certificate.path("cert.pem"), certificate.path("key.pem"));
    let config = format!("[tls]\ncert = {cert:?}\nkey = {key:?}\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    let plain = post(gateway.addr(), "/pay").key("k-1").json("{}").try_send().await;
    assert!(plain.is_err(), "{plain:?}");
    assert_eq!(upstream.requests(), 0);
    let (_, answers) = pay_over_tls(gateway.addr(), certificate.client(&[]), 1).await;
    assert_eq!(answers[0].1, 201);
}

/// An app behind TLS. Counts what it runs, and answers with the version it was spoken to in.
async fn start_tls_app(tls: TlsAcceptor) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("it is bound");
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (tls, count) = (tls.clone(), count.clone());
            tokio::spawn(async move {
                let Ok(stream) = tls.accept(tcp).await else { return };
                let service = service_fn(move |request: Request<Incoming>| {
                    let count = count.clone();
                    async move {
                        let version = request.version();
                        let _ = request.into_body().collect().await;
                        count.fetch_add(1, SeqCst);
                        let mut answer = Response::new(Full::new(Bytes::from(format!("{version:?}"))));
                        *answer.status_mut() = http::StatusCode::CREATED;
                        Ok::<_, Infallible>(answer)
                    }
                });
                let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    (addr, runs)
}

#[tokio::test]
async fn an_upstream_behind_tls_is_checked_against_the_given_authority() {
    let certificate = SelfSignedCertificate::new();
    for (alpn, spoken) in [(&["h2", "http/1.1"][..], "HTTP/2.0"), (&["http/1.1"], "HTTP/1.1"), (&[], "HTTP/1.1")] {
        let (addr, runs) = start_tls_app(certificate.server(alpn)).await;
        let config = format!("upstream_ca = {:?}\n{}", certificate.path("cert.pem"), policy(""));
        let gateway = GatewayProcess::spawn(BIN, &config, &format!("https://localhost:{}", addr.port())).await;
        let request = post(gateway.addr(), "/pay").key("k-1").json("{}");
        let first = request.send().await;
        assert_ran(&first);
        assert_eq!(first.text(), spoken);
        assert_replay(&request.send().await, &first);
        let passed = testbed::client::get(gateway.addr(), "/list").send().await;
        assert_eq!((passed.status, passed.text().as_str()), (201, spoken), "{passed:?}");
        assert_eq!(runs.load(SeqCst), 2);
    }
}

#[tokio::test]
async fn an_upstream_with_a_strangers_certificate_gets_nothing() {
    let (trusted, strangers) = (SelfSignedCertificate::new(), SelfSignedCertificate::new());
    let (addr, runs) = start_tls_app(strangers.server(&["h2", "http/1.1"])).await;
    let config = format!("upstream_ca = {:?}\n{}", trusted.path("cert.pem"), policy(""));
    let gateway = GatewayProcess::spawn(BIN, &config, &format!("https://localhost:{}", addr.port())).await;
    let request = post(gateway.addr(), "/pay").key("k-1").json("{}");
    for _ in 0..2 {
        assert_refused(&request.send().await, 502, "upstream-unreachable");
    }
    assert_eq!(runs.load(SeqCst), 0);
}

#[tokio::test]
async fn an_upstream_without_tls_where_tls_is_expected_gets_no_request() {
    let certificate = SelfSignedCertificate::new();
    let upstream = TestUpstream::start().await;
    let config = format!("upstream_ca = {:?}\n{}", certificate.path("cert.pem"), policy(""));
    let gateway = GatewayProcess::spawn(BIN, &config, &format!("https://localhost:{}", upstream.addr().port())).await;
    let request = post(gateway.addr(), "/pay").key("k-1").json("{}");
    assert_refused(&request.send().await, 502, "upstream-unreachable");
    assert_eq!(upstream.executions(), 0);
}
