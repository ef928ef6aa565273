//! Reads the inner service's response and classifies it by status.

use std::{future::poll_fn, pin::Pin, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame};
use sha2::{Digest, Sha256};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};

use super::{
    body::{BoxError, CHUNK_BYTES, StreamChunk, poll_inner},
    budget::InFlightCounter,
};
use crate::{engine::UnknownCause, json_rpc::ResponseEventFinder, policy::Policy, record::RecordBody};

/// The maximum number of chunks that a streamed response may be ahead of its client.
const MAX_CHUNKS_AHEAD: usize = 16;

/// How long an event stream may stay open after its response. A connection whose stream has ended can be used again.
const MAX_WAIT_FOR_STREAM_END: Duration = Duration::from_millis(100);

pub(super) enum BufferedBody {
    Whole(Bytes, Option<Box<HeaderMap>>),
    /// The body exceeds the limit; contains its beginning.
    TooLong(Bytes),
}

pub(super) async fn read<B>(mut body: Pin<&mut B>, at_most: u64, live: bool) -> Result<BufferedBody, BoxError>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    // Most bodies are a single frame, which is passed on without a copy.
    let mut only = Bytes::new();
    let mut more = BytesMut::new();
    let mut trailers = None;
    loop {
        if live {
            return Ok(BufferedBody::TooLong(only));
        }
        let Some(frame) = next(body.as_mut()).await else { break };
        match frame?.into_data() {
            Ok(data) if only.is_empty() && more.is_empty() => only = data,
            Ok(data) => {
                if more.is_empty() {
                    more.reserve(only.len() + data.len());
                    more.extend_from_slice(&only);
                }
                more.extend_from_slice(&data);
            }
            Err(frame) => trailers = frame.into_trailers().ok().map(Box::new),
        }
        if only.len().max(more.len()) as u64 > at_most {
            return Ok(BufferedBody::TooLong(if more.is_empty() { only } else { more.freeze() }));
        }
    }
    Ok(BufferedBody::Whole(if more.is_empty() { only } else { more.freeze() }, trailers))
}

pub(super) async fn next<B>(mut body: Pin<&mut B>) -> Option<Result<Frame<Bytes>, BoxError>>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    poll_fn(|cx| poll_inner(body.as_mut(), cx)).await
}

/// A response that is streamed to its client while it arrives, with the last frame held back.
pub(super) struct ResponseStream {
    tail: StreamTail,
    hash: Sha256,
    length: u64,
    /// The whole body, while it is short enough to store.
    kept: Option<BytesMut>,
    max_kept_bytes: u64,
    /// Events must not wait for the next one: only the end itself is held back.
    is_live: bool,
    /// Counts the chunks that the client has not read yet.
    in_flight: Option<InFlightCounter>,
    /// Finds the response in an event stream, of which nothing else is stored.
    finder: Option<ResponseEventFinder>,
}

/// The end of a streamed response, sent once the answer is recorded. If it is dropped, the client sees a truncated
/// response.
pub(super) struct StreamTail {
    /// `None` once the client has stalled or left. The rest is still read.
    client: Option<mpsc::Sender<StreamChunk>>,
    /// Sent when the next frame has arrived.
    held_back: Option<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
    idle_timeout: Duration,
}

impl ResponseStream {
    pub(super) fn new(
        policy: &Policy, is_live: bool, in_flight: Option<InFlightCounter>, finder: Option<ResponseEventFinder>,
    ) -> (Self, mpsc::Receiver<StreamChunk>) {
        let (client, pieces) = mpsc::channel(MAX_CHUNKS_AHEAD);
        let stream = Self {
            tail: StreamTail { client: Some(client), held_back: None, trailers: None, idle_timeout: policy.timeout },
            hash: Sha256::new(),
            length: 0,
            kept: Some(BytesMut::new()),
            max_kept_bytes: policy.max_response,
            is_live,
            in_flight,
            finder,
        };
        (stream, pieces)
    }

    /// Reads the response to its end. `Err` contains why the outcome is unknown.
    pub(super) async fn pump<B>(&mut self, begun: Bytes, mut body: Pin<&mut B>) -> Result<(), UnknownCause>
    where
        B: Body<Data: Buf, Error: Into<BoxError>>,
    {
        self.push(begun).await;
        let mut response_at = None;
        loop {
            let has_response = self.finder.is_some() && self.tail.held_back.is_some();
            let limit = match has_response {
                true => *response_at.get_or_insert_with(Instant::now) + MAX_WAIT_FOR_STREAM_END,
                false => Instant::now() + self.tail.idle_timeout,
            };
            match timeout_at(limit, next(body.as_mut())).await {
                Err(_) | Ok(Some(Err(_))) if has_response => return Ok(()),
                Err(_) => return Err(UnknownCause::TimedOut),
                Ok(Some(Err(_))) => return Err(UnknownCause::ConnectionLost),
                Ok(None) => return self.end_events().await,
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.push(data).await,
                    Err(frame) => self.tail.trailers = frame.into_trailers().ok(),
                },
            }
        }
    }

    async fn push(&mut self, data: Bytes) {
        if data.is_empty() {
            return;
        }
        self.hash.update(&data);
        self.length += data.len() as u64;
        if self.finder.is_some() {
            return self.push_events(data).await;
        }
        if self.length > self.max_kept_bytes {
            self.kept = None;
        } else if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(&data);
        }
        let ready = if self.is_live { Some(data) } else { self.tail.held_back.replace(data) };
        if let Some(ready) = ready {
            self.send(ready).await;
        }
    }

    /// Sends all events up to the response, which is held back. What follows it has no meaning.
    async fn push_events(&mut self, data: Bytes) {
        let Some(finder) = self.finder.as_mut().filter(|_| self.tail.held_back.is_none()) else { return };
        let found = finder.push(&data);
        if let Some(response) = found.response {
            self.kept = (response.len() as u64 <= self.max_kept_bytes).then(|| BytesMut::from(&*response));
            self.tail.held_back = Some(response);
        }
        self.send(found.ready).await;
    }

    /// Sends the rest of a stream that has ended without a response.
    async fn end_events(&mut self) -> Result<(), UnknownCause> {
        let Some(finder) = &mut self.finder else { return Ok(()) };
        let rest = finder.take_rest();
        if finder.has_passed_large && self.tail.held_back.is_none() {
            self.kept = None;
        }
        self.send(rest).await;
        Ok(())
    }

    /// Splits the data into chunks, so that their number bounds their size.
    async fn send(&mut self, mut data: Bytes) {
        while let (Some(client), false) = (&self.tail.client, data.is_empty()) {
            let piece = data.split_to(data.len().min(CHUNK_BYTES));
            if let Some(ahead) = &self.in_flight {
                ahead.count(piece.len() as u64);
            }
            if !matches!(timeout(self.tail.idle_timeout, client.send(StreamChunk::Data(piece))).await, Ok(Ok(()))) {
                self.tail.client = None;
            }
        }
    }

    pub(super) fn end(self) -> (RecordBody, StreamTail) {
        let body = match self.kept {
            Some(kept) => RecordBody::Whole(kept.freeze()),
            None => RecordBody::Digest { length: self.length, sha256: self.hash.finalize().into() },
        };
        (body, self.tail)
    }
}

impl StreamTail {
    /// A client that stalls now is dropped like one that stalled before: it must not occupy its slot forever.
    pub(super) async fn send(self) {
        let Some(client) = self.client else { return };
        let pieces =
            [self.held_back.map(StreamChunk::Data), self.trailers.map(StreamChunk::Trailers), Some(StreamChunk::End)];
        for piece in pieces.into_iter().flatten() {
            if !matches!(timeout(self.idle_timeout, client.send(piece)).await, Ok(Ok(()))) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stalls_before_the_end_is_dropped() {
        let (mut stream, mut pieces) = ResponseStream::new(&Policy::ietf(), false, None, None);
        // As many as fit, plus the one held back.
        for _ in 0..=MAX_CHUNKS_AHEAD {
            stream.push(Bytes::from_static(b"piece")).await;
        }
        let (_, tail) = stream.end();
        tail.send().await;
        let mut seen = Vec::new();
        while let Some(piece) = pieces.recv().await {
            seen.push(piece);
        }
        assert_eq!(seen.len(), MAX_CHUNKS_AHEAD);
        assert!(
            seen.iter().all(|piece| matches!(piece, StreamChunk::Data(_))),
            "no end: the client sees a broken answer"
        );
    }
}
