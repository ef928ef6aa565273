//! The errors of a configuration, one line each.

use std::path::Path;

/// A setting that prevents the start. `Display` is one line for it and one for each of the others: the origin with line
/// and column, the key, the value found, the values allowed.
///
/// Retrying does not help until the setting is changed.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.lines())]
#[non_exhaustive]
pub struct ConfigError {
    /// The file, the variable or the flag. Empty if nothing sets the value.
    pub origin: String,
    /// The full dotted path, such as `route[2].key.format`; lists count from 1. Empty for the whole file.
    pub key: String,
    /// The value found and the values allowed.
    pub message: Box<str>,
    /// The `match` of the route that contains the key.
    pub route: Option<Box<str>>,
    /// Line and column in the file, from 1.
    pub position: Option<(u32, u32)>,
    /// Further errors of the same configuration.
    pub others: Box<[ConfigError]>,
    #[source]
    pub source: Option<std::io::Error>,
}

impl ConfigError {
    /// An error in the file. [`in_file`](Self::in_file) adds its name.
    pub(super) fn at(key: impl Into<String>, what: impl Into<String>) -> Self {
        Self::new("", key, what)
    }

    /// Joins all errors into one, in the order of the file.
    pub(super) fn join(mut errors: Vec<Self>) -> Option<Self> {
        // Stable: errors without a position stay behind the others, in the order in which they were found.
        errors.sort_by_key(|error| error.position.unwrap_or((u32::MAX, 0)));
        let mut errors = errors.into_iter();
        let first = errors.next()?;
        Some(Self { others: errors.collect(), ..first })
    }

    pub(super) fn in_file(self, path: Option<&Path>) -> Self {
        let others = self.others.into_iter().map(|other| other.in_file(path)).collect();
        let origin = path.map(|path| path.display().to_string()).filter(|_| self.origin.is_empty());
        Self { origin: origin.unwrap_or(self.origin), others, ..self }
    }

    /// Whether the two concern the same table, so that one may be the consequence of the other.
    pub(super) fn may_follow_from(&self, earlier: &Self) -> bool {
        let table =
            |key: &str| key.split_inclusive(['.', ']']).next().unwrap_or_default().trim_end_matches('.').to_owned();
        let (own, earlier) = (table(&self.key), table(&earlier.key));
        own == earlier || own.starts_with("route[") && earlier == "policy"
    }

    fn lines(&self) -> String {
        let lines: Vec<String> = std::iter::once(self).chain(&self.others).map(Self::line).collect();
        lines.join("\n")
    }

    fn line(&self) -> String {
        let position = self.position.map(|(line, column)| format!("{line}:{column}")).unwrap_or_default();
        let origin = [&self.origin, &position].into_iter().filter(|part| !part.is_empty());
        let origin = origin.map(String::as_str).collect::<Vec<_>>().join(":");
        let places = [&origin, &self.key].into_iter().filter(|place| !place.is_empty());
        let places: String = places.map(|place| escape_to_one_line(place) + ": ").collect();
        let route = self.route.as_ref().filter(|_| !self.key.ends_with(".match"));
        let route = route.map(|route| format!(" (match = {route:?})")).unwrap_or_default();
        format!("{places}{}{route}", escape_to_one_line(&self.message))
    }

    pub(crate) fn new(origin: impl Into<String>, key: impl Into<String>, what: impl Into<String>) -> Self {
        let (origin, key, message) = (origin.into(), key.into(), what.into().into_boxed_str());
        Self { origin, key, message, route: None, position: None, others: Box::default(), source: None }
    }
}

/// Joins the text of a file or a library into one line.
fn escape_to_one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Returns `"a" "b"`.
pub(super) fn quote_list<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" ")
}

/// Returns the most similar allowed word, if one is similar enough.
pub(super) fn closest_match<'a>(word: &str, allowed: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = (word.len() / 3).clamp(1, 2);
    let word = word.replace('-', "_").to_lowercase();
    let near = allowed
        .into_iter()
        .map(|allowed| (edit_distance(&word, &allowed.to_lowercase()), allowed))
        .filter(|(edits, _)| *edits <= most);
    near.min_by_key(|(edits, _)| *edits).map(|(_, allowed)| allowed)
}

/// The number of letters to change, insert, delete or swap with their neighbour.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for (i, left) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, right) in b.iter().enumerate() {
            let mut least = (rows[i][j] + usize::from(left != right)).min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *left == b[j - 1] && a[i - 1] == *right {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_origin_key_and_what_was_found() {
        let mut error = ConfigError::new("ibid.toml", "route[2].ttl", "found 5;\n  allowed is a duration");
        assert_eq!(error.to_string(), "ibid.toml: route[2].ttl: found 5; allowed is a duration");
        error.route = Some("POST /a".into());
        assert_eq!(error.to_string(), "ibid.toml: route[2].ttl: found 5; allowed is a duration (match = \"POST /a\")");
        assert_eq!(ConfigError::new("", "", "x").to_string(), "x");
        let second = ConfigError { position: Some((3, 1)), ..ConfigError::new("ibid.toml", "ttl", "found 5") };
        let both = ConfigError::join(vec![error, second]).unwrap().to_string();
        assert_eq!(both.lines().next(), Some("ibid.toml:3:1: ttl: found 5"));
        assert_eq!(both.lines().count(), 2);
    }

    #[test]
    fn close_words_are_found_and_far_ones_are_not() {
        let allowed = ["ttl", "timeout", "on_unknown", "upstream"];
        assert_eq!(closest_match("tll", allowed), Some("ttl"));
        assert_eq!(closest_match("on-unknown", allowed), Some("on_unknown"));
        assert_eq!(closest_match("time_out", allowed), Some("timeout"));
        assert_eq!(closest_match("usptream", allowed), Some("upstream"));
        assert_eq!(closest_match("retries", allowed), None);
    }
}
