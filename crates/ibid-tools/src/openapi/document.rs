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
    /// Whether it is a collection in `{}` or `[]`.
    pub(super) flow: bool,
    pub(super) kind: NodeKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NodeKind {
    Scalar { text: String, style: ScalarQuoting },
    Map(Vec<(DocumentNode, DocumentNode)>),
    Sequence(Vec<DocumentNode>),
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
pub struct DocumentError {
    pub line: usize,
    pub why: String,
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

    /// Returns a member as it is written, including members that were merged with `<<`.
    pub(super) fn written_member<'a>(&'a self, node: &'a DocumentNode, name: &str) -> Option<&'a DocumentNode> {
        let node = self.resolve_alias(node);
        node.own_member(name).map(|(_, value)| value).or_else(|| self.merged_member(node, name, 0))
    }

    /// Like [`written_member`](Self::written_member), with the value of an alias.
    pub(super) fn member<'a>(&'a self, node: &'a DocumentNode, name: &str) -> Option<&'a DocumentNode> {
        self.written_member(node, name).map(|value| self.resolve_alias(value))
    }

    fn merged_member<'a>(&'a self, node: &'a DocumentNode, name: &str, depth: usize) -> Option<&'a DocumentNode> {
        let (_, sources) = node.own_member("<<")?;
        let sources = match &sources.kind {
            NodeKind::Sequence(items) => items,
            _ => std::slice::from_ref(sources),
        };
        sources.iter().find_map(|source| {
            let source = self.resolve_alias(source);
            let found = source.own_member(name).map(|(_, value)| value);
            found.or_else(|| if depth < MAX_DEPTH { self.merged_member(source, name, depth + 1) } else { None })
        })
    }

    pub(super) fn text_member<'a>(&'a self, node: &'a DocumentNode, name: &str) -> Option<&'a str> {
        self.member(node, name).and_then(DocumentNode::scalar)
    }

    /// Returns the target of `#/components/responses/Conflict`. `None` for other documents and missing targets.
    pub(super) fn resolve_reference<'a>(&'a self, reference: &str) -> Option<&'a DocumentNode> {
        let path = reference.strip_prefix("#/")?;
        path.split('/').try_fold(&self.root, |node, step| {
            let step = step.replace("~1", "/").replace("~0", "~");
            self.member(node, &step)
        })
    }
}

impl DocumentNode {
    /// Returns a member that is not merged, with its name.
    pub(super) fn own_member(&self, name: &str) -> Option<(&Self, &Self)> {
        self.entries().iter().find(|(key, _)| key.scalar() == Some(name)).map(|(key, value)| (key, value))
    }

    pub(super) fn entries(&self) -> &[(Self, Self)] {
        match &self.kind {
            NodeKind::Map(entries) => entries,
            _ => &[],
        }
    }

    pub(super) fn items(&self) -> &[Self] {
        match &self.kind {
            NodeKind::Sequence(items) => items,
            _ => &[],
        }
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.kind, NodeKind::Map(_))
    }

    pub(super) fn first_child(&self) -> Option<&Self> {
        self.entries().first().map(|(key, _)| key).or(self.items().first())
    }

    pub(super) fn last_child(&self) -> Option<&Self> {
        self.entries().last().map(|(_, value)| value).or(self.items().last())
    }

    pub(super) fn scalar(&self) -> Option<&str> {
        match &self.kind {
            NodeKind::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    pub(super) fn count_references(&self, to: &str) -> usize {
        let entries = self.entries().iter().map(|(key, value)| {
            usize::from(key.scalar() == Some("$ref") && value.scalar() == Some(to)) + value.count_references(to)
        });
        entries.sum::<usize>() + self.items().iter().map(|item| item.count_references(to)).sum::<usize>()
    }
}

/// Whether `new` is `old` with additional members and items, and everything else has the same order and spelling.
pub(super) fn is_only_extended(
    (old_in, old): (&OpenapiDocument, &DocumentNode), (new_in, new): (&OpenapiDocument, &DocumentNode),
) -> bool {
    let extended = |old: &DocumentNode, new: &DocumentNode| is_only_extended((old_in, old), (new_in, new));
    let same_source = || {
        let source = old_in.text[old.start..old.end].trim_end();
        source == new_in.text[new.start..new.end].trim_end()
    };
    old.flow == new.flow
        && match (&old.kind, &new.kind) {
            (NodeKind::Scalar { style: ScalarQuoting::Block, .. }, _) => old.kind == new.kind,
            (NodeKind::Scalar { .. }, _) => old.kind == new.kind && same_source(),
            (NodeKind::Map(old), NodeKind::Map(new)) => {
                is_subsequence(old, new, |old, new| extended(&old.0, &new.0) && extended(&old.1, &new.1))
            }
            (NodeKind::Sequence(old), NodeKind::Sequence(new)) => is_subsequence(old, new, extended),
            (NodeKind::Alias(old), NodeKind::Alias(new)) => old == new,
            _ => false,
        }
}

fn is_subsequence<T>(old: &[T], new: &[T], same: impl Fn(&T, &T) -> bool) -> bool {
    let mut rest = new.iter();
    old.iter().all(|old| rest.any(|new| same(old, new)))
}
