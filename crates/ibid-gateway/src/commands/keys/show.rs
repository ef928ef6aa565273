//! Entries and changes as people read them.

use std::{io, time::Duration};

use bytes::Bytes;

use super::Failed;
use crate::records::{
    BodyView, Changed, Response, View,
    change::rough,
    view::{date, now_ms, unhex},
};

/// How many bytes of a body that is no text are shown to people.
const SHOWN: usize = 512;

/// One line per entry, under a line of names.
pub(super) fn table(entries: &[View], out: &mut dyn io::Write) -> io::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let names = ["STATE", "AGE", "EXPIRES IN", "ATTEMPT", "STATUS", "ENDPOINT", "TENANT", "USER", "KEY", "ADDRESS"];
    let row = |view: &View| {
        [
            plain(&view.state),
            rough_ms(view.age_ms),
            rough_ms(view.expires_in_ms),
            view.attempt.to_string(),
            view.status.map_or("-".into(), |status| status.to_string()),
            or_dash(&view.endpoint),
            or_dash(&view.tenant),
            or_dash(&view.user),
            or_dash(&view.key),
            plain(&view.address),
        ]
    };
    let rows: Vec<[String; 10]> = [names.map(String::from)].into_iter().chain(entries.iter().map(row)).collect();
    columns(&rows, out)
}

/// Lines whose parts stand under each other.
pub(in crate::commands) fn columns<const N: usize>(rows: &[[String; N]], out: &mut dyn io::Write) -> io::Result<()> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

/// Every field on a line of its own, then the answer.
pub(super) fn entry(view: &View, out: &mut dyn io::Write) -> Result<(), Failed> {
    let mut lines = vec![
        ("address", plain(&view.address)),
        ("state", plain(&view.state)),
        ("key", or_dash(&view.key)),
        ("tenant", or_dash(&view.tenant)),
        ("user", or_dash(&view.user)),
        ("endpoint", or_dash(&view.endpoint)),
        ("request", or_dash(format!("{} {}", view.method, view.path).trim())),
        ("client", or_dash(&view.client)),
        ("user agent", or_dash(&view.user_agent)),
        ("status code", view.status.map_or("-".into(), |status| status.to_string())),
        ("requested at", plain(&view.requested_at)),
        ("completed at", view.completed_at.as_deref().map_or("-".into(), plain)),
        ("duration", view.duration_ms.map_or("-".into(), |took| format!("{took:.1} ms"))),
        ("success", view.success.map_or("-".into(), |success| success.to_string())),
        ("expires at", format!("{} (in {})", plain(&view.expires_at), rough_ms(view.expires_in_ms))),
        ("attempt", view.attempt.to_string()),
        ("fence", view.fence.to_string()),
        ("fingerprint", plain(&view.fingerprint)),
    ];
    if let Some(left) = view.takeover_in_ms {
        lines.push(("takeover", if left == 0 { "now".into() } else { format!("in {}", rough_ms(left)) }));
    }
    for (name, value) in lines {
        writeln!(out, "{name:<13}  {value}")?;
    }
    if let Some(response) = &view.response {
        answer(response, out)?;
    }
    Ok(())
}

/// The bytes of the answer's body.
pub(super) fn body_of(view: &View) -> Result<Bytes, Failed> {
    let not_so = |why: String| Err(Failed::NotSo(why));
    match &view.response {
        None => not_so(format!("it has no answer: it is {}", plain(&view.state))),
        Some(Response::Unreadable { unreadable }) => {
            not_so(format!("its answer cannot be read: {}", plain(unreadable)))
        }
        Some(Response::Whole { body, .. }) => match body {
            None => not_so("its body was not kept: remember_body is off".into()),
            Some(BodyView::Digest { length, .. }) => {
                not_so(format!("its body of {length} bytes was too large to keep; only its digest is there"))
            }
            Some(BodyView::Text { text, .. }) => Ok(Bytes::copy_from_slice(text.as_bytes())),
            Some(BodyView::Hex { hex, .. }) => match unhex(hex) {
                Some(bytes) => Ok(bytes.into()),
                None => not_so("its body did not arrive as hex".into()),
            },
        },
    }
}

fn answer(response: &Response, out: &mut dyn io::Write) -> io::Result<()> {
    let (headers, body, trailers) = match response {
        Response::Whole { headers, body, trailers } => (headers, body, trailers),
        Response::Unreadable { unreadable } => {
            return writeln!(out, "\nthe answer cannot be read: {}", plain(unreadable));
        }
    };
    for (title, headers) in [("response headers", headers), ("response trailers", trailers)] {
        if headers.is_empty() {
            continue;
        }
        writeln!(out, "\n{title}")?;
        for (name, value) in headers {
            writeln!(out, "  {}: {}", plain(name), plain(value))?;
        }
    }
    match body {
        None => writeln!(out, "\nresponse body: not kept"),
        Some(BodyView::Digest { length, sha256 }) => {
            writeln!(out, "\nresponse body: {length} bytes, of which only the SHA-256 was kept\n{}", plain(sha256))
        }
        Some(BodyView::Text { length: 0, .. }) => writeln!(out, "\nresponse body: empty"),
        Some(BodyView::Text { length, text }) => {
            writeln!(out, "\nresponse body: {length} bytes of text\n{}", plain_lines(text))
        }
        Some(BodyView::Hex { length, hex }) => {
            let cut = if hex.len() > 2 * SHOWN { "\n… (--body writes all of it)" } else { "" };
            let shown = plain(hex.get(..2 * SHOWN).unwrap_or(hex));
            writeln!(out, "\nresponse body: {length} bytes, in hex\n{shown}{cut}")
        }
    }
}

/// Says what was there, what is there, and why; and writes the line for the log.
pub(super) fn changed(
    told: &Changed, failed: Option<Failed>, json: bool, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), Failed> {
    // Before anything else: whoever does not take what is printed must not hide what was changed.
    log(told, aside)?;
    let known = told.changed == Some(true) || told.refused.is_some();
    if known && json {
        writeln!(out, "{}", serde_json::to_string_pretty(told).expect("a change has a form"))?;
    } else if known {
        writeln!(out, "before  {}", line(&told.before))?;
        writeln!(out, "after   {}", told.after.as_ref().map_or_else(|| absent(told), line))?;
    }
    failed.map_or(Ok(()), Err)
}

fn log(told: &Changed, aside: &mut dyn io::Write) -> io::Result<()> {
    let (level, changed) = match (told.changed, &told.refused) {
        (Some(true), _) => ("INFO", "true"),
        (Some(false), Some(_)) => ("WARN", "false"),
        (Some(false), None) => ("ERROR", "false"),
        (None, _) => ("ERROR", "unknown"),
    };
    let after = match (&told.after, level) {
        (Some(after), _) => plain(&after.state),
        (None, "ERROR") => "unknown".into(),
        (None, _) => "absent".into(),
    };
    let before = &told.before;
    writeln!(
        aside,
        "{} {level} keys {} changed={changed} address={} fence={} key={:?} endpoint={:?} before={} after={after} \
         reason={:?}",
        date(now_ms()),
        plain(&told.action),
        plain(&before.address),
        before.fence,
        before.key,
        before.endpoint,
        plain(&before.state),
        told.reason,
    )
}

fn absent(told: &Changed) -> String {
    match told.action.as_str() {
        "resolve" => "absent".into(),
        _ => "absent: the next request with its key runs".into(),
    }
}

fn line(view: &View) -> String {
    let status = match (&view.success, view.status) {
        (Some(_), Some(status)) => format!(" {status}"),
        _ => String::new(),
    };
    format!(
        "{}{status}, attempt {}, fence {}, {} old, expires in {}, key {}, {}",
        plain(&view.state),
        view.attempt,
        view.fence,
        rough_ms(view.age_ms),
        rough_ms(view.expires_in_ms),
        plain(&view.key),
        plain(&view.address)
    )
}

/// Text of somebody else, safe to show in a terminal.
pub(in crate::commands) fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() { shown.extend(character.escape_default()) } else { shown.push(character) }
    }
    shown
}

/// The same, of more than one line.
fn plain_lines(text: &str) -> String {
    text.split_inclusive(['\n', '\r', '\t'])
        .map(|part| {
            let end = part.trim_end_matches(['\n', '\r', '\t']).len();
            plain(&part[..end]) + &part[end..]
        })
        .collect()
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".into() } else { plain(text) }
}

fn rough_ms(ms: u64) -> String {
    rough(Duration::from_millis(ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters_of_others() {
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{9b}é"), "a\\u{1b}[2Jb\\nc\\u{9b}é");
        assert_eq!(plain_lines("a\r\n\tb\u{1b}[2J\n"), "a\r\n\tb\\u{1b}[2J\n");
    }
}
