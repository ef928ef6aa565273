//! Turns a file, variables and flags into finished [`GatewaySettings`]. After start-up no setting can be invalid.
//!
//! The steps are `raw` (the file as written) → `args` (overrides by variables and flags) → `validate` (defaults,
//! contradictions) → [`GatewaySettings`]. Only this module reads the environment.
//!
//! ```
//! use ibid_gateway::config::{Env, GatewaySettings, ServeArgs};
//!
//! let args = ServeArgs { upstream: Some("http://127.0.0.1:3000".into()), ..ServeArgs::default() };
//! let settings = GatewaySettings::load(&args, &Env::from_pairs(&[("IBID_PRESET", "stripe")])).unwrap();
//! assert_eq!(settings.listen.to_string(), "127.0.0.1:8080");
//! assert_eq!(settings.routes.iter().next().unwrap().preset, "stripe");
//! ```

use std::path::{Path, PathBuf};

use bytes::Bytes;
use toml::{Table, Value};

use self::toml_node::{FromToml, TomlNode};

mod args;
pub(crate) mod dials;
mod env;
mod error;
pub(crate) mod raw;
mod reload_check;
mod secret;
mod settings;
mod store;
mod toml_node;
mod validate;
mod values;
mod warnings;

pub use args::{AdminTlsArgs, ServeArgs};
pub(crate) use dials::is_webhook_preset;
pub use env::Env;
pub use error::ConfigError;
pub use reload_check::{forgotten_answers, shortened_ttls};
pub use secret::{Collector, RedactedStoreUrl, Secret};
pub use settings::{
    AdminSettings, AdminToken, ClientIdentity, ClientTls, GatewaySettings, GrpcUnknown, JwtKeys, JwtSettings,
    LimitSettings, LogFormat, LogLevel, LogSettings, Pem, QuotaSettings, Role, TlsSettings, TokenSource, TraceSettings,
};
pub use store::{DEFAULT_STORE, SealSettings, StoreSelection, StoreSettings};

impl GatewaySettings {
    /// Reads the file, if one is named, applies variables and flags, and validates the result.
    pub fn load(args: &ServeArgs, env: &Env<'_>) -> Result<Self, ConfigError> {
        Self::load_with_reflection(args, env, None)
    }

    /// Like [`load`](Self::load), with the descriptor set that reflection returned.
    pub fn load_with_reflection(
        args: &ServeArgs, env: &Env<'_>, reflected: Option<Bytes>,
    ) -> Result<Self, ConfigError> {
        let path = args::config_path(args.config.as_ref(), env)?;
        let text = match &path {
            None => String::new(),
            Some(path) => read_file(path)?,
        };
        Self::parse_and_validate(&text, path, args, env, reflected)
    }

    /// Like [`load`](Self::load), with the text of the file.
    pub fn from_text(text: &str, path: Option<PathBuf>, args: &ServeArgs, env: &Env<'_>) -> Result<Self, ConfigError> {
        Self::parse_and_validate(text, path, args, env, None)
    }

    fn parse_and_validate(
        text: &str, path: Option<PathBuf>, args: &ServeArgs, env: &Env<'_>, reflected: Option<Bytes>,
    ) -> Result<Self, ConfigError> {
        let folder = path.as_deref().and_then(Path::parent).unwrap_or(Path::new("")).to_owned();
        let lookup = env::ValueResolver::new(env, folder, reflected);
        let in_file = |why: ConfigError| why.in_file(path.as_deref());
        let value = Value::Table(parse_toml(text).map_err(in_file)?);
        let mut file = read_raw_file(&value, &lookup).map_err(in_file)?;
        args.apply_to(&mut file, env)?;
        validate::validate(file, path.clone(), &lookup).map_err(in_file)
    }
}

/// Parses a duration in the syntax of the file. The error names the value found and the values allowed.
pub(crate) fn parse_duration(text: &str) -> Result<std::time::Duration, String> {
    toml_node::Scalar::from_text(text)
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|why| ConfigError {
        source: Some(std::io::Error::from(why.kind())),
        ..ConfigError::new(path.display().to_string(), "", format!("cannot be read: {why}"))
    })
}

fn read_raw_file(value: &Value, lookup: &env::ValueResolver<'_>) -> Result<raw::RawFile, ConfigError> {
    raw::RawFile::from_toml(&TomlNode { value, path: String::new(), lookup }).map_err(|why| {
        let number = why.key.strip_prefix("route[").and_then(|rest| rest.split(']').next()?.parse::<usize>().ok());
        let route = number.and_then(|number| value.get("route")?.get(number - 1)?.get("match")?.as_str());
        ConfigError { route: route.map(str::to_owned), ..why }
    })
}

/// Reads one table of a file, and returns all of them as written. The others may name variables that only the gateway
/// has.
fn read_table<T: FromToml>(path: &Path, env: &Env<'_>, name: &str) -> Result<(Option<T>, Table), ConfigError> {
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    let lookup = env::ValueResolver::new(env, folder, None);
    let file = parse_toml(&read_file(path)?)?;
    let node = file.get(name).map(|value| TomlNode { value, path: name.to_owned(), lookup: &lookup });
    Ok((node.map(|node| T::from_toml(&node)).transpose()?, file))
}

/// The error names the line and the column.
fn parse_toml(text: &str) -> Result<Table, ConfigError> {
    text.parse().map_err(|why: toml::de::Error| {
        let start = why.span().map_or(0, |span| span.start).min(text.len());
        let before = text.get(..start).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        ConfigError::at(format!("line {line}, column {column}"), why.message())
    })
}
