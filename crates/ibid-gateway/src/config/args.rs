//! The flags of `serve` and their variables, which override the file, and those of the operators' commands for TLS
//! towards an admin port.

use std::{fmt, net::SocketAddr, path::PathBuf};

use super::{
    env::{Env, ValueResolver},
    error::ConfigError,
    raw,
    secret::{RedactedStoreUrl, Secret, UpstreamUrl},
    settings::{ClientIdentity, ClientTls, LogFormat, LogLevel, Pem},
    toml_node::Scalar,
    values::{Listen, Preset},
};

/// `ibid serve`. Flags override variables, variables the file, and the file the defaults.
#[derive(Clone, Default, clap::Args)]
pub struct ServeArgs {
    /// The configuration file; without one, flags and defaults apply [env: IBID_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where clients connect [env: IBID_LISTEN] [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// The app, such as http://127.0.0.1:3000 [env: IBID_UPSTREAM]
    #[arg(long, value_name = "URL")]
    pub upstream: Option<String>,
    /// Where records are stored: embedded:PATH, redis://HOST, postgres://HOST/DB or memory: [env: IBID_STORE] [default:
    /// embedded:ibid-data]
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// The preset of the default policy: leads, appsportal, bookings, platform, membership, ietf, stripe, acp, ucp or
    /// iceberg; with off, only routes are covered [env: IBID_PRESET] [default: ietf]
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Where operators connect, or off [env: IBID_ADMIN] [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    pub admin: Option<String>,
    /// The format of logs, text or json [env: IBID_LOG_FORMAT] [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// The least severe level to log: error, warn, info, debug or trace [env: IBID_LOG_LEVEL] [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// The directory of the local journal, or off [env: IBID_JOURNAL] [default: ibid-journal, off with memory:]
    #[arg(long, value_name = "DIRECTORY")]
    pub journal: Option<String>,
}

/// Omits the store, whose URL may contain a password.
impl fmt::Debug for ServeArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let store = self.store.as_ref().map(|_| "****");
        f.debug_struct("ServeArgs").field("config", &self.config).field("store", &store).finish_non_exhaustive()
    }
}

impl ServeArgs {
    /// Reads only a file, as `ibid check` does.
    pub fn for_file(file: impl Into<PathBuf>) -> Self {
        Self { config: Some(file.into()), ..Self::default() }
    }

    pub(super) fn apply_to(&self, file: &mut raw::RawFile, lookup: &ValueResolver<'_>) {
        /// Each line is a setting, its value from the flag or variable, and its syntax.
        macro_rules! override_with {
            ($($($setting:ident).+ = $flag:ident, $name:literal as $type:ty;)+) => {$(
                if let Some(Some(value)) = lookup.collect(read_override::<$type>(&self.$flag, $name, lookup.env)) {
                    file.$($setting).+ = value.into();
                }
            )+};
        }
        override_with! {
            listen = listen, "listen" as SocketAddr;
            upstream = upstream, "upstream" as UpstreamUrl;
            store.url = store, "store" as RedactedStoreUrl;
            admin.listen = admin, "admin" as Listen;
            log.format = log_format, "log-format" as LogFormat;
            log.level = log_level, "log-level" as LogLevel;
            journal = journal, "journal" as String;
        }
        if let Some(Some(Preset(preset))) = lookup.collect(read_override(&self.preset, "preset", lookup.env)) {
            file.policy.get_or_insert_default().preset = Some(preset);
        }
    }
}

/// Returns the value of a flag, or of its variable: `--log-level` takes precedence over `IBID_LOG_LEVEL`.
pub(super) fn read_override<T: Scalar>(
    flag: &Option<String>, name: &str, env: &Env<'_>,
) -> Result<Option<T>, ConfigError> {
    let Some((origin, text)) = flag_or_variable(flag.clone(), name, env)? else { return Ok(None) };
    let lookup = ValueResolver::new(env, PathBuf::new(), None);
    let value = lookup.resolve(&text).and_then(|resolved| T::from_text(resolved.as_deref().unwrap_or(&text)));
    value.map(Some).map_err(|what| ConfigError::new(origin, "", what))
}

/// Returns the text of a flag, or of its variable, and the name of the one that has it.
pub(super) fn flag_or_variable(
    flag: Option<String>, name: &str, env: &Env<'_>,
) -> Result<Option<(String, String)>, ConfigError> {
    if let Some(text) = flag {
        return Ok(Some((format!("--{name}"), text)));
    }
    let variable = format!("IBID_{}", name.to_uppercase().replace('-', "_"));
    Ok(env.non_empty(&variable)?.map(|text| (variable, text)))
}

pub(super) fn config_path(flag: Option<&PathBuf>, env: &Env<'_>) -> Result<Option<PathBuf>, ConfigError> {
    match flag {
        Some(path) => Ok(Some(path.clone())),
        None => Ok(env.non_empty("IBID_CONFIG")?.map(PathBuf::from)),
    }
}

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

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;

    #[test]
    fn every_flag_names_its_variable_in_the_help() {
        let command = ServeArgs::augment_args(clap::Command::new("serve"));
        command.clone().debug_assert();
        for flag in command.get_arguments() {
            let name = flag.get_long().expect("only long flags");
            let variable = format!("[env: IBID_{}]", name.to_uppercase().replace('-', "_"));
            assert!(flag.get_help().expect(name).to_string().contains(&variable), "{name}");
        }
    }
}
