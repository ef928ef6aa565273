//! The CloudEvents attributes of a message, in every spelling that its protocol bindings have.
//!
//! Binary mode keeps them in headers: `ce-id` (HTTP and NATS, percent-encoded), `ce_id` (Kafka), `cloudEvents:id` and
//! `cloudEvents_id` (AMQP). Structured mode keeps them in the content, which its content type says.

use std::{borrow::Cow, str, time::SystemTime};

use super::event::{Delivered, Unidentified};
use crate::{
    fingerprint::{
        Pointer,
        json::{Found, find},
    },
    time::parse_rfc3339,
};

pub(super) struct CloudEvent<'a> {
    pub(super) source: Cow<'a, str>,
    pub(super) id: Cow<'a, str>,
    pub(super) at: Option<SystemTime>,
}

const PREFIXES: [(&str, Coding); 4] = [
    ("ce-", Coding::Percent),
    ("ce_", Coding::Plain),
    ("cloudevents:", Coding::Plain),
    ("cloudevents_", Coding::Plain),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Coding {
    Plain,
    Percent,
}

/// `None` if the message is no CloudEvent.
pub(super) fn cloud_event<'a>(delivered: &Delivered<'a>) -> Result<Option<CloudEvent<'a>>, Unidentified> {
    let in_headers = delivered.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    let in_headers = in_headers.and_then(|(_, value)| str::from_utf8(value).ok());
    let media = delivered.content_type.or(in_headers).unwrap_or_default();
    let media = media.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if media.starts_with("application/cloudevents-batch") {
        return Err(Unidentified::Unreadable("it is a batch: one message must be one event"));
    }
    match media.strip_prefix("application/cloudevents") {
        Some("" | "+json") => structured(delivered.body).map(Some),
        Some(_) => Err(Unidentified::Unreadable("its format is not JSON")),
        None => binary(delivered.headers),
    }
}

fn structured(body: &[u8]) -> Result<CloudEvent<'_>, Unidentified> {
    let member = |pointer: &str, missing: Unidentified| {
        let pointer = Pointer::parse(pointer).expect("written here");
        match find(body, &pointer) {
            Some(Found::String(text)) => Ok(text),
            Some(Found::Absent) => Err(missing),
            Some(_) => Err(Unidentified::Unreadable("its id, source and time must be strings")),
            None => Err(Unidentified::Unreadable("its content is not JSON that has one meaning")),
        }
    };
    let id = member("/id", Unidentified::Half("id"))?;
    let source = member("/source", Unidentified::Half("source"))?;
    let at = match member("/time", Unidentified::Missing) {
        Ok(text) => Some(time(&text)?),
        Err(Unidentified::Missing) => None,
        Err(why) => return Err(why),
    };
    Ok(CloudEvent { source, id, at })
}

fn binary<'a>(headers: &[(&'a str, &'a [u8])]) -> Result<Option<CloudEvent<'a>>, Unidentified> {
    let id = attribute(headers, "id")?;
    let source = attribute(headers, "source")?;
    match (id, source) {
        (None, None) => Ok(None),
        (None, _) => Err(Unidentified::Half("id")),
        (_, None) => Err(Unidentified::Half("source")),
        (Some(id), Some(source)) => {
            let at = attribute(headers, "time")?.map(|text| time(&text)).transpose()?;
            Ok(Some(CloudEvent { source, id, at }))
        }
    }
}

/// One attribute in any spelling. Two values that differ can be read in two ways.
fn attribute<'a>(
    headers: &[(&'a str, &'a [u8])], attribute: &'static str,
) -> Result<Option<Cow<'a, str>>, Unidentified> {
    let mut found: Option<Cow<'a, str>> = None;
    for (name, value) in headers {
        let Some(coding) = spelled(name, attribute) else { continue };
        let not_text = || Unidentified::Unusable { part: attribute, why: "is not UTF-8" };
        let value = str::from_utf8(value).map_err(|_| not_text())?;
        let value = match coding {
            Coding::Percent => percent_decoded(value).ok_or_else(not_text)?,
            Coding::Plain => Cow::Borrowed(value),
        };
        if found.replace(value.clone()).is_some_and(|before| before != value) {
            return Err(Unidentified::Ambiguous(attribute));
        }
    }
    Ok(found)
}

fn spelled(name: &str, attribute: &str) -> Option<Coding> {
    let of = |(prefix, coding): (&str, Coding)| {
        let (head, tail) = name.split_at_checked(prefix.len())?;
        (head.eq_ignore_ascii_case(prefix) && tail.eq_ignore_ascii_case(attribute)).then_some(coding)
    };
    PREFIXES.into_iter().find_map(of)
}

/// What is not an escape stays as it is, as the binding asks of readers.
fn percent_decoded(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(Cow::Borrowed(text));
    }
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, tail @ ..] = rest {
        rest = tail;
        let digit = |byte: &u8| char::from(*byte).to_digit(16);
        match (first, tail) {
            (b'%', [high, low, after @ ..]) if digit(high).is_some() && digit(low).is_some() => {
                bytes.push((digit(high)? * 16 + digit(low)?) as u8);
                rest = after;
            }
            _ => bytes.push(*first),
        }
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

fn time(text: &str) -> Result<SystemTime, Unidentified> {
    parse_rfc3339(text).ok_or(Unidentified::Unusable { part: "time", why: "is no RFC 3339 timestamp" })
}
