//! What is added, and how it is written.

use super::tree::{Kind, Node};

/// A value that is to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Made {
    Text(String),
    Number(u64),
    Bool(bool),
    List(Vec<Made>),
    Map(Vec<(String, Made)>),
}

/// A mapping.
pub(super) fn map<const N: usize>(entries: [(&str, Made); N]) -> Made {
    Made::Map(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// Text.
pub(super) fn text(text: impl Into<String>) -> Made {
    Made::Text(text.into())
}

/// `{$ref: …}`.
pub(super) fn reference(to: impl Into<String>) -> Made {
    map([("$ref", text(to))])
}

impl Made {
    /// Whether it is already written there.
    pub(super) fn is(&self, node: &Node) -> bool {
        match (self, &node.kind) {
            (Self::Text(text), Kind::Scalar { text: found, .. }) => text == found,
            (Self::Number(number), Kind::Scalar { text, .. }) => *text == number.to_string(),
            (Self::Bool(value), Kind::Scalar { text, .. }) => *text == value.to_string(),
            (Self::List(made), Kind::List { items, .. }) => {
                made.len() == items.len() && made.iter().zip(items).all(|(made, item)| made.is(item))
            }
            (Self::Map(made), Kind::Map { entries, .. }) => {
                let same = |((name, made), (key, value)): (&(String, Self), &(Node, Node))| {
                    key.scalar() == Some(name) && made.is(value)
                };
                made.len() == entries.len() && made.iter().zip(entries).all(same)
            }
            _ => false,
        }
    }

    /// As JSON, which YAML takes inside `{}` and `[]`, too. On one line without `lines`: the indent so far, and what each level
    /// adds.
    pub(super) fn json(&self, lines: Option<(&str, &str)>, newline: &str) -> String {
        let (open, close, inside): (_, _, Vec<String>) = match self {
            Self::Text(text) => return quoted(text),
            Self::Number(number) => return number.to_string(),
            Self::Bool(value) => return value.to_string(),
            Self::List(items) => {
                ('[', ']', items.iter().map(|item| item.json(deeper(lines).as_ref().map(both), newline)).collect())
            }
            Self::Map(entries) => {
                let member = |(name, value): &(String, Self)| {
                    format!("{}: {}", quoted(name), value.json(deeper(lines).as_ref().map(both), newline))
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

    /// As the value of a member of a YAML block at `indent`: what follows the colon.
    pub(super) fn block(&self, indent: usize, unit: usize, newline: &str) -> String {
        let pad = |width: usize| format!("{newline}{}", " ".repeat(width));
        match self {
            Self::Text(text) => format!(" {}", plain_or_quoted(text)),
            Self::Number(number) => format!(" {number}"),
            Self::Bool(value) => format!(" {value}"),
            Self::List(items) if items.iter().all(|item| matches!(item, Self::Text(_))) => {
                let items: Vec<_> = items.iter().map(|item| item.json(None, newline).replace('"', "'")).collect();
                format!(" [{}]", items.join(", "))
            }
            Self::List(items) => {
                let inner = indent + unit;
                items.iter().map(|item| format!("{}{}", pad(inner), item.item(inner, unit, newline))).collect()
            }
            Self::Map(entries) => {
                let inner = indent + unit;
                entries
                    .iter()
                    .map(|(key, value)| format!("{}{}", pad(inner), value.member(key, inner, unit, newline)))
                    .collect()
            }
        }
    }

    /// As a member of a YAML block: `key: value`.
    pub(super) fn member(&self, key: &str, indent: usize, unit: usize, newline: &str) -> String {
        format!("{}:{}", plain_or_quoted(key), self.block(indent, unit, newline))
    }

    /// As an item of a YAML block whose dash is at `indent`: `- value`.
    pub(super) fn item(&self, indent: usize, unit: usize, newline: &str) -> String {
        let Self::Map(entries) = self else { return format!("-{}", self.block(indent, unit, newline)) };
        let members = entries.iter().map(|(key, value)| value.member(key, indent + 2, unit, newline));
        format!("- {}", members.collect::<Vec<_>>().join(&format!("{newline}{}", " ".repeat(indent + 2))))
    }
}

fn deeper(lines: Option<(&str, &str)>) -> Option<(String, String)> {
    lines.map(|(indent, unit)| (format!("{indent}{unit}"), unit.to_owned()))
}

fn both((indent, unit): &(String, String)) -> (&str, &str) {
    (indent, unit)
}

/// A JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("text is text in JSON")
}

/// Plain where YAML, old or new, reads the same text; in single quotes otherwise.
fn plain_or_quoted(text: &str) -> String {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'/' | b'+' | b'$');
    let first = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'$');
    let word = ["true", "false", "yes", "no", "on", "off", "null", "y", "n"].contains(&text.to_lowercase().as_str());
    if first && !word && text.bytes().all(letter) {
        return text.to_owned();
    }
    match text.chars().any(char::is_control) {
        true => quoted(text),
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
        let made = map([("a", Made::List(vec![reference("#/x")])), ("b", Made::Number(1))]);
        assert_eq!(made.json(None, "\n"), r##"{"a": [{"$ref": "#/x"}], "b": 1}"##);
        assert_eq!(
            made.json(Some(("", "  ")), "\n"),
            "{\n  \"a\": [\n    {\n      \"$ref\": \"#/x\"\n    }\n  ],\n  \"b\": 1\n}"
        );
        assert_eq!(made.block(0, 2, "\n"), "\n  a:\n    - $ref: '#/x'\n  b: 1");
    }
}
