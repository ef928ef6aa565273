//! Formats numbers, times and untrusted text for pages.

use std::{borrow::Cow, time::Duration};

/// Such as `12,345`.
pub(super) fn format_count(number: u64) -> String {
    let digits = number.to_string();
    let mut shown = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

/// Such as `0.4`, `12.5` or `1,240`: about three significant digits.
pub(super) fn format_rate(per_second: f64) -> String {
    match per_second {
        0.0 => "0".into(),
        small @ ..10.0 => format!("{small:.2}"),
        medium @ ..100.0 => format!("{medium:.1}"),
        large => format_count(large.round() as u64),
    }
}

/// Such as `3.2 %`; a dash for `None`.
pub(super) fn format_percent(part: Option<f64>) -> String {
    part.map_or("–".into(), |part| format!("{:.1} %", part * 100.0))
}

/// Such as `350 µs`, `1.25 ms` or `2.1 s`; a dash for `None`.
pub(super) fn format_duration(duration: Option<Duration>) -> String {
    let Some(duration) = duration else { return "–".into() };
    match duration.as_secs_f64() {
        micros @ ..0.001 => format!("{:.0} µs", micros * 1e6),
        millis @ ..0.01 => format!("{:.2} ms", millis * 1e3),
        millis @ ..1.0 => format!("{:.0} ms", millis * 1e3),
        seconds @ ..100.0 => format!("{seconds:.1} s"),
        seconds => format!("{seconds:.0} s"),
    }
}

/// Such as `3.4 MiB`.
pub(super) fn format_size(bytes: u64) -> String {
    let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// `2026-11-15 08:00:00`, from RFC 3339.
pub(super) fn display_date(date: &str) -> String {
    let cut = date.get(..19).unwrap_or(date);
    cut.replacen('T', " ", 1)
}

/// `08:00:00`, from RFC 3339.
pub(super) fn format_time(date: &str) -> String {
    date.get(11..19).unwrap_or(date).to_owned()
}

/// Adds a capital letter and a full stop.
pub(super) fn to_sentence(text: &str) -> String {
    let mut letters = text.trim_end_matches('.').chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).chain(['.']).collect()
}

/// Replaces invisible characters, and those that change the text direction, with their code. Untrusted text needs it.
/// The templates escape markup.
pub(super) fn escape_invisible(text: &str) -> Cow<'_, str> {
    if !text.contains(is_invisible) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_invisible(character) { shown.extend(character.escape_unicode()) } else { shown.push(character) }
    }
    Cow::Owned(shown)
}

/// Like [`escape_invisible`], but keeps line breaks.
pub(super) fn escape_invisible_lines(text: &str) -> String {
    text.lines().map(escape_invisible).collect::<Vec<_>>().join("\n")
}

/// Control characters, direction marks and zero-width characters.
fn is_invisible(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_plain() {
        assert_eq!([0, 999, 1000, 1_234_567].map(format_count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 0.25, 12.34, 1234.5].map(format_rate), ["0", "0.25", "12.3", "1,235"]);
        assert_eq!([None, Some(0.0321)].map(format_percent), ["–", "3.2 %"]);
        let durations = [None, Some(350), Some(1250), Some(250_000), Some(2_100_000), Some(600_000_000)];
        let shown = durations.map(|micros| format_duration(micros.map(Duration::from_micros)));
        assert_eq!(shown, ["–", "350 µs", "1.25 ms", "250 ms", "2.1 s", "600 s"]);
        assert_eq!([0, 1023, 1024, 3_565_158].map(format_size), ["0 bytes", "1023 bytes", "1.0 KiB", "3.4 MiB"]);
    }

    #[test]
    fn times_are_cut_and_never_panic() {
        assert_eq!(display_date("2026-11-15T08:00:00.000Z"), "2026-11-15 08:00:00");
        assert_eq!(format_time("2026-11-15T08:00:00.000Z"), "08:00:00");
        assert_eq!((display_date("é"), format_time("")), ("é".into(), String::new()));
    }

    #[test]
    fn what_cannot_be_seen_is_shown() {
        assert_eq!(escape_invisible("pay-1 é 支払"), "pay-1 é 支払");
        assert_eq!(escape_invisible("a\u{202e}b\0\u{200b}"), "a\\u{202e}b\\u{0}\\u{200b}");
        assert_eq!(escape_invisible_lines("a\tb\n\u{1b}[2J"), "a\\u{9}b\n\\u{1b}[2J");
    }
}
