//! The only place that reads the environment, and the files that values refer to.

use std::{cell::RefCell, collections::BTreeSet, ffi::OsString, fmt, path::PathBuf};

use bytes::Bytes;

use super::error::ConfigError;

/// The source of environment variables: the process, or a test.
pub struct Env<'a>(Box<VariableReader<'a>>);

type VariableReader<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

/// Resolves `env:NAME` and `file:PATH` for one file.
#[derive(Debug)]
pub(super) struct ValueResolver<'a> {
    pub(super) env: &'a Env<'a>,
    /// The base of relative paths.
    pub(super) folder: PathBuf,
    /// The descriptor set from reflection, if the upstreams were queried.
    pub(super) reflected: Option<Bytes>,
    read_paths: RefCell<BTreeSet<PathBuf>>,
    /// What is wrong with the file so far. Reading goes on, so that its writer sees all errors at once.
    errors: RefCell<Vec<ConfigError>>,
}

impl<'a> Env<'a> {
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    pub fn process() -> Self {
        Self(Box::new(|name| std::env::var_os(name)))
    }

    pub fn from_pairs(variables: &'a [(&'a str, &'a str)]) -> Self {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Self(Box::new(move |name| find(name).map(|(_, value)| OsString::from(value))))
    }

    /// Returns the variable unless it is unset or empty. Containers often set unused variables to the empty string.
    pub(super) fn non_empty(&self, name: &str) -> Result<Option<String>, ConfigError> {
        let value = self.variable(name).map_err(|what| ConfigError::new(name, "", what))?;
        Ok(value.filter(|value| !value.is_empty()))
    }

    /// Returns the variable's value.
    ///
    /// # Errors
    /// Returns an error, without the value, if it is not UTF-8.
    pub(super) fn variable(&self, name: &str) -> Result<Option<String>, String> {
        let value = (self.0)(name).map(OsString::into_string).transpose();
        value.map_err(|_| format!("the environment variable {name} is not UTF-8"))
    }
}

impl fmt::Debug for Env<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Env(****)")
    }
}

impl<'a> ValueResolver<'a> {
    pub(super) fn new(env: &'a Env<'a>, folder: PathBuf, reflected: Option<Bytes>) -> Self {
        Self { env, folder, reflected, read_paths: RefCell::default(), errors: RefCell::default() }
    }

    /// Returns the value, or keeps the error for [`take_errors`](Self::take_errors).
    pub(super) fn collect<T>(&self, result: Result<T, ConfigError>) -> Option<T> {
        result.map_err(|why| self.errors.borrow_mut().push(why)).ok()
    }

    pub(super) fn take_errors(&self) -> Vec<ConfigError> {
        self.errors.take()
    }

    /// Resolves a text of the form `env:NAME` or `file:PATH`. Removes line breaks at the end.
    pub(super) fn resolve(&self, text: &str) -> Result<Option<String>, String> {
        let mut value = if let Some(name) = text.strip_prefix("env:") {
            match self.env.variable(name)? {
                Some(value) => value,
                None => return Err(format!("{text:?}: the environment variable {name} is not set")),
            }
        } else if let Some(path) = text.strip_prefix("file:") {
            self.read(path).map_err(|why| format!("{text:?}: cannot read it: {why}"))?
        } else {
            return Ok(None);
        };
        value.truncate(value.trim_end_matches(['\r', '\n']).len());
        Ok(Some(value))
    }

    /// Reads a text file. The path is relative to the configuration's directory.
    pub(super) fn read(&self, path: &str) -> std::io::Result<String> {
        std::fs::read_to_string(self.record_path(path))
    }

    /// Like [`read`](Self::read), for binary files.
    pub(super) fn read_bytes(&self, path: &str) -> std::io::Result<Vec<u8>> {
        std::fs::read(self.record_path(path))
    }

    pub(super) fn read_paths(&self) -> Vec<PathBuf> {
        self.read_paths.borrow().iter().cloned().collect()
    }

    fn record_path(&self, path: &str) -> PathBuf {
        let path = self.folder.join(path);
        self.read_paths.borrow_mut().insert(path.clone());
        path
    }
}
