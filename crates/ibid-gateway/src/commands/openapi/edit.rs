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
    /// The indentation of one level.
    unit: String,
}

struct Addition<'a> {
    node: &'a DocumentNode,
    /// Members to insert before an existing member.
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

    /// Adds a member before another one, or at the end.
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

    /// Finds the depths of the collections with additions.
    fn depths(&self, node: &DocumentNode, level: usize, found: &mut HashMap<usize, usize>) {
        let address = std::ptr::from_ref(node).addr();
        if self.by_position.contains_key(&address) {
            found.insert(address, level);
        }
        let members = node.entries().iter().map(|(_, value)| value);
        members.chain(node.items()).for_each(|child| self.depths(child, level + 1, found));
    }

    fn indent_before(&self, at: usize) -> Option<String> {
        indent_before(self.document, at)
    }

    /// The indentation of the line at a position.
    fn indent_of_line(&self, at: usize) -> String {
        let start = self.document.text[..at].rfind('\n').map_or(0, |found| found + 1);
        self.document.text[start..].chars().take_while(|space| matches!(space, ' ' | '\t')).collect()
    }

    fn column(&self, at: usize) -> usize {
        let before = &self.document.text[..at];
        before[before.rfind('\n').map_or(0, |found| found + 1)..].chars().count()
    }

    fn insert_before(&self, to: &DocumentNode, next: &DocumentNode, name: &str, made: &NewValue) -> (usize, String) {
        let (newline, unit) = (self.newline, &self.unit);
        if let NodeKind::Map { flow: true, .. } = to.kind {
            return match self.indent_before(next.start) {
                Some(indent) => {
                    let value = made.to_json(Some((&indent, unit)), newline);
                    (next.start, format!("{}: {value},{newline}{indent}", quote_json(name)))
                }
                None => (next.start, format!("{}: {}, ", quote_json(name), made.to_json(None, newline))),
            };
        }
        let column = self.column(next.start);
        let member = made.to_yaml_member(name, column, unit.len(), newline);
        match self.indent_before(next.start) {
            // Comments directly above the next member stay with it.
            Some(indent) => (self.above_comments(next.start, &indent), format!("{indent}{member}{newline}")),
            None => (next.start, format!("{member}{newline}{}", " ".repeat(column))),
        }
    }

    /// The start of the line at a position, or of the comments directly above it.
    fn above_comments(&self, at: usize, indent: &str) -> usize {
        let text = &self.document.text;
        let mut start = text[..at].rfind('\n').map_or(0, |found| found + 1);
        while start > 0 {
            let above = text[..start - 1].rfind('\n').map_or(0, |found| found + 1);
            let line = &text[above..start - 1];
            if !line.strip_prefix(indent).is_some_and(|line| line.starts_with('#')) {
                break;
            }
            start = above;
        }
        start
    }

    /// Appends members or items.
    fn append(&self, addition: &Addition<'_>) -> Result<(usize, String), DocumentError> {
        match &addition.node.kind {
            NodeKind::Map { flow: true, entries } => {
                let last = entries.last().map(|(_, value)| value.end);
                Ok(self.append_in_flow(addition, entries.first().map(|(key, _)| key.start), last))
            }
            NodeKind::Sequence { flow: true, items } => Ok(self.append_in_flow(
                addition,
                items.first().map(|item| item.start),
                items.last().map(|item| item.end),
            )),
            NodeKind::Map { entries, .. } => {
                let (first, _) = entries.first().ok_or_else(|| self.cannot_insert(addition.node))?;
                Ok(self.append_in_block(addition, self.column(first.start)))
            }
            NodeKind::Sequence { .. } => {
                if !self.document.text[addition.node.start..].starts_with('-') {
                    return Err(self.cannot_insert(addition.node));
                }
                Ok(self.append_in_block(addition, self.column(addition.node.start)))
            }
            _ => Err(self.cannot_insert(addition.node)),
        }
    }

    fn cannot_insert(&self, node: &DocumentNode) -> DocumentError {
        self.document.error_at(node, "nothing can be added to what is written here; write it as a mapping or a list")
    }

    fn append_in_flow(&self, addition: &Addition<'_>, first: Option<usize>, last: Option<usize>) -> (usize, String) {
        let (newline, unit) = (self.newline, &self.unit);
        let close = addition.node.end - 1;
        let write = |lines: Option<(&str, &str)>| -> Vec<String> {
            let one = |(name, made): &(Option<String>, NewValue)| match name {
                Some(name) => format!("{}: {}", quote_json(name), made.to_json(lines, newline)),
                None => made.to_json(lines, newline),
            };
            addition.last.iter().map(one).collect()
        };
        let (Some(first), Some(last)) = (first, last) else {
            // An empty collection is written on several lines only if the rest of the document is.
            let root = &self.document.root;
            let lines = self.document.syntax == DocumentSyntax::Json
                && root.entries().first().is_some_and(|(key, _)| self.indent_before(key.start).is_some());
            if !lines {
                return (addition.node.start + 1, write(None).join(", "));
            }
            let outer = self.indent_of_line(addition.node.start);
            let indent = format!("{outer}{unit}");
            let inside = write(Some((&indent, unit))).join(&format!(",{newline}{indent}"));
            return (addition.node.start + 1, format!("{newline}{indent}{inside}{newline}{outer}"));
        };
        // YAML allows a trailing comma.
        let comma = if has_comma(&self.document.text[last..close]) { "" } else { "," };
        match self.indent_before(first) {
            Some(indent) => {
                let inside = write(Some((&indent, unit))).join(&format!(",{newline}{indent}"));
                let place = if comma.is_empty() { after_comma(&self.document.text, last) } else { last };
                (place, format!("{comma}{newline}{indent}{inside}"))
            }
            None => {
                let place = if comma.is_empty() { after_comma(&self.document.text, last) } else { last };
                (place, format!("{comma} {}", write(None).join(", ")))
            }
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
    fn end_of_lines(&self, node: &DocumentNode, column: usize) -> usize {
        let text = &self.document.text;
        let last = match &node.kind {
            NodeKind::Map { entries, .. } => entries.last().map(|(_, value)| value),
            NodeKind::Sequence { items, .. } => items.last(),
            _ => None,
        };
        match last.map(|last| (last, &last.kind)) {
            Some((last, NodeKind::Map { flow: false, entries })) if !entries.is_empty() => {
                self.end_of_lines(last, self.column(last.start))
            }
            Some((last, NodeKind::Sequence { flow: false, items })) if !items.is_empty() => {
                self.end_of_lines(last, self.column(last.start))
            }
            Some((last, NodeKind::Scalar { style: ScalarQuoting::Block, .. })) => {
                self.end_of_block_text(last.start, column)
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

/// The indentation of one level of a document.
fn indent_unit(document: &OpenapiDocument) -> String {
    let root = &document.root;
    let inner = root.entries().iter().find_map(|(_, value)| value.entries().first().map(|(key, _)| key));
    let first = match document.syntax {
        DocumentSyntax::Json => root.entries().first().map(|(key, _)| key),
        DocumentSyntax::Yaml => inner.filter(|key| document.line_of(key.start) > 1),
    };
    let found = first.and_then(|key| indent_before(document, key.start));
    found.filter(|unit| !unit.is_empty() && unit.len() <= 8).unwrap_or_else(|| "  ".into())
}

/// The text before a position in its line, if it is only white space.
fn indent_before(document: &OpenapiDocument, at: usize) -> Option<String> {
    let before = &document.text[..at];
    let line = &before[before.rfind('\n').map_or(0, |found| found + 1)..];
    line.bytes().all(|byte| byte == b' ' || byte == b'\t').then(|| line.to_owned())
}

fn end_of_line(text: &str, at: usize) -> usize {
    let end = text[at..].find('\n').map_or(text.len(), |found| at + found);
    if text[at..end].ends_with('\r') { end - 1 } else { end }
}

fn next_line(text: &str, at: usize) -> Option<usize> {
    text[at..].find('\n').map(|found| at + found + 1).filter(|start| *start < text.len())
}

/// Whether there is a comma outside of comments.
fn has_comma(between: &str) -> bool {
    between.lines().any(|line| line.split('#').next().is_some_and(|line| line.contains(',')))
}

fn after_comma(text: &str, at: usize) -> usize {
    text[at..].find(',').map_or(at, |found| at + found + 1)
}
