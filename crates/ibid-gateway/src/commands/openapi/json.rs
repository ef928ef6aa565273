//! JSON with places. `serde_json` says whether it is JSON; this finds where everything is.
//!
//! YAML's parser could read most JSON, but not all: not surrogate pairs, and no tabs between members.

use std::collections::HashMap;

use super::tree::{Document, Kind, MAX_DEPTH, Node, Style, Syntax, Wrong};

pub(super) fn read(text: String) -> Result<Document, Wrong> {
    // Its own limit is 128, below which the tree's is.
    let checked: Result<serde::de::IgnoredAny, _> = serde_json::from_str(&text);
    checked.map_err(|why| {
        let told = why.to_string();
        let told = told.split(" at line ").next().unwrap_or(&told);
        Wrong { line: why.line(), why: format!("no JSON: {told} (column {})", why.column()) }
    })?;
    let mut scan = Scan { bytes: text.as_bytes(), at: 0, depth: 0 };
    let root = scan.value().ok_or_else(|| Wrong { line: 1, why: format!("nested more than {MAX_DEPTH} deep") })?;
    Ok(Document::new(text, root, Syntax::Json, HashMap::new()))
}

/// Reads what is known to be JSON. `None` only where it is too deep.
struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
}

impl Scan<'_> {
    fn value(&mut self) -> Option<Node> {
        self.space();
        let start = self.at;
        let kind = match self.bytes[self.at] {
            b'{' => Kind::Map { flow: true, entries: self.inside(b'}', Self::member)? },
            b'[' => Kind::List { flow: true, items: self.inside(b']', Self::value)? },
            b'"' => return Some(self.string()),
            _ => {
                let rest = &self.bytes[start..];
                let length = rest.iter().position(|byte| b",]} \t\r\n".contains(byte)).unwrap_or(rest.len());
                self.at += length;
                let text = String::from_utf8_lossy(&rest[..length]).into_owned();
                Kind::Scalar { text, style: Style::Plain }
            }
        };
        Some(Node { start, end: self.at, kind })
    }

    fn inside<T>(&mut self, close: u8, one: fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        self.at += 1;
        let mut all = Vec::new();
        self.space();
        while self.bytes[self.at] != close {
            all.push(one(self)?);
            self.space();
            if self.bytes[self.at] == b',' {
                self.at += 1;
                self.space();
            }
        }
        self.at += 1;
        self.depth -= 1;
        // Most are small, and there are many.
        all.shrink_to_fit();
        Some(all)
    }

    fn member(&mut self) -> Option<(Node, Node)> {
        let key = self.string();
        self.space();
        self.at += 1; // the colon
        Some((key, self.value()?))
    }

    fn string(&mut self) -> Node {
        let start = self.at;
        self.at += 1;
        while self.bytes[self.at] != b'"' {
            self.at += if self.bytes[self.at] == b'\\' { 2 } else { 1 };
        }
        self.at += 1;
        let source = &self.bytes[start..self.at];
        // A lone surrogate is no text; nothing that matters here is spelled so.
        let text = serde_json::from_slice(source).unwrap_or_else(|_| String::from_utf8_lossy(source).into_owned());
        Node { start, end: self.at, kind: Kind::Scalar { text, style: Style::Quoted } }
    }

    fn space(&mut self) {
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }
}
