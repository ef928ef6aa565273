//! Reads a request's body within the limits of the policy, the memory budget and the body timeout.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame};
use tokio::time::{Instant, timeout_at};

use super::{
    LayerState, Route,
    body::BoxError,
    budget::{BudgetClient, MemoryBudget, MemoryReservation, TransferReservation},
    exchange::NotClaimedReason,
    request,
};
use crate::{
    policy::Policy,
    refusal::{Refusal, RefusalReason},
};

/// Smaller bodies (in bytes) that arrive at once are only counted; larger ones are charged to their client.
const MAX_UNCHARGED_BODY_BYTES: u64 = 16 << 10;

const BROKEN_OFF: &str = "the body broke off or is malformed";

/// The maximum body timeout. A longer one could overflow the clock.
const MAX_BODY_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A body as far as it was read.
#[derive(Default)]
pub(super) struct ReadBody {
    pub(super) data: Bytes,
    /// Boxed, because few requests have any.
    pub(super) trailers: Option<Box<HeaderMap>>,
    /// Whether nothing follows.
    pub(super) is_whole: bool,
    /// Whether it did not arrive with its head.
    pub(super) was_awaited: bool,
}

/// The bytes read so far. Most bodies are a single frame, which is passed on without a copy.
#[derive(Default)]
struct PartialBody {
    first: Bytes,
    more: BytesMut,
}

/// A body with its reserved memory, which is released once the bytes were sent on.
struct ReservedBytes(Bytes, #[expect(dead_code, reason = "released on drop")] TransferReservation);

enum BodyEvent {
    Frame(Frame<Bytes>),
    End,
    Malformed,
    Evicted,
}

/// Reads a small body that has arrived with its head, and returns the memory that is counted until the operation ends.
/// `None` if the body is not whole after one frame: [`read_body`] goes on.
pub(super) fn read_at_once<B>(
    shared: &LayerState, policy: &Policy, declared: Option<u64>, mut body: Pin<&mut B>, read: &mut ReadBody,
    cx: &mut Context<'_>,
) -> Result<Option<MemoryReservation>, NotClaimedReason>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    let max = MAX_UNCHARGED_BODY_BYTES.min(policy.max_request);
    if declared.is_some_and(|length| length > max) {
        return Ok(None);
    }
    let is_ended = match poll_next(body.as_mut(), None, cx) {
        Poll::Pending | Poll::Ready(BodyEvent::Evicted) => return Ok(None),
        Poll::Ready(BodyEvent::Malformed) => return Err(NotClaimedReason::Malformed(BROKEN_OFF)),
        Poll::Ready(BodyEvent::End) => true,
        Poll::Ready(BodyEvent::Frame(frame)) => {
            match frame.into_data() {
                Ok(data) => read.data = data,
                Err(frame) => read.trailers = frame.into_trailers().ok().map(Box::new),
            }
            body.is_end_stream()
        }
    };
    if !is_ended || read.data.len() as u64 > max {
        return Ok(None);
    }
    let counted = shared.budget.reserve(read.data.len() as u64);
    read.is_whole = counted.is_some();
    counted.map(Some).ok_or_else(|| NotClaimedReason::Refused(overloaded()))
}

/// Reads a body to its end, and returns the memory that is counted until the operation ends. `read` is what was read,
/// also if that fails.
pub(super) async fn read_body<B>(
    shared: &LayerState, route: &Route, client: &BudgetClient, declared: Option<u64>, mut body: Pin<&mut B>,
    read: &mut ReadBody,
) -> Result<MemoryReservation, NotClaimedReason>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    let budget = &shared.budget;
    if declared.is_some_and(|length| length > budget.0.limit) {
        return Err(NotClaimedReason::Refused(overloaded()));
    }
    let mut begun = PartialBody { first: std::mem::take(&mut read.data), more: BytesMut::new() };
    // `None` until the body is large or has to be awaited.
    let mut reservation: Option<TransferReservation> = None;
    // Set when the body is first awaited: most bodies have arrived with their head.
    let mut deadline = None;
    let ended = loop {
        if let Err(refusal) = check_growth(budget, route, client, begun.len(), declared, &mut reservation) {
            break Err(NotClaimedReason::Refused(refusal));
        }
        let next = match poll_fn(|cx| Poll::Ready(poll_next(body.as_mut(), reservation.as_ref(), cx))).await {
            Poll::Ready(next) => next,
            Poll::Pending => {
                read.was_awaited = true;
                let waiting = reservation.get_or_insert_with(|| budget.begin_receive(client));
                if waiting.grow_to(reservation_size(begun.len(), declared)).is_err() {
                    break Err(NotClaimedReason::Refused(overloaded()));
                }
                let timeout = shared.settings.body_timeout.min(MAX_BODY_TIMEOUT);
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + timeout);
                match timeout_at(deadline, poll_fn(|cx| poll_next(body.as_mut(), Some(waiting), cx))).await {
                    Err(_) => break Err(NotClaimedReason::TimedOut),
                    Ok(next) => next,
                }
            }
        };
        match next {
            BodyEvent::Frame(frame) => match frame.into_data() {
                Ok(data) => {
                    if let Some(reservation) = &reservation {
                        reservation.record_progress(data.len() as u64);
                    }
                    begun.push(data);
                }
                Err(frame) => read.trailers = frame.into_trailers().ok().map(Box::new),
            },
            BodyEvent::End => break Ok(()),
            BodyEvent::Evicted => break Err(NotClaimedReason::Refused(evicted())),
            BodyEvent::Malformed => {
                return Err(NotClaimedReason::Malformed(BROKEN_OFF));
            }
        }
    };
    let length = begun.len();
    read.data = begun.bytes();
    ended?;
    match reservation {
        Some(reservation) if length > MAX_UNCHARGED_BODY_BYTES => {
            // Evicted at the last moment: the memory is already used by others.
            let counted = reservation.complete().ok().and_then(|()| budget.reserve(0));
            let counted = counted.ok_or_else(|| NotClaimedReason::Refused(evicted()))?;
            read.data = Bytes::from_owner(ReservedBytes(std::mem::take(&mut read.data), reservation));
            read.is_whole = true;
            Ok(counted)
        }
        reservation => {
            drop(reservation);
            let counted = budget.reserve(length).ok_or_else(|| NotClaimedReason::Refused(overloaded()))?;
            read.is_whole = true;
            Ok(counted)
        }
    }
}

/// Checks length and memory before each frame, and before the end.
fn check_growth(
    budget: &MemoryBudget, route: &Route, client: &BudgetClient, length: u64, declared: Option<u64>,
    reservation: &mut Option<TransferReservation>,
) -> Result<(), Refusal> {
    request::check_length(&route.policy, length)?;
    if reservation.is_none() && length <= MAX_UNCHARGED_BODY_BYTES {
        return Ok(());
    }
    let reservation = reservation.get_or_insert_with(|| budget.begin_receive(client));
    reservation.grow_to(reservation_size(length, declared)).map_err(|_| overloaded())
}

/// The size to reserve: buffers grow by doubling, up to the declared length.
fn reservation_size(length: u64, declared: Option<u64>) -> u64 {
    let doubled = if length == 0 { 0 } else { length.next_power_of_two() };
    doubled.min(declared.unwrap_or(u64::MAX).max(length))
}

fn poll_next<B>(body: Pin<&mut B>, waiting: Option<&TransferReservation>, cx: &mut Context<'_>) -> Poll<BodyEvent>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    if let Poll::Ready(frame) = body.poll_frame(cx) {
        return Poll::Ready(match frame {
            Some(Ok(frame)) => BodyEvent::Frame(frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))),
            Some(Err(_)) => BodyEvent::Malformed,
            None => BodyEvent::End,
        });
    }
    match waiting.map(|waiting| waiting.poll_evicted(cx)) {
        Some(Poll::Ready(())) => Poll::Ready(BodyEvent::Evicted),
        _ => Poll::Pending,
    }
}

impl PartialBody {
    fn push(&mut self, data: Bytes) {
        if self.first.is_empty() && self.more.is_empty() {
            self.first = data;
            return;
        }
        if self.more.is_empty() {
            self.more.extend_from_slice(&self.first);
            self.first = Bytes::new();
        }
        self.more.extend_from_slice(&data);
    }

    fn len(&self) -> u64 {
        self.first.len().max(self.more.len()) as u64
    }

    fn bytes(self) -> Bytes {
        if self.more.is_empty() { self.first } else { self.more.freeze() }
    }
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

pub(super) fn overloaded() -> Refusal {
    let detail = "more requests are running or being read than this gateway was given room for";
    Refusal::new(RefusalReason::Overloaded, detail).retry_after(Duration::from_secs(1))
}

fn evicted() -> Refusal {
    Refusal { detail: "the body arrived too slowly while memory was short".into(), ..overloaded() }
}
