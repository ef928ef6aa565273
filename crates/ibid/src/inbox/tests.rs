use std::time::{Duration, SystemTime};

use super::*;

type HeaderSlice<'a> = &'a [(&'a str, &'a [u8])];

fn delivered<'a>(headers: HeaderSlice<'a>, body: &'a [u8]) -> DeliveredMessage<'a> {
    DeliveredMessage { headers, content_type: None, body, broker: None, published_at: None }
}

fn of<'a>(headers: HeaderSlice<'a>, body: &'a [u8]) -> Result<(String, String), EventIdentityError> {
    let event = InboxEvent::of("c", &delivered(headers, body))?;
    Ok((event.source().to_owned(), event.id().to_owned()))
}

fn found(source: &str, id: &str) -> Result<(String, String), EventIdentityError> {
    Ok((source.to_owned(), id.to_owned()))
}

#[test]
fn every_binding_spells_the_same_attributes() {
    for (source, id) in [
        ("ce-source", "ce-id"),
        ("CE-Source", "Ce-Id"),
        ("ce_source", "ce_id"),
        ("cloudEvents:source", "cloudEvents:id"),
        ("cloudEvents_source", "cloudEvents_id"),
    ] {
        assert_eq!(of(&[(source, b"/orders"), ("x", b"y"), (id, b"17")], b""), found("/orders", "17"), "{id}");
    }
}

#[test]
fn a_structured_event_is_read_from_its_content() {
    let body =
        br#"{"specversion":"1.0","id":"17","source":"/or\u0064ers","time":"2025-11-27T10:30:00Z","data":{"id":"no"}}"#;
    for media in
        ["application/cloudevents+json; charset=utf-8", "Application/CloudEvents+JSON", "application/cloudevents"]
    {
        assert_eq!(
            of(&[("Content-Type", media.as_bytes()), ("ce-id", b"other")], body),
            found("/orders", "17"),
            "{media}"
        );
        let apart = DeliveredMessage { content_type: Some(media), ..delivered(&[], body) };
        let event = InboxEvent::of("c", &apart).unwrap();
        assert_eq!(event.at(), Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_764_239_400_000)));
    }
    let structured = |body| of(&[("content-type", b"application/cloudevents+json")], body);
    assert_eq!(structured(br#"{"id":"1"}"#), Err(EventIdentityError::MissingAttribute("source")));
    assert_eq!(structured(br#"{"source":"1"}"#), Err(EventIdentityError::MissingAttribute("id")));
    for unreadable in [&b"{"[..], b"", br#"{"id":1,"source":"s"}"#, br#"{"id":"1","id":"2","source":"s"}"#] {
        assert!(matches!(structured(unreadable), Err(EventIdentityError::Unreadable(_))), "{unreadable:?}");
    }
    for other in [&b"application/cloudevents-batch+json"[..], b"application/cloudevents+avro"] {
        let read = of(&[("content-type", other)], br#"{"id":"1","source":"s"}"#);
        assert!(matches!(read, Err(EventIdentityError::Unreadable(_))), "{read:?}");
    }
}

#[test]
fn escapes_in_headers_of_http_and_nats_are_resolved_and_nowhere_else() {
    assert_eq!(of(&[("ce-source", b"/caf%C3%A9%20x"), ("ce-id", b"100%")], b""), found("/café x", "100%"));
    assert_eq!(of(&[("ce_source", b"/caf%C3%A9"), ("ce_id", b"1")], b""), found("/caf%C3%A9", "1"));
    let broken = of(&[("ce-source", b"%FF"), ("ce-id", b"1")], b"");
    assert!(matches!(broken, Err(EventIdentityError::Unusable { part: "source", .. })), "{broken:?}");
}

#[test]
fn the_brokers_id_counts_where_there_is_no_cloud_event() {
    let broker = Some(BrokerMessageId { source: "nats:ORDERS", id: "m-1" });
    let published = Some(SystemTime::UNIX_EPOCH);
    let event =
        InboxEvent::of("c", &DeliveredMessage { broker, published_at: published, ..delivered(&[], b"") }).unwrap();
    assert_eq!((event.source(), event.id(), event.at()), ("nats:ORDERS", "m-1", published));
    let cloud: HeaderSlice<'_> = &[("ce-id", b"1"), ("ce-source", b"s"), ("ce-time", b"2025-11-27T10:30:00Z")];
    let event =
        InboxEvent::of("c", &DeliveredMessage { broker, published_at: published, ..delivered(cloud, b"") }).unwrap();
    assert_eq!((event.source(), event.id()), ("s", "1"));
    assert_ne!(event.at(), published);
    // An incomplete CloudEvent is an error; the broker's id is no substitute.
    let half = InboxEvent::of("c", &DeliveredMessage { broker, ..delivered(&[("ce-id", b"1")], b"") });
    assert_eq!(half, Err(EventIdentityError::MissingAttribute("source")));
}

#[test]
fn what_cannot_be_told_apart_has_no_identity() {
    assert_eq!(of(&[("message", b"1")], br#"{"id":"1","source":"s"}"#), Err(EventIdentityError::Missing));
    assert_eq!(
        of(&[("ce-id", b"1"), ("ce_id", b"2"), ("ce-source", b"s")], b""),
        Err(EventIdentityError::Ambiguous("id"))
    );
    assert_eq!(of(&[("ce-id", b"1"), ("ce_id", b"1"), ("ce-source", b"s")], b""), found("s", "1"));
    let long = "x".repeat(MAX_IDENTITY_PART_BYTES + 1);
    for (source, id) in
        [("", "1"), ("s", " "), ("s", "a\0b"), ("s", "a\nb"), (long.as_str(), "1"), ("s", long.as_str())]
    {
        assert!(
            matches!(InboxEvent::new("c", source, id), Err(EventIdentityError::Unusable { .. })),
            "{source:?} {id:?}"
        );
    }
    assert!(InboxEvent::new("", "s", "1").is_err() && InboxEvent::new(&"c".repeat(129), "s", "1").is_err());
    assert!(InboxEvent::new(&"c".repeat(128), &long[1..], &long[1..]).is_ok());
    let bad_time = of(&[("ce-id", b"1"), ("ce-source", b"s"), ("ce-time", b"yesterday")], b"");
    assert!(matches!(bad_time, Err(EventIdentityError::Unusable { part: "time", .. })), "{bad_time:?}");
}

#[test]
fn no_two_events_share_an_address() {
    let at = |consumer, source, id| {
        let event = InboxEvent::new(consumer, source, id).unwrap();
        event.scope().address(event.id(), None, None)
    };
    let one = at("ab", "c", "d");
    for other in [at("a", "bc", "d"), at("ab", "cd", "d"), at("a", "b", "cd"), at("ab", "c", "e")] {
        assert_ne!(one, other);
    }
}
