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
mod schema;
mod secret;
mod settings;
mod source_text;
mod store;
mod toml_node;
mod validate;
mod values;
mod warnings;

pub use args::{AdminTlsArgs, ServeArgs};
pub(crate) use dials::is_webhook_preset;
pub use env::Env;
pub use error::ConfigError;
pub use reload_check::{forgotten_answers, shortened_memory};
pub use schema::file_schema;
pub use secret::{Collector, RedactedStoreUrl, Secret};
pub use settings::{
    AdminSettings, AdminToken, ApiListen, ApiSettings, AuditDestination, ClientIdentity, ClientTls, GatewaySettings,
    GrpcUnknown, JwtKeys, JwtSettings, LimitSettings, LogFormat, LogLevel, LogSettings, Pem, QuotaSettings, Role,
    TlsSettings, TokenSource, TraceSettings,
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
        let (table, syntax_errors) = source_text::parse_toml(text);
        // What the wrong lines would have set is unknown, so contradictions are not looked for.
        let is_complete = table.is_some() && syntax_errors.is_empty();
        let value = Value::Table(table.unwrap_or_default());
        let mut file = raw::RawFile::from_toml(&TomlNode { value: &value, path: String::new(), lookup: &lookup })
            .expect("the root is a table");
        args.apply_to(&mut file, &lookup);
        let mut errors = lookup.take_errors();
        // A wrong flag or variable is not in the file either.
        if is_complete && errors.iter().all(|error| error.origin.is_empty()) {
            let settings = validate::validate(file, path.clone(), &lookup);
            let mut found = lookup.take_errors();
            if errors.is_empty() && found.is_empty() {
                return Ok(settings);
            }
            found.retain(|error| !errors.iter().any(|earlier| error.may_follow_from(earlier)));
            errors.extend(found);
        }
        for error in &mut errors {
            error.position = path.as_ref().and_then(|_| source_text::find_key(text, &error.key));
            error.route = route_match(&error.key, &value);
        }
        errors.extend(syntax_errors);
        Err(ConfigError::join(errors).expect("an incomplete file has errors").in_file(path.as_deref()))
    }
}

/// Returns the `match` of the route that contains the key.
fn route_match(key: &str, file: &Value) -> Option<Box<str>> {
    let number: usize = key.strip_prefix("route[")?.split(']').next()?.parse().ok()?;
    Some(file.get("route")?.get(number - 1)?.get("match")?.as_str()?.into())
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

/// Reads one table of a file, and returns all of them as written. The others may name variables that only the gateway
/// has.
fn read_table<T: FromToml>(path: &Path, env: &Env<'_>, name: &str) -> Result<(Option<T>, Table), ConfigError> {
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    let lookup = env::ValueResolver::new(env, folder, None);
    let text = read_file(path)?;
    let (file, mut errors) = source_text::parse_toml(&text);
    let file = file.filter(|_| errors.is_empty()).unwrap_or_default();
    let node = file.get(name).map(|value| TomlNode { value, path: name.to_owned(), lookup: &lookup });
    let table = node.and_then(|node| node.read());
    errors.extend(lookup.take_errors().into_iter().map(|mut error| {
        error.position = source_text::find_key(&text, &error.key);
        error
    }));
    ConfigError::join(errors).map_or(Ok((table, file)), Err)
}
