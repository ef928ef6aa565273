//! JSON pointers (RFC 6901).
//!
//! Invariant: a pointer refers to a value *inside* the document, never to the whole document, because a fingerprint
//! that ignores everything would be equal for all requests.
//!
//! Example: `/items/0/sent~1at` is the member `sent/at` of the first element of `items`.

use std::fmt;

use super::text;

/// A position inside a JSON document, such as `/items/0/sent_at`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonPointer {
    source: String,
    pub(super) steps: Vec<PointerStep>,
}

/// One step: to a member of an object or an element of an array, depending on the document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PointerStep {
    /// The canonical text of the member name, with its quotes.
    pub(super) name: Vec<u8>,
    pub(super) index: Option<u32>,
}

/// Why a text is not a usable JSON pointer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{written}` is not a usable JSON pointer: {reason}")]
pub struct JsonPointerError {
    written: String,
    reason: &'static str,
}

impl JsonPointer {
    /// Parses a pointer in the notation of RFC 6901.
    pub fn parse(written: &str) -> Result<JsonPointer, JsonPointerError> {
        let fail = |reason| JsonPointerError { written: written.to_owned(), reason };
        if written.is_empty() {
            return Err(fail("it points at the whole document; name a place inside it"));
        }
        let path = written.strip_prefix('/').ok_or_else(|| fail("it has to start with `/`"))?;
        let steps = path.split('/').map(PointerStep::parse).collect::<Option<_>>();
        let steps = steps.ok_or_else(|| fail("`~` has to be written `~0`, and `/` in a name `~1`"))?;
        Ok(JsonPointer { source: written.to_owned(), steps })
    }

    /// The name of the same field in a form: `card[number]` for `/card/number`.
    pub(crate) fn form_name(&self) -> String {
        let mut names = self.source[1..].split('/').map(|name| name.replace("~1", "/").replace("~0", "~"));
        let first = names.next().unwrap_or_default();
        names.fold(first, |name, step| format!("{name}[{step}]"))
    }

    /// The pointer to the same place inside the value at `base`.
    pub(crate) fn under(&self, base: &str) -> Self {
        Self::parse(&format!("{base}{self}")).expect("both are pointers")
    }
}

impl PointerStep {
    fn parse(step: &str) -> Option<PointerStep> {
        let mut pieces = step.split('~');
        let mut name = pieces.next()?.to_owned();
        for piece in pieces {
            let (escape, rest) = piece.split_at_checked(1)?;
            name.push(match escape {
                "0" => '~',
                "1" => '/',
                _ => return None,
            });
            name.push_str(rest);
        }
        // `00` and `+1` are member names, but not indexes.
        let plain = name == "0" || name.starts_with(|first: char| matches!(first, '1'..='9'));
        let index = if plain { name.parse().ok() } else { None };
        Some(PointerStep { name: text::quoted(&name), index })
    }
}

impl fmt::Display for JsonPointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}
