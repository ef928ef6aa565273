//! A document in which every node has its position in the text.
//!
//! The tree is never written back. It provides positions for insertions; all other text stays as it is: comments,
//! quotes, numbers, order.

use std::collections::HashMap;

/// Maximum depth. Deeper documents are rejected.
pub(super) const MAX_DEPTH: usize = 120;

pub(super) struct OpenapiDocument {
    pub(super) text: String,
    pub(super) root: DocumentNode,
    pub(super) syntax: DocumentSyntax,
    anchors: HashMap<usize, DocumentNode>,
    /// The positions of line ends.
    ends: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DocumentSyntax {
    Json,
    Yaml,
}

/// A value from byte `start` to before byte `end`. A block collection ends with its last child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DocumentNode {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) kind: NodeKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NodeKind {
    Scalar {
        text: String,
        style: ScalarQuoting,
    },
    Map {
        flow: bool,
        entries: Vec<(DocumentNode, DocumentNode)>,
    },
    Sequence {
        flow: bool,
        items: Vec<DocumentNode>,
    },
    /// A reference to a YAML anchor.
    Alias(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScalarQuoting {
    Plain,
    Quoted,
    /// `|` or `>`.
    Block,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DocumentError {
    pub(crate) line: usize,
    pub(crate) why: String,
}

impl OpenapiDocument {
    pub(super) fn new(
        text: String, root: DocumentNode, syntax: DocumentSyntax, anchors: HashMap<usize, DocumentNode>,
    ) -> Self {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect();
        Self { text, root, syntax, anchors, ends }
    }

    /// The line of a position, from 1.
    pub(super) fn line_of(&self, at: usize) -> usize {
        self.ends.partition_point(|end| *end < at) + 1
    }

    pub(super) fn error_at(&self, node: &DocumentNode, why: impl Into<String>) -> DocumentError {
        DocumentError { line: self.line_of(node.start), why: why.into() }
    }

    pub(super) fn resolve_alias<'a>(&'a self, node: &'a DocumentNode) -> &'a DocumentNode {
        match &node.kind {
            NodeKind::Alias(id) => self.anchors.get(id).unwrap_or(node),
            _ => node,
        }
    }

    /// Returns a member, including members that were merged with `<<`.
    pub(super) fn member<'a>(&'a self, node: &'a DocumentNode, name: &str) -> Option<&'a DocumentNode> {
        let node = self.resolve_alias(node);
        node.own_member(name).map(|(_, value)| value).or_else(|| self.merged_member(node, name, 0))
    }

    fn merged_member<'a>(&'a self, node: &'a DocumentNode, name: &str, depth: usize) -> Option<&'a DocumentNode> {
        let (_, sources) = node.own_member("<<")?;
        let sources = match &sources.kind {
            NodeKind::Sequence { items, .. } => items.iter().collect(),
            _ => vec![sources],
        };
        sources.into_iter().find_map(|source| {
            let source = self.resolve_alias(source);
            let found = source.own_member(name).map(|(_, value)| value);
            found.or_else(|| if depth < MAX_DEPTH { self.merged_member(source, name, depth + 1) } else { None })
        })
    }

    /// Returns a scalar member.
    pub(super) fn text_member<'a>(&'a self, node: &'a DocumentNode, name: &str) -> Option<&'a str> {
        self.member(node, name).and_then(|value| self.resolve_alias(value).scalar())
    }

    /// Returns the target of `#/components/responses/Conflict`. `None` for other documents and missing targets.
    pub(super) fn resolve_reference<'a>(&'a self, reference: &str) -> Option<&'a DocumentNode> {
        let path = reference.strip_prefix("#/")?;
        path.split('/').try_fold(&self.root, |node, step| {
            let step = step.replace("~1", "/").replace("~0", "~");
            self.member(node, &step).map(|found| self.resolve_alias(found))
        })
    }
}

impl DocumentNode {
    /// Returns a member that is not merged, with its name.
    pub(super) fn own_member(&self, name: &str) -> Option<(&Self, &Self)> {
        self.entries().iter().find(|(key, _)| key.scalar() == Some(name)).map(|(key, value)| (key, value))
    }

    /// The members of a mapping; empty for other nodes.
    pub(super) fn entries(&self) -> &[(Self, Self)] {
        match &self.kind {
            NodeKind::Map { entries, .. } => entries,
            _ => &[],
        }
    }

    /// The items of a list; empty for other nodes.
    pub(super) fn items(&self) -> &[Self] {
        match &self.kind {
            NodeKind::Sequence { items, .. } => items,
            _ => &[],
        }
    }

    pub(super) fn scalar(&self) -> Option<&str> {
        match &self.kind {
            NodeKind::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// How often the node contains this reference.
    pub(super) fn count_references(&self, to: &str) -> usize {
        let entries = self.entries().iter().map(|(key, value)| {
            usize::from(key.scalar() == Some("$ref") && value.scalar() == Some(to)) + value.count_references(to)
        });
        entries.sum::<usize>() + self.items().iter().map(|item| item.count_references(to)).sum::<usize>()
    }
}

/// Whether `new` is `old` with additional members and items, and everything else has the same order and spelling.
pub(super) fn is_only_extended(old: (&OpenapiDocument, &DocumentNode), new: (&OpenapiDocument, &DocumentNode)) -> bool {
    let (old_in, old_node) = old;
    let (new_in, new_node) = new;
    match (&old_node.kind, &new_node.kind) {
        (NodeKind::Scalar { text: old_text, style: old_style }, NodeKind::Scalar { text, style }) => {
            let source = |document: &OpenapiDocument, node: &DocumentNode| {
                document.text[node.start..node.end].trim_end().to_owned()
            };
            old_text == text
                && old_style == style
                && (*style == ScalarQuoting::Block || source(old_in, old_node) == source(new_in, new_node))
        }
        (NodeKind::Alias(old), NodeKind::Alias(new)) => old == new,
        (NodeKind::Map { flow: old_flow, entries: old }, NodeKind::Map { flow, entries }) => {
            let same = |(old_key, old): &(DocumentNode, DocumentNode), (key, value): &(DocumentNode, DocumentNode)| {
                is_only_extended((old_in, old_key), (new_in, key)) && is_only_extended((old_in, old), (new_in, value))
            };
            old_flow == flow && is_subsequence(old, entries, same)
        }
        (NodeKind::Sequence { flow: old_flow, items: old }, NodeKind::Sequence { flow, items }) => {
            old_flow == flow && is_subsequence(old, items, |old, new| is_only_extended((old_in, old), (new_in, new)))
        }
        _ => false,
    }
}

fn is_subsequence<T>(old: &[T], new: &[T], same: impl Fn(&T, &T) -> bool) -> bool {
    let mut rest = new.iter();
    old.iter().all(|old| rest.any(|new| same(old, new)))
}
