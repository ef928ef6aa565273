//! The gRPC stream on which Envoy sends the messages of one HTTP request.
//!
//! Invariant: a stream ends with OK only if ibid ended it on purpose. If the server ends a stream with OK, Envoy goes on
//! without it.

use std::{convert::Infallible, pin::Pin, sync::OnceLock, time::Duration};

use bytes::Bytes;
use envoy_types::pb::envoy::{
    extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
    service::ext_proc::v3::{
        HeaderMutation, ProcessingRequest, ProcessingResponse, processing_request::Request as EnvoyMessage,
    },
};
use futures_util::{Stream, stream};
use http::{HeaderMap, Response};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use ibid::http::DispatchOutcome;
use tokio::sync::{mpsc, watch};
use tonic::{Status, Streaming};

use super::{
    envoy_app::BodyPart,
    messages::{self, AwaitedMessage, BodyDirection},
};

/// How long Envoy is told to wait while the store is asked. Envoy ignores it if its `max_message_timeout` is lower.
const STORE_MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct EnvoyStream {
    pub(super) received: EnvoyReceiver,
    pub(super) replies: EnvoySender,
}

pub(super) struct EnvoyReceiver {
    messages: Streaming<ProcessingRequest>,
    /// Closed when Envoy has reset the stream.
    replies: mpsc::Sender<StreamItem>,
}

pub(super) struct EnvoySender(mpsc::Sender<StreamItem>);

/// How Envoy sends the body of a request that ibid asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestMode {
    /// In one message, within Envoy's buffer.
    Buffered,
    /// In chunks, which ibid sends back if the request passes. Only so can a response with trailers replace the app's.
    Streamed,
}

/// What the stream's task sends.
enum StreamItem {
    Reply(Box<ProcessingResponse>),
    Failed(Status),
    End,
}

/// Why a stream ends early.
#[derive(Debug)]
pub(super) enum StreamError {
    /// Envoy has ended the stream.
    EndedByEnvoy,
    Failed(Status),
}

impl EnvoyStream {
    /// Also returns the replies, as Envoy gets them.
    pub(super) fn new(
        messages: Streaming<ProcessingRequest>,
    ) -> (Self, impl Stream<Item = Result<ProcessingResponse, Status>>) {
        let (replies, outgoing) = mpsc::channel(1);
        let outgoing = stream::unfold(Some(outgoing), async |outgoing| {
            let mut outgoing = outgoing?;
            match outgoing.recv().await {
                Some(StreamItem::Reply(reply)) => Some((Ok(*reply), Some(outgoing))),
                Some(StreamItem::Failed(status)) => Some((Err(status), None)),
                Some(StreamItem::End) => None,
                None => Some((Err(Status::internal("ibid gave up the request")), None)),
            }
        });
        let received = EnvoyReceiver { messages, replies: replies.clone() };
        (Self { received, replies: EnvoySender(replies) }, outgoing)
    }

    /// Ends the stream.
    pub(super) async fn end(self, result: Result<(), StreamError>) {
        let item = match result {
            Ok(()) => StreamItem::End,
            Err(StreamError::EndedByEnvoy) => return,
            Err(StreamError::Failed(status)) => {
                tracing::warn!("ext_proc: {}", status.message());
                StreamItem::Failed(status)
            }
        };
        let _ = self.replies.0.send(item).await;
    }
}

impl EnvoyReceiver {
    /// The next message. Dropping the future loses none.
    pub(super) async fn next(&mut self) -> Result<ProcessingRequest, StreamError> {
        tokio::select! {
            biased;
            message = self.messages.message() => match message {
                Ok(Some(message)) => Ok(message),
                Ok(None) => Err(StreamError::EndedByEnvoy),
                Err(status) => Err(StreamError::Failed(status)),
            },
            () = self.replies.closed() => Err(StreamError::EndedByEnvoy),
        }
    }

    /// Returns if the stream ends, while Envoy waits for a reply.
    pub(super) async fn ended(&mut self) -> StreamError {
        match self.next().await {
            Ok(_) => unexpected("while it waited for a reply"),
            Err(error) => error,
        }
    }

    /// Asks for the body of the request once it is `wanted`, and reads it. Returns if the stream ends.
    pub(super) async fn read_request(
        &mut self, replies: &EnvoySender, mode: RequestMode, mut wanted: watch::Receiver<bool>,
        parts: mpsc::Sender<BodyPart>, trailers: &OnceLock<HeaderMap>,
    ) -> StreamError {
        let is_wanted = tokio::select! {
            error = self.ended() => return error,
            wanted = wanted.wait_for(|is_wanted| *is_wanted) => wanted.is_ok(),
        };
        let read = match mode {
            _ if !is_wanted => return self.ended().await,
            RequestMode::Buffered => self.read_buffered(replies, parts).await,
            RequestMode::Streamed => {
                let asked = replies.reply(messages::change_mode(messages::run_mode(BodySendMode::FullDuplexStreamed)));
                match asked.await {
                    Ok(()) => return self.read_body(parts, trailers).await,
                    Err(error) => Err(error),
                }
            }
        };
        match read {
            Err(error) => error,
            Ok(never) => match never {},
        }
    }

    async fn read_buffered(
        &mut self, replies: &EnvoySender, parts: mpsc::Sender<BodyPart>,
    ) -> Result<Infallible, StreamError> {
        let (kind, mode) = (AwaitedMessage::RequestHeaders, messages::run_mode(BodySendMode::Buffered));
        replies.reply(messages::pass(kind, HeaderMutation::default(), Some(mode))).await?;
        let Some(EnvoyMessage::RequestBody(body)) = self.next().await?.request else {
            return Err(misconfigured(
                "Envoy did not send the body of a covered request, which went to the app unprotected; set \
                 allow_mode_override to true",
            ));
        };
        replies.extend_timeout().await?;
        let _ = parts.send(BodyPart::Frame(Frame::data(body.body.into()))).await;
        let _ = parts.send(BodyPart::End).await;
        Err(self.ended().await)
    }

    pub(super) async fn read_response_head(&mut self) -> Result<ResponseHead, StreamError> {
        let message = self.next().await?;
        let origin = messages::response_origin(&message);
        let attempts = messages::attempt_count(&message);
        let Some(EnvoyMessage::ResponseHeaders(headers)) = message.request else {
            return Err(unexpected("instead of the response's headers"));
        };
        let origin = origin.ok_or_else(|| {
            misconfigured(
                "Envoy does not say whether the response is the app's, so its outcome is unknown; add \
                 response.code_details to response_attributes",
            )
        })?;
        if attempts.is_some_and(|attempts| attempts > 1.0) {
            tracing::error!(attempts, "ext_proc: Envoy sent a claimed request more than once; remove its retry_policy");
        }
        let has_body = !headers.end_of_stream;
        let head = messages::response_head(headers.headers);
        let head = head.map_err(|why| StreamError::Failed(Status::invalid_argument(why)))?;
        Ok(ResponseHead { origin, head, has_body })
    }

    /// Reads a body that Envoy sends in chunks, and its trailers. Returns if the stream ends.
    pub(super) async fn read_body(
        &mut self, parts: mpsc::Sender<BodyPart>, trailers: &OnceLock<HeaderMap>,
    ) -> StreamError {
        loop {
            // A body that nobody reads is not received.
            let Ok(room) = parts.reserve().await else {
                self.replies.closed().await;
                return StreamError::EndedByEnvoy;
            };
            let is_end = match self.next().await.map(|message| message.request) {
                Err(error) => return error,
                Ok(Some(EnvoyMessage::RequestBody(chunk) | EnvoyMessage::ResponseBody(chunk))) => {
                    if chunk.body.is_empty() {
                        drop(room);
                    } else {
                        room.send(BodyPart::Frame(Frame::data(chunk.body.into())));
                    }
                    chunk.end_of_stream
                }
                Ok(Some(EnvoyMessage::RequestTrailers(sent) | EnvoyMessage::ResponseTrailers(sent))) => {
                    let sent = match messages::trailers(sent) {
                        Ok(sent) => sent,
                        Err(why) => return StreamError::Failed(Status::invalid_argument(why)),
                    };
                    room.send(BodyPart::Frame(Frame::trailers(sent.clone())));
                    let _ = trailers.set(sent);
                    true
                }
                Ok(_) => return unexpected("instead of a body"),
            };
            if is_end {
                let _ = parts.send(BodyPart::End).await;
                return self.ended().await;
            }
        }
    }
}

/// The head of a response.
pub(super) struct ResponseHead {
    /// Whether the app sent it, or how the request failed if Envoy made it.
    pub(super) origin: Result<(), DispatchOutcome>,
    /// As Envoy has it.
    pub(super) head: Response<()>,
    pub(super) has_body: bool,
}

impl EnvoySender {
    pub(super) async fn reply(&self, reply: ProcessingResponse) -> Result<(), StreamError> {
        let sent = self.0.send(StreamItem::Reply(Box::new(reply))).await;
        sent.map_err(|_| StreamError::EndedByEnvoy)
    }

    /// Tells Envoy that the next reply takes longer, because the store is asked.
    pub(super) async fn extend_timeout(&self) -> Result<(), StreamError> {
        self.reply(messages::extend_timeout(STORE_MESSAGE_TIMEOUT)).await
    }

    /// Sends a body in place of the one that Envoy has sent in chunks. `sent_trailers` are those of Envoy, which it
    /// awaits a reply to.
    pub(super) async fn send_body<B>(
        &self, direction: BodyDirection, mut body: Pin<&mut B>, sent_trailers: &OnceLock<HeaderMap>,
    ) -> Result<(), StreamError>
    where
        B: Body<Data = Bytes, Error: std::fmt::Display>,
    {
        let mut trailers = HeaderMap::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|why| StreamError::Failed(Status::internal(why.to_string())))?;
            match frame.into_data() {
                Ok(data) => {
                    let is_last = body.is_end_stream() && sent_trailers.get().is_none();
                    self.reply(messages::chunk(direction, data, is_last)).await?;
                    if is_last {
                        return Ok(());
                    }
                }
                Err(frame) => trailers = frame.into_trailers().unwrap_or_default(),
            }
        }
        let end = match sent_trailers.get() {
            Some(sent) => messages::pass_trailers(direction, messages::header_changes(sent, &trailers)),
            None => messages::chunk(direction, Bytes::new(), true),
        };
        self.reply(end).await
    }
}

fn misconfigured(what: &str) -> StreamError {
    StreamError::Failed(Status::failed_precondition(what))
}

fn unexpected(when: &str) -> StreamError {
    StreamError::Failed(Status::failed_precondition(format!("Envoy sent an unexpected message {when}")))
}
