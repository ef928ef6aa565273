//! The bodies that the layer passes on: untouched, whole, or streamed with the end held back.

use std::{
    error::Error,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::mpsc;

use super::{
    budget::{MemoryReservation, TransferReservation},
    shadow::ResponseTap,
};

/// The chunk size of responses in bytes. With small chunks, a client that does not read keeps the body here, where its
/// memory is accounted for.
pub(crate) const CHUNK_BYTES: usize = 16 << 10;

/// Any error of an inner body.
pub type BoxError = Box<dyn Error + Send + Sync>;

pin_project! {
    /// The body of a request to the inner service.
    #[derive(Debug)]
    pub struct RequestBody<B> {
        first: Option<Bytes>,
        #[pin]
        untouched: Option<B>,
        rest: Option<Pin<Box<B>>>,
        // Boxed, because few requests have any, and requests are moved often.
        trailers: Option<Box<HeaderMap>>,
    }
}

impl<B> RequestBody<B> {
    /// Creates a body of which nothing was read.
    pub fn untouched(body: B) -> Self {
        Self { first: None, untouched: Some(body), rest: None, trailers: None }
    }

    /// Creates a body that was read completely.
    pub fn whole(body: Bytes, trailers: Option<HeaderMap>) -> Self {
        let first = Some(body).filter(|body| !body.is_empty());
        Self { first, untouched: None, rest: None, trailers: trailers.map(Box::new) }
    }

    /// Creates a body whose beginning was read.
    pub fn begun(first: Bytes, rest: Pin<Box<B>>) -> Self {
        let first = Some(first).filter(|first| !first.is_empty());
        Self { first, untouched: None, rest: Some(rest), trailers: None }
    }

    /// Puts a frame back that was read from this body.
    pub fn with_first_frame(self, frame: Frame<Bytes>) -> Self {
        match frame.into_data() {
            Ok(data) => Self { first: Some(data), ..self },
            // Nothing follows the trailers.
            Err(frame) => Self::whole(Bytes::new(), frame.into_trailers().ok()),
        }
    }

    fn untouched_body(&self) -> Option<&B> {
        self.untouched.as_ref().or(self.rest.as_deref())
    }
}

impl<B> Default for RequestBody<B> {
    fn default() -> Self {
        Self::whole(Bytes::new(), None)
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if let Some(body) = this.untouched.as_pin_mut() {
            return poll_inner(body, cx);
        }
        if let Some(rest) = this.rest {
            return poll_inner(rest.as_mut(), cx);
        }
        Poll::Ready(this.trailers.take().map(|trailers| Ok(Frame::trailers(*trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.trailers.is_none() && self.untouched_body().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        if self.trailers.is_some() {
            // No exact size: HTTP/1.1 can send trailers only after a chunked body.
            return SizeHint::default();
        }
        let rest = self.untouched_body().map_or(SizeHint::with_exact(0), Body::size_hint);
        size_hint_with(self.first.as_ref(), &rest)
    }
}

pin_project! {
    /// The body of a response.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        inner: ResponseBodyKind<B>,
    }
}

pin_project! {
    #[project = InnerProject]
    #[derive(Debug)]
    enum ResponseBodyKind<B> {
        Untouched { #[pin] body: B },
        Whole { data: Option<Bytes>, trailers: Option<Box<HeaderMap>>, held: Option<TransferReservation> },
        Streamed { pieces: mpsc::Receiver<StreamChunk>, ended: bool, left: Option<u64>, held: Option<TransferReservation> },
        Tapped { #[pin] body: B, tap: Box<ResponseTap> },
        Begun { first: Option<Bytes>, held: Option<MemoryReservation>, rest: Pin<Box<ResponseBody<B>>> },
    }
}

/// A complete body and its trailers.
#[derive(Debug, Default)]
pub(crate) struct WholeBody {
    pub(crate) data: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl<B> From<WholeBody> for ResponseBody<B> {
    fn from(body: WholeBody) -> Self {
        Self::whole(body.data, body.trailers)
    }
}

/// A message of a streamed response. If the channel closes before the end, the client must see a truncated response.
#[derive(Debug)]
pub(crate) enum StreamChunk {
    Data(Bytes),
    Trailers(HeaderMap),
    End,
}

/// The response was truncated: its end was lost, or must not be sent.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the answer broke off")]
pub struct TruncatedResponse;

impl<B> ResponseBody<B> {
    /// Wraps the inner service's body.
    pub fn untouched(body: B) -> Self {
        Self { inner: ResponseBodyKind::Untouched { body } }
    }

    /// Wraps the inner service's body and observes its frames.
    pub(super) fn with_tap(body: B, mut tap: Box<ResponseTap>) -> Self
    where
        B: Body,
    {
        if body.is_end_stream() {
            tap.finish();
        }
        Self { inner: ResponseBodyKind::Tapped { body, tap } }
    }

    /// Creates a body that is complete.
    pub fn whole(data: impl Into<Bytes>, trailers: Option<HeaderMap>) -> Self {
        let data = Some(data.into()).filter(|data: &Bytes| !data.is_empty());
        let trailers = trailers.filter(|trailers| !trailers.is_empty()).map(Box::new);
        Self { inner: ResponseBodyKind::Whole { data, trailers, held: None } }
    }

    /// Creates a body whose beginning was read, with the memory reserved for it.
    pub fn begun(first: Bytes, held: Option<MemoryReservation>, rest: Self) -> Self {
        let first = Some(first).filter(|first| !first.is_empty());
        Self { inner: ResponseBodyKind::Begun { first, held, rest: Box::pin(rest) } }
    }

    /// The bytes of a complete body, unless there are none.
    pub(crate) fn whole_data(&self) -> Option<&Bytes> {
        match &self.inner {
            ResponseBodyKind::Whole { data, .. } => data.as_ref(),
            _ => None,
        }
    }

    /// The length of a complete body.
    pub(crate) fn whole_length(&self) -> u64 {
        self.whole_data().map_or(0, |data| data.len() as u64)
    }

    /// Attaches the memory reservation of a complete body.
    pub(crate) fn attach_reservation(&mut self, reservation: TransferReservation) {
        if let ResponseBodyKind::Whole { held, .. } = &mut self.inner {
            *held = Some(reservation);
        }
    }

    /// The trailers of a complete body.
    pub(crate) fn trailers(&self) -> Option<&HeaderMap> {
        match &self.inner {
            ResponseBodyKind::Whole { trailers, .. } => trailers.as_deref(),
            _ => None,
        }
    }

    pub(crate) fn streamed(
        pieces: mpsc::Receiver<StreamChunk>, length: Option<u64>, held: Option<TransferReservation>,
    ) -> Self {
        Self { inner: ResponseBodyKind::Streamed { pieces, ended: false, left: length, held } }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().inner.project() {
            InnerProject::Untouched { body } => poll_inner(body, cx),
            InnerProject::Whole { data: Some(_), held: Some(held), .. } if held.poll_evicted(cx).is_ready() => {
                Poll::Ready(Some(Err(TruncatedResponse.into())))
            }
            InnerProject::Whole { data, trailers, held } => {
                let data = next_chunk(data, held).map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(|trailers| Frame::trailers(*trailers))).map(Ok))
            }
            InnerProject::Tapped { mut body, tap } => {
                let frame = ready!(poll_inner(body.as_mut(), cx));
                match &frame {
                    Some(Ok(frame)) => tap.observe_frame(frame, body.is_end_stream()),
                    None => tap.finish(),
                    Some(Err(_)) => {}
                }
                Poll::Ready(frame)
            }
            InnerProject::Begun { first, held, rest } => match first.take() {
                Some(first) => Poll::Ready(Some(Ok(Frame::data(first)))),
                None => {
                    *held = None;
                    rest.as_mut().poll_frame(cx)
                }
            },
            InnerProject::Streamed { ended: true, .. } => Poll::Ready(None),
            InnerProject::Streamed { ended, held: Some(held), .. } if held.poll_evicted(cx).is_ready() => {
                *ended = true;
                Poll::Ready(Some(Err(TruncatedResponse.into())))
            }
            InnerProject::Streamed { pieces, ended, left, held } => Poll::Ready(match ready!(pieces.poll_recv(cx)) {
                Some(StreamChunk::Data(data)) => {
                    if let Some(held) = held {
                        held.release_sent(data.len() as u64);
                    }
                    *left = left.map(|left| left.saturating_sub(data.len() as u64));
                    Some(Ok(Frame::data(data)))
                }
                Some(StreamChunk::Trailers(trailers)) => Some(Ok(Frame::trailers(trailers))),
                Some(StreamChunk::End) => {
                    *ended = true;
                    None
                }
                None => {
                    *ended = true;
                    Some(Err(TruncatedResponse.into()))
                }
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            ResponseBodyKind::Untouched { body } | ResponseBodyKind::Tapped { body, .. } => body.is_end_stream(),
            ResponseBodyKind::Whole { data, trailers, .. } => data.is_none() && trailers.is_none(),
            ResponseBodyKind::Streamed { ended, .. } => *ended,
            ResponseBodyKind::Begun { first, rest, .. } => first.is_none() && rest.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            ResponseBodyKind::Untouched { body } | ResponseBodyKind::Tapped { body, .. } => body.size_hint(),
            // No exact size with trailers: HTTP/1.1 can send them only after a chunked body.
            ResponseBodyKind::Whole { trailers: Some(_), .. } => SizeHint::default(),
            ResponseBodyKind::Whole { data, .. } => size_hint_with(data.as_ref(), &SizeHint::with_exact(0)),
            ResponseBodyKind::Streamed { left, .. } => left.map_or_else(SizeHint::default, SizeHint::with_exact),
            ResponseBodyKind::Begun { first, rest, .. } => size_hint_with(first.as_ref(), &rest.size_hint()),
        }
    }
}

/// The size of bytes that were read, and of the rest.
fn size_hint_with(first: Option<&Bytes>, rest: &SizeHint) -> SizeHint {
    let first = first.map_or(0, |first| first.len() as u64);
    let mut hint = SizeHint::new();
    hint.set_lower(rest.lower() + first);
    if let Some(upper) = rest.upper() {
        hint.set_upper(upper + first);
    }
    hint
}

/// Takes the next chunk of a complete body. The memory is released with the last chunk.
fn next_chunk(data: &mut Option<Bytes>, held: &mut Option<TransferReservation>) -> Option<Bytes> {
    let Some(holds) = held else { return data.take() };
    let all = data.as_mut()?;
    if all.len() > CHUNK_BYTES {
        holds.record_progress(CHUNK_BYTES as u64);
        return Some(all.split_to(CHUNK_BYTES));
    }
    // Copied, so that a client that never reads its last chunk does not keep the whole record in memory.
    let last = Bytes::copy_from_slice(all);
    (*data, *held) = (None, None);
    Some(last)
}

pub(super) fn poll_inner<B>(body: Pin<&mut B>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    let frame = ready!(body.poll_frame(cx));
    let whole = |frame: Frame<B::Data>| frame.map_data(|mut data| data.copy_to_bytes(data.remaining()));
    Poll::Ready(frame.map(|frame| frame.map(whole).map_err(Into::into)))
}
