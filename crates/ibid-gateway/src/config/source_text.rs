//! The text of a configuration file: what its syntax errors are, and where each key stands.

use toml::{
    Spanned, Table,
    de::{DeTable, DeValue},
};

use super::error::ConfigError;

/// Parses the text, and returns one error per line that is not TOML. The table holds all other lines; it is `None` if
/// they cannot be read on their own.
pub(super) fn parse_toml(text: &str) -> (Option<Table>, Vec<ConfigError>) {
    let found = match text.parse::<Table>() {
        Ok(table) => return (Some(table), Vec::new()),
        // The recovering parser does not check all that the strict one does.
        Err(first) => [first].into_iter().chain(DeTable::parse_recoverable(text).1),
    };
    let mut errors: Vec<ConfigError> = Vec::new();
    for why in found {
        let (line, column) = line_and_column(text, why.span().map_or(0, |span| span.start));
        if errors.iter().all(|known| known.position.is_none_or(|(known, _)| known != line)) {
            let written = text.lines().nth(line as usize - 1).unwrap_or_default();
            let (column, message) = missing_quotes(written).unwrap_or_else(|| (column, why.message().to_owned()));
            errors.push(ConfigError { position: Some((line, column)), ..ConfigError::at("", message) });
        }
    }
    let is_wrong = |number: u32| errors.iter().any(|error| error.position.is_some_and(|(line, _)| line == number));
    // Without its header, the lines of a table would be read as part of another one.
    let loses_header = (1..).zip(text.lines()).any(|(number, line)| is_wrong(number) && line.trim().starts_with('['));
    let others: Vec<&str> =
        (1..).zip(text.lines()).map(|(number, line)| if is_wrong(number) { "" } else { line }).collect();
    (others.join("\n").parse().ok().filter(|_| !loses_header), errors)
}

/// Recognises `listen = 127.0.0.1:8080`, and returns the column of the value and a message. The value is not shown: it may
/// be a secret.
fn missing_quotes(line: &str) -> Option<(u32, String)> {
    let (key, rest) = line.split_once('=')?;
    let value = rest.split('#').next().unwrap_or_default().trim();
    let is_bare = !value.is_empty() && !value.contains(['"', '\'', '[', ']', '{', '}', '=', ',']);
    let is_invalid = || format!("value = {value}").parse::<Table>().is_err();
    let column = (line.chars().count() - rest.trim_start().chars().count() + 1) as u32;
    (is_bare && is_invalid()).then(|| (column, format!("the value needs quotes: {} = \"…\"", key.trim())))
}

/// Finds the line and the column of a key such as `route[2].key.format`, or of the innermost table above it that the
/// text has. Lists count from 1, and so do lines and columns.
pub(super) fn find_key(text: &str, key: &str) -> Option<(u32, u32)> {
    let (root, _) = DeTable::parse_recoverable(text);
    let (mut start, mut table): (Option<usize>, Option<&DeTable<'_>>) = (None, Some(root.get_ref()));
    for (name, index) in steps(key) {
        let Some((at, value)) = table.and_then(|table| table.iter().find(|(at, _)| *at.get_ref() == name)) else {
            break;
        };
        let item = match (value.get_ref(), index) {
            (DeValue::Array(items), Some(index)) => items.get(index - 1),
            _ => None,
        };
        start = Some(item.map_or(at.span(), Spanned::span).start);
        table = item.unwrap_or(value).get_ref().as_table();
    }
    start.map(|start| line_and_column(text, start))
}

/// Splits `a."b c"[2].d` into names, each with the number of an item in its list.
fn steps(key: &str) -> Vec<(String, Option<usize>)> {
    let (mut steps, mut rest) = (Vec::new(), key);
    while !rest.is_empty() {
        let end = match rest.strip_prefix('"') {
            Some(quoted) => quoted.find('"').map_or(rest.len(), |end| end + 2),
            None => rest.find(['.', '[']).unwrap_or(rest.len()),
        };
        let (name, mut after) = rest.split_at(end);
        let mut index = None;
        if let Some((number, next)) = after.strip_prefix('[').and_then(|after| after.split_once(']')) {
            (index, after) = (number.parse().ok().filter(|number| *number > 0), next);
        }
        steps.push((name.trim_matches('"').to_owned(), index));
        rest = after.trim_start_matches('.');
    }
    steps
}

fn line_and_column(text: &str, start: usize) -> (u32, u32) {
    let before = text.get(..start.min(text.len())).unwrap_or(text);
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (before.matches('\n').count() as u32 + 1, column as u32)
}
