//! Parses JSON with positions. `serde_json` validates the text; this scanner finds the positions.
//!
//! The YAML parser accepts most JSON, but neither surrogate pairs nor tabs between members.

use std::collections::HashMap;

use super::document::{
    DocumentError, DocumentNode, DocumentSyntax, MAX_DEPTH, NodeKind, OpenapiDocument, ScalarQuoting,
};

pub(super) fn read(text: String) -> Result<OpenapiDocument, DocumentError> {
    // Its own limit is 128, above the tree's.
    let checked: Result<serde::de::IgnoredAny, _> = serde_json::from_str(&text);
    checked.map_err(|why| {
        let told = why.to_string();
        let told = told.split(" at line ").next().unwrap_or(&told);
        DocumentError { line: why.line(), why: format!("no JSON: {told} (column {})", why.column()) }
    })?;
    let mut scan = JsonScanner { bytes: text.as_bytes(), at: 0, depth: 0 };
    let root = scan
        .parse_value()
        .ok_or_else(|| DocumentError { line: 1, why: format!("nested more than {MAX_DEPTH} deep") })?;
    Ok(OpenapiDocument::new(text, root, DocumentSyntax::Json, HashMap::new()))
}

/// Scans valid JSON. Returns `None` only if it is too deep.
struct JsonScanner<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: usize,
}

impl JsonScanner<'_> {
    fn parse_value(&mut self) -> Option<DocumentNode> {
        self.skip_space();
        let start = self.at;
        let kind = match self.bytes[self.at] {
            b'{' => NodeKind::Map(self.parse_items(b'}', Self::parse_member)?),
            b'[' => NodeKind::Sequence(self.parse_items(b']', Self::parse_value)?),
            b'"' => return Some(self.parse_string()),
            _ => {
                let rest = &self.bytes[start..];
                let length = rest.iter().position(|byte| b",]} \t\r\n".contains(byte)).unwrap_or(rest.len());
                self.at += length;
                let text = String::from_utf8_lossy(&rest[..length]).into_owned();
                NodeKind::Scalar { text, style: ScalarQuoting::Plain }
            }
        };
        Some(DocumentNode { start, end: self.at, flow: !matches!(kind, NodeKind::Scalar { .. }), kind })
    }

    fn parse_items<T>(&mut self, close: u8, one: fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        self.at += 1;
        let mut all = Vec::new();
        self.skip_space();
        while self.bytes[self.at] != close {
            all.push(one(self)?);
            self.skip_space();
            if self.bytes[self.at] == b',' {
                self.at += 1;
                self.skip_space();
            }
        }
        self.at += 1;
        self.depth -= 1;
        // There are many, and most are small.
        all.shrink_to_fit();
        Some(all)
    }

    fn parse_member(&mut self) -> Option<(DocumentNode, DocumentNode)> {
        let key = self.parse_string();
        self.skip_space();
        self.at += 1; // the colon
        Some((key, self.parse_value()?))
    }

    fn parse_string(&mut self) -> DocumentNode {
        let start = self.at;
        self.at += 1;
        while self.bytes[self.at] != b'"' {
            self.at += if self.bytes[self.at] == b'\\' { 2 } else { 1 };
        }
        self.at += 1;
        let source = &self.bytes[start..self.at];
        // A lone surrogate is not valid text; no name that matters here contains one.
        let text = serde_json::from_slice(source).unwrap_or_else(|_| String::from_utf8_lossy(source).into_owned());
        DocumentNode { start, end: self.at, flow: false, kind: NodeKind::Scalar { text, style: ScalarQuoting::Quoted } }
    }

    fn skip_space(&mut self) {
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }
}
