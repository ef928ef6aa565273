//! A document as it is written: every node knows its place in the text.
//!
//! Nothing is ever written back from this tree. It says where to insert, and everything that is not inserted stays as it
//! is: comments, quotes, numbers, order.

use std::collections::HashMap;

/// Deeper documents are refused.
pub(super) const MAX_DEPTH: usize = 120;

/// A whole document.
pub(super) struct Document {
    pub(super) text: String,
    pub(super) root: Node,
    pub(super) syntax: Syntax,
    anchors: HashMap<usize, Node>,
    /// Where lines end.
    ends: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syntax {
    Json,
    Yaml,
}

/// A value, from `start` to before `end`, in bytes. The end of a block collection is that of its last child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Scalar {
        text: String,
        style: Style,
    },
    Map {
        flow: bool,
        entries: Vec<(Node, Node)>,
    },
    List {
        flow: bool,
        items: Vec<Node>,
    },
    /// A reference to an anchor of YAML.
    Alias(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Quoted,
    /// `|` or `>`.
    Block,
}

/// What is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) line: usize,
    pub(crate) why: String,
}

impl Document {
    pub(super) fn new(text: String, root: Node, syntax: Syntax, anchors: HashMap<usize, Node>) -> Self {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect();
        Self { text, root, syntax, anchors, ends }
    }

    /// The line of a place, from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        self.ends.partition_point(|end| *end < at) + 1
    }

    pub(super) fn wrong(&self, node: &Node, why: impl Into<String>) -> Wrong {
        Wrong { line: self.line(node.start), why: why.into() }
    }

    /// What an alias stands for.
    pub(super) fn seen<'a>(&'a self, node: &'a Node) -> &'a Node {
        match &node.kind {
            Kind::Alias(id) => self.anchors.get(id).unwrap_or(node),
            _ => node,
        }
    }

    /// A member, also one that was merged in with `<<`.
    pub(super) fn member<'a>(&'a self, node: &'a Node, name: &str) -> Option<&'a Node> {
        let node = self.seen(node);
        node.own(name).map(|(_, value)| value).or_else(|| self.merged(node, name, 0))
    }

    fn merged<'a>(&'a self, node: &'a Node, name: &str, depth: usize) -> Option<&'a Node> {
        let (_, sources) = node.own("<<")?;
        let sources = match &sources.kind {
            Kind::List { items, .. } => items.iter().collect(),
            _ => vec![sources],
        };
        sources.into_iter().find_map(|source| {
            let source = self.seen(source);
            let found = source.own(name).map(|(_, value)| value);
            found.or_else(|| if depth < MAX_DEPTH { self.merged(source, name, depth + 1) } else { None })
        })
    }

    /// A member that is text.
    pub(super) fn text_of<'a>(&'a self, node: &'a Node, name: &str) -> Option<&'a str> {
        self.member(node, name).and_then(|value| self.seen(value).scalar())
    }

    /// What `#/components/responses/Conflict` points to. `None` for other documents, and for what is not there.
    pub(super) fn pointed<'a>(&'a self, reference: &str) -> Option<&'a Node> {
        let path = reference.strip_prefix("#/")?;
        path.split('/').try_fold(&self.root, |node, step| {
            let step = step.replace("~1", "/").replace("~0", "~");
            self.member(node, &step).map(|found| self.seen(found))
        })
    }
}

impl Node {
    /// A member that is written here, with its name.
    pub(super) fn own(&self, name: &str) -> Option<(&Self, &Self)> {
        self.entries().iter().find(|(key, _)| key.scalar() == Some(name)).map(|(key, value)| (key, value))
    }

    /// The members of a mapping; none of anything else.
    pub(super) fn entries(&self) -> &[(Self, Self)] {
        match &self.kind {
            Kind::Map { entries, .. } => entries,
            _ => &[],
        }
    }

    /// The items of a list; none of anything else.
    pub(super) fn items(&self) -> &[Self] {
        match &self.kind {
            Kind::List { items, .. } => items,
            _ => &[],
        }
    }

    pub(super) fn scalar(&self) -> Option<&str> {
        match &self.kind {
            Kind::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// How often this reference is made in it.
    pub(super) fn references(&self, to: &str) -> usize {
        let entries = self.entries().iter().map(|(key, value)| {
            usize::from(key.scalar() == Some("$ref") && value.scalar() == Some(to)) + value.references(to)
        });
        entries.sum::<usize>() + self.items().iter().map(|item| item.references(to)).sum::<usize>()
    }
}

/// Whether `new` is `old` with members and items added, everything else in the same order and spelled the same.
pub(super) fn only_added(old: (&Document, &Node), new: (&Document, &Node)) -> bool {
    let (old_in, old_node) = old;
    let (new_in, new_node) = new;
    match (&old_node.kind, &new_node.kind) {
        (Kind::Scalar { text: old_text, style: old_style }, Kind::Scalar { text, style }) => {
            let source = |document: &Document, node: &Node| document.text[node.start..node.end].trim_end().to_owned();
            old_text == text
                && old_style == style
                && (*style == Style::Block || source(old_in, old_node) == source(new_in, new_node))
        }
        (Kind::Alias(old), Kind::Alias(new)) => old == new,
        (Kind::Map { flow: old_flow, entries: old }, Kind::Map { flow, entries }) => {
            let same = |(old_key, old): &(Node, Node), (key, value): &(Node, Node)| {
                only_added((old_in, old_key), (new_in, key)) && only_added((old_in, old), (new_in, value))
            };
            old_flow == flow && is_subsequence(old, entries, same)
        }
        (Kind::List { flow: old_flow, items: old }, Kind::List { flow, items }) => {
            old_flow == flow && is_subsequence(old, items, |old, new| only_added((old_in, old), (new_in, new)))
        }
        _ => false,
    }
}

fn is_subsequence<T>(old: &[T], new: &[T], same: impl Fn(&T, &T) -> bool) -> bool {
    let mut rest = new.iter();
    old.iter().all(|old| rest.any(|new| same(old, new)))
}
