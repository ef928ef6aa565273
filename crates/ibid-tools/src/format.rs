//! Durations, sizes and lists as they are written in a configuration file and printed.

use std::{fmt::Display, time::Duration};

pub const ALLOWED_DURATION: &str = "a duration such as \"500ms\" \"30s\" \"5m\" \"24h\" \"7d\"";

/// In milliseconds.
const DURATIONS: [(u64, &str); 5] = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms")];
const SIZES: [(u64, &str); 4] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "")];

/// The longest duration of a setting: a hundred years, because stores compute in microseconds.
pub const MAX_DURATION: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Parses `500ms`, `30s`, `5m`, `24h` or `7d`. The result may exceed [`MAX_DURATION`].
pub fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (millis, _) = DURATIONS.into_iter().find(|(_, name)| *name == unit)?;
    Some(Duration::from_millis(number.parse::<u64>().ok()?.saturating_mul(millis)))
}

/// Formats as in a file: `5m`. Days are read, but not written.
pub fn format_duration(duration: Duration) -> String {
    with_unit(duration.as_millis(), &DURATIONS[1..])
}

/// Formats as in a file: `64KiB`.
pub fn format_size(bytes: u64) -> String {
    with_unit(bytes.into(), &SIZES)
}

/// Writes a number in its largest unit that needs no fraction.
fn with_unit(number: u128, units: &[(u64, &str)]) -> String {
    let fits = |(unit, _): &&(u64, &str)| *unit == 1 || number > 0 && number.is_multiple_of(u128::from(*unit));
    let (unit, name) = units.iter().find(fits).expect("one is 1");
    format!("{}{name}", number / u128::from(*unit))
}

/// `a, b`, or `none`.
pub fn format_list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() { "none".into() } else { items.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_read_as_they_are_written() {
        for (millis, text) in [
            (0, "0ms"),
            (500, "500ms"),
            (1500, "1500ms"),
            (30_000, "30s"),
            (90_000, "90s"),
            (300_000, "5m"),
            (86_400_000, "24h"),
        ] {
            assert_eq!(format_duration(Duration::from_millis(millis)), text);
            assert_eq!(parse_duration(text), Some(Duration::from_millis(millis)));
        }
        for (bytes, text) in [(0, "0"), (1000, "1000"), (1024, "1KiB"), (1 << 20, "1MiB"), (3 << 30, "3GiB")] {
            assert_eq!(format_size(bytes), text);
        }
        for wrong in ["", "5", "m", "-5m", "5 m", "5w", "1.5h", "99999999999999999999s"] {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
    }
}
