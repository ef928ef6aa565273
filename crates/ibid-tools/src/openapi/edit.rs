//! Insertions into a document's text. Nothing is ever replaced or removed.

use std::collections::{BTreeMap, HashMap};

use super::{
    document::{DocumentError, DocumentNode, DocumentSyntax, NodeKind, OpenapiDocument, ScalarQuoting},
    new_value::{NewValue, quote_json},
};

/// The additions to each collection of the document.
pub(super) struct Additions<'a> {
    document: &'a OpenapiDocument,
    /// Keyed by the address of the collection's node.
    by_position: BTreeMap<usize, Addition<'a>>,
    newline: &'static str,
    unit: String,
}

struct Addition<'a> {
    node: &'a DocumentNode,
    before: Vec<(&'a DocumentNode, String, NewValue)>,
    /// Members to append; items have no name.
    last: Vec<(Option<String>, NewValue)>,
}

impl<'a> Additions<'a> {
    pub(super) fn new(document: &'a OpenapiDocument) -> Self {
        let newline = if document.text.contains("\r\n") { "\r\n" } else { "\n" };
        Self { document, by_position: BTreeMap::new(), newline, unit: indent_unit(document) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_position.is_empty()
    }

    fn entry_for(&mut self, node: &'a DocumentNode) -> &mut Addition<'a> {
        // A block collection may start at the same position as its parent, so the key is the node's address.
        let address = std::ptr::from_ref(node).addr();
        self.by_position.entry(address).or_insert_with(|| Addition { node, before: Vec::new(), last: Vec::new() })
    }

    /// Adds a member to a member that is itself new. Keeps an existing member of the same name.
    pub(super) fn add_nested(
        &mut self, to: &'a DocumentNode, next: Option<&'a DocumentNode>, outer: &str, name: &str, made: NewValue,
    ) {
        let at = self.entry_for(to);
        let before = at.before.iter_mut().filter(|(_, found, _)| found == outer).map(|(_, _, made)| made);
        let last = at.last.iter_mut().filter(|(found, _)| found.as_deref() == Some(outer)).map(|(_, made)| made);
        match before.chain(last).next() {
            Some(NewValue::Map(entries)) if entries.iter().any(|(found, _)| found == name) => {}
            Some(NewValue::Map(entries)) => entries.push((name.to_owned(), made)),
            _ => self.add_member_before(to, next, outer, NewValue::Map(vec![(name.to_owned(), made)])),
        }
    }

    /// Appends a member. Keeps an existing member of the same name.
    pub(super) fn add_member(&mut self, to: &'a DocumentNode, name: &str, made: NewValue) {
        let last = &mut self.entry_for(to).last;
        if !last.iter().any(|(found, _)| found.as_deref() == Some(name)) {
            last.push((Some(name.to_owned()), made));
        }
    }

    pub(super) fn add_member_before(
        &mut self, to: &'a DocumentNode, next: Option<&'a DocumentNode>, name: &str, made: NewValue,
    ) {
        match next {
            Some(next) => self.entry_for(to).before.push((next, name.to_owned(), made)),
            None => self.add_member(to, name, made),
        }
    }

    pub(super) fn add_item(&mut self, to: &'a DocumentNode, made: NewValue) {
        self.entry_for(to).last.push((None, made));
    }

    /// Returns the text with all insertions.
    ///
    /// # Errors
    /// Returns the position at which nothing can be inserted.
    pub(super) fn apply(&self) -> Result<String, DocumentError> {
        let mut inserted: Vec<(usize, usize, String)> = Vec::new();
        let mut depths = HashMap::new();
        self.depths(&self.document.root, 0, &mut depths);
        for (address, addition) in &self.by_position {
            let depth = depths.get(address).copied().unwrap_or(0);
            for (next, name, made) in &addition.before {
                let (place, text) = self.insert_before(addition.node, next, name, made);
                inserted.push((place, depth, text));
            }
            if !addition.last.is_empty() {
                let (place, text) = self.append(addition)?;
                inserted.push((place, depth, text));
            }
        }
        inserted.sort_by(|(a, inner, _), (b, outer, _)| a.cmp(b).then(outer.cmp(inner)));
        let mut text = String::with_capacity(self.document.text.len() * 2);
        let mut from = 0;
        for (place, _, insertion) in &inserted {
            text.push_str(&self.document.text[from..*place]);
            text.push_str(insertion);
            from = *place;
        }
        text.push_str(&self.document.text[from..]);
        Ok(text)
    }

    fn depths(&self, node: &DocumentNode, level: usize, found: &mut HashMap<usize, usize>) {
        let address = std::ptr::from_ref(node).addr();
        if self.by_position.contains_key(&address) {
            found.insert(address, level);
        }
        let members = node.entries().iter().map(|(_, value)| value);
        members.chain(node.items()).for_each(|child| self.depths(child, level + 1, found));
    }

    fn insert_before(&self, to: &DocumentNode, next: &DocumentNode, name: &str, made: &NewValue) -> (usize, String) {
        let (text, newline, unit) = (&self.document.text, self.newline, &self.unit);
        let indent = indent_before(text, next.start);
        if to.flow {
            let value = made.to_json(indent.map(|indent| (indent, unit.as_str())), newline);
            let gap = indent.map_or(" ".into(), |indent| format!("{newline}{indent}"));
            return (next.start, format!("{}: {value},{gap}", quote_json(name)));
        }
        let column = column(text, next.start);
        let member = made.to_yaml_member(name, column, unit.len(), newline);
        match indent {
            // Comments directly above the next member stay with it.
            Some(indent) => (self.above_comments(next.start, indent), format!("{indent}{member}{newline}")),
            None => (next.start, format!("{member}{newline}{}", " ".repeat(column))),
        }
    }

    /// The start of the line at a position, or of the comments directly above it.
    fn above_comments(&self, at: usize, indent: &str) -> usize {
        let text = &self.document.text;
        let mut start = line_start(text, at);
        while start > 0 {
            let above = line_start(text, start - 1);
            let line = &text[above..start - 1];
            if !line.strip_prefix(indent).is_some_and(|line| line.starts_with('#')) {
                break;
            }
            start = above;
        }
        start
    }

    fn append(&self, addition: &Addition<'_>) -> Result<(usize, String), DocumentError> {
        let (text, node) = (&self.document.text, addition.node);
        let is_list = matches!(node.kind, NodeKind::Sequence(_)) && text[node.start..].starts_with('-');
        if node.flow {
            Ok(self.append_in_flow(addition))
        } else if is_list || !node.entries().is_empty() {
            Ok(self.append_in_block(addition, column(text, node.start)))
        } else {
            let why = "nothing can be added to what is written here; write it as a mapping or a list";
            Err(self.document.error_at(node, why))
        }
    }

    fn append_in_flow(&self, addition: &Addition<'_>) -> (usize, String) {
        let (text, newline, unit, node) = (&self.document.text, self.newline, &self.unit, addition.node);
        let write = |indent: Option<&str>| {
            let lines = indent.map(|indent| (indent, unit.as_str()));
            let one = |(name, made): &(Option<String>, NewValue)| match name {
                Some(name) => format!("{}: {}", quote_json(name), made.to_json(lines, newline)),
                None => made.to_json(lines, newline),
            };
            let glue = indent.map_or(", ".into(), |indent| format!(",{newline}{indent}"));
            addition.last.iter().map(one).collect::<Vec<_>>().join(&glue)
        };
        let (Some(first), Some(last)) = (node.first_child(), node.last_child()) else {
            // An empty collection is written on several lines only if the rest of the document is.
            let lines = self.document.syntax == DocumentSyntax::Json
                && self.document.root.first_child().is_some_and(|key| indent_before(text, key.start).is_some());
            if !lines {
                return (node.start + 1, write(None));
            }
            let line = &text[line_start(text, node.start)..];
            let outer = &line[..line.len() - line.trim_start_matches([' ', '\t']).len()];
            let indent = format!("{outer}{unit}");
            return (node.start + 1, format!("{newline}{indent}{}{newline}{outer}", write(Some(&indent))));
        };
        let indent = indent_before(text, first.start);
        let gap = indent.map_or(" ".into(), |indent| format!("{newline}{indent}"));
        // YAML allows a trailing comma.
        match find_comma(&text[last.end..node.end - 1]) {
            Some(comma) => (last.end + comma + 1, format!("{gap}{}", write(indent))),
            None => (last.end, format!(",{gap}{}", write(indent))),
        }
    }

    fn append_in_block(&self, addition: &Addition<'_>, column: usize) -> (usize, String) {
        let (newline, unit) = (self.newline, self.unit.len());
        let write = |(name, made): &(Option<String>, NewValue)| match name {
            Some(name) => made.to_yaml_member(name, column, unit, newline),
            None => made.to_yaml_item(column, unit, newline),
        };
        let text: String =
            addition.last.iter().map(|one| format!("{newline}{}{}", " ".repeat(column), write(one))).collect();
        (self.end_of_lines(addition.node, column), text)
    }

    /// The end of the last line of a block collection, before its line break.
    fn end_of_lines(&self, node: &DocumentNode, column_of_node: usize) -> usize {
        let text = &self.document.text;
        match node.last_child() {
            Some(last) if !last.flow && last.first_child().is_some() => {
                self.end_of_lines(last, column(text, last.start))
            }
            Some(DocumentNode { start, kind: NodeKind::Scalar { style: ScalarQuoting::Block, .. }, .. }) => {
                self.end_of_block_text(*start, column_of_node)
            }
            _ => end_of_line(text, node.end),
        }
    }

    /// The end of a `|` or `>` text, whose lines are indented deeper than `column`.
    fn end_of_block_text(&self, header: usize, column: usize) -> usize {
        let text = &self.document.text;
        let mut end = end_of_line(text, header);
        // The parser reports the start of the text at its header or at its first line.
        let keeps = text[header..end].split('#').next().is_some_and(|header| header.contains('+'));
        let mut at = end;
        while let Some(start) = next_line(text, at) {
            let line_end = end_of_line(text, start);
            let line = &text[start..line_end];
            let indent = line.bytes().take_while(|byte| *byte == b' ').count();
            let blank = line.trim().is_empty();
            if !blank && indent <= column {
                break;
            }
            if !blank || keeps {
                end = line_end;
            }
            at = line_end;
        }
        end
    }
}

fn indent_unit(document: &OpenapiDocument) -> String {
    let root = &document.root;
    let first = match document.syntax {
        DocumentSyntax::Json => root.first_child(),
        DocumentSyntax::Yaml => {
            let inner = root.entries().iter().find_map(|(_, value)| value.entries().first().map(|(key, _)| key));
            inner.filter(|key| document.line_of(key.start) > 1)
        }
    };
    let found = first.and_then(|key| indent_before(&document.text, key.start));
    found.filter(|unit| !unit.is_empty() && unit.len() <= 8).unwrap_or("  ").to_owned()
}

fn line_start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |found| found + 1)
}

fn column(text: &str, at: usize) -> usize {
    text[line_start(text, at)..at].chars().count()
}

/// The text before a position in its line, if it is only white space.
fn indent_before(text: &str, at: usize) -> Option<&str> {
    let line = &text[line_start(text, at)..at];
    line.bytes().all(|byte| byte == b' ' || byte == b'\t').then_some(line)
}

fn end_of_line(text: &str, at: usize) -> usize {
    let end = text[at..].find('\n').map_or(text.len(), |found| at + found);
    if text[at..end].ends_with('\r') { end - 1 } else { end }
}

fn next_line(text: &str, at: usize) -> Option<usize> {
    text[at..].find('\n').map(|found| at + found + 1).filter(|start| *start < text.len())
}

/// The position of a comma outside of comments.
fn find_comma(between: &str) -> Option<usize> {
    let has_comma = between.lines().any(|line| line.split('#').next().is_some_and(|line| line.contains(',')));
    between.find(',').filter(|_| has_comma)
}
