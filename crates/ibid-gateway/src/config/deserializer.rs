//! Deserializes a TOML tree into the structs of [`raw`](super::raw), and knows the key of every value.
//!
//! It resolves `env:NAME` and `file:PATH` at the value, so that an error names the key.

use std::{borrow::Cow, fmt};

use serde::de::{
    DeserializeSeed, Deserializer, Error as _, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor,
    value::StrDeserializer,
};
use toml::Value;

use super::{
    env::ValueResolver,
    error::{closest_match, quote_list},
};

/// A problem and the key that has it.
#[derive(Debug)]
pub(super) struct TreeError {
    /// Innermost first.
    path: Vec<PathStep>,
    kind: TreeErrorKind,
}

#[derive(Debug)]
enum PathStep {
    Key(String),
    /// Counts from 1.
    Index(usize),
}

#[derive(Debug)]
enum TreeErrorKind {
    Message(String),
    /// `found` is shown only if it cannot be a secret.
    WrongType {
        found: String,
        kind: &'static str,
        allowed: String,
    },
    UnknownKey {
        key: String,
        allowed: &'static [&'static str],
    },
}

pub(super) struct TomlNode<'a> {
    pub(super) value: &'a Value,
    pub(super) lookup: &'a ValueResolver<'a>,
}

impl TreeError {
    /// Returns the dotted path of the key, and the message.
    pub(super) fn into_key_and_message(self) -> (String, String) {
        let mut path = String::new();
        let mut steps = self.path;
        if let TreeErrorKind::UnknownKey { key, .. } = &self.kind {
            steps.insert(0, PathStep::Key(key.clone()));
        }
        for step in steps.iter().rev() {
            match step {
                PathStep::Key(key) => {
                    let dot = if path.is_empty() { "" } else { "." };
                    let bare =
                        !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
                    path.push_str(dot);
                    path.push_str(&if bare { Cow::Borrowed(key.as_str()) } else { format!("{key:?}").into() });
                }
                PathStep::Index(index) => path.push_str(&format!("[{index}]")),
            }
        }
        let table = match steps.last() {
            Some(PathStep::Key(table)) if steps.len() > 1 => table.as_str(),
            _ => "",
        };
        let what = match self.kind {
            TreeErrorKind::Message(_) | TreeErrorKind::WrongType { .. } if path == "route" => {
                "found no list of routes; write [[route]], with two brackets".into()
            }
            TreeErrorKind::Message(what) => what,
            TreeErrorKind::WrongType { kind, allowed, .. } if may_be_secret(&path) => {
                format!("found {kind}; allowed is {allowed}")
            }
            TreeErrorKind::WrongType { found, allowed, .. } => format!("found {found}; allowed is {allowed}"),
            TreeErrorKind::UnknownKey { key, allowed } => {
                let allowed = allowed.iter().copied().filter(|word| table != "policy" || *word != "match");
                match closest_match(&key, allowed.clone()) {
                    Some(close) => format!("unknown key, did you mean {close:?}? allowed are {}", quote_list(allowed)),
                    None => format!("unknown key; allowed are {}", quote_list(allowed)),
                }
            }
        };
        (path, what)
    }

    /// Returns the number of the route that contains the key, from 1.
    pub(super) fn route_number(&self) -> Option<usize> {
        match self.path[..] {
            [.., PathStep::Index(index), PathStep::Key(ref key)] if key == "route" => Some(index),
            _ => None,
        }
    }

    fn at_step(mut self, step: PathStep) -> Self {
        self.path.push(step);
        self
    }

    fn message(what: impl Into<String>) -> Self {
        Self { path: Vec::new(), kind: TreeErrorKind::Message(what.into()) }
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

impl serde::de::Error for TreeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::message(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let (found, kind) = match found {
            Unexpected::Str(text) => (format!("{text:?}"), "text"),
            Unexpected::Signed(number) => (number.to_string(), "a number"),
            Unexpected::Unsigned(number) => (number.to_string(), "a number"),
            Unexpected::Float(number) => (number.to_string(), "a number"),
            Unexpected::Bool(switch) => (switch.to_string(), "a switch"),
            Unexpected::Seq => ("a list".into(), "a list"),
            Unexpected::Map => ("a table".into(), "a table"),
            other => (other.to_string(), "something else"),
        };
        let expected = expected.to_string();
        let expected = match expected.as_str() {
            "a sequence" => "a list",
            other if other.starts_with("struct ") => "a table",
            other => other,
        };
        Self { path: Vec::new(), kind: TreeErrorKind::WrongType { found, kind, allowed: expected.into() } }
    }

    fn unknown_field(key: &str, allowed: &'static [&'static str]) -> Self {
        Self { path: Vec::new(), kind: TreeErrorKind::UnknownKey { key: key.into(), allowed } }
    }
}

impl fmt::Display for TreeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for TreeError {}

impl<'de> Deserializer<'de> for TomlNode<'_> {
    type Error = TreeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TreeError> {
        let Self { value, lookup } = self;
        match value {
            Value::String(text) => match lookup.resolve(text).map_err(TreeError::message)? {
                None => visitor.visit_str(text),
                Some(resolved) => visitor.visit_string::<TreeError>(resolved).map_err(|mut wrong| {
                    if let TreeErrorKind::Message(what) | TreeErrorKind::WrongType { allowed: what, .. } =
                        &mut wrong.kind
                    {
                        what.push_str(&format!(" (from {text:?})"));
                    }
                    wrong
                }),
            },
            Value::Integer(number) => visitor.visit_i64(*number),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::Boolean(switch) => visitor.visit_bool(*switch),
            Value::Datetime(_) => Err(TreeError::invalid_type(Unexpected::Other("a date"), &visitor)),
            Value::Array(values) => visitor.visit_seq(TomlSeqAccess { values: values.iter(), index: 0, lookup }),
            Value::Table(table) => visitor.visit_map(TomlMapAccess { members: table.iter(), next: None, lookup }),
        }
    }

    /// Always `Some`: absent keys are never visited.
    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TreeError> {
        visitor.visit_some(self)
    }

    /// Accepts only a table: a list of values would be a second syntax.
    fn deserialize_struct<V: Visitor<'de>>(
        self, _name: &'static str, _fields: &'static [&'static str], visitor: V,
    ) -> Result<V::Value, TreeError> {
        match self.value {
            Value::Array(_) => Err(TreeError::invalid_type(Unexpected::Seq, &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

struct TomlSeqAccess<'a> {
    values: std::slice::Iter<'a, Value>,
    index: usize,
    lookup: &'a ValueResolver<'a>,
}

impl<'de> SeqAccess<'de> for TomlSeqAccess<'_> {
    type Error = TreeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, TreeError> {
        let Some(value) = self.values.next() else { return Ok(None) };
        self.index += 1;
        let element = seed.deserialize(TomlNode { value, lookup: self.lookup });
        element.map(Some).map_err(|wrong| wrong.at_step(PathStep::Index(self.index)))
    }
}

struct TomlMapAccess<'a> {
    members: toml::map::Iter<'a, String, Value>,
    next: Option<(&'a str, &'a Value)>,
    lookup: &'a ValueResolver<'a>,
}

impl<'de> MapAccess<'de> for TomlMapAccess<'_> {
    type Error = TreeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, TreeError> {
        let Some((key, value)) = self.members.next() else { return Ok(None) };
        self.next = Some((key, value));
        let key: StrDeserializer<'_, TreeError> = key.as_str().into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, TreeError> {
        let (key, value) = self.next.take().expect("a key comes before its value");
        let member = seed.deserialize(TomlNode { value, lookup: self.lookup });
        member.map_err(|wrong| wrong.at_step(PathStep::Key(key.into())))
    }
}
