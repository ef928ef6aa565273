//! TLS to the database with rustls.
//!
//! The modes have libpq's meaning: `prefer` and `require` encrypt without verifying the certificate; `verify-ca`, or a
//! given root certificate, verifies the certificate chain; `verify-full` also verifies the host name.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::{TlsConnector, client};

use crate::certificates::{ReloadingTlsConfig, TlsMaterial, TlsPaths};

/// How much of the server's certificate is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsVerification {
    Nothing,
    /// The certificate chain.
    Chain,
    /// The certificate chain and the host name.
    Full,
}

#[derive(Debug, Clone)]
pub(super) struct PostgresTls {
    pub(super) verify: TlsVerification,
    pub(super) paths: TlsPaths,
}

impl PostgresTls {
    /// Reads the certificates, and reloads them when they change.
    pub(super) fn reloading_config(&self) -> Result<Arc<ReloadingTlsConfig>, String> {
        let verify = self.verify;
        ReloadingTlsConfig::open(super::error::STORE_NAME, self.paths.clone(), move |files| verify.config(files))
    }

    /// Reads the certificates for a single connection.
    pub(super) fn connector(&self) -> Result<PostgresTlsConnector, String> {
        self.verify.config(&self.paths.read()).map(|config| PostgresTlsConnector(Arc::new(config)))
    }
}

impl TlsVerification {
    fn config(self, files: &TlsMaterial) -> Result<ClientConfig, String> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("TLS cannot be set up: {error}"))?;
        let chain = match self {
            Self::Nothing => None,
            Self::Chain | Self::Full => {
                let roots = Arc::new(files.root_certificates("sslrootcert")?);
                let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).build();
                Some(verifier.map_err(|error| format!("TLS cannot be set up: {error}"))?)
            }
        };
        let algorithms = provider.signature_verification_algorithms;
        let verifier = PostgresCertVerifier { chain, verify: self, algorithms };
        let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        files.with_client_certificate(builder)
    }
}

#[derive(Debug)]
struct PostgresCertVerifier {
    chain: Option<Arc<WebPkiServerVerifier>>,
    verify: TlsVerification,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for PostgresCertVerifier {
    fn verify_server_cert(
        &self, end_entity: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>], name: &ServerName<'_>,
        ocsp: &[u8], now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            // The chain is verified before the name.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if self.verify == TlsVerification::Chain => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self, message: &[u8], certificate: &CertificateDer<'_>, signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self, message: &[u8], certificate: &CertificateDer<'_>, signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[derive(Debug, Clone)]
pub(super) struct PostgresTlsConnector(pub(super) Arc<ClientConfig>);

pub(super) struct HostTlsConnector(Arc<ClientConfig>, ServerName<'static>);

pub(super) struct EncryptedStream<S>(client::TlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for PostgresTlsConnector {
    type Stream = EncryptedStream<S>;
    type TlsConnect = HostTlsConnector;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<HostTlsConnector> {
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| io::Error::other("the host is neither a name nor an address, as TLS needs"))?;
        Ok(HostTlsConnector(self.0.clone(), name))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for HostTlsConnector {
    type Stream = EncryptedStream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<EncryptedStream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move { TlsConnector::from(self.0).connect(self.1, stream).await.map(EncryptedStream) })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for EncryptedStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for EncryptedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for EncryptedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
