//! Wall-clock time for people: RFC 3339 in UTC with milliseconds. Readings of the clock that are used twice, and
//! timers that most work does not need.

use std::{
    cell::Cell,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};

thread_local!(static CALLED_AT: Cell<Option<Instant>> = const { Cell::new(None) });

/// Calls a store that runs in this process, which takes `now` for the current time: one reading of the clock serves the
/// engine and the store.
pub(crate) fn call_at<R>(now: Instant, call: impl FnOnce() -> R) -> R {
    /// Restores the outer time, even if the call panics.
    struct RestoreTime(Option<Instant>);
    impl Drop for RestoreTime {
        fn drop(&mut self) {
            CALLED_AT.set(self.0);
        }
    }
    let _restore = RestoreTime(CALLED_AT.replace(Some(now)));
    call()
}

/// The time of the current [`call_at`], or the current time.
pub(crate) fn called_at() -> Instant {
    CALLED_AT.get().unwrap_or_else(Instant::now)
}

/// Returns what `work` returns, or `None` at the deadline.
pub(crate) fn until<F: Future>(deadline: Instant, work: Pin<&mut F>) -> impl Future<Output = Option<F::Output>> {
    Until { work, deadline, timer: None }
}

pin_project! {
    /// Like [`tokio::time::Timeout`]. The timer is made when the work is first pending: work that is ready needs none.
    struct Until<'a, F> {
        work: Pin<&'a mut F>,
        deadline: Instant,
        #[pin]
        timer: Option<Sleep>,
    }
}

impl<F: Future> Future for Until<'_, F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Poll::Ready(done) = this.work.as_mut().poll(cx) {
            return Poll::Ready(Some(done));
        }
        if this.timer.is_none() {
            this.timer.set(Some(sleep_until(*this.deadline)));
        }
        this.timer.as_pin_mut().expect("just set").poll(cx).map(|()| None)
    }
}

/// The instant after this duration; a very distant one if that would overflow.
pub(crate) fn from_now(after: Duration) -> Instant {
    const DISTANT: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(after).unwrap_or_else(|| now + DISTANT)
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Formats milliseconds since the Unix epoch: `2025-11-27T10:30:00.000Z`.
pub fn rfc3339(ms: u64) -> String {
    let (days, rest) = (ms / 86_400_000, ms % 86_400_000);
    // Days since 0000-03-01: years then end with the leap day, and months have regular lengths.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute) = (rest / 3_600_000, rest / 60_000 % 60);
    let (second, milli) = (rest / 1_000 % 60, rest % 1_000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// Parses `2025-11-27T10:30:00Z`, with any fraction of a second and any offset.
pub(crate) fn parse_rfc3339(text: &str) -> Option<SystemTime> {
    let number = |digits: &[u8]| {
        let digit = |byte: u8| byte.is_ascii_digit().then(|| i64::from(byte - b'0'));
        digits.iter().try_fold(0, |sum, &byte| Some(sum * 10 + digit(byte)?))
    };
    let (head, rest) = text.as_bytes().split_at_checked(19)?;
    let [_, _, _, _, b'-', _, _, b'-', _, _, b'T' | b't' | b' ', _, _, b':', _, _, b':', _, _] = head else {
        return None;
    };
    let (year, month, day) = (number(&head[..4])?, number(&head[5..7])?, number(&head[8..10])?);
    let (hour, minute, second) = (number(&head[11..13])?, number(&head[14..16])?, number(&head[17..])?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let length = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    // A leap second counts as the next second.
    if !(1..=length).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let (fraction, zone) = match rest {
        [b'.', rest @ ..] => rest.split_at(rest.iter().take_while(|byte| byte.is_ascii_digit()).count()),
        zone => (&b"0"[..], zone),
    };
    let first_nine: Vec<_> = fraction.iter().copied().chain([b'0'; 9]).take(9).collect();
    let nanos = number(&first_nine).filter(|_| !fraction.is_empty())?;
    let offset = match zone {
        b"Z" | b"z" => 0,
        [sign @ (b'+' | b'-'), hours @ .., b':', _, _] if hours.len() == 2 => {
            let (hours, minutes) = (number(hours)?, number(&zone[4..])?);
            if hours > 23 || minutes > 59 {
                return None;
            }
            (hours * 3600 + minutes * 60) * if *sign == b'-' { -1 } else { 1 }
        }
        _ => return None,
    };
    // Days since 0000-03-01, as above.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + (153 * month + 2) / 5 + day - 1;
    let seconds = (days - 719_468) * 86_400 + hour * 3600 + minute * 60 + second - offset;
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let at =
        if seconds < 0 { SystemTime::UNIX_EPOCH.checked_sub(whole) } else { SystemTime::UNIX_EPOCH.checked_add(whole) };
    at?.checked_add(Duration::from_nanos(nanos as u64))
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        pin::pin,
    };

    use super::*;

    #[test]
    fn a_call_has_the_time_that_its_caller_read() {
        let (outer, inner) = (Instant::now(), Instant::now() + Duration::from_secs(7));
        let seen = call_at(outer, || (called_at(), call_at(inner, called_at), called_at()));
        assert_eq!(seen, (outer, inner, outer));
        assert!(called_at() >= outer && called_at() < inner, "outside of a call it is the current time");
    }

    #[tokio::test(start_paused = true)]
    async fn work_is_awaited_until_the_deadline() {
        let deadline = Instant::now() + Duration::from_secs(1);
        assert_eq!(until(deadline, pin!(ready(7))).await, Some(7));
        assert_eq!(until(deadline, pin!(pending::<()>())).await, None);
        assert_eq!(Instant::now(), deadline);
        assert_eq!(until(deadline, pin!(ready(7))).await, Some(7), "what is ready counts, however late");
    }

    #[test]
    fn what_is_written_can_be_read() {
        let ms = |text: &str| {
            let at = parse_rfc3339(text)?;
            Some(at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64)
        };
        for at in [0, 1_764_239_400_000, 951_782_400_123, 4_107_542_399_999, 68_169_599_000] {
            assert_eq!(ms(&rfc3339(at)), Some(at));
        }
        assert_eq!(ms("2025-11-27T12:30:00.5+02:00"), Some(1_764_239_400_500));
        assert_eq!(ms("2025-11-27t05:00:00.123456789-05:30"), Some(1_764_239_400_123));
        assert_eq!(ms("2016-12-31T23:59:60Z"), Some(1_483_228_800_000));
        let before = parse_rfc3339("1969-12-31T23:59:59.25Z").unwrap();
        assert_eq!(SystemTime::UNIX_EPOCH.duration_since(before).unwrap(), Duration::from_millis(750));
        for wrong in [
            "",
            "2025-11-27",
            "2025-11-27T10:30:00",
            "2025-13-27T10:30:00Z",
            "2025-02-29T10:30:00Z",
            "2025-11-27T24:30:00Z",
            "2025-11-27T10:30:00.Z",
            "2025-11-27T10:30:00+2:00",
            "2025-11-27T10:30:00Zé",
            "+025-11-27T10:30:00Z",
            "2025-11-27T10:30:0é",
        ] {
            assert_eq!(ms(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn known_instants() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(1_764_239_400_000), "2025-11-27T10:30:00.000Z");
        assert_eq!(rfc3339(951_782_400_123), "2000-02-29T00:00:00.123Z");
        assert_eq!(rfc3339(4_107_542_399_999), "2100-02-28T23:59:59.999Z");
    }
}
