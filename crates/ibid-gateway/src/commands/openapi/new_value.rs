//! New values and how they are written.

use super::document::{DocumentNode, NodeKind};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NewValue {
    Text(String),
    Number(u64),
    Bool(bool),
    List(Vec<NewValue>),
    Map(Vec<(String, NewValue)>),
}

pub(super) fn new_map<const N: usize>(entries: [(&str, NewValue); N]) -> NewValue {
    NewValue::Map(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

pub(super) fn new_text(text: impl Into<String>) -> NewValue {
    NewValue::Text(text.into())
}

/// `{$ref: …}`.
pub(super) fn new_reference(to: impl Into<String>) -> NewValue {
    new_map([("$ref", new_text(to))])
}

impl NewValue {
    /// Whether the node already has this value.
    pub(super) fn matches_node(&self, node: &DocumentNode) -> bool {
        match (self, &node.kind) {
            (Self::Text(text), NodeKind::Scalar { text: found, .. }) => text == found,
            (Self::Number(number), NodeKind::Scalar { text, .. }) => *text == number.to_string(),
            (Self::Bool(value), NodeKind::Scalar { text, .. }) => *text == value.to_string(),
            (Self::List(made), NodeKind::Sequence { items, .. }) => {
                made.len() == items.len() && made.iter().zip(items).all(|(made, item)| made.matches_node(item))
            }
            (Self::Map(made), NodeKind::Map { entries, .. }) => {
                let same = |((name, made), (key, value)): (&(String, Self), &(DocumentNode, DocumentNode))| {
                    key.scalar() == Some(name) && made.matches_node(value)
                };
                made.len() == entries.len() && made.iter().zip(entries).all(same)
            }
            _ => false,
        }
    }

    /// Writes JSON, which is also valid inside YAML's `{}` and `[]`. `lines` is the current indentation and that of one
    /// level; without it, writes one line.
    pub(super) fn to_json(&self, lines: Option<(&str, &str)>, newline: &str) -> String {
        let (open, close, inside): (_, _, Vec<String>) = match self {
            Self::Text(text) => return quote_json(text),
            Self::Number(number) => return number.to_string(),
            Self::Bool(value) => return value.to_string(),
            Self::List(items) => (
                '[',
                ']',
                items.iter().map(|item| item.to_json(increase_indent(lines).as_ref().map(as_strs), newline)).collect(),
            ),
            Self::Map(entries) => {
                let member = |(name, value): &(String, Self)| {
                    format!(
                        "{}: {}",
                        quote_json(name),
                        value.to_json(increase_indent(lines).as_ref().map(as_strs), newline)
                    )
                };
                ('{', '}', entries.iter().map(member).collect())
            }
        };
        match lines {
            None => format!("{open}{}{close}", inside.join(", ")),
            Some((indent, unit)) => {
                let glue = format!(",{newline}{indent}{unit}");
                format!("{open}{newline}{indent}{unit}{}{newline}{indent}{close}", inside.join(&glue))
            }
        }
    }

    /// Writes the value of a member of a YAML block at `indent`: the text after the colon.
    pub(super) fn to_yaml_block(&self, indent: usize, unit: usize, newline: &str) -> String {
        let pad = |width: usize| format!("{newline}{}", " ".repeat(width));
        match self {
            Self::Text(text) => format!(" {}", plain_or_quoted(text)),
            Self::Number(number) => format!(" {number}"),
            Self::Bool(value) => format!(" {value}"),
            Self::List(items) if items.iter().all(|item| matches!(item, Self::Text(_))) => {
                let items: Vec<_> = items.iter().map(|item| item.to_json(None, newline).replace('"', "'")).collect();
                format!(" [{}]", items.join(", "))
            }
            Self::List(items) => {
                let inner = indent + unit;
                items.iter().map(|item| format!("{}{}", pad(inner), item.to_yaml_item(inner, unit, newline))).collect()
            }
            Self::Map(entries) => {
                let inner = indent + unit;
                entries
                    .iter()
                    .map(|(key, value)| format!("{}{}", pad(inner), value.to_yaml_member(key, inner, unit, newline)))
                    .collect()
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

fn increase_indent(lines: Option<(&str, &str)>) -> Option<(String, String)> {
    lines.map(|(indent, unit)| (format!("{indent}{unit}"), unit.to_owned()))
}

fn as_strs((indent, unit): &(String, String)) -> (&str, &str) {
    (indent, unit)
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
    match text.chars().any(char::is_control) {
        true => quote_json(text),
        false => format!("'{}'", text.replace('\'', "''")),
    }
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
        let made = new_map([("a", NewValue::List(vec![new_reference("#/x")])), ("b", NewValue::Number(1))]);
        assert_eq!(made.to_json(None, "\n"), r##"{"a": [{"$ref": "#/x"}], "b": 1}"##);
        assert_eq!(
            made.to_json(Some(("", "  ")), "\n"),
            "{\n  \"a\": [\n    {\n      \"$ref\": \"#/x\"\n    }\n  ],\n  \"b\": 1\n}"
        );
        assert_eq!(made.to_yaml_block(0, 2, "\n"), "\n  a:\n    - $ref: '#/x'\n  b: 1");
    }
}
