//! Parses and formats `grpc-timeout`: how long the client of a call waits.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tokio::time::Instant;

/// The maximum timeout. Adding it to any instant does not overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The deadline of a call that has just arrived. `None` if the header is missing or invalid; servers ignore it then,
/// too.
pub(crate) fn deadline(headers: &HeaderMap) -> Option<Instant> {
    let value = headers.get("grpc-timeout")?.to_str().ok()?;
    Some(Instant::now() + parse_timeout(value)?.min(MAX_TIMEOUT))
}

/// Parses 1 to 8 digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let at = text.len().checked_sub(1)?;
    let (digits, unit) = (text.get(..at)?, text.get(at..)?);
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Formats a timeout in the finest unit that fits, rounded up.
pub(super) fn format_timeout(timeout: Duration) -> HeaderValue {
    const MOST: u128 = 99_999_999;
    let seconds = u128::from(timeout.as_secs()) + u128::from(timeout.subsec_nanos() > 0);
    let units = [
        (timeout.as_nanos().div_ceil(1_000_000), 'm'),
        (seconds, 'S'),
        (seconds.div_ceil(60), 'M'),
        (seconds.div_ceil(3600).min(MOST), 'H'),
    ];
    let (number, unit) = units.into_iter().find(|(number, _)| *number <= MOST).expect("the last is cut to fit");
    HeaderValue::from_str(&format!("{number}{unit}")).expect("digits and a letter")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_and_written_in_every_unit() {
        for (text, duration) in [
            ("1H", Duration::from_secs(3600)),
            ("2M", Duration::from_secs(120)),
            ("99999999S", Duration::from_secs(99_999_999)),
            ("100m", Duration::from_millis(100)),
            ("7u", Duration::from_micros(7)),
            ("0n", Duration::ZERO),
        ] {
            assert_eq!(parse_timeout(text), Some(duration), "{text}");
        }
        for wrong in ["", "1", "m", "123456789m", "-1m", "1.5S", "1x", "+1S", "1 S", "1é"] {
            assert_eq!(parse_timeout(wrong), None, "{wrong}");
        }
        for (duration, text) in [
            (Duration::from_secs(60), "60000m"),
            (Duration::from_micros(1), "1m"),
            (Duration::from_secs(99_999), "99999000m"),
            (Duration::from_secs(100_000), "100000S"),
            (Duration::from_secs(100_000_000), "1666667M"),
            (Duration::from_secs(6_000_000_000), "1666667H"),
            (Duration::MAX, "99999999H"),
        ] {
            assert_eq!(format_timeout(duration), text, "{duration:?}");
        }
    }

    #[tokio::test]
    async fn a_timeout_of_ages_is_no_overflow() {
        let mut headers = HeaderMap::new();
        assert_eq!(deadline(&headers), None);
        headers.insert("grpc-timeout", HeaderValue::from_static("99999999H"));
        assert!(deadline(&headers).unwrap() > Instant::now());
    }
}
