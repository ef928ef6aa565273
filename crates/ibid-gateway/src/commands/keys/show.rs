//! Formats entries and changes for people.

use std::io;

use bytes::Bytes;
use data_encoding::HEXLOWER_PERMISSIVE;
use ibid_tools::CommandError;

use crate::{
    commands::print::{escape_control, escape_control_lines, print_columns, print_json},
    format::{format_date, format_rough_ms, now_ms},
    records::{AnswerView, BodyView, ChangeReport, RecordView},
};

const MAX_BINARY_SHOWN: usize = 512;

pub(super) fn print_table(entries: &[RecordView], out: &mut dyn io::Write) -> io::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let names = ["STATE", "AGE", "EXPIRES IN", "ATTEMPT", "STATUS", "ENDPOINT", "TENANT", "USER", "KEY", "ADDRESS"];
    let row = |view: &RecordView| {
        [
            escape_control(&view.state),
            format_rough_ms(view.age_ms),
            format_rough_ms(view.expires_in_ms),
            view.attempt.to_string(),
            view.status.map_or("-".into(), |status| status.to_string()),
            or_dash(&view.endpoint),
            or_dash(&view.tenant),
            or_dash(&view.user),
            or_dash(&view.key),
            escape_control(&view.address),
        ]
    };
    let rows: Vec<[String; 10]> = [names.map(String::from)].into_iter().chain(entries.iter().map(row)).collect();
    print_columns(&rows, out)
}

pub(super) fn print_entry(view: &RecordView, out: &mut dyn io::Write) -> io::Result<()> {
    let mut lines = vec![
        ("address", escape_control(&view.address)),
        ("state", escape_control(&view.state)),
        ("key", or_dash(&view.key)),
        ("tenant", or_dash(&view.tenant)),
        ("user", or_dash(&view.user)),
        ("endpoint", or_dash(&view.endpoint)),
        ("request", or_dash(format!("{} {}", view.method, view.path).trim())),
        ("client", or_dash(&view.client)),
        ("user agent", or_dash(&view.user_agent)),
        ("status code", view.status.map_or("-".into(), |status| status.to_string())),
        ("requested at", escape_control(&view.requested_at)),
        ("completed at", view.completed_at.as_deref().map_or("-".into(), escape_control)),
        ("duration", view.duration_ms.map_or("-".into(), |took| format!("{took:.1} ms"))),
        ("success", view.success.map_or("-".into(), |success| success.to_string())),
        ("expires at", format!("{} (in {})", escape_control(&view.expires_at), format_rough_ms(view.expires_in_ms))),
        ("attempt", view.attempt.to_string()),
        ("fence", view.fence.to_string()),
        ("fingerprint", escape_control(&view.fingerprint)),
    ];
    lines.extend(view.sealed_with.as_deref().map(|key| ("sealed with", escape_control(key))));
    if let Some(left) = view.takeover_in_ms {
        lines.push(("takeover", if left == 0 { "now".into() } else { format!("in {}", format_rough_ms(left)) }));
    }
    if let Some(known) = &view.unknown {
        let since = known.since.as_deref().map_or(String::new(), |since| format!(" ({})", escape_control(since)));
        lines.push(("unknown since", escape_control(&known.cause) + &since));
        let at = known.probed_at.as_deref().map(escape_control).unwrap_or_default();
        lines.extend(known.probe.as_deref().map(|told| ("app asked", format!("{} ({at})", escape_control(told)))));
    }
    if let Some(held) = &view.held {
        let first = held.first.as_deref();
        lines.push(("first key", first.map_or("gone".into(), |first| or_dash(&first.key))));
        lines.extend(first.map(|first| ("first address", escape_control(&first.address))));
        lines.extend(first.map(|first| ("first request", first_request(first))));
        let differs = if held.differs.is_empty() { "nothing".into() } else { held.differs.join(", ") };
        lines.push(("differs in", differs));
    }
    for (name, value) in lines {
        writeln!(out, "{name:<13}  {value}")?;
    }
    view.response.as_ref().map_or(Ok(()), |response| print_answer(response, out))
}

fn first_request(first: &RecordView) -> String {
    let state = first.status.map_or_else(|| first.state.clone(), |status| format!("{} {status}", first.state));
    let line = format!("{} {} from {}, {}", first.method, first.path, first.client, first.user_agent);
    escape_control(&format!("{line}; at {}; {state}", first.requested_at))
}

pub(super) fn answer_body(view: &RecordView) -> Result<Bytes, CommandError> {
    let why = match &view.response {
        None => format!("it has no answer: it is {}", escape_control(&view.state)),
        Some(AnswerView::Unreadable { unreadable, .. }) => {
            format!("its answer cannot be read: {}", escape_control(unreadable))
        }
        Some(AnswerView::Whole { body, .. }) => match body {
            None => "its body was not kept: remember_body is off".into(),
            Some(BodyView::Digest { length, .. }) => {
                format!("its body of {length} bytes was too large to keep; only its digest is there")
            }
            Some(BodyView::Text { text, .. }) => return Ok(Bytes::copy_from_slice(text.as_bytes())),
            Some(BodyView::Hex { hex, .. }) => match HEXLOWER_PERMISSIVE.decode(hex.as_bytes()) {
                Ok(bytes) => return Ok(bytes.into()),
                Err(_) => "its body did not arrive as hex".into(),
            },
        },
    };
    Err(CommandError::Conflict(why))
}

fn print_answer(response: &AnswerView, out: &mut dyn io::Write) -> io::Result<()> {
    let (headers, body, trailers) = match response {
        AnswerView::Whole { headers, body, trailers } => (headers, body, trailers),
        AnswerView::Unreadable { unreadable, .. } => {
            return writeln!(out, "\nthe answer cannot be read: {}", escape_control(unreadable));
        }
    };
    for (title, headers) in [("response headers", headers), ("response trailers", trailers)] {
        if !headers.is_empty() {
            writeln!(out, "\n{title}")?;
        }
        for (name, value) in headers {
            writeln!(out, "  {}: {}", escape_control(name), escape_control(value))?;
        }
    }
    match body {
        None => writeln!(out, "\nresponse body: not kept"),
        Some(BodyView::Digest { length, sha256 }) => {
            writeln!(
                out,
                "\nresponse body: {length} bytes, of which only the SHA-256 was kept\n{}",
                escape_control(sha256)
            )
        }
        Some(BodyView::Text { length: 0, .. }) => writeln!(out, "\nresponse body: empty"),
        Some(BodyView::Text { length, text }) => {
            writeln!(out, "\nresponse body: {length} bytes of text\n{}", escape_control_lines(text))
        }
        Some(BodyView::Hex { length, hex }) => {
            let cut = if hex.len() > 2 * MAX_BINARY_SHOWN { "\n… (--body writes all of it)" } else { "" };
            let shown = escape_control(hex.get(..2 * MAX_BINARY_SHOWN).unwrap_or(hex));
            writeln!(out, "\nresponse body: {length} bytes, in hex\n{shown}{cut}")
        }
    }
}

/// Prints the entry before and after a change with the reason, and writes the log line.
pub(super) fn print_change(
    told: &ChangeReport, failed: Option<CommandError>, json: bool, out: &mut dyn io::Write, aside: &mut dyn io::Write,
) -> Result<(), CommandError> {
    // First, so that a reader that closes standard output cannot hide the change.
    write_log_line(told, aside)?;
    let known = told.changed == Some(true) || told.refused.is_some();
    if known && json {
        print_json(told, out)?;
    } else if known {
        writeln!(out, "before  {}", describe_entry(&told.before))?;
        let then = if told.action == "resolve" { "" } else { ": the next request with its key runs" };
        let after = told.after.as_ref().map_or_else(|| format!("absent{then}"), describe_entry);
        writeln!(out, "after   {after}")?;
    }
    failed.map_or(Ok(()), Err)
}

fn write_log_line(told: &ChangeReport, aside: &mut dyn io::Write) -> io::Result<()> {
    let (level, changed) = match (told.changed, &told.refused) {
        (Some(true), _) => ("INFO", "true"),
        (Some(false), Some(_)) => ("WARN", "false"),
        (Some(false), None) => ("ERROR", "false"),
        (None, _) => ("ERROR", "unknown"),
    };
    let after = match (&told.after, level) {
        (Some(after), _) => escape_control(&after.state),
        (None, "ERROR") => "unknown".into(),
        (None, _) => "absent".into(),
    };
    let before = &told.before;
    writeln!(
        aside,
        "{} {level} keys {} changed={changed} address={} fence={} key={:?} endpoint={:?} before={} after={after} \
         reason={:?}",
        format_date(now_ms()),
        escape_control(&told.action),
        escape_control(&before.address),
        before.fence,
        before.key,
        before.endpoint,
        escape_control(&before.state),
        told.reason,
    )
}

fn describe_entry(view: &RecordView) -> String {
    let status = match (&view.success, view.status) {
        (Some(_), Some(status)) => format!(" {status}"),
        _ => String::new(),
    };
    format!(
        "{}{status}, attempt {}, fence {}, {} old, expires in {}, key {}, {}",
        escape_control(&view.state),
        view.attempt,
        view.fence,
        format_rough_ms(view.age_ms),
        format_rough_ms(view.expires_in_ms),
        escape_control(&view.key),
        escape_control(&view.address)
    )
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".into() } else { escape_control(text) }
}
