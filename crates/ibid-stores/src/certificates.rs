//! Reloads the TLS certificates named in a store's URL when their files change, without a restart.
//!
//! Invariant: the configuration in use is built from files that were read together and match. If they do not match (one
//! of a pair is replaced before the other), the change is rejected, logged once, and the previous configuration stays.
//! Open connections are not affected.

use std::{
    fmt, io,
    path::PathBuf,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use rustls::{
    CertificateError, ClientConfig, ConfigBuilder, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        VerifierBuilderError, WantsClientCert, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
};
use sha2::{Digest, Sha256};

/// Interval at which the files are checked between connections, so that a change is logged soon after it is made.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TlsPaths {
    /// CA certificates that verify the server. `None` uses the system's root certificates.
    pub(crate) ca: Option<PathBuf>,
    pub(crate) client_cert: Option<(PathBuf, PathBuf)>,
}

/// Contents of the files, or the error of reading them.
pub(crate) struct TlsMaterial {
    ca: Option<TlsFile>,
    cert: Option<TlsFile>,
    key: Option<TlsFile>,
}

struct TlsFile {
    path: PathBuf,
    contents: io::Result<Vec<u8>>,
}

type BuildTlsConfig = dyn Fn(&TlsMaterial) -> Result<ClientConfig, String> + Send + Sync;

pub(crate) struct ReloadingTlsConfig {
    /// Name of the store in log messages.
    store: &'static str,
    paths: TlsPaths,
    build_config: Box<BuildTlsConfig>,
    state: Mutex<LoadedTlsConfig>,
}

struct LoadedTlsConfig {
    /// Hash of the files as last read, whether usable or not.
    content_hash: [u8; 32],
    config: Arc<ClientConfig>,
}

impl ReloadingTlsConfig {
    /// Reads the files, and checks them for changes for as long as the returned value lives.
    ///
    /// # Errors
    /// Returns the reason if they cannot be used.
    pub(crate) fn open(
        store: &'static str, files: TlsPaths,
        make: impl Fn(&TlsMaterial) -> Result<ClientConfig, String> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, String> {
        let contents = files.read();
        let state = Mutex::new(LoadedTlsConfig { content_hash: contents.hash(), config: Arc::new(make(&contents)?) });
        let this = Arc::new(Self { store, paths: files, build_config: Box::new(make), state });
        if !this.paths.is_empty() {
            tokio::spawn(poll_for_changes(Arc::downgrade(&this)));
        }
        Ok(this)
    }

    /// Returns the configuration for a new connection.
    pub(crate) async fn now(&self) -> Arc<ClientConfig> {
        if !self.paths.is_empty() {
            let files = self.paths.clone();
            // `spawn_blocking` fails only at runtime shutdown.
            if let Ok(contents) = tokio::task::spawn_blocking(move || files.read()).await {
                self.apply_changes(&contents);
            }
        }
        self.state.lock().config.clone()
    }

    fn apply_changes(&self, contents: &TlsMaterial) {
        let hash = contents.hash();
        let mut state = self.state.lock();
        if state.content_hash == hash {
            return;
        }
        state.content_hash = hash;
        match (self.build_config)(contents) {
            Ok(config) => {
                state.config = Arc::new(config);
                tracing::info!(store = self.store, "changed certificates are taken up: new connections use them");
            }
            Err(why) => tracing::error!(
                store = self.store,
                %why,
                "changed certificates cannot be used; new connections use those from before"
            ),
        }
    }
}

async fn poll_for_changes(certificates: Weak<ReloadingTlsConfig>) {
    loop {
        tokio::time::sleep(RELOAD_INTERVAL).await;
        let Some(certificates) = certificates.upgrade() else { return };
        certificates.now().await;
    }
}

impl TlsPaths {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn read(&self) -> TlsMaterial {
        let read = |path: &PathBuf| TlsFile { path: path.clone(), contents: std::fs::read(path) };
        TlsMaterial {
            ca: self.ca.as_ref().map(read),
            cert: self.client_cert.as_ref().map(|(cert, _)| read(cert)),
            key: self.client_cert.as_ref().map(|(_, key)| read(key)),
        }
    }
}

impl TlsMaterial {
    /// Returns the certificates that verify the server: those in the file, or those of the system. `option` names the
    /// file in the URL.
    pub(crate) fn root_certificates(&self, option: &str) -> Result<RootCertStore, String> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(ca) => {
                for certificate in ca.certificates()? {
                    roots.add(certificate).map_err(|error| ca.unusable(error))?;
                }
            }
            None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
        }
        if roots.is_empty() {
            return Err(format!("there is no certificate authority to trust; name a file with {option}=FILE"));
        }
        Ok(roots)
    }

    /// Adds the client certificate, if there is one.
    pub(crate) fn with_client_certificate(
        &self, config: ConfigBuilder<ClientConfig, WantsClientCert>,
    ) -> Result<ClientConfig, String> {
        let (Some(cert), Some(key)) = (&self.cert, &self.key) else { return Ok(config.with_no_client_auth()) };
        let secret = PrivateKeyDer::from_pem_slice(key.bytes()?).map_err(|error| key.unusable(error))?;
        config.with_client_auth_cert(cert.certificates()?, secret).map_err(|error| cert.unusable(error))
    }

    /// Identifies the contents without keeping a copy of the private key.
    fn hash(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for content in [&self.ca, &self.cert, &self.key].into_iter().flatten() {
            match &content.contents {
                Ok(bytes) => {
                    hash.update((bytes.len() as u64).to_le_bytes());
                    hash.update(bytes);
                }
                Err(why) => {
                    hash.update(u64::MAX.to_le_bytes());
                    hash.update(why.to_string());
                }
            }
        }
        hash.finalize().into()
    }
}

/// Accepts certificates for any name and, without CAs, every certificate. Still verifies the handshake.
#[derive(Debug)]
pub struct AnyNameVerifier {
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl AnyNameVerifier {
    /// Creates a verifier that accepts only certificates from these CAs, if any are given.
    pub fn new(roots: Option<RootCertStore>) -> Result<Arc<Self>, VerifierBuilderError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = |roots| WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
        Ok(Arc::new(Self { chain: roots.map(verifier).transpose()?, provider }))
    }
}

impl ServerCertVerifier for AnyNameVerifier {
    fn verify_server_cert(
        &self, shown: &CertificateDer<'_>, between: &[CertificateDer<'_>], name: &ServerName<'_>, ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(shown, between, name, ocsp, now) {
            // The verifier checks the issuer before the name.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self, message: &[u8], certificate: &CertificateDer<'_>, signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self, message: &[u8], certificate: &CertificateDer<'_>, signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl TlsFile {
    fn bytes(&self) -> Result<&[u8], String> {
        self.contents.as_deref().map_err(|error| self.unusable(error))
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, String> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(self.bytes()?).collect();
        match found.map_err(|error| self.unusable(error))? {
            none if none.is_empty() => Err(self.unusable("it holds no certificate in PEM form")),
            some => Ok(some),
        }
    }

    fn unusable(&self, error: impl fmt::Display) -> String {
        format!("{} cannot be used: {error}", self.path.display())
    }
}
