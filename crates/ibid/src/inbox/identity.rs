//! Reads the CloudEvents attributes of a message in all spellings of the protocol bindings.
//!
//! Binary mode stores them in headers: `ce-id` (HTTP and NATS, percent-encoded), `ce_id` (Kafka), `cloudEvents:id` and
//! `cloudEvents_id` (AMQP). Structured mode stores them in the content, as indicated by its content type.

use std::{borrow::Cow, str, time::SystemTime};

use percent_encoding::percent_decode_str;

use super::event::{DeliveredMessage, EventIdentityError};
use crate::{
    fingerprint::{
        JsonPointer,
        json::{JsonLookup, find},
    },
    time::parse_rfc3339,
};

pub(super) struct CloudEvent<'a> {
    pub(super) source: Cow<'a, str>,
    pub(super) id: Cow<'a, str>,
    pub(super) time: Option<SystemTime>,
}

const ATTRIBUTE_PREFIXES: [(&str, AttributeEncoding); 4] = [
    ("ce-", AttributeEncoding::Percent),
    ("ce_", AttributeEncoding::Plain),
    ("cloudevents:", AttributeEncoding::Plain),
    ("cloudevents_", AttributeEncoding::Plain),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum AttributeEncoding {
    Plain,
    Percent,
}

/// Returns `None` if the message is not a CloudEvent.
pub(super) fn parse_cloud_event<'a>(
    delivered: &DeliveredMessage<'a>,
) -> Result<Option<CloudEvent<'a>>, EventIdentityError> {
    let in_headers = delivered.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    let in_headers = in_headers.and_then(|(_, value)| str::from_utf8(value).ok());
    let media = delivered.content_type.or(in_headers).unwrap_or_default();
    let media = media.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if media.starts_with("application/cloudevents-batch") {
        return Err(EventIdentityError::Unreadable("it is a batch: one message must be one event"));
    }
    match media.strip_prefix("application/cloudevents") {
        Some("" | "+json") => parse_structured(delivered.body).map(Some),
        Some(_) => Err(EventIdentityError::Unreadable("its format is not JSON")),
        None => parse_binary(delivered.headers),
    }
}

fn parse_structured(body: &[u8]) -> Result<CloudEvent<'_>, EventIdentityError> {
    let member = |pointer: &str, missing: EventIdentityError| {
        let pointer = JsonPointer::parse(pointer).expect("written here");
        match find(body, &pointer) {
            Some(JsonLookup::String(text)) => Ok(text),
            Some(JsonLookup::Absent) => Err(missing),
            Some(_) => Err(EventIdentityError::Unreadable("its id, source and time must be strings")),
            None => Err(EventIdentityError::Unreadable("its content is not JSON that has one meaning")),
        }
    };
    let id = member("/id", EventIdentityError::MissingAttribute("id"))?;
    let source = member("/source", EventIdentityError::MissingAttribute("source"))?;
    let at = match member("/time", EventIdentityError::Missing) {
        Ok(text) => Some(parse_time(&text)?),
        Err(EventIdentityError::Missing) => None,
        Err(why) => return Err(why),
    };
    Ok(CloudEvent { source, id, time: at })
}

fn parse_binary<'a>(headers: &[(&'a str, &'a [u8])]) -> Result<Option<CloudEvent<'a>>, EventIdentityError> {
    let id = attribute(headers, "id")?;
    let source = attribute(headers, "source")?;
    match (id, source) {
        (None, None) => Ok(None),
        (None, _) => Err(EventIdentityError::MissingAttribute("id")),
        (_, None) => Err(EventIdentityError::MissingAttribute("source")),
        (Some(id), Some(source)) => {
            let at = attribute(headers, "time")?.map(|text| parse_time(&text)).transpose()?;
            Ok(Some(CloudEvent { source, id, time: at }))
        }
    }
}

/// Reads one attribute in any spelling. Two different values are an error.
fn attribute<'a>(
    headers: &[(&'a str, &'a [u8])], attribute: &'static str,
) -> Result<Option<Cow<'a, str>>, EventIdentityError> {
    let mut found: Option<Cow<'a, str>> = None;
    for (name, value) in headers {
        let Some(coding) = attribute_encoding(name, attribute) else { continue };
        let not_text = || EventIdentityError::Unusable { part: attribute, why: "is not UTF-8" };
        let value = str::from_utf8(value).map_err(|_| not_text())?;
        let value = match coding {
            // Invalid escapes stay as they are, as the binding requires of readers.
            AttributeEncoding::Percent => percent_decode_str(value).decode_utf8().map_err(|_| not_text())?,
            AttributeEncoding::Plain => Cow::Borrowed(value),
        };
        if found.replace(value.clone()).is_some_and(|before| before != value) {
            return Err(EventIdentityError::Ambiguous(attribute));
        }
    }
    Ok(found)
}

fn attribute_encoding(name: &str, attribute: &str) -> Option<AttributeEncoding> {
    let of = |(prefix, coding): (&str, AttributeEncoding)| {
        let (head, tail) = name.split_at_checked(prefix.len())?;
        (head.eq_ignore_ascii_case(prefix) && tail.eq_ignore_ascii_case(attribute)).then_some(coding)
    };
    ATTRIBUTE_PREFIXES.into_iter().find_map(of)
}

fn parse_time(text: &str) -> Result<SystemTime, EventIdentityError> {
    parse_rfc3339(text).ok_or(EventIdentityError::Unusable { part: "time", why: "is no RFC 3339 timestamp" })
}
