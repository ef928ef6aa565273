//! TLS to the database with rustls.
//!
//! The modes have libpq's meaning: `prefer` and `require` encrypt without verifying the certificate; `verify-ca`, or a
//! given root certificate, verifies the certificate chain; `verify-full` also verifies the host name.

use std::sync::Arc;

use rustls::{ClientConfig, crypto::aws_lc_rs};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::certificates::{AnyNameVerifier, ReloadingTlsConfig, TlsMaterial, TlsPaths};

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
    pub(super) fn connector(&self) -> Result<MakeRustlsConnect, String> {
        self.verify.config(&self.paths.read()).map(MakeRustlsConnect::new)
    }
}

impl TlsVerification {
    fn config(self, files: &TlsMaterial) -> Result<ClientConfig, String> {
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("TLS cannot be set up: {error}"))?;
        let roots = || files.root_certificates("sslrootcert");
        let issuers = match self {
            Self::Nothing => None,
            Self::Chain => Some(roots()?),
            Self::Full => return files.with_client_certificate(builder.with_root_certificates(roots()?)),
        };
        let verifier = AnyNameVerifier::new(issuers).map_err(|error| format!("TLS cannot be set up: {error}"))?;
        files.with_client_certificate(builder.dangerous().with_custom_certificate_verifier(verifier))
    }
}

/// Reads the current certificates for a new connection.
pub(super) async fn connector(certificates: &ReloadingTlsConfig) -> MakeRustlsConnect {
    MakeRustlsConnect::new(ClientConfig::clone(&*certificates.now().await))
}
