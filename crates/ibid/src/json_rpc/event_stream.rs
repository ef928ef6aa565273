//! Event streams in which one event is the response, and all others are notifications and requests of the server.
//!
//! The response is held back until it is recorded, as the end of any other answer is: a client acts on it as soon as it
//! arrives. All other events pass at once.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, header};

use super::ToolOutcome;

/// Whether a response is an event stream by its Content-Type.
pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    let is = |value: &HeaderValue| {
        value.as_bytes().get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"))
    };
    headers.get(header::CONTENT_TYPE).is_some_and(is)
}

/// Finds the event with the response in a stream.
pub(crate) struct ResponseEventFinder {
    /// The current event, as far as it has arrived.
    event: BytesMut,
    /// How much of `event` has no end in it.
    searched: usize,
    max_event_bytes: u64,
    /// The current event is too large to hold back: it passes.
    is_passing: bool,
    /// Whether some event was too large, so that it is not known whether it was the response.
    pub(crate) has_passed_large: bool,
}

/// What [`ResponseEventFinder::push`] found.
pub(crate) struct FoundEvents {
    /// What can be sent to the client now.
    pub(crate) ready: Bytes,
    /// The event with the response, and everything after it.
    pub(crate) response: Option<Bytes>,
}

impl ResponseEventFinder {
    pub(crate) fn new(max_event_bytes: u64) -> Self {
        Self { event: BytesMut::new(), searched: 0, max_event_bytes, is_passing: false, has_passed_large: false }
    }

    /// Adds the next piece of the stream. Must not be called after the response was found.
    pub(crate) fn push(&mut self, data: &[u8]) -> FoundEvents {
        self.event.extend_from_slice(data);
        let mut ready = BytesMut::new();
        while let Some(end) = self.event_end() {
            let event = self.event.split_to(end);
            self.searched = 0;
            if !std::mem::take(&mut self.is_passing) && is_response(&event) {
                let mut response = event;
                response.unsplit(self.event.split());
                return FoundEvents { ready: ready.freeze(), response: Some(response.freeze()) };
            }
            ready.unsplit(event);
        }
        if self.event.len() as u64 > self.max_event_bytes {
            (self.is_passing, self.has_passed_large) = (true, true);
        }
        if self.is_passing {
            // The last byte may belong to the end of the event.
            let passed = self.event.split_to(self.event.len().saturating_sub(1));
            self.searched = 0;
            ready.unsplit(passed);
        }
        FoundEvents { ready: ready.freeze(), response: None }
    }

    /// The rest of a stream that has ended.
    pub(crate) fn take_rest(&mut self) -> Bytes {
        self.event.split().freeze()
    }

    /// The end of the current event: two line ends in a row. `\r\n` is a single one.
    fn event_end(&mut self) -> Option<usize> {
        let is_line_end = |byte: u8| byte == b'\n' || byte == b'\r';
        let ends = |pair: &[u8]| is_line_end(pair[0]) && is_line_end(pair[1]) && pair != b"\r\n";
        let found = self.event[self.searched..].windows(2).position(ends).map(|at| self.searched + at + 2);
        self.searched = self.event.len().saturating_sub(1);
        found
    }
}

/// The response in a stream, as JSON.
pub(super) fn find_response(stream: &Bytes) -> Option<Bytes> {
    let mut finder = ResponseEventFinder::new(u64::MAX);
    finder.push(stream).response.map(|event| event_data(first_event(&event)))
}

/// The first event of a text that starts with one.
fn first_event(events: &[u8]) -> &[u8] {
    let mut finder = ResponseEventFinder::new(u64::MAX);
    finder.event.extend_from_slice(events);
    let end = finder.event_end().unwrap_or(events.len());
    &events[..end]
}

fn is_response(event: &[u8]) -> bool {
    ToolOutcome::of(&event_data(event)).is_some()
}

/// The data of an event: its `data` lines.
fn event_data(event: &[u8]) -> Bytes {
    let lines = event.split(|byte| *byte == b'\n' || *byte == b'\r');
    let data = lines.filter_map(|line| line.strip_prefix(b"data:"));
    let data: Vec<&[u8]> = data.map(|data| data.strip_prefix(b" ").unwrap_or(data)).collect();
    data.join(&b'\n').into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRESS: &str = "event: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\n";
    const ASK: &str = "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"sampling/createMessage\"}\r\n\r\n";
    const RESPONSE: &str = "event: message\nid: 7\ndata: {\"jsonrpc\":\"2.0\",\ndata: \"id\":1,\"result\":{}}\n\n";

    #[test]
    fn the_response_is_held_back_and_nothing_else() {
        let stream = format!(": hello\n\n{PROGRESS}{ASK}{RESPONSE}: bye\n\n");
        for size in 1..=stream.len() {
            let mut finder = ResponseEventFinder::new(1 << 20);
            let (mut sent, mut held) = (Vec::new(), Vec::new());
            for piece in stream.as_bytes().chunks(size) {
                if !held.is_empty() {
                    held.extend_from_slice(piece);
                    continue;
                }
                let found = finder.push(piece);
                sent.extend_from_slice(&found.ready);
                held.extend(found.response.into_iter().flatten());
            }
            let held = String::from_utf8(held).unwrap();
            assert_eq!(held.trim_start_matches('\n'), format!("{RESPONSE}: bye\n\n"), "{size}");
            assert_eq!(String::from_utf8(sent).unwrap() + &held, stream, "{size}");
        }
        let found = find_response(&Bytes::from(stream)).unwrap();
        assert_eq!(found, &b"{\"jsonrpc\":\"2.0\",\n\"id\":1,\"result\":{}}"[..]);
        assert_eq!(find_response(&Bytes::from(format!("{PROGRESS}{ASK}"))), None);
    }

    #[test]
    fn an_event_that_is_too_large_passes() {
        let large = format!("data: {}\n\n", "x".repeat(100));
        let stream = format!("{large}{RESPONSE}");
        for size in [1, 7, 99, stream.len()] {
            let mut finder = ResponseEventFinder::new(80);
            let (mut sent, mut held) = (Vec::new(), None);
            for piece in stream.as_bytes().chunks(size) {
                let found = finder.push(piece);
                sent.extend_from_slice(&found.ready);
                held = held.or(found.response);
            }
            assert_eq!(held.as_deref(), Some(RESPONSE.as_bytes()), "{size}");
            assert_eq!(String::from_utf8(sent).unwrap(), large, "{size}");
        }
    }

    #[test]
    fn a_stream_without_a_response_passes_to_its_end() {
        let mut finder = ResponseEventFinder::new(80);
        assert_eq!(finder.push(b"data: {}\n\ndata: cut").ready, &b"data: {}\n\n"[..]);
        assert_eq!(finder.take_rest(), &b"data: cut"[..]);
    }
}
