//! TLS: the listeners' certificates, the CAs for clients and other servers, and the gateway's client certificates.

use std::sync::Arc;

use ibid_stores::AnyNameVerifier;
use rustls::{
    ClientConfig, ConfigBuilder, RootCertStore, ServerConfig, WantsVerifier,
    client::WantsClientCert,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};

use crate::config::{ClientIdentity, ClientTls, Pem, TlsSettings};

/// Returns the TLS configuration of a listener that supports the protocols `spoken`, the preferred one first. `table`
/// names the configuration table, for errors.
pub fn server_config(table: &str, tls: &TlsSettings, spoken: &[&str]) -> Result<Arc<ServerConfig>, String> {
    let chain = parse_certificates(tls.cert.text()).map_err(|why| format!("{table}.cert: {why}"))?;
    let key = PrivateKeyDer::from_pem_slice(tls.key.text().as_bytes()).map_err(|why| format!("{table}.key: {why}"))?;
    let mut config = ServerConfig::builder_with_provider(crypto_provider())
        .with_safe_default_protocol_versions()
        .expect("the provider knows them")
        .with_client_cert_verifier(client_verifier(table, tls.client_ca.as_ref())?)
        .with_single_cert(chain, key)
        .map_err(|why| format!("{table}: {why}"))?;
    config.alpn_protocols = spoken.iter().map(|name| name.as_bytes().to_vec()).collect();
    Ok(Arc::new(config))
}

/// Accepts any client, or only clients with a certificate from one of these CAs.
fn client_verifier(table: &str, ca: Option<&Pem>) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let Some(ca) = ca else { return Ok(WebPkiClientVerifier::no_client_auth()) };
    let named = format!("{table}.client_ca");
    let roots = Arc::new(parse_roots(&named, ca.text())?);
    WebPkiClientVerifier::builder_with_provider(roots, crypto_provider())
        .build()
        .map_err(|why| format!("{named}: {why}"))
}

/// Returns the TLS configuration for connections to another server. `None` if the
/// defaults apply. `whose` is the prefix of the settings' names, for errors.
pub fn client_config(whose: &str, tls: &ClientTls) -> Result<Option<Arc<ClientConfig>>, String> {
    if *tls == ClientTls::default() {
        return Ok(None);
    }
    let roots = match &tls.ca {
        Some(ca) => parse_roots(&format!("{whose}ca"), ca.text())?,
        None => native_roots().map_err(|why| format!("no usable root certificates on this system: {why}"))?,
    };
    Ok(Some(Arc::new(with_identity(client_builder().with_root_certificates(roots), whose, tls)?)))
}

fn client_builder() -> ConfigBuilder<ClientConfig, WantsVerifier> {
    let builder = ClientConfig::builder_with_provider(crypto_provider());
    builder.with_safe_default_protocol_versions().expect("the provider knows them")
}

fn with_identity(
    config: ConfigBuilder<ClientConfig, WantsClientCert>, whose: &str, tls: &ClientTls,
) -> Result<ClientConfig, String> {
    let Some(ClientIdentity { cert, key }) = &tls.identity else { return Ok(config.with_no_client_auth()) };
    let chain = parse_certificates(cert.text()).map_err(|why| format!("{whose}cert: {why}"))?;
    let key = PrivateKeyDer::from_pem_slice(key.text().as_bytes()).map_err(|why| format!("{whose}key: {why}"))?;
    config.with_client_auth_cert(chain, key).map_err(|why| format!("{whose}cert: {why}"))
}

/// Returns the TLS configuration of `ibid health`. It connects to an IP address of its own machine, so it cannot check
/// the certificate's name. The certificate must be issued by one of these CAs, if any are given. The health check
/// exchanges no secrets.
pub fn health_client_config(whose: &str, tls: &ClientTls) -> Result<Arc<ClientConfig>, String> {
    let named = format!("{whose}ca");
    let roots = tls.ca.as_ref().map(|ca| parse_roots(&named, ca.text())).transpose()?;
    let verifier = AnyNameVerifier::new(roots).map_err(|why| format!("{named}: {why}"))?;
    let config = client_builder().dangerous().with_custom_certificate_verifier(verifier);
    Ok(Arc::new(with_identity(config, whose, tls)?))
}

/// Returns the TLS configuration of `ibid conform`: it trusts these certificates, those of the system, or all.
pub fn for_checks(ca: Option<&str>, insecure: bool) -> Result<Arc<ClientConfig>, String> {
    let mut config = if insecure {
        let anybody = AnyNameVerifier::new(None).expect("there are no certificates to build it from");
        client_builder().dangerous().with_custom_certificate_verifier(anybody).with_no_client_auth()
    } else {
        let roots = match ca {
            Some(pem) => parse_roots("--ca", pem)?,
            None => native_roots().unwrap_or_else(|_| RootCertStore::empty()),
        };
        client_builder().with_root_certificates(roots).with_no_client_auth()
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn parse_roots(key: &str, ca: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in parse_certificates(ca).map_err(|why| format!("{key}: {why}"))? {
        roots.add(certificate).map_err(|why| format!("{key}: {why}"))?;
    }
    Ok(roots)
}

pub(crate) fn native_roots() -> Result<RootCertStore, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    match roots.add_parsable_certificates(found.certs) {
        (0, _) => Err(found.errors.first().map_or_else(|| "none installed".to_owned(), ToString::to_string)),
        _ => Ok(roots),
    }
}

fn parse_certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match all {
        Ok(all) if all.is_empty() => Err("there is no certificate in it".into()),
        Ok(all) => Ok(all),
        Err(why) => Err(why.to_string()),
    }
}

fn crypto_provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}
