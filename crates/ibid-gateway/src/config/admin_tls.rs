//! TLS towards the admin port, for the operators' commands.

use std::path::PathBuf;

use super::{
    args::flag_or_variable,
    env::{Env, ValueResolver},
    error::ConfigError,
    secret::Secret,
    settings::{ClientIdentity, ClientTls, Pem},
    toml_node::Scalar,
};

/// Certificates for connections to an admin port. Flags and variables name files.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct AdminTlsArgs {
    /// CA certificates to verify the admin port's certificate [env: IBID_ADMIN_CA]
    #[arg(long, value_name = "FILE")]
    pub admin_ca: Option<PathBuf>,
    /// The client certificate, for an admin port that requires one [env: IBID_ADMIN_CERT]
    #[arg(long, value_name = "FILE")]
    pub admin_cert: Option<PathBuf>,
    /// The private key of the client certificate [env: IBID_ADMIN_KEY]
    #[arg(long, value_name = "FILE")]
    pub admin_key: Option<PathBuf>,
}

impl AdminTlsArgs {
    /// Whether a flag is set. Variables do not count: they may be meant for another command.
    pub fn has_flags(&self) -> bool {
        self.admin_ca.is_some() || self.admin_cert.is_some() || self.admin_key.is_some()
    }

    pub fn load(&self, env: &Env<'_>) -> Result<ClientTls, ConfigError> {
        let ca = read_pem("admin-ca", self.admin_ca.as_ref(), env)?;
        let cert = read_pem("admin-cert", self.admin_cert.as_ref(), env)?;
        let key = read_pem("admin-key", self.admin_key.as_ref(), env)?;
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some(ClientIdentity { cert, key }),
            (None, None) => None,
            (cert, _) => {
                let missing = if cert.is_none() { "--admin-cert" } else { "--admin-key" };
                return Err(ConfigError::new(missing, "", "missing; a certificate and its key belong together"));
            }
        };
        Ok(ClientTls { ca, identity })
    }
}

fn read_pem(name: &str, flag: Option<&PathBuf>, env: &Env<'_>) -> Result<Option<Pem>, ConfigError> {
    let flag = flag.map(|path| path.display().to_string());
    let Some((origin, path)) = flag_or_variable(flag, name, env)? else { return Ok(None) };
    let lookup = ValueResolver::new(env, PathBuf::new(), None);
    let pem = Secret::from_text(&path).and_then(|path| Pem::load(name, path, &lookup));
    pem.map(Some).map_err(|what| ConfigError::new(origin, "", what))
}
