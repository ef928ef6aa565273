//! The gRPC stream on which Envoy sends the messages of one HTTP request.
//!
//! Invariant: a stream ends with OK only if ibid ended it on purpose. If the server ends a stream with OK, Envoy goes on
//! without it.

use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::{
    HeaderMutation, ProcessingRequest, ProcessingResponse, processing_request::Request as EnvoyRequest,
};
use futures_util::{Stream, stream};
use http_body_util::Full;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::{
    envoy_app::EnvoyReply,
    messages::{self, MessageKind},
};

/// How long Envoy is told to wait while the store is asked. Envoy ignores it if its `max_message_timeout` is lower.
const STORE_MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct EnvoyStream {
    received: Streaming<ProcessingRequest>,
    replies: mpsc::Sender<StreamItem>,
}

/// What the stream's task sends.
pub(super) enum StreamItem {
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
        received: Streaming<ProcessingRequest>,
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
        (Self { received, replies }, outgoing)
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
        let _ = self.replies.send(item).await;
    }

    /// The next message. Dropping the future loses none.
    pub(super) async fn next(&mut self) -> Result<ProcessingRequest, StreamError> {
        tokio::select! {
            biased;
            message = self.received.message() => match message {
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

    pub(super) async fn reply(&self, reply: ProcessingResponse) -> Result<(), StreamError> {
        let sent = self.replies.send(StreamItem::Reply(Box::new(reply))).await;
        sent.map_err(|_| StreamError::EndedByEnvoy)
    }

    /// Tells Envoy that the next reply takes longer, because the store is asked.
    pub(super) async fn extend_timeout(&self) -> Result<(), StreamError> {
        self.reply(messages::extend_timeout(STORE_MESSAGE_TIMEOUT)).await
    }

    /// Asks for the body of the request, and reads it.
    pub(super) async fn read_request_body(&mut self) -> Result<Vec<u8>, StreamError> {
        let (kind, none) = (MessageKind::RequestHeaders, HeaderMutation::default());
        self.reply(messages::pass(kind, none, Some(messages::buffered()))).await?;
        match self.next().await?.request {
            Some(EnvoyRequest::RequestBody(body)) => Ok(body.body),
            _ => Err(misconfigured(
                "Envoy did not send the body of a covered request, which went to the app unprotected; set \
                 allow_mode_override to true",
            )),
        }
    }

    /// Reads the response, and returns the message that awaits the reply.
    pub(super) async fn read_response(&mut self) -> Result<(MessageKind, EnvoyReply), StreamError> {
        let message = self.next().await?;
        let origin = messages::response_origin(&message);
        let attempts = messages::attempt_count(&message);
        let Some(EnvoyRequest::ResponseHeaders(headers)) = message.request else {
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
        if let Err(outcome) = origin {
            return Ok((MessageKind::ResponseHeaders, Err(outcome)));
        }
        let is_whole = headers.end_of_stream;
        let head = messages::response_head(headers.headers);
        let head = head.map_err(|why| StreamError::Failed(Status::invalid_argument(why)))?;
        if is_whole {
            return Ok((MessageKind::ResponseHeaders, Ok(head.map(|()| Full::default()))));
        }
        self.reply(messages::pass(MessageKind::ResponseHeaders, HeaderMutation::default(), None)).await?;
        match self.next().await?.request {
            Some(EnvoyRequest::ResponseBody(body)) => {
                Ok((MessageKind::ResponseBody, Ok(head.map(|()| Full::new(body.body.into())))))
            }
            _ => Err(misconfigured(
                "Envoy did not send the body of the response, so its outcome is unknown; set allow_mode_override to true",
            )),
        }
    }
}

fn misconfigured(what: &str) -> StreamError {
    StreamError::Failed(Status::failed_precondition(what))
}

fn unexpected(when: &str) -> StreamError {
    StreamError::Failed(Status::failed_precondition(format!("Envoy sent an unexpected message {when}")))
}
