//! Entries as people and programs read them.

use std::{
    fmt::Write as _,
    io,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use ibid::{
    LabelText, Record, RecordBody, rfc3339,
    store::{Claim, Fingerprint, Listed, State},
};
use serde_json::{Map, Value, json};

use ibid_stores::seal::sealed_with;

use super::{
    Failed,
    find::{Entry, Found},
};

/// How many bytes of a body that is no text are shown to people.
const SHOWN: usize = 512;
/// The last millisecond that has a date with four digits of year.
const LAST_DATE: u64 = 253_402_300_799_999;

/// The state's name.
pub(super) fn state(state: State) -> &'static str {
    match state {
        State::Processing => "processing",
        State::Done => "done",
        State::Failed => "failed",
        State::Unknown => "unknown",
    }
}

/// Milliseconds since the Unix epoch.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    millis(since)
}

/// When it was asked for, by the clock of the gateway that was asked; else from its age.
pub(super) fn requested_at(listed: &Listed) -> u64 {
    match (&listed.outline, LabelText::decode(&listed.label)) {
        (Some(outline), _) if outline.requested_at_ms > 0 => outline.requested_at_ms,
        (_, Some(label)) if label.requested_at_ms > 0 => label.requested_at_ms,
        _ => now_ms().saturating_sub(millis(listed.age)),
    }
}

/// One line per entry, under a line of names.
pub(super) fn table(entries: &[Listed], out: &mut dyn io::Write) -> io::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let names = ["STATE", "AGE", "EXPIRES IN", "ATTEMPT", "STATUS", "ENDPOINT", "TENANT", "USER", "KEY", "ADDRESS"];
    let row = |listed: &Listed| {
        let tags = &listed.tags;
        [
            state(listed.state).into(),
            rough(listed.age),
            rough(listed.expires_in),
            listed.attempt.to_string(),
            listed.outline.map_or("-".into(), |outline| outline.status.to_string()),
            or_dash(tags.endpoint()),
            or_dash(tags.tenant()),
            or_dash(tags.user()),
            or_dash(tags.key()),
            listed.address.to_string(),
        ]
    };
    let rows: Vec<[String; 10]> = [names.map(String::from)].into_iter().chain(entries.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..names.len()).map(width).collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

/// `{"records":[…],"next":…}`.
pub(super) fn page_as_json(page: &Found) -> Value {
    let records: Vec<Value> = page.entries.iter().map(|listed| Value::Object(listed_as_json(listed))).collect();
    json!({ "records": records, "next": page.next.map(|next| next.to_string()) })
}

/// Everything that lists know of an entry.
pub(super) fn listed_as_json(listed: &Listed) -> Map<String, Value> {
    let label = LabelText::decode(&listed.label).unwrap_or_default();
    let expires_at = now_ms().saturating_add(millis(listed.expires_in));
    let object = json!({
        "address": listed.address.to_string(),
        "state": state(listed.state),
        "key": listed.tags.key(),
        "tenant": listed.tags.tenant(),
        "user": listed.tags.user(),
        "endpoint": listed.tags.endpoint(),
        "method": label.method,
        "path": label.path,
        "client": label.peer,
        "user_agent": label.user_agent,
        "status": listed.outline.map(|outline| outline.status),
        "requested_at": date(requested_at(listed)),
        "completed_at": listed.outline.map(|outline| date(outline.completed_at_ms)),
        "duration_ms": listed.outline.map(|outline| outline.took.as_secs_f64() * 1000.0),
        "success": success(listed.state),
        "age_ms": millis(listed.age),
        "expires_at": date(expires_at),
        "expires_in_ms": millis(listed.expires_in),
        "attempt": listed.attempt,
        "fence": listed.fence.0,
        "fingerprint": fingerprint(&listed.fingerprint),
    });
    match object {
        Value::Object(mut members) => {
            if let Some(key) = sealed_with(&listed.label) {
                members.insert("sealed_with".into(), key.into());
            }
            members
        }
        _ => unreachable!("it is written as an object"),
    }
}

/// The same, with the answer, and with when another may take it over.
pub(super) fn entry_as_json(entry: &Entry) -> Value {
    let mut members = listed_as_json(&entry.listed);
    match &entry.claim {
        Claim::Busy(holder) | Claim::Unknown(holder) => {
            members.insert("takeover_in_ms".into(), millis(holder.takeover_in).into());
        }
        Claim::Done(done) => {
            let response = match decoded(&done.record) {
                Err(why) => json!({ "unreadable": why, "sealed_with": sealed_with(&done.record) }),
                Ok(record) => json!({
                    "headers": pairs(&record.headers),
                    "body": body_as_json(&record.body),
                    "trailers": pairs(&record.trailers),
                }),
            };
            members.insert("response".into(), response);
        }
        Claim::Granted(_) | Claim::Spent => {}
    }
    Value::Object(members)
}

/// Every field on a line of its own, then the answer.
pub(super) fn entry(entry: &Entry, out: &mut dyn io::Write) -> Result<(), Failed> {
    let listed = &entry.listed;
    let label = LabelText::decode(&listed.label).unwrap_or_default();
    let outline = listed.outline;
    let expires_at = date(now_ms().saturating_add(millis(listed.expires_in)));
    let mut lines = vec![
        ("address", listed.address.to_string()),
        ("state", state(listed.state).into()),
        ("key", or_dash(listed.tags.key())),
        ("tenant", or_dash(listed.tags.tenant())),
        ("user", or_dash(listed.tags.user())),
        ("endpoint", or_dash(listed.tags.endpoint())),
        ("request", or_dash(format!("{} {}", label.method, label.path).trim())),
        ("client", or_dash(&label.peer)),
        ("user agent", or_dash(&label.user_agent)),
        ("status code", outline.map_or("-".into(), |outline| outline.status.to_string())),
        ("requested at", date(requested_at(listed))),
        ("completed at", outline.map_or("-".into(), |outline| date(outline.completed_at_ms))),
        ("duration", outline.map_or("-".into(), |outline| format!("{:.1} ms", outline.took.as_secs_f64() * 1000.0))),
        ("success", success(listed.state).map_or("-".into(), |success| success.to_string())),
        ("expires at", format!("{expires_at} (in {})", rough(listed.expires_in))),
        ("attempt", listed.attempt.to_string()),
        ("fence", listed.fence.to_string()),
        ("fingerprint", fingerprint(&listed.fingerprint)),
    ];
    lines.extend(sealed_with(&listed.label).map(|key| ("sealed with", key)));
    if let Claim::Busy(holder) | Claim::Unknown(holder) = &entry.claim {
        let left =
            if holder.takeover_in.is_zero() { "now".into() } else { format!("in {}", rough(holder.takeover_in)) };
        lines.push(("takeover", left));
    }
    for (name, value) in lines {
        writeln!(out, "{name:<13}  {value}")?;
    }
    if let Claim::Done(done) = &entry.claim {
        answer(&done.record, out)?;
    }
    Ok(())
}

/// The bytes of the answer's body.
pub(super) fn body_of(entry: &Entry) -> Result<Bytes, Failed> {
    let Claim::Done(done) = &entry.claim else {
        return Err(Failed::NotSo(format!("it has no answer: it is {}", state(entry.listed.state))));
    };
    match decoded(&done.record).map(|record| record.body) {
        Ok(RecordBody::Whole(body)) => Ok(body),
        Ok(RecordBody::Digest { length, .. }) => {
            Err(Failed::NotSo(format!("its body of {length} bytes was too large to keep; only its digest is there")))
        }
        Ok(RecordBody::None) => Err(Failed::NotSo("its body was not kept: remember_body is off".into())),
        Err(why) => Err(Failed::NotSo(format!("its answer cannot be read: {why}"))),
    }
}

/// The record, or why it cannot be read.
fn decoded(record: &Bytes) -> Result<Record, String> {
    let sealed = |key: String| format!("it is sealed with the key {key:?}, and does not open with what is at hand");
    Record::decode(record.clone()).map_err(|why| sealed_with(record).map_or(why.to_string(), sealed))
}

/// How many entries are shown as they are sealed.
pub(super) fn sealed(entries: &[Listed]) -> usize {
    entries.iter().filter(|listed| sealed_with(&listed.label).is_some()).count()
}

fn answer(record: &Bytes, out: &mut dyn io::Write) -> io::Result<()> {
    let record = match decoded(record) {
        Ok(record) => record,
        Err(why) => return writeln!(out, "\nthe answer cannot be read: {why}"),
    };
    for (title, headers) in [("response headers", &record.headers), ("response trailers", &record.trailers)] {
        if headers.is_empty() {
            continue;
        }
        writeln!(out, "\n{title}")?;
        for (name, value) in headers {
            writeln!(out, "  {name}: {}", plain(&String::from_utf8_lossy(value.as_bytes())))?;
        }
    }
    match &record.body {
        RecordBody::None => writeln!(out, "\nresponse body: not kept"),
        RecordBody::Digest { length, sha256 } => {
            writeln!(out, "\nresponse body: {length} bytes, of which only the SHA-256 was kept\n{}", hex(sha256))
        }
        RecordBody::Whole(body) if body.is_empty() => writeln!(out, "\nresponse body: empty"),
        RecordBody::Whole(body) => match text(body) {
            Some(text) => writeln!(out, "\nresponse body: {} bytes of text\n{text}", body.len()),
            None => {
                let cut = if body.len() > SHOWN { "\n… (--body writes all of it)" } else { "" };
                let shown = hex(&body[..body.len().min(SHOWN)]);
                writeln!(out, "\nresponse body: {} bytes, in hex\n{shown}{cut}", body.len())
            }
        },
    }
}

fn body_as_json(body: &RecordBody) -> Value {
    match body {
        RecordBody::None => Value::Null,
        RecordBody::Digest { length, sha256 } => json!({ "length": length, "sha256": hex(sha256) }),
        RecordBody::Whole(body) => match text(body) {
            Some(text) => json!({ "length": body.len(), "text": text }),
            None => json!({ "length": body.len(), "hex": hex(body) }),
        },
    }
}

/// In the order in which they are sent; a name may be there twice.
fn pairs(headers: &http::HeaderMap) -> Value {
    headers.iter().map(|(name, value)| json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())])).collect()
}

/// The bytes as text, if they can be shown as they are.
fn text(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    text.chars().all(|character| matches!(character, '\n' | '\r' | '\t') || !character.is_control()).then_some(text)
}

/// Text of somebody else, safe to show in a terminal.
pub(super) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() { shown.extend(character.escape_default()) } else { shown.push(character) }
    }
    shown
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".into() } else { plain(text) }
}

fn success(state: State) -> Option<bool> {
    match state {
        State::Done => Some(true),
        State::Failed => Some(false),
        State::Processing | State::Unknown => None,
    }
}

/// Version and ends only: it is a digest of what the client sent.
fn fingerprint(fingerprint: &Fingerprint) -> String {
    if *fingerprint == Fingerprint::NONE {
        return "none".into();
    }
    format!("v{} {}", fingerprint.version, ibid::mask(&hex(&fingerprint.digest)))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn date(ms: u64) -> String {
    rfc3339(ms.min(LAST_DATE))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The largest unit that says enough: `45s`, `12m`, `3h`, `5d`.
pub(super) fn rough(duration: Duration) -> String {
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
    fn a_terminal_gets_no_control_characters_of_others() {
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{9b}é"), "a\\u{1b}[2Jb\\nc\\u{9b}é");
        assert_eq!(text(b"a\x1b[2J"), None);
        assert_eq!(text(b"\xff"), None);
        assert_eq!(text("é\r\n\t".as_bytes()), Some("é\r\n\t"));
    }

    #[test]
    fn durations_are_rough_and_dates_have_an_end() {
        for (seconds, shown) in [(0, "0ms"), (119, "119s"), (120, "2m"), (7_200, "2h"), (172_800, "2d")] {
            assert_eq!(rough(Duration::from_secs(seconds)), shown);
        }
        assert_eq!(rough(Duration::MAX), format!("{}d", u64::MAX / 86_400));
        assert_eq!(date(u64::MAX), "9999-12-31T23:59:59.999Z");
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }
}
