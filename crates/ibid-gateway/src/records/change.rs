//! What operators change, and what became of it.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::{
    Record, RecordBody,
    store::{Claim, End, ErrorKind, Fence, Held, Outline, Store, StoreError},
};
use ibid_stores::seal::is_sealed;
use serde::{Deserialize, Serialize};

use super::{Entry, View, find, state_name, view};
use crate::config::raw::FRAMING;

/// A body beyond this is no answer of an app.
pub const LARGEST_BODY: u64 = 64 << 20;
/// The shortest that a resolved answer is kept, whatever is left of the entry.
const SHORTEST: Duration = Duration::from_secs(60);

/// What is to become of an entry.
#[derive(Debug, Clone)]
pub enum What {
    /// It never happened.
    Release,
    /// Nothing is to be known of it.
    Forget,
    /// It ended like this.
    Resolve(Answer),
}

/// How an operation ended, as somebody who knows says.
#[derive(Debug, Clone)]
pub struct Answer {
    /// From 200 on.
    pub status: StatusCode,
    /// None that frames a message; see [`Answer::header`].
    pub headers: HeaderMap,
    /// All of it.
    pub body: Bytes,
    /// How long it is remembered from now on; `None`: as long as the entry would have lived in all.
    pub keep: Option<Duration>,
}

/// A change that somebody wants.
#[derive(Debug, Clone)]
pub struct Change {
    /// What to do.
    pub what: What,
    /// Why.
    pub reason: String,
    /// Of the entry that they saw; none: of whatever is there.
    pub fence: Option<Fence>,
}

/// What became of it.
#[derive(Debug)]
pub struct Made {
    /// What was there.
    pub before: Entry,
    /// `None` if nothing is there now, or that is not known.
    pub after: Option<Entry>,
    /// Whether it was made.
    pub outcome: Outcome,
}

/// Whether a change was made.
#[derive(Debug)]
pub enum Outcome {
    /// It was.
    Changed,
    /// Why nothing was.
    Refused(String),
    /// The store failed. Unless it says that it did not, it may have applied the change.
    Failed(StoreError),
}

/// The same for programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Changed {
    /// `release`, `forget` or `resolve`.
    pub action: String,
    /// `None` if nobody knows.
    pub changed: Option<bool>,
    /// As given.
    pub reason: String,
    /// Why nothing was changed.
    pub refused: Option<String>,
    /// What was there.
    pub before: View,
    /// What is there now.
    pub after: Option<View>,
}

impl What {
    /// Its name.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Forget => "forget",
            Self::Resolve(_) => "resolve",
        }
    }
}

impl Answer {
    /// Reads one header of an answer.
    ///
    /// # Errors
    /// What is wrong with it, for whoever wrote it.
    pub fn header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), String> {
        let wrong =
            || format!("{:?} is no header; write one such as 'Location: /payments/7'", format!("{name}: {value}"));
        let parsed: HeaderName = name.trim().parse().map_err(|_| wrong())?;
        if FRAMING.contains(&parsed) {
            return Err(format!("{:?} frames a message, or is never replayed; leave it out", parsed.as_str()));
        }
        Ok((parsed, value.trim().parse().map_err(|_| wrong())?))
    }

    fn end(&self, before: &Entry) -> End {
        let (requested_at_ms, completed_at_ms) = (view::requested_at(&before.listed), view::now_ms());
        let record = Record {
            status: self.status,
            requested_at_ms,
            completed_at_ms,
            headers: self.headers.clone(),
            body: RecordBody::Whole(self.body.clone()),
            trailers: HeaderMap::new(),
            cookies: Vec::new(),
        };
        let life = before.listed.age.saturating_add(before.listed.expires_in);
        // How long it ran is what nobody knows.
        let outline = Outline { status: self.status.as_u16(), requested_at_ms, completed_at_ms, took: Duration::ZERO };
        End::Complete {
            failed: self.status.is_client_error() || self.status.is_server_error(),
            record: record.encode(),
            outline,
            keep: self.keep.unwrap_or(life.max(SHORTEST)),
        }
    }
}

impl Change {
    /// Makes it, if the entry still is what it was taken for.
    pub async fn make(&self, store: &dyn Store, before: Entry) -> Made {
        let (address, seen) = (before.listed.address, self.fence.unwrap_or(before.listed.fence));
        let outcome = match self.refusal(&before, seen) {
            Some(why) => Outcome::Refused(why),
            None => self.apply(store, &before, seen).await,
        };
        // That it was changed must be said, whether or not it can be read again.
        let after = find::at(store, &address).await.ok().flatten();
        Made { before, after, outcome }
    }

    async fn apply(&self, store: &dyn Store, before: &Entry, seen: Fence) -> Outcome {
        let (operators, address) = (store.operators(), &before.listed.address);
        let held = match &self.what {
            What::Forget => operators.forget(address, seen).await,
            What::Release => operators.resolve(address, seen, &End::Release).await,
            What::Resolve(answer) => operators.resolve(address, seen, &answer.end(before)).await,
        };
        match held {
            Ok(Held::Held | Held::Restored) => Outcome::Changed,
            Ok(Held::Lost(_)) => Outcome::Refused("it has changed meanwhile".into()),
            Err(error) => Outcome::Failed(error),
        }
    }

    /// Why the store would not do it, in more words than it has.
    fn refusal(&self, before: &Entry, seen: Fence) -> Option<String> {
        let listed = &before.listed;
        if listed.fence != seen {
            return Some(format!("it has changed meanwhile: its fence is {}, not {seen}", listed.fence));
        }
        // An answer in clear would be in the store, and never be given.
        if matches!(self.what, What::Resolve(_)) && is_sealed(&listed.fingerprint) {
            let what = "it is sealed, and its gateway does not give an answer that is not; name the gateway's --config, \
                        with its [seal]";
            return Some(what.into());
        }
        match (&self.what, &before.claim) {
            (What::Forget, _) | (_, Claim::Unknown(_)) => None,
            (_, Claim::Busy(holder)) => Some(format!(
                "it is running: its gateway was heard of, and its lease ends in {} unless it is extended; wait until \
                 then, or forget it",
                rough(holder.takeover_in)
            )),
            _ => Some(format!(
                "it is {}, so there is nothing left to resolve; forget it if it is to run again",
                state_name(listed.state)
            )),
        }
    }

    /// What became of it, for programs.
    pub fn told(&self, made: &Made) -> Changed {
        let (changed, refused) = match &made.outcome {
            Outcome::Changed => (Some(true), None),
            Outcome::Refused(why) => (Some(false), Some(why.clone())),
            Outcome::Failed(error) => ((error.kind != ErrorKind::Ambiguous).then_some(false), None),
        };
        Changed {
            action: self.what.verb().into(),
            changed,
            reason: self.reason.clone(),
            refused,
            before: View::from(&made.before.listed),
            after: made.after.as_ref().map(|after| View::from(&after.listed)),
        }
    }
}

/// The largest unit that says enough: `45s`, `12m`, `3h`, `5d`.
pub(crate) fn rough(duration: Duration) -> String {
    match (duration.as_secs(), duration.subsec_millis()) {
        (0, millis) => format!("{millis}ms"),
        (seconds @ ..120, _) => format!("{seconds}s"),
        (seconds @ ..7_200, _) => format!("{}m", seconds / 60),
        (seconds @ ..172_800, _) => format!("{}h", seconds / 3_600),
        (seconds, _) => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rough() {
        for (seconds, shown) in [(0, "0ms"), (119, "119s"), (120, "2m"), (7_200, "2h"), (172_800, "2d")] {
            assert_eq!(rough(Duration::from_secs(seconds)), shown);
        }
        assert_eq!(rough(Duration::MAX), format!("{}d", u64::MAX / 86_400));
    }
}
