//! Prints for people: aligned columns, and text of others without control characters.

use std::io;

use serde::Serialize;

pub(super) fn print_columns<const N: usize>(rows: &[[String; N]], out: &mut dyn io::Write) -> io::Result<()> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    rows.iter().try_for_each(|row| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())
    })
}

pub(super) fn print_json(value: &impl Serialize, out: &mut dyn io::Write) -> io::Result<()> {
    writeln!(out, "{}", serde_json::to_string_pretty(value).expect("it has a form"))
}

/// Makes foreign text safe for a terminal.
pub(super) fn escape_control(text: &str) -> String {
    escape_except(text, &[])
}

/// Like [`escape_control`], for several lines.
pub(super) fn escape_control_lines(text: &str) -> String {
    escape_except(text, &['\n', '\r', '\t'])
}

fn escape_except(text: &str, allowed: &[char]) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_control() && !allowed.contains(&character) {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters_of_others() {
        assert_eq!(escape_control("a\u{1b}[2Jb\nc\u{9b}é"), "a\\u{1b}[2Jb\\nc\\u{9b}é");
        assert_eq!(escape_control_lines("a\r\n\tb\u{1b}[2J\n"), "a\r\n\tb\\u{1b}[2J\n");
    }
}
