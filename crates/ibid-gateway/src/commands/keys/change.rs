//! What operators change, and the line that says so.

use std::{fs, io, io::Read as _, path::Path, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::{
    Record, RecordBody, rfc3339,
    store::{Claim, End, ErrorKind, Fence, Held, Outline, State, StoreError},
};
use serde_json::{Value, json};

use super::{
    Failed, OutcomeName, ResolveArgs,
    find::{self, Entry, Wanted},
    show,
};
use crate::{commands::outside::Opened, config::raw::FRAMING};

/// A body beyond this is no answer of an app.
const LARGEST_BODY: u64 = 64 << 20;
/// The shortest that a resolved answer is kept, whatever is left of the entry.
const SHORTEST: Duration = Duration::from_secs(60);

/// What is to become of an entry.
#[derive(Debug)]
pub(super) enum What {
    /// It never happened.
    Release,
    /// Nothing is to be known of it.
    Forget,
    /// It ended like this.
    Resolve(Answer),
}

/// How an operation ended, as somebody who knows says.
#[derive(Debug)]
pub(super) struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    keep: Option<Duration>,
}

/// A change that somebody wants.
pub(super) struct Change<'a> {
    pub(super) what: What,
    pub(super) reason: &'a str,
    /// Of the entry that they saw; none: of whatever is there.
    pub(super) fence: Option<Fence>,
}

/// What became of it.
pub(super) struct Made {
    before: Entry,
    /// `None` if nothing is there now, or that is not known.
    after: Option<Entry>,
    outcome: Outcome,
}

enum Outcome {
    Changed,
    /// Why nothing was.
    Refused(String),
    /// The store failed. Unless it says that it did not, it may have applied the change.
    Failed(StoreError),
}

/// Reads how it ended from the flags.
pub(super) fn resolution(args: &ResolveArgs) -> Result<What, Failed> {
    let usage = |what: &str| Err(Failed::Usage(what.into()));
    if args.outcome == OutcomeName::NotExecuted {
        if args.status.is_some() || args.body.is_some() || !args.header.is_empty() || args.keep.is_some() {
            return usage("--as not-executed has no answer; leave out --status, --body, --header and --keep");
        }
        return Ok(What::Release);
    }
    let Some(status) = args.status.and_then(|status| StatusCode::from_u16(status).ok()) else {
        return usage("--as done needs the --status of its answer, such as --status 201");
    };
    let mut headers = HeaderMap::new();
    for written in &args.header {
        let (name, value) = header(written).map_err(Failed::Usage)?;
        headers.append(name, value);
    }
    let body = match &args.body {
        None => Bytes::new(),
        Some(path) => body(path).map_err(|why| Failed::Usage(format!("--body: {}: {why}", path.display())))?,
    };
    if args.keep.is_some_and(|keep| keep.is_zero()) {
        return usage("--keep: it is zero; it must be longer, such as 24h");
    }
    Ok(What::Resolve(Answer { status, headers, body, keep: args.keep }))
}

fn header(written: &str) -> Result<(HeaderName, HeaderValue), String> {
    let wrong = || format!("--header: {written:?} is no header; write one such as 'Location: /payments/7'");
    let (name, value) = written.split_once(':').ok_or_else(wrong)?;
    let name: HeaderName = name.trim().parse().map_err(|_| wrong())?;
    if FRAMING.contains(&name) {
        return Err(format!("--header: {:?} frames a message, or is never replayed; leave it out", name.as_str()));
    }
    Ok((name, value.trim().parse().map_err(|_| wrong())?))
}

fn body(path: &Path) -> io::Result<Bytes> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(LARGEST_BODY + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST_BODY {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is larger than 64 MiB"));
    }
    Ok(bytes.into())
}

impl Change<'_> {
    /// Makes it, if the entry still is what it was taken for.
    pub(super) async fn make(&self, store: &Opened, wanted: &Wanted) -> Result<Made, Failed> {
        let before = wanted.find_one(store).await?;
        let (address, seen) = (before.listed.address, self.fence.unwrap_or(before.listed.fence));
        if let Some(why) = self.refusal(&before, seen).or_else(|| self.lacks_keys(&before, store)) {
            let after = find::at(store, &address).await?;
            return Ok(Made { before, after, outcome: Outcome::Refused(why) });
        }
        let operators = store.store().operators();
        let held = match &self.what {
            What::Forget => operators.forget(&address, seen).await,
            What::Release => operators.resolve(&address, seen, &End::Release).await,
            What::Resolve(answer) => operators.resolve(&address, seen, &answer.end(&before)).await,
        };
        let outcome = match held {
            Ok(Held::Held | Held::Restored) => Outcome::Changed,
            Ok(Held::Lost(_)) => Outcome::Refused("it has changed meanwhile".into()),
            Err(error) => Outcome::Failed(error),
        };
        // That it was changed must be said, whether or not it can be read again.
        let after = find::at(store, &address).await.ok().flatten();
        Ok(Made { before, after, outcome })
    }

    /// Why the store would not do it, in more words than it has.
    fn refusal(&self, before: &Entry, seen: Fence) -> Option<String> {
        let listed = &before.listed;
        if listed.fence != seen {
            return Some(format!("it has changed meanwhile: its fence is {}, not {seen}", listed.fence));
        }
        match (&self.what, &before.claim) {
            (What::Forget, _) | (_, Claim::Unknown(_)) => None,
            (_, Claim::Busy(holder)) => Some(format!(
                "it is running: its gateway was heard of, and its lease ends in {} unless it is extended; wait until \
                 then, or forget it",
                show::rough(holder.takeover_in)
            )),
            _ => Some(format!(
                "it is {}, so there is nothing left to resolve; forget it if it is to run again",
                show::state(listed.state)
            )),
        }
    }

    /// An answer in clear would be in the store, and never be given.
    fn lacks_keys(&self, before: &Entry, store: &Opened) -> Option<String> {
        let is_sealed = ibid_stores::seal::is_sealed(&before.listed.fingerprint);
        (matches!(self.what, What::Resolve(_)) && is_sealed && store.sealed.is_none()).then(|| {
            "it is sealed, and its gateway does not give an answer that is not; name the gateway's --config, with its \
             [seal]"
                .into()
        })
    }

    fn verb(&self) -> &'static str {
        match self.what {
            What::Release => "release",
            What::Forget => "forget",
            What::Resolve(_) => "resolve",
        }
    }
}

impl Answer {
    fn end(&self, before: &Entry) -> End {
        let (requested_at_ms, completed_at_ms) = (show::requested_at(&before.listed), show::now_ms());
        let record = Record {
            status: self.status,
            requested_at_ms,
            completed_at_ms,
            headers: self.headers.clone(),
            body: RecordBody::Whole(self.body.clone()),
            trailers: HeaderMap::new(),
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

impl Made {
    /// Says what was there, what is there, and why; and writes the line for the log.
    pub(super) fn print(
        self, change: &Change<'_>, json: bool, out: &mut dyn io::Write, aside: &mut dyn io::Write,
    ) -> Result<(), Failed> {
        self.log(change, aside)?;
        let refused = match &self.outcome {
            Outcome::Changed => None,
            Outcome::Refused(why) => Some(why),
            Outcome::Failed(_) => return self.end(),
        };
        if json {
            let entry = |entry: &Entry| Value::Object(show::listed_as_json(&entry.listed));
            let object = json!({
                "action": change.verb(),
                "changed": refused.is_none(),
                "reason": change.reason,
                "refused": refused,
                "before": entry(&self.before),
                "after": self.after.as_ref().map(entry),
            });
            writeln!(out, "{object:#}")?;
        } else {
            writeln!(out, "before  {}", line(&self.before))?;
            writeln!(out, "after   {}", self.after.as_ref().map_or_else(|| absent(change), line))?;
        }
        self.end()
    }

    /// Before anything else: whoever does not take what is printed must not hide what was changed.
    fn log(&self, change: &Change<'_>, aside: &mut dyn io::Write) -> io::Result<()> {
        let (level, changed) = match &self.outcome {
            Outcome::Changed => ("INFO", "true"),
            Outcome::Refused(_) => ("WARN", "false"),
            Outcome::Failed(error) if error.kind == ErrorKind::Ambiguous => ("ERROR", "unknown"),
            Outcome::Failed(_) => ("ERROR", "false"),
        };
        let listed = &self.before.listed;
        let after = match (&self.outcome, &self.after) {
            (_, Some(after)) => show::state(after.listed.state),
            (Outcome::Failed(_), None) => "unknown",
            (_, None) => "absent",
        };
        writeln!(
            aside,
            "{} {level} keys {} changed={changed} address={} fence={} key={:?} endpoint={:?} before={} after={after} \
             reason={:?}",
            rfc3339(show::now_ms()),
            change.verb(),
            listed.address,
            listed.fence,
            listed.tags.key(),
            listed.tags.endpoint(),
            show::state(listed.state),
            change.reason,
        )
    }

    fn end(self) -> Result<(), Failed> {
        match self.outcome {
            Outcome::Changed => Ok(()),
            Outcome::Refused(why) => Err(Failed::NotSo(format!("nothing was changed: {why}"))),
            Outcome::Failed(error) => Err(error.into()),
        }
    }
}

fn absent(change: &Change<'_>) -> String {
    match change.what {
        What::Forget | What::Release => "absent: the next request with its key runs".into(),
        What::Resolve(_) => "absent".into(),
    }
}

fn line(entry: &Entry) -> String {
    let listed = &entry.listed;
    let status = match (listed.state, listed.outline) {
        (State::Done | State::Failed, Some(outline)) => format!(" {}", outline.status),
        _ => String::new(),
    };
    format!(
        "{}{status}, attempt {}, fence {}, {} old, expires in {}, key {}, {}",
        show::state(listed.state),
        listed.attempt,
        listed.fence,
        show::rough(listed.age),
        show::rough(listed.expires_in),
        show::plain(listed.tags.key()),
        listed.address
    )
}
