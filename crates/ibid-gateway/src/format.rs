//! Text for people: durations, sizes, counts, dates and untrusted text.

use std::{
    borrow::Cow,
    fmt::Display,
    time::{Duration, SystemTime},
};

pub(crate) use ibid_tools::{
    describe::duration as duration_in_words,
    format::{
        MAX_DURATION, format_duration as format_exact_duration, format_size as format_exact_size, parse_duration,
    },
};

/// The last millisecond of the year 9999, the limit of RFC 3339.
const MAX_DATE_MS: u64 = 253_402_300_799_999;
const SIZE_UNITS: [(u64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

/// Such as `1 MiB`, without loss.
pub(crate) fn size_in_words(bytes: u64) -> String {
    let text = format_exact_size(bytes);
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    format!("{digits} {}", if digits == text { "bytes" } else { &text[digits.len()..] })
}

/// In one unit, rounded down: `45s`, `12m`, `3h`, `5d`.
pub(crate) fn format_rough(duration: Duration) -> String {
    match (duration.as_secs(), duration.subsec_millis()) {
        (0, millis) => format!("{millis}ms"),
        (seconds @ ..120, _) => format!("{seconds}s"),
        (seconds @ ..7_200, _) => format!("{}m", seconds / 60),
        (seconds @ ..172_800, _) => format!("{}h", seconds / 3_600),
        (seconds, _) => format!("{}d", seconds / 86_400),
    }
}

pub(crate) fn format_rough_ms(ms: u64) -> String {
    format_rough(Duration::from_millis(ms))
}

/// A measured time, such as `350 µs`, `1.25 ms` or `2.1 s`; a dash for `None`.
pub(crate) fn format_duration(duration: Option<Duration>) -> String {
    let Some(duration) = duration else { return "–".into() };
    match duration.as_secs_f64() {
        micros @ ..0.001 => format!("{:.0} µs", micros * 1e6),
        millis @ ..0.01 => format!("{:.2} ms", millis * 1e3),
        millis @ ..1.0 => format!("{:.0} ms", millis * 1e3),
        seconds @ ..100.0 => format!("{seconds:.1} s"),
        seconds => format!("{seconds:.0} s"),
    }
}

/// Rounded, such as `3.4 MiB`.
pub(crate) fn format_size(bytes: u64) -> String {
    match SIZE_UNITS.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// A whole number, such as `12,345`.
pub(crate) fn format_count(number: impl Display) -> String {
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
pub(crate) fn format_rate(per_second: f64) -> String {
    match per_second {
        0.0 => "0".into(),
        small @ ..10.0 => format!("{small:.2}"),
        medium @ ..100.0 => format!("{medium:.1}"),
        large => format_count(large.round() as u64),
    }
}

/// Such as `3.2 %`; a dash for `None`.
pub(crate) fn format_percent(part: Option<f64>) -> String {
    part.map_or("–".into(), |part| format!("{:.1} %", part * 100.0))
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    as_millis(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

pub(crate) fn as_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// RFC 3339, capped at the year 9999.
pub(crate) fn format_date(ms: u64) -> String {
    ibid::time::rfc3339(ms.min(MAX_DATE_MS))
}

/// `2026-11-15 08:00:00`, from RFC 3339.
pub(crate) fn display_date(date: &str) -> String {
    date.get(..19).unwrap_or(date).replacen('T', " ", 1)
}

/// `2026-11-15 08:00:00.000`, from RFC 3339.
pub(crate) fn display_date_with_millis(date: &str) -> String {
    display_date(date) + date.get(19..23).unwrap_or_default()
}

/// `08:00:00`, from RFC 3339.
pub(crate) fn format_time(date: &str) -> String {
    date.get(11..19).unwrap_or(date).to_owned()
}

/// `08:00:00.250`, from RFC 3339.
pub(crate) fn format_time_with_millis(date: &str) -> String {
    date.get(11..23).unwrap_or(date).to_owned()
}

/// Adds a capital letter and a full stop.
pub(crate) fn to_sentence(text: &str) -> String {
    capitalize(text.trim_end_matches('.')) + "."
}

pub(crate) fn capitalize(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect()
}

/// Such as `a, b and c`.
pub(crate) fn join_with_and<T: ToString>(words: &[T]) -> String {
    let words: Vec<String> = words.iter().map(ToString::to_string).collect();
    match &words[..] {
        [] => "nothing".into(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// Replaces invisible characters, and those that change the text direction, with their code. Untrusted text needs it.
/// It does not escape markup.
pub(crate) fn escape_invisible(text: &str) -> Cow<'_, str> {
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
pub(crate) fn escape_invisible_lines(text: &str) -> String {
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

    #[test]
    fn durations_are_rough() {
        for (seconds, shown) in [(0, "0ms"), (119, "119s"), (120, "2m"), (7_200, "2h"), (172_800, "2d")] {
            assert_eq!(format_rough(Duration::from_secs(seconds)), shown);
        }
        assert_eq!(format_rough(Duration::MAX), format!("{}d", u64::MAX / 86_400));
    }
}
