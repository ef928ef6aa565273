//! An HTTP/1.1 connection: sends one request at a time and reads its reply.
//!
//! The task of the exchange owns the connection and does its input and output; there is no driver task.
//!
//! Invariants:
//! - [`H1Connection::is_unwritten`] is the proof that no byte of the current request reached the upstream. The
//!   connection must then be dropped, so that none can follow.
//! - A write that fails after the first one does not lose a reply: the peer may have answered and stopped reading (413,
//!   then close). The rest of the request is discarded, and the read side decides.

use std::io::{self, IoSlice, Write as _};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::poll_read_buf;

use super::h1_codec::{
    DecodedChunk, MAX_HEAD_BYTES, ReplyFraming, RequestFraming, decode_head, encode_head, encode_last_chunk,
};
use super::socket::UpstreamStream;
use super::{AddedHeaders, BodyError};

/// The read buffer's size in bytes; it grows while the upstream fills it.
const MIN_READ_BYTES: usize = 8 * 1024;
const MAX_READ_BYTES: usize = 256 * 1024;

/// Called for each interim (1xx) reply.
pub type OnInterim<'a> = &'a (dyn Fn(StatusCode, &HeaderMap) + Send + Sync);

pub(super) struct H1Connection {
    stream: UpstreamStream,
    /// The value of `written` before the current request.
    written_before: u64,
    /// Bytes that were read and not decoded yet.
    input: BytesMut,
    read_bytes: usize,
    /// A head or a chunk's line on its way out; the part of a body that follows it; and what follows that.
    output: Vec<u8>,
    output_written: usize,
    data: Bytes,
    data_end: &'static [u8],
    sending: SendingStep,
    framing: ReplyFraming,
    has_reply_bytes: bool,
    may_reuse: bool,
    /// When the upstream will close the idle connection, minus a margin.
    pub(super) reuse_until: Option<Instant>,
}

/// What is left to send of the current request.
enum SendingStep {
    Body(RequestFraming),
    Flush,
    Done,
}

impl H1Connection {
    pub(super) fn new(stream: UpstreamStream) -> Self {
        Self {
            stream,
            written_before: 0,
            input: BytesMut::new(),
            read_bytes: MIN_READ_BYTES,
            output: Vec::new(),
            output_written: 0,
            data: Bytes::new(),
            data_end: b"",
            sending: SendingStep::Done,
            framing: ReplyFraming::Length(0),
            has_reply_bytes: false,
            may_reuse: true,
            reuse_until: None,
        }
    }

    /// Whether the idle connection can carry a request.
    pub(super) fn is_silent(&mut self, cx: &mut Context<'_>) -> bool {
        self.stream.is_silent(cx)
    }

    pub(super) fn close(self) {
        self.stream.close();
    }

    /// Prepares to send a request. Sends nothing yet.
    pub(super) fn begin<B: Body>(&mut self, request: &Request<B>, more: AddedHeaders<'_>, default_host: &HeaderValue) {
        self.clear_output();
        let (framing, is_last) = encode_head(request, more, default_host, &mut self.output);
        self.written_before = self.stream.written();
        self.sending = SendingStep::Body(framing);
        self.has_reply_bytes = false;
        self.may_reuse = !is_last;
    }

    /// Whether no byte of the request can have reached the upstream.
    pub(super) fn is_unwritten(&self) -> bool {
        self.stream.written() == self.written_before
    }

    /// Whether a byte of the reply has arrived.
    pub(super) fn has_reply_bytes(&self) -> bool {
        self.has_reply_bytes
    }

    /// Whether the whole request is sent.
    pub(super) fn is_sent(&self) -> bool {
        matches!(self.sending, SendingStep::Done)
    }

    /// Whether the reply is complete, and the connection can carry another request once this one is sent.
    pub(super) fn may_reuse(&self) -> bool {
        self.may_reuse && self.input.is_empty()
    }

    /// Sends the request whose body is `body`, and returns the reply's head. An error ends the connection.
    pub(super) fn poll_reply<B>(
        &mut self, cx: &mut Context<'_>, request: &mut Request<B>, on_interim: Option<OnInterim<'_>>,
    ) -> Poll<Result<Response<()>, String>>
    where
        B: Body<Data = Bytes, Error: Into<BodyError>> + Unpin,
    {
        if let Poll::Ready(Err(why)) = self.poll_send(cx, request.body_mut()) {
            return Poll::Ready(Err(why));
        }
        loop {
            if !self.input.is_empty()
                && let Some(reply) = decode_head(&mut self.input, request.method())?
            {
                let status = reply.response.status();
                if status.is_informational() && status != StatusCode::SWITCHING_PROTOCOLS {
                    on_interim.iter().for_each(|call| call(status, reply.response.headers()));
                    continue;
                }
                self.framing = reply.framing;
                self.may_reuse &= reply.keeps_alive;
                // Counts from the head, because the upstream's clock may start before the body is read. A long reply
                // merely costs its connection.
                let until = |secs: u32| Instant::now() + Duration::from_secs(u64::from(secs.saturating_sub(1)));
                self.reuse_until = reply.keep_alive_secs.map(until);
                return Poll::Ready(Ok(reply.response));
            }
            if self.input.len() >= MAX_HEAD_BYTES {
                return Poll::Ready(Err(format!("the reply's head is longer than {MAX_HEAD_BYTES} bytes")));
            }
            match ready!(self.poll_fill(cx)) {
                Ok(0) => return Poll::Ready(Err("connection closed before the reply was complete".to_owned())),
                Ok(_) => self.has_reply_bytes = true,
                Err(why) => return Poll::Ready(Err(why.to_string())),
            }
        }
    }

    /// Sends the rest of the request. An error is one of the body, or of the first write.
    pub(super) fn poll_send<B>(&mut self, cx: &mut Context<'_>, body: &mut B) -> Poll<Result<(), String>>
    where
        B: Body<Data = Bytes, Error: Into<BodyError>> + Unpin + ?Sized,
    {
        while !self.is_sent() {
            // The first part of the body is written together with the head.
            let needs_body = self.data.is_empty() && self.data_end.is_empty();
            let is_waiting = needs_body
                && matches!(self.sending, SendingStep::Body(_))
                && self.poll_next_part(cx, body)?.is_pending();
            if let Err(why) = ready!(self.poll_write_out(cx)) {
                if self.is_unwritten() {
                    return Poll::Ready(Err(why.to_string()));
                }
                self.discard_request();
            } else if is_waiting {
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn discard_request(&mut self) {
        self.may_reuse = false;
        self.sending = SendingStep::Done;
        self.clear_output();
        (self.data, self.data_end) = (Bytes::new(), b"");
    }

    fn clear_output(&mut self) {
        self.output.clear();
        self.output_written = 0;
    }

    /// Takes the next part of the body.
    fn poll_next_part<B>(&mut self, cx: &mut Context<'_>, body: &mut B) -> Poll<Result<(), String>>
    where
        B: Body<Data = Bytes, Error: Into<BodyError>> + Unpin + ?Sized,
    {
        let SendingStep::Body(framing) = &mut self.sending else { return Poll::Ready(Ok(())) };
        let frame = match framing {
            RequestFraming::Length(0) => None,
            _ => ready!(Pin::new(body).poll_frame(cx)),
        };
        let frame = frame.transpose().map_err(|why| format!("the request's body failed: {}", why.into()))?;
        match (frame.map(Frame::into_data), framing) {
            (Some(Ok(data)), _) if data.is_empty() => {}
            (Some(Ok(data)), RequestFraming::Length(left)) => {
                let len = data.len() as u64;
                *left = left.checked_sub(len).ok_or("the request's body is longer than its content-length")?;
                self.data = data;
                if *left == 0 {
                    self.sending = SendingStep::Flush;
                }
            }
            (Some(Ok(data)), RequestFraming::Chunked(_)) => {
                let _ = write!(self.output, "{:x}\r\n", data.len());
                (self.data, self.data_end) = (data, b"\r\n");
            }
            (None | Some(Err(_)), RequestFraming::Length(1..)) => {
                return Poll::Ready(Err("the request's body is shorter than its content-length".to_owned()));
            }
            (None | Some(Err(_)), RequestFraming::Length(0)) => self.sending = SendingStep::Flush,
            (end, RequestFraming::Chunked(announced)) => {
                let trailers = end.and_then(Result::err).and_then(|frame| frame.into_trailers().ok());
                encode_last_chunk(&mut self.output, trailers.as_ref(), announced);
                self.sending = SendingStep::Flush;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Writes what was taken of the request.
    fn poll_write_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let output = &self.output[self.output_written..];
            if output.is_empty() && self.data.is_empty() && self.data_end.is_empty() {
                break;
            }
            let parts = [IoSlice::new(output), IoSlice::new(&self.data), IoSlice::new(self.data_end)];
            let n = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &parts))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_output = n.min(output.len());
            let of_data = (n - of_output).min(self.data.len());
            self.output_written += of_output;
            self.data.advance(of_data);
            self.data_end = &self.data_end[n - of_output - of_data..];
        }
        self.clear_output();
        // TLS has its own buffer.
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        if matches!(self.sending, SendingStep::Flush) {
            self.sending = SendingStep::Done;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.input.capacity() - self.input.len() < self.read_bytes / 4 {
            self.input.reserve(self.read_bytes);
        }
        let n = ready!(poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.input))?;
        if self.input.len() == self.input.capacity() {
            self.read_bytes = MAX_READ_BYTES.min(self.read_bytes * 2);
        } else if n < self.read_bytes / 4 {
            self.read_bytes = MIN_READ_BYTES.max(self.read_bytes / 2);
        }
        Poll::Ready(Ok(n))
    }

    /// Returns the next frame of the reply's body. `None`: the reply is complete. An error ends the connection.
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        loop {
            match &mut self.framing {
                ReplyFraming::Length(0) => return Poll::Ready(None),
                ReplyFraming::Length(left) if !self.input.is_empty() => {
                    let len = usize::try_from(*left).unwrap_or(usize::MAX).min(self.input.len());
                    *left -= len as u64;
                    return Poll::Ready(Some(Ok(Frame::data(self.input.split_to(len).freeze()))));
                }
                ReplyFraming::UntilClose if !self.input.is_empty() => {
                    return Poll::Ready(Some(Ok(Frame::data(self.input.split().freeze()))));
                }
                ReplyFraming::Chunked(decoder) => match decoder.decode(&mut self.input) {
                    Ok(DecodedChunk::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                    Ok(DecodedChunk::End(trailers)) => {
                        self.framing = ReplyFraming::Length(0);
                        return Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))));
                    }
                    Ok(DecodedChunk::Incomplete) => {}
                    Err(why) => return Poll::Ready(Some(Err(why))),
                },
                _ => {}
            }
            match (ready!(self.poll_fill(cx)), &self.framing) {
                (Ok(0), ReplyFraming::UntilClose) => self.framing = ReplyFraming::Length(0),
                (Ok(0), _) => return Poll::Ready(Some(Err("connection closed before the reply was complete".into()))),
                (Ok(_), _) => {}
                (Err(why), _) => return Poll::Ready(Some(Err(why.to_string()))),
            }
        }
    }

    /// Whether the reply's body has been returned completely.
    pub(super) fn is_reply_complete(&self) -> bool {
        matches!(self.framing, ReplyFraming::Length(0))
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        match self.framing {
            ReplyFraming::Length(left) => SizeHint::with_exact(left),
            _ => SizeHint::default(),
        }
    }

    /// Reads the bytes of an upgraded connection.
    pub(super) fn poll_read_raw(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.input.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let len = self.input.len().min(buf.remaining());
        buf.put_slice(&self.input.split_to(len));
        Poll::Ready(Ok(()))
    }

    /// The stream of an upgraded connection, for writing.
    pub(super) fn stream(&mut self) -> Pin<&mut UpstreamStream> {
        Pin::new(&mut self.stream)
    }
}
