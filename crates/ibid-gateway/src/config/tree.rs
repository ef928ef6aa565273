//! From a TOML tree to the structs of [`raw`](super::raw), knowing at every value which key it belongs to.
//!
//! `env:NAME` and `file:PATH` are resolved here, at the value that says so, so that an error names its key.

use std::{borrow::Cow, fmt};

use serde::de::{
    DeserializeSeed, Deserializer, Error as _, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor,
    value::StrDeserializer,
};
use toml::Value;

use super::{
    env::Lookup,
    error::{close, listed},
};

/// What is wrong, and at which key.
#[derive(Debug)]
pub(super) struct Wrong {
    /// Innermost first.
    steps: Vec<Step>,
    what: What,
}

#[derive(Debug)]
enum Step {
    Key(String),
    /// From 1.
    Index(usize),
}

#[derive(Debug)]
enum What {
    Said(String),
    /// Shown only where it cannot be a secret.
    Type {
        found: String,
        kind: &'static str,
        allowed: String,
    },
    Unknown {
        key: String,
        allowed: &'static [&'static str],
    },
}

/// A value on its way into a struct.
pub(super) struct Node<'a> {
    pub(super) value: &'a Value,
    pub(super) lookup: &'a Lookup<'a>,
}

impl Wrong {
    /// The dotted path of the key, and the sentence about it.
    pub(super) fn told(self) -> (String, String) {
        let mut path = String::new();
        let mut steps = self.steps;
        if let What::Unknown { key, .. } = &self.what {
            steps.insert(0, Step::Key(key.clone()));
        }
        for step in steps.iter().rev() {
            match step {
                Step::Key(key) => {
                    let dot = if path.is_empty() { "" } else { "." };
                    let bare =
                        !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
                    path.push_str(dot);
                    path.push_str(&if bare { Cow::Borrowed(key.as_str()) } else { format!("{key:?}").into() });
                }
                Step::Index(index) => path.push_str(&format!("[{index}]")),
            }
        }
        let table = match steps.last() {
            Some(Step::Key(table)) if steps.len() > 1 => table.as_str(),
            _ => "",
        };
        let what = match self.what {
            What::Said(_) | What::Type { .. } if path == "route" => {
                "found no list of routes; write [[route]], with two brackets".into()
            }
            What::Said(what) => what,
            What::Type { kind, allowed, .. } if may_be_secret(&path) => format!("found {kind}; allowed is {allowed}"),
            What::Type { found, allowed, .. } => format!("found {found}; allowed is {allowed}"),
            What::Unknown { key, allowed } => {
                let allowed = allowed.iter().copied().filter(|word| table != "policy" || *word != "match");
                match close(&key, allowed.clone()) {
                    Some(close) => format!("unknown key, did you mean {close:?}? allowed are {}", listed(allowed)),
                    None => format!("unknown key; allowed are {}", listed(allowed)),
                }
            }
        };
        (path, what)
    }

    /// The number of the route that the key is in, from 1.
    pub(super) fn route(&self) -> Option<usize> {
        match self.steps[..] {
            [.., Step::Index(index), Step::Key(ref key)] if key == "route" => Some(index),
            _ => None,
        }
    }

    fn under(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    fn said(what: impl Into<String>) -> Self {
        Self { steps: Vec::new(), what: What::Said(what.into()) }
    }
}

/// Whether a token, a private key or a secret may stand at this path, if only by a slip of the pen.
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

impl serde::de::Error for Wrong {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::said(message.to_string())
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
        Self { steps: Vec::new(), what: What::Type { found, kind, allowed: expected.into() } }
    }

    fn unknown_field(key: &str, allowed: &'static [&'static str]) -> Self {
        Self { steps: Vec::new(), what: What::Unknown { key: key.into(), allowed } }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.what)
    }
}

impl std::error::Error for Wrong {}

impl<'de> Deserializer<'de> for Node<'_> {
    type Error = Wrong;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        let Self { value, lookup } = self;
        match value {
            Value::String(text) => match lookup.resolve(text).map_err(Wrong::said)? {
                None => visitor.visit_str(text),
                Some(resolved) => visitor.visit_string::<Wrong>(resolved).map_err(|mut wrong| {
                    if let What::Said(what) | What::Type { allowed: what, .. } = &mut wrong.what {
                        what.push_str(&format!(" (from {text:?})"));
                    }
                    wrong
                }),
            },
            Value::Integer(number) => visitor.visit_i64(*number),
            Value::Float(number) => visitor.visit_f64(*number),
            Value::Boolean(switch) => visitor.visit_bool(*switch),
            Value::Datetime(_) => Err(Wrong::invalid_type(Unexpected::Other("a date"), &visitor)),
            Value::Array(values) => visitor.visit_seq(Nodes { values: values.iter(), at: 0, lookup }),
            Value::Table(table) => visitor.visit_map(Members { members: table.iter(), next: None, lookup }),
        }
    }

    /// What is there is there: absent keys are never visited.
    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_some(self)
    }

    /// Only from a table: a list of values would be a second way to write it.
    fn deserialize_struct<V: Visitor<'de>>(
        self, _name: &'static str, _fields: &'static [&'static str], visitor: V,
    ) -> Result<V::Value, Wrong> {
        match self.value {
            Value::Array(_) => Err(Wrong::invalid_type(Unexpected::Seq, &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

struct Nodes<'a> {
    values: std::slice::Iter<'a, Value>,
    at: usize,
    lookup: &'a Lookup<'a>,
}

impl<'de> SeqAccess<'de> for Nodes<'_> {
    type Error = Wrong;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Wrong> {
        let Some(value) = self.values.next() else { return Ok(None) };
        self.at += 1;
        let element = seed.deserialize(Node { value, lookup: self.lookup });
        element.map(Some).map_err(|wrong| wrong.under(Step::Index(self.at)))
    }
}

struct Members<'a> {
    members: toml::map::Iter<'a, String, Value>,
    next: Option<(&'a str, &'a Value)>,
    lookup: &'a Lookup<'a>,
}

impl<'de> MapAccess<'de> for Members<'_> {
    type Error = Wrong;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Wrong> {
        let Some((key, value)) = self.members.next() else { return Ok(None) };
        self.next = Some((key, value));
        let key: StrDeserializer<'_, Wrong> = key.as_str().into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Wrong> {
        let (key, value) = self.next.take().expect("a key comes before its value");
        let member = seed.deserialize(Node { value, lookup: self.lookup });
        member.map_err(|wrong| wrong.under(Step::Key(key.into())))
    }
}
