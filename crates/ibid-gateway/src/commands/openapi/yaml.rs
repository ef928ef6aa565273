//! YAML with places, from the events of a YAML 1.2 parser.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::tree::{Document, Kind, MAX_DEPTH, Node, Style, Syntax, Wrong};

pub(super) fn read(text: String) -> Result<Document, Wrong> {
    // The parser counts characters.
    let mut places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    places.push(text.len());
    let mut events = Vec::new();
    for event in Parser::new_from_str(&text) {
        let (event, span) = event.map_err(|why| Wrong {
            line: why.marker().line(),
            why: format!("no YAML: {} (column {})", why.info(), why.marker().col() + 1),
        })?;
        events.push((event, span));
    }
    let mut build = Build { text: &text, places, events: events.into_iter(), anchors: HashMap::new(), depth: 0 };
    let root = build.document()?;
    let anchors = build.anchors;
    Ok(Document::new(text, root, Syntax::Yaml, anchors))
}

struct Build<'a, I> {
    text: &'a str,
    places: Vec<usize>,
    events: I,
    anchors: HashMap<usize, Node>,
    depth: usize,
}

impl<'a, I: Iterator<Item = (Event<'a>, Span)>> Build<'a, I> {
    fn document(&mut self) -> Result<Node, Wrong> {
        let mut root = None;
        while let Some((event, span)) = self.events.next() {
            match event {
                Event::StreamStart
                | Event::DocumentStart(_)
                | Event::DocumentEnd
                | Event::StreamEnd
                | Event::Nothing => {}
                _ if root.is_some() => {
                    return Err(self.wrong(span, "a second document begins here; give one at a time"));
                }
                event => root = Some(self.node(event, span, 0)?),
            }
        }
        root.ok_or_else(|| Wrong { line: 1, why: "the document is empty".into() })
    }

    fn wrong(&self, span: Span, why: impl Into<String>) -> Wrong {
        Wrong { line: span.start.line(), why: why.into() }
    }

    fn place(&self, index: usize) -> usize {
        self.places[index.min(self.places.len() - 1)]
    }

    /// `least` is where it can start at the earliest: the parser puts values that are not there behind what follows.
    fn node(&mut self, event: Event<'a>, span: Span, least: usize) -> Result<Node, Wrong> {
        let (start, end) = (self.place(span.start.index()), self.place(span.end.index()));
        let (anchor, node) = match event {
            Event::Alias(id) => return Ok(Node { start, end, kind: Kind::Alias(id) }),
            Event::Scalar(text, style, anchor, _) => (anchor, self.scalar(&text, style, (start, end), least)),
            Event::SequenceStart(anchor, _) => (anchor, self.list(span, start)?),
            Event::MappingStart(anchor, _) => (anchor, self.map(span, start)?),
            _ => return Err(self.wrong(span, "no YAML that can be understood")),
        };
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn scalar(&self, text: &str, style: ScalarStyle, (start, end): (usize, usize), least: usize) -> Node {
        let style = match style {
            ScalarStyle::Plain => Style::Plain,
            ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted => Style::Quoted,
            ScalarStyle::Literal | ScalarStyle::Folded => Style::Block,
        };
        let source = &self.text[start..end];
        let (start, end) = match style {
            // Nothing is written: it is where it could have been.
            Style::Plain if text.is_empty() || source.trim().is_empty() => (least, least),
            Style::Plain => (start, start + source.trim_end().len()),
            _ => (start, end),
        };
        Node { start, end, kind: Kind::Scalar { text: text.to_owned(), style } }
    }

    fn deeper(&mut self, span: Span) -> Result<(), Wrong> {
        self.depth += 1;
        match self.depth > MAX_DEPTH {
            true => Err(self.wrong(span, format!("nested more than {MAX_DEPTH} deep"))),
            false => Ok(()),
        }
    }

    fn next(&mut self, span: Span) -> Result<(Event<'a>, Span), Wrong> {
        self.events.next().ok_or_else(|| self.wrong(span, "it does not end"))
    }

    fn list(&mut self, span: Span, start: usize) -> Result<Node, Wrong> {
        self.deeper(span)?;
        let start = self.bare(start);
        let flow = self.text[start..].starts_with('[');
        let (mut items, mut least) = (Vec::<Node>::new(), start + 1);
        loop {
            let (event, at) = self.next(span)?;
            if event == Event::SequenceEnd {
                break;
            }
            let item = self.node(event, at, least)?;
            least = item.end;
            items.push(item);
        }
        self.depth -= 1;
        items.shrink_to_fit();
        let end = if flow { self.closed(least) } else { items.last().map_or(start, |last| last.end) };
        let start = if flow { start } else { items.first().map_or(start, |first| self.dash(start, first.start)) };
        Ok(Node { start, end, kind: Kind::List { flow, items } })
    }

    /// Behind an anchor and a tag.
    fn bare(&self, mut start: usize) -> usize {
        while self.text[start..].starts_with(['&', '!']) {
            let rest = &self.text[start..];
            let word = rest.find(char::is_whitespace).unwrap_or(rest.len());
            start += rest.len() - rest[word..].trim_start().len();
        }
        start
    }

    /// The end of a flow collection whose last child ends at `from`: the parser's own is off behind a trailing comma.
    fn closed(&self, from: usize) -> usize {
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

    /// The dash of a list's first item. The parser puts a list that is not indented behind it.
    fn dash(&self, start: usize, first: usize) -> usize {
        if self.text[start..].starts_with('-') {
            return start;
        }
        let before = &self.text[..first.max(start)];
        let mut end = before.len();
        while let Some(at) = before[..end].rfind('-') {
            let line = &before[before[..at].rfind('\n').map_or(0, |found| found + 1)..at];
            // A dash of a comment, or of an anchor's name, has something before it.
            if line.bytes().all(|byte| matches!(byte, b' ' | b'-' | b'?' | b':')) {
                return at;
            }
            end = at;
        }
        start
    }

    fn map(&mut self, span: Span, start: usize) -> Result<Node, Wrong> {
        self.deeper(span)?;
        let start = self.bare(start);
        let flow = self.text[start..].starts_with('{');
        let mut entries = Vec::<(Node, Node)>::new();
        loop {
            let (event, at) = self.next(span)?;
            if event == Event::MappingEnd {
                break;
            }
            let least = entries.last().map_or(start, |(_, value)| value.end);
            let key = self.node(event, at, least)?;
            let (event, at) = self.next(span)?;
            // After its colon.
            let colon = self.text[key.end..].find(':').map_or(key.end, |found| key.end + found + 1);
            let value = self.node(event, at, colon)?;
            entries.push((key, value));
        }
        self.depth -= 1;
        entries.shrink_to_fit();
        let (start, end) = match (flow, entries.first(), entries.last()) {
            (true, _, last) => (start, self.closed(last.map_or(start + 1, |(_, value)| value.end))),
            (false, Some((first, _)), Some((_, last))) => (first.start, last.end),
            (false, ..) => (start, start),
        };
        Ok(Node { start, end, kind: Kind::Map { flow, entries } })
    }
}
