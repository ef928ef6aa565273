//! Reads a TOML tree. Every node knows its key, so that an error names it, and resolves `env:NAME` and `file:PATH`.

use serde_json::Value as Json;
use toml::Value;

use super::{
    env::ValueResolver,
    error::{ConfigError, closest_match, quote_list},
    schema,
};

/// A longer list of keys is not shown.
const MAX_LISTED_KEYS: usize = 8;

pub(super) struct TomlNode<'a> {
    pub(super) value: &'a Value,
    /// The dotted path of its key; lists count from 1.
    pub(super) path: String,
    pub(super) lookup: &'a ValueResolver<'a>,
}

/// A value that is written as one word, number or boolean.
///
/// Every type can be parsed from text, also numbers and booleans, because `env:` and `file:` yield text.
pub(super) trait Scalar: Sized {
    const ALLOWED: &'static str;

    /// # Errors
    /// Returns the value found and the values allowed.
    fn from_text(text: &str) -> Result<Self, String>;

    /// Like [`from_text`](Self::from_text); `None` if the type has no number syntax.
    fn from_number(_: i64) -> Option<Result<Self, String>> {
        None
    }

    /// `None` if the type is not a boolean.
    fn from_bool(_: bool) -> Option<Self> {
        None
    }

    /// All texts that are allowed, if there are only a few. By default, those that `ALLOWED` consists of.
    fn choices() -> Vec<&'static str> {
        let words: Vec<&str> = Self::ALLOWED.split(' ').collect();
        let quoted: Option<Vec<&str>> = words.iter().map(|word| word.strip_prefix('"')?.strip_suffix('"')).collect();
        quoted.unwrap_or_default()
    }
}

/// A type that the file can contain: a scalar, a list or a table.
pub(super) trait FromToml: Sized {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError>;

    fn list_from_toml(node: &TomlNode<'_>) -> Result<Vec<Self>, ConfigError> {
        Ok(node.items("a list")?.iter().filter_map(TomlNode::read).collect())
    }

    /// The JSON schema of the type.
    fn schema() -> Json;
}

impl<T: Scalar> FromToml for T {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        let wrong_type = || node.wrong_type(T::ALLOWED);
        match node.value {
            Value::String(text) => node.parse_text(text, T::from_text),
            Value::Integer(number) => T::from_number(*number).ok_or_else(wrong_type)?.map_err(|what| node.error(what)),
            Value::Boolean(switch) => T::from_bool(*switch).ok_or_else(wrong_type),
            _ => Err(wrong_type()),
        }
    }

    /// A single value is a list of one.
    fn list_from_toml(node: &TomlNode<'_>) -> Result<Vec<Self>, ConfigError> {
        match node.value {
            Value::String(_) | Value::Integer(_) => Ok(vec![T::from_toml(node)?]),
            _ => {
                let items = node.items(&format!("a list, each {}", T::ALLOWED))?;
                Ok(items.iter().filter_map(TomlNode::read).collect())
            }
        }
    }

    fn schema() -> Json {
        schema::scalar::<T>()
    }
}

impl<T: FromToml> FromToml for Option<T> {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        T::from_toml(node).map(Some)
    }

    fn schema() -> Json {
        T::schema()
    }
}

impl<T: FromToml> FromToml for Vec<T> {
    fn from_toml(node: &TomlNode<'_>) -> Result<Self, ConfigError> {
        T::list_from_toml(node)
    }

    fn schema() -> Json {
        schema::list(T::schema())
    }
}

impl<'a> TomlNode<'a> {
    pub(super) fn members(&self, allowed: &str) -> Result<Vec<(&'a str, TomlNode<'a>)>, ConfigError> {
        let Value::Table(table) = self.value else { return Err(self.wrong_type(allowed)) };
        Ok(table.iter().map(|(key, value)| (key.as_str(), self.child(self.path_of(key), value))).collect())
    }

    pub(super) fn items(&self, allowed: &str) -> Result<Vec<TomlNode<'a>>, ConfigError> {
        let Value::Array(items) = self.value else { return Err(self.wrong_type(allowed)) };
        let item = |(at, value): (usize, &'a Value)| self.child(format!("{}[{}]", self.path, at + 1), value);
        Ok(items.iter().enumerate().map(item).collect())
    }

    pub(super) fn error(&self, what: impl Into<String>) -> ConfigError {
        match self.path.as_str() {
            "route" => ConfigError::at("route", "found no list of routes; write [[route]], with two brackets"),
            path => ConfigError::at(path, what),
        }
    }

    pub(super) fn wrong_type(&self, allowed: &str) -> ConfigError {
        let mut source = String::new();
        let (found, kind) = match self.value {
            Value::String(text) => match self.resolve(text) {
                Err(why) => return why,
                Ok(resolved) => {
                    source = self.source_note(resolved.as_deref());
                    (format!("{:?}", resolved.as_deref().unwrap_or(text)), "text")
                }
            },
            Value::Integer(number) => (number.to_string(), "a number"),
            Value::Float(number) => (number.to_string(), "a number"),
            Value::Boolean(switch) => (switch.to_string(), "a switch"),
            Value::Array(_) => ("a list".into(), "a list"),
            Value::Table(_) => ("a table".into(), "a table"),
            Value::Datetime(_) => ("a date".into(), "something else"),
        };
        let found = if may_be_secret(&self.path) { kind } else { &found };
        self.error(format!("found {found}; allowed is {allowed}{source}"))
    }

    /// Reads the node. An error is kept, and reading goes on.
    pub(super) fn read<T: FromToml>(&self) -> Option<T> {
        self.lookup.collect(T::from_toml(self))
    }

    /// Keeps the error of a table's member that does not exist. `self` is that member.
    pub(super) fn report_unknown_key(&self, key: &str, allowed: &[&'static str]) {
        let in_policy = self.path.starts_with("policy.");
        let allowed: Vec<&str> = allowed.iter().copied().filter(|word| !in_policy || *word != "match").collect();
        let elsewhere = || schema::tables_with_key(key).into_iter().next();
        let what = match closest_match(key, allowed.iter().copied()) {
            Some(close) => format!("unknown key, did you mean {close:?}?"),
            None => match elsewhere() {
                Some(table) if table.is_empty() => format!("unknown key here; {key:?} belongs to the top of the file"),
                Some(table) => format!("unknown key here; {key:?} belongs to [{table}]"),
                None if allowed.len() <= MAX_LISTED_KEYS => format!("unknown key; allowed are {}", quote_list(allowed)),
                None => "unknown key; docs/configuration.md lists all keys, and so does `ibid schema`".into(),
            },
        };
        self.lookup.collect(Err::<(), _>(ConfigError::at(&self.path, what)));
    }

    /// Parses the text of this node, or the text that it refers to.
    pub(super) fn parse_text<T>(
        &self, text: &str, parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, ConfigError> {
        let resolved = self.resolve(text)?;
        parse(resolved.as_deref().unwrap_or(text))
            .map_err(|what| self.error(what + &self.source_note(resolved.as_deref())))
    }

    fn child(&self, path: String, value: &'a Value) -> TomlNode<'a> {
        TomlNode { value, path, lookup: self.lookup }
    }

    fn path_of(&self, key: &str) -> String {
        let bare = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
        let key = if bare { key.to_owned() } else { format!("{key:?}") };
        if self.path.is_empty() { key } else { format!("{}.{key}", self.path) }
    }

    fn resolve(&self, text: &str) -> Result<Option<String>, ConfigError> {
        self.lookup.resolve(text).map_err(|what| self.error(what))
    }

    fn source_note(&self, resolved: Option<&str>) -> String {
        match (resolved, self.value.as_str()) {
            (Some(_), Some(text)) => format!(" (from {text:?})"),
            _ => String::new(),
        }
    }
}

/// Whether the value at this path may be a token, a private key or a secret, even by mistake.
fn may_be_secret(path: &str) -> bool {
    let (table, name) = (path.split(['.', '[']).next(), path.rsplit('.').next());
    matches!(table, Some("admin" | "tls")) && !matches!(name, Some("listen" | "role" | "user"))
        || table == Some("seal") && !matches!(name, Some("id" | "accept_plain" | "plain_addresses"))
        || matches!(path, "jwt" | "jwt.secret" | "jwt.pem" | "jwt.jwks" | "jwt.key" | "upstream_key")
        || matches!(
            path,
            "store" | "trace" | "trace.key" | "store.url" | "store.fallback" | "store.cache" | "trace.otlp"
        )
        || path.ends_with(".signature")
        || path.split(['.', '[']).any(|step| step == "secrets")
}

/// Declares tables of the file. Each setting has its type, the syntax that it is read `as` if that is another type, and
/// its default.
macro_rules! tables {
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:literal) => { $key };
    (@read $node:ident) => { $node.read() };
    (@read $node:ident $read:ty) => { $node.read::<$read>().map(Into::into) };
    (@schema $type:ty) => { <$type as $crate::config::toml_node::FromToml>::schema() };
    (@schema $type:ty, $read:ty) => { <$read as $crate::config::toml_node::FromToml>::schema() };
    ($($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[$doc:meta])* $member:vis $field:ident $(($key:literal))?: $type:ty $(as $read:ty)? $(= $default:expr)?,)*
    })*) => {$(
        $(#[$meta])*
        $vis struct $name {
            $($(#[$doc])* $member $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: tables!(@default $($default)?),)* }
            }
        }

        impl $crate::config::toml_node::FromToml for $name {
            fn from_toml(
                node: &$crate::config::toml_node::TomlNode<'_>,
            ) -> Result<Self, $crate::config::error::ConfigError> {
                let mut table = Self::default();
                for (key, node) in node.members("a table")? {
                    match key {
                        $(tables!(@key $field $($key)?) => {
                            if let Some(value) = tables!(@read node $($read)?) {
                                table.$field = value;
                            }
                        })*
                        _ => node.report_unknown_key(key, &[$(tables!(@key $field $($key)?)),*]),
                    }
                }
                Ok(table)
            }

            fn schema() -> serde_json::Value {
                $crate::config::schema::table(vec![
                    $((tables!(@key $field $($key)?), tables!(@schema $type $(, $read)?)),)*
                ])
            }
        }
    )*};
}
pub(super) use tables;
