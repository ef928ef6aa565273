//! The flags of `serve` and their variables, which override the file.

use std::{fmt, path::PathBuf};

use super::{
    env::{Env, ValueResolver},
    error::ConfigError,
    raw,
    scalar::{Scalar, Single},
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
    /// The preset of the default policy: leads, appsportal, bookings, platform, membership, ietf or stripe; with off,
    /// only routes are covered [env: IBID_PRESET] [default: ietf]
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

    /// The path of the file, from the flag or the variable.
    pub(super) fn config_path(&self, env: &Env<'_>) -> Result<Option<PathBuf>, ConfigError> {
        if self.config.is_some() {
            return Ok(self.config.clone());
        }
        Ok(non_empty_variable(env, "IBID_CONFIG")?.map(PathBuf::from))
    }

    /// Overrides the file with flags and variables.
    pub(super) fn apply_to(&self, file: &mut raw::RawFile, env: &Env<'_>) -> Result<(), ConfigError> {
        override_value(&mut file.listen, &self.listen, "listen", env)?;
        override_value(&mut file.upstream, &self.upstream, "upstream", env)?;
        override_value(&mut file.store.url, &self.store, "store", env)?;
        override_value(&mut file.admin.listen, &self.admin, "admin", env)?;
        override_value(&mut file.log.format, &self.log_format, "log-format", env)?;
        override_value(&mut file.log.level, &self.log_level, "log-level", env)?;
        override_value(&mut file.journal, &self.journal, "journal", env)?;
        let mut preset = None;
        override_value(&mut preset, &self.preset, "preset", env)?;
        if preset.is_some() {
            file.policy.get_or_insert_default().preset = preset;
        }
        Ok(())
    }
}

/// `--log-level` overrides `IBID_LOG_LEVEL`, which overrides the value in the slot.
pub(super) fn override_value<T: Scalar>(
    slot: &mut Option<Single<T>>, flag: &Option<String>, name: &str, env: &Env<'_>,
) -> Result<(), ConfigError> {
    let name_of_variable = format!("IBID_{}", name.to_uppercase().replace('-', "_"));
    let (origin, text) = match flag {
        Some(text) => (format!("--{name}"), text.clone()),
        None => match non_empty_variable(env, &name_of_variable)? {
            Some(text) => (name_of_variable, text),
            None => return Ok(()),
        },
    };
    let lookup = ValueResolver::new(env, PathBuf::new(), None);
    let value = lookup.resolve(&text).and_then(|resolved| T::from_text(resolved.as_deref().unwrap_or(&text)));
    *slot = Some(Single(value.map_err(|what| ConfigError::new(origin, "", what))?));
    Ok(())
}

/// Returns the variable unless it is unset or empty. Containers often set unused variables to the empty string.
pub(super) fn non_empty_variable(env: &Env<'_>, name: &str) -> Result<Option<String>, ConfigError> {
    let value = env.variable(name).map_err(|what| ConfigError::new(name, "", what))?;
    Ok(value.filter(|value| !value.is_empty()))
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
