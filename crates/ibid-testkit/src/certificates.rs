//! Certificates and who vouches for them, in files as an operator has them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;

/// Somebody who vouches for others.
pub struct CertificateAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct IssuedCertificate {
    /// The certificate.
    pub der: Vec<u8>,
    /// Its private key, as PKCS #8.
    pub key_der: Vec<u8>,
    /// The certificate's file.
    pub cert: PathBuf,
    /// The key's file.
    pub key: PathBuf,
}

impl CertificateAuthority {
    /// One of its own, whom nobody else knows.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> CertificateAuthority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("a certificate");
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("ca.pem"), issuer.pem()).expect("written");
        CertificateAuthority { issuer, folder }
    }

    /// The file of its own certificate.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Its own certificate.
    pub fn der(&self) -> Vec<u8> {
        self.issuer.der().to_vec()
    }

    /// A certificate of this common name, for `localhost` and 127.0.0.1, good for a server and for a client. Another one of the
    /// same name takes the place of its files.
    pub fn vouch(&self, name: &str) -> IssuedCertificate {
        let mut params = CertificateParams::new(["localhost", "127.0.0.1"].map(String::from)).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        let path = |end: &str| self.folder.path().join(format!("{name}.{end}"));
        let (cert_path, key_path) = (path("crt"), path("key"));
        fs::write(&cert_path, cert.pem()).expect("written");
        fs::write(&key_path, key.serialize_pem()).expect("written");
        IssuedCertificate { der: cert.der().to_vec(), key_der: key.serialize_der(), cert: cert_path, key: key_path }
    }
}

/// Puts a file in the place of another in one step, as tools that renew certificates do.
///
/// # Panics
/// If it cannot.
pub fn replace(from: &Path, to: &Path) {
    let next = to.with_extension("next");
    fs::copy(from, &next).expect("copied");
    fs::rename(&next, to).expect("replaced");
}
