use std::time::{Duration, SystemTime};

use super::*;

type Headers<'a> = &'a [(&'a str, &'a [u8])];

fn delivered<'a>(headers: Headers<'a>, body: &'a [u8]) -> Delivered<'a> {
    Delivered { headers, content_type: None, body, broker: None, published: None }
}

fn of<'a>(headers: Headers<'a>, body: &'a [u8]) -> Result<(String, String), Unidentified> {
    let event = Event::of("c", &delivered(headers, body))?;
    Ok((event.source().to_owned(), event.id().to_owned()))
}

fn found(source: &str, id: &str) -> Result<(String, String), Unidentified> {
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
        let apart = Delivered { content_type: Some(media), ..delivered(&[], body) };
        let event = Event::of("c", &apart).unwrap();
        assert_eq!(event.at(), Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_764_239_400_000)));
    }
    let structured = |body| of(&[("content-type", b"application/cloudevents+json")], body);
    assert_eq!(structured(br#"{"id":"1"}"#), Err(Unidentified::Half("source")));
    assert_eq!(structured(br#"{"source":"1"}"#), Err(Unidentified::Half("id")));
    for unreadable in [&b"{"[..], b"", br#"{"id":1,"source":"s"}"#, br#"{"id":"1","id":"2","source":"s"}"#] {
        assert!(matches!(structured(unreadable), Err(Unidentified::Unreadable(_))), "{unreadable:?}");
    }
    for other in [&b"application/cloudevents-batch+json"[..], b"application/cloudevents+avro"] {
        let read = of(&[("content-type", other)], br#"{"id":"1","source":"s"}"#);
        assert!(matches!(read, Err(Unidentified::Unreadable(_))), "{read:?}");
    }
}

#[test]
fn escapes_in_headers_of_http_and_nats_are_resolved_and_nowhere_else() {
    assert_eq!(of(&[("ce-source", b"/caf%C3%A9%20x"), ("ce-id", b"100%")], b""), found("/café x", "100%"));
    assert_eq!(of(&[("ce_source", b"/caf%C3%A9"), ("ce_id", b"1")], b""), found("/caf%C3%A9", "1"));
    let broken = of(&[("ce-source", b"%FF"), ("ce-id", b"1")], b"");
    assert!(matches!(broken, Err(Unidentified::Unusable { part: "source", .. })), "{broken:?}");
}

#[test]
fn the_brokers_id_counts_where_there_is_no_cloud_event() {
    let broker = Some(BrokerId { source: "nats:ORDERS", id: "m-1" });
    let published = Some(SystemTime::UNIX_EPOCH);
    let event = Event::of("c", &Delivered { broker, published, ..delivered(&[], b"") }).unwrap();
    assert_eq!((event.source(), event.id(), event.at()), ("nats:ORDERS", "m-1", published));
    let cloud: Headers<'_> = &[("ce-id", b"1"), ("ce-source", b"s"), ("ce-time", b"2025-11-27T10:30:00Z")];
    let event = Event::of("c", &Delivered { broker, published, ..delivered(cloud, b"") }).unwrap();
    assert_eq!((event.source(), event.id()), ("s", "1"));
    assert_ne!(event.at(), published);
    // Half a CloudEvent is a broken one, not a reason to take another name.
    let half = Event::of("c", &Delivered { broker, ..delivered(&[("ce-id", b"1")], b"") });
    assert_eq!(half, Err(Unidentified::Half("source")));
}

#[test]
fn what_cannot_be_told_apart_has_no_identity() {
    assert_eq!(of(&[("message", b"1")], br#"{"id":"1","source":"s"}"#), Err(Unidentified::Missing));
    assert_eq!(of(&[("ce-id", b"1"), ("ce_id", b"2"), ("ce-source", b"s")], b""), Err(Unidentified::Ambiguous("id")));
    assert_eq!(of(&[("ce-id", b"1"), ("ce_id", b"1"), ("ce-source", b"s")], b""), found("s", "1"));
    let long = "x".repeat(MAX_PART + 1);
    for (source, id) in
        [("", "1"), ("s", " "), ("s", "a\0b"), ("s", "a\nb"), (long.as_str(), "1"), ("s", long.as_str())]
    {
        assert!(matches!(Event::new("c", source, id), Err(Unidentified::Unusable { .. })), "{source:?} {id:?}");
    }
    assert!(Event::new("", "s", "1").is_err() && Event::new(&"c".repeat(129), "s", "1").is_err());
    assert!(Event::new(&"c".repeat(128), &long[1..], &long[1..]).is_ok());
    let bad_time = of(&[("ce-id", b"1"), ("ce-source", b"s"), ("ce-time", b"yesterday")], b"");
    assert!(matches!(bad_time, Err(Unidentified::Unusable { part: "time", .. })), "{bad_time:?}");
}

#[test]
fn no_two_events_share_an_address() {
    let at = |consumer, source, id| {
        let event = Event::new(consumer, source, id).unwrap();
        event.scope().address(event.id(), None, None)
    };
    let one = at("ab", "c", "d");
    for other in [at("a", "bc", "d"), at("ab", "cd", "d"), at("a", "b", "cd"), at("ab", "c", "e")] {
        assert_ne!(one, other);
    }
}
