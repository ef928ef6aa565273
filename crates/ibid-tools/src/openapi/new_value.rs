//! New values and how they are written.

use super::document::{DocumentNode, NodeKind};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NewValue {
    Text(String),
    /// A number or a boolean.
    Literal(String),
    List(Vec<NewValue>),
    Map(Vec<(String, NewValue)>),
}

/// `object! { "type" => "string", "minLength" => 1u64 }`.
macro_rules! object {
    ($($name:expr => $value:expr),* $(,)?) => {
        $crate::openapi::new_value::NewValue::Map(vec![$(($name.into(), $value.into())),*])
    };
}
pub(super) use object;

/// `{$ref: …}`.
pub(super) fn new_reference(to: impl Into<String>) -> NewValue {
    object! { "$ref" => to.into() }
}

macro_rules! from_values {
    ($($type:ty => $value:expr;)+) => {$(
        impl From<$type> for NewValue {
            fn from(value: $type) -> Self {
                $value(value)
            }
        }
    )+};
}

from_values! {
    &str => |text: &str| Self::Text(text.to_owned());
    String => Self::Text;
    u64 => |number: u64| Self::Literal(number.to_string());
    bool => |value: bool| Self::Literal(value.to_string());
    Vec<NewValue> => Self::List;
}

impl NewValue {
    pub(super) fn matches_node(&self, node: &DocumentNode) -> bool {
        match (self, &node.kind) {
            (Self::Text(text) | Self::Literal(text), NodeKind::Scalar { text: found, .. }) => text == found,
            (Self::List(made), NodeKind::Sequence(items)) => {
                made.len() == items.len() && made.iter().zip(items).all(|(made, item)| made.matches_node(item))
            }
            (Self::Map(made), NodeKind::Map(entries)) => {
                let mut pairs = made.iter().zip(entries);
                made.len() == entries.len()
                    && pairs.all(|((name, made), (key, value))| key.scalar() == Some(name) && made.matches_node(value))
            }
            _ => false,
        }
    }

    /// Writes JSON, which is also valid inside YAML's `{}` and `[]`. `lines` is the current indentation and that of one
    /// level; without it, writes one line.
    pub(super) fn to_json(&self, lines: Option<(&str, &str)>, newline: &str) -> String {
        let inner = lines.map(|(indent, unit)| (format!("{indent}{unit}"), unit));
        let inner = inner.as_ref().map(|(indent, unit)| (indent.as_str(), *unit));
        let (open, close, inside): (_, _, Vec<String>) = match self {
            Self::Text(text) => return quote_json(text),
            Self::Literal(text) => return text.clone(),
            Self::List(items) => ('[', ']', items.iter().map(|item| item.to_json(inner, newline)).collect()),
            Self::Map(entries) => {
                let member =
                    |(name, value): &(String, Self)| format!("{}: {}", quote_json(name), value.to_json(inner, newline));
                ('{', '}', entries.iter().map(member).collect())
            }
        };
        match lines.zip(inner) {
            None => format!("{open}{}{close}", inside.join(", ")),
            Some(((outer, _), (indent, _))) => {
                let inside = inside.join(&format!(",{newline}{indent}"));
                format!("{open}{newline}{indent}{inside}{newline}{outer}{close}")
            }
        }
    }

    /// Writes the value of a member of a YAML block at `indent`: the text after the colon.
    pub(super) fn to_yaml_block(&self, indent: usize, unit: usize, newline: &str) -> String {
        let inner = indent + unit;
        let line = |text: String| format!("{newline}{}{text}", " ".repeat(inner));
        match self {
            Self::Text(text) => format!(" {}", plain_or_quoted(text)),
            Self::Literal(text) => format!(" {text}"),
            Self::List(items) if items.iter().all(|item| matches!(item, Self::Text(_))) => {
                format!(" {}", self.to_json(None, newline).replace('"', "'"))
            }
            Self::List(items) => items.iter().map(|item| line(item.to_yaml_item(inner, unit, newline))).collect(),
            Self::Map(entries) => {
                entries.iter().map(|(key, value)| line(value.to_yaml_member(key, inner, unit, newline))).collect()
            }
        }
    }

    /// Writes a member of a YAML block: `key: value`.
    pub(super) fn to_yaml_member(&self, key: &str, indent: usize, unit: usize, newline: &str) -> String {
        format!("{}:{}", plain_or_quoted(key), self.to_yaml_block(indent, unit, newline))
    }

    /// Writes an item of a YAML block whose dash is at `indent`: `- value`.
    pub(super) fn to_yaml_item(&self, indent: usize, unit: usize, newline: &str) -> String {
        let Self::Map(entries) = self else { return format!("-{}", self.to_yaml_block(indent, unit, newline)) };
        let members = entries.iter().map(|(key, value)| value.to_yaml_member(key, indent + 2, unit, newline));
        format!("- {}", members.collect::<Vec<_>>().join(&format!("{newline}{}", " ".repeat(indent + 2))))
    }
}

pub(super) fn quote_json(text: &str) -> String {
    serde_json::to_string(text).expect("text is text in JSON")
}

/// Writes plain text if YAML 1.1 and 1.2 both read it as this text; otherwise single quotes.
fn plain_or_quoted(text: &str) -> String {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'/' | b'+' | b'$');
    let first = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'$');
    let word = ["true", "false", "yes", "no", "on", "off", "null", "y", "n"].contains(&text.to_lowercase().as_str());
    if first && !word && text.bytes().all(letter) {
        return text.to_owned();
    }
    if text.contains(char::is_control) { quote_json(text) } else { format!("'{}'", text.replace('\'', "''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_they_will_be_read() {
        for (given, written) in [
            ("string", "string"),
            ("true", "'true'"),
            ("409", "'409'"),
            ("#/a", "'#/a'"),
            ("it's", "'it''s'"),
            ("a: b", "'a: b'"),
            ("No", "'No'"),
            ("", "''"),
            ("a\nb", "\"a\\nb\""),
        ] {
            assert_eq!(plain_or_quoted(given), written);
        }
        let made = object! { "a" => vec![new_reference("#/x")], "b" => 1u64 };
        assert_eq!(made.to_json(None, "\n"), r##"{"a": [{"$ref": "#/x"}], "b": 1}"##);
        assert_eq!(
            made.to_json(Some(("", "  ")), "\n"),
            "{\n  \"a\": [\n    {\n      \"$ref\": \"#/x\"\n    }\n  ],\n  \"b\": 1\n}"
        );
        assert_eq!(made.to_yaml_block(0, 2, "\n"), "\n  a:\n    - $ref: '#/x'\n  b: 1");
    }
}
