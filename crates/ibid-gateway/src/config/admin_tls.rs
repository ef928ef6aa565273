//! How the commands of operators reach an admin port that speaks TLS.

use std::path::PathBuf;

use super::{
    args::non_empty_variable,
    env::{Env, ValueResolver},
    error::ConfigError,
    scalar::Scalar,
    secret::Secret,
    settings::{ClientIdentity, Pem},
    validate,
};

/// Certificates towards an admin port, by flags and variables. All are files.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct AdminTlsArgs {
    /// Certificates that the admin port's own is checked against [env: IBID_ADMIN_CA]
    #[arg(long, value_name = "FILE")]
    pub admin_ca: Option<PathBuf>,
    /// The certificate to show to an admin port that asks for one [env: IBID_ADMIN_CERT]
    #[arg(long, value_name = "FILE")]
    pub admin_cert: Option<PathBuf>,
    /// Its private key [env: IBID_ADMIN_KEY]
    #[arg(long, value_name = "FILE")]
    pub admin_key: Option<PathBuf>,
}

/// The same, read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdminTls {
    /// Whom the admin port's certificate is checked against.
    pub ca: Option<Pem>,
    /// What is shown to it.
    pub shown: Option<ClientIdentity>,
}

impl AdminTlsArgs {
    /// Whether a flag says something. Variables do not count: they may be meant for another command.
    pub fn has_flags(&self) -> bool {
        self.admin_ca.is_some() || self.admin_cert.is_some() || self.admin_key.is_some()
    }

    /// Reads the files.
    ///
    /// # Errors
    /// One line about the one that cannot be used.
    pub fn load(&self, env: &Env<'_>) -> Result<AdminTls, ConfigError> {
        let ca = read_pem("admin-ca", self.admin_ca.as_ref(), env)?;
        let cert = read_pem("admin-cert", self.admin_cert.as_ref(), env)?;
        let key = read_pem("admin-key", self.admin_key.as_ref(), env)?;
        let shown = match (cert, key) {
            (Some(cert), Some(key)) => Some(ClientIdentity { cert, key }),
            (None, None) => None,
            (cert, _) => {
                let missing = if cert.is_none() { "--admin-cert" } else { "--admin-key" };
                return Err(ConfigError::new(missing, "", "missing; a certificate and its key belong together"));
            }
        };
        Ok(AdminTls { ca, shown })
    }
}

fn read_pem(name: &str, flag: Option<&PathBuf>, env: &Env<'_>) -> Result<Option<Pem>, ConfigError> {
    let (origin, path) = match flag {
        Some(path) => (format!("--{name}"), path.display().to_string()),
        None => {
            let origin = format!("IBID_{}", name.to_uppercase().replace('-', "_"));
            match non_empty_variable(env, &origin)? {
                Some(path) => (origin, path),
                None => return Ok(None),
            }
        }
    };
    let lookup = ValueResolver::new(env, PathBuf::new(), None);
    let pem = Secret::from_text(&path).and_then(|path| validate::load_pem(name, &path, &lookup));
    pem.map(Some).map_err(|what| ConfigError::new(origin, "", what))
}
