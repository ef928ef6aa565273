//! Certificates: the listener's own, and those that upstreams are checked against.

use std::sync::Arc;

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

use crate::config::{Pem, Tls};

/// How the listener speaks TLS: HTTP/2 where the client can, else HTTP/1.1.
///
/// # Errors
/// What is wrong with the certificate or its key.
pub fn for_listener(tls: &Tls) -> Result<Arc<ServerConfig>, String> {
    let chain = certificates(&tls.cert).map_err(|why| format!("tls.cert: {why}"))?;
    let key = PrivateKeyDer::from_pem_slice(tls.key.text().as_bytes()).map_err(|why| format!("tls.key: {why}"))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("the provider knows them")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|why| format!("tls: {why}"))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// How upstreams are checked; `None` trusts what the system trusts.
///
/// # Errors
/// What is wrong with the certificates.
pub fn towards_upstream(ca: Option<&Pem>) -> Result<Option<Arc<ClientConfig>>, String> {
    let Some(ca) = ca else { return Ok(None) };
    let mut roots = RootCertStore::empty();
    for certificate in certificates(ca).map_err(|why| format!("upstream_ca: {why}"))? {
        roots.add(certificate).map_err(|why| format!("upstream_ca: {why}"))?;
    }
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("the provider knows them")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Some(Arc::new(config)))
}

fn certificates(pem: &Pem) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.text().as_bytes()).collect();
    match all {
        Ok(all) if all.is_empty() => Err("there is no certificate in it".into()),
        Ok(all) => Ok(all),
        Err(why) => Err(why.to_string()),
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}
