//! Parses YAML and JSON with positions: YAML from the events of a YAML 1.2 parser; JSON by a scanner, after `serde_json`
//! has validated the text. The YAML parser accepts most JSON, but neither surrogate pairs nor tabs between members.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::document::{
    DocumentError, DocumentNode, DocumentSyntax, MAX_DEPTH, NodeKind, OpenapiDocument, ScalarQuoting,
};

pub(super) fn read_yaml(text: String) -> Result<OpenapiDocument, DocumentError> {
    // The parser counts characters, not bytes.
    let mut byte_offsets: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    byte_offsets.push(text.len());
    let mut events = Vec::new();
    for event in Parser::new_from_str(&text) {
        let (event, span) = event.map_err(|why| DocumentError {
            line: why.marker().line(),
            why: format!("no YAML: {} (column {})", why.info(), why.marker().col() + 1),
        })?;
        events.push((event, span));
    }
    let events = events.into_iter();
    let mut build = YamlBuilder { text: &text, byte_offsets, events, anchors: HashMap::new(), depth: 0 };
    let root = build.parse_document()?;
    let anchors = build.anchors;
    Ok(OpenapiDocument::new(text, root, DocumentSyntax::Yaml, anchors))
}

struct YamlBuilder<'a, I> {
    text: &'a str,
    byte_offsets: Vec<usize>,
    events: I,
    anchors: HashMap<usize, DocumentNode>,
    depth: usize,
}

impl<'a, I: Iterator<Item = (Event<'a>, Span)>> YamlBuilder<'a, I> {
    fn parse_document(&mut self) -> Result<DocumentNode, DocumentError> {
        let mut root = None;
        while let Some((event, span)) = self.events.next() {
            match event {
                Event::StreamStart
                | Event::DocumentStart(_)
                | Event::DocumentEnd
                | Event::StreamEnd
                | Event::Nothing => {}
                _ if root.is_some() => {
                    return Err(self.error_at(span, "a second document begins here; give one at a time"));
                }
                event => root = Some(self.parse_node(event, span, 0)?),
            }
        }
        root.ok_or_else(|| DocumentError { line: 1, why: "the document is empty".into() })
    }

    fn error_at(&self, span: Span, why: impl Into<String>) -> DocumentError {
        DocumentError { line: span.start.line(), why: why.into() }
    }

    fn byte_offset(&self, index: usize) -> usize {
        self.byte_offsets[index.min(self.byte_offsets.len() - 1)]
    }

    /// `least` is the earliest possible start: the parser reports empty values after the following text.
    fn parse_node(&mut self, event: Event<'a>, span: Span, least: usize) -> Result<DocumentNode, DocumentError> {
        let (start, end) = (self.byte_offset(span.start.index()), self.byte_offset(span.end.index()));
        let (anchor, node) = match event {
            Event::Alias(id) => return Ok(DocumentNode { start, end, flow: false, kind: NodeKind::Alias(id) }),
            Event::Scalar(text, style, anchor, _) => (anchor, self.scalar_node(&text, style, (start, end), least)),
            Event::SequenceStart(anchor, _) => (anchor, self.parse_list(span, start)?),
            Event::MappingStart(anchor, _) => (anchor, self.parse_map(span, start)?),
            _ => return Err(self.error_at(span, "no YAML that can be understood")),
        };
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn scalar_node(&self, text: &str, style: ScalarStyle, (start, end): (usize, usize), least: usize) -> DocumentNode {
        let style = match style {
            ScalarStyle::Plain => ScalarQuoting::Plain,
            ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted => ScalarQuoting::Quoted,
            ScalarStyle::Literal | ScalarStyle::Folded => ScalarQuoting::Block,
        };
        let source = &self.text[start..end];
        let (start, end) = match style {
            // An empty value is at its earliest possible position.
            ScalarQuoting::Plain if text.is_empty() || source.trim().is_empty() => (least, least),
            ScalarQuoting::Plain => (start, start + source.trim_end().len()),
            _ => (start, end),
        };
        DocumentNode { start, end, flow: false, kind: NodeKind::Scalar { text: text.to_owned(), style } }
    }

    fn enter_level(&mut self, span: Span) -> Result<(), DocumentError> {
        self.depth += 1;
        match self.depth > MAX_DEPTH {
            true => Err(self.error_at(span, format!("nested more than {MAX_DEPTH} deep"))),
            false => Ok(()),
        }
    }

    fn next_event(&mut self, span: Span) -> Result<(Event<'a>, Span), DocumentError> {
        self.events.next().ok_or_else(|| self.error_at(span, "it does not end"))
    }

    /// Returns the next event, or `None` if it ends the collection.
    fn next_unless(&mut self, span: Span, end: &Event<'a>) -> Result<Option<(Event<'a>, Span)>, DocumentError> {
        let (event, at) = self.next_event(span)?;
        Ok((event != *end).then_some((event, at)))
    }

    fn parse_list(&mut self, span: Span, start: usize) -> Result<DocumentNode, DocumentError> {
        self.enter_level(span)?;
        let start = self.skip_anchor_and_tag(start);
        let flow = self.text[start..].starts_with('[');
        let mut items = Vec::<DocumentNode>::new();
        while let Some((event, at)) = self.next_unless(span, &Event::SequenceEnd)? {
            let least = items.last().map_or(start + 1, |last| last.end);
            items.push(self.parse_node(event, at, least)?);
        }
        self.depth -= 1;
        items.shrink_to_fit();
        let (start, end) = match (flow, items.first(), items.last()) {
            (true, _, last) => (start, self.flow_end(last.map_or(start + 1, |last| last.end))),
            (false, Some(first), Some(last)) => (self.first_dash(start, first.start), last.end),
            (false, ..) => (start, start),
        };
        Ok(DocumentNode { start, end, flow, kind: NodeKind::Sequence(items) })
    }

    fn skip_anchor_and_tag(&self, mut start: usize) -> usize {
        while self.text[start..].starts_with(['&', '!']) {
            let rest = &self.text[start..];
            let word = rest.find(char::is_whitespace).unwrap_or(rest.len());
            start += rest.len() - rest[word..].trim_start().len();
        }
        start
    }

    /// The end of a flow collection whose last child ends at `from`. The parser's own position is wrong after a
    /// trailing comma.
    fn flow_end(&self, from: usize) -> usize {
        let mut rest = self.text[from..].char_indices();
        while let Some((at, character)) = rest.next() {
            match character {
                '}' | ']' => return from + at + 1,
                '#' => drop(rest.find(|(_, character)| *character == '\n')),
                _ => {}
            }
        }
        self.text.len()
    }

    /// The dash of a list's first item. For a list without indentation, the parser's position is after it.
    fn first_dash(&self, start: usize, first: usize) -> usize {
        if self.text[start..].starts_with('-') {
            return start;
        }
        let before = &self.text[..first.max(start)];
        let mut end = before.len();
        while let Some(at) = before[..end].rfind('-') {
            let line = &before[before[..at].rfind('\n').map_or(0, |found| found + 1)..at];
            // A dash in a comment or in an anchor's name has other text before it.
            if line.bytes().all(|byte| matches!(byte, b' ' | b'-' | b'?' | b':')) {
                return at;
            }
            end = at;
        }
        start
    }

    fn parse_map(&mut self, span: Span, start: usize) -> Result<DocumentNode, DocumentError> {
        self.enter_level(span)?;
        let start = self.skip_anchor_and_tag(start);
        let flow = self.text[start..].starts_with('{');
        let mut entries = Vec::<(DocumentNode, DocumentNode)>::new();
        while let Some((event, at)) = self.next_unless(span, &Event::MappingEnd)? {
            let least = entries.last().map_or(start, |(_, value)| value.end);
            let key = self.parse_node(event, at, least)?;
            let (event, at) = self.next_event(span)?;
            // Values start after the colon.
            let colon = self.text[key.end..].find(':').map_or(key.end, |found| key.end + found + 1);
            let value = self.parse_node(event, at, colon)?;
            entries.push((key, value));
        }
        self.depth -= 1;
        entries.shrink_to_fit();
        let (start, end) = match (flow, entries.first(), entries.last()) {
            (true, _, last) => (start, self.flow_end(last.map_or(start + 1, |(_, value)| value.end))),
            (false, Some((first, _)), Some((_, last))) => (first.start, last.end),
            (false, ..) => (start, start),
        };
        Ok(DocumentNode { start, end, flow, kind: NodeKind::Map(entries) })
    }
}

pub(super) fn read_json(text: String) -> Result<OpenapiDocument, DocumentError> {
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
