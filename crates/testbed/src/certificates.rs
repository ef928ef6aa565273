//! Certificates and their authority, as files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;

pub struct CertificateAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

#[derive(Clone, Debug)]
pub struct IssuedCertificate {
    pub der: Vec<u8>,
    pub key_der: Vec<u8>,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl CertificateAuthority {
    /// Creates an authority that no system trusts.
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

    pub fn der(&self) -> Vec<u8> {
        self.issuer.der().to_vec()
    }

    /// Issues a certificate with this common name for `localhost` and 127.0.0.1, valid for servers and clients.
    /// Replaces the files of an earlier certificate with the same name.
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

/// Replaces a file atomically, as tools that renew certificates do.
pub fn replace(from: &Path, to: &Path) {
    let next = to.with_extension("next");
    fs::copy(from, &next).expect("copied");
    fs::rename(&next, to).expect("replaced");
}
