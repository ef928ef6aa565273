//! Background updates of the front store: best effort, bounded in number and attempts.
//!
//! Their order does not matter: each call is bound to a token, so a late one does not change a claim that is settled in
//! the front, or an entry that now belongs to another holder.

use std::collections::VecDeque;

use tokio::{sync::oneshot, time::timeout};

use super::*;

/// Maximum attempts to update the front before its entry is left to expire.
const MAX_ATTEMPTS: u32 = 4;
const INITIAL_BACKOFF: Duration = Duration::from_millis(50);
/// How long a release waits for the front.
const RELEASE_WAIT: Duration = Duration::from_millis(50);

/// Maximum number of recently forgotten addresses that are remembered.
const MAX_RECENT_FORGETS: usize = 256;

#[derive(Debug, Clone)]
pub(super) enum BackgroundTask {
    /// Settles a claim: one that the front itself granted, whose lease has the front's fence, or one by its token alone
    /// ([`without_fence`]). Then an absent entry is not restored: it may have been forgotten since.
    Settle { lease: Lease, copied: FrontSettlement },
    /// Extends or restores the claim, for `duration` counted from `sent_at`.
    Extend { lease: Lease, duration: Duration, sent_at: Instant },
    /// Sets the lease end of a claim that the front itself granted. A time of now lets the lease expire.
    HoldUntil(Lease, Instant),
    /// Removes the marker of a holder, if it is still the latest.
    RemoveMarker(Address, Fence),
    /// Removes the marker of a claim that the front granted, then releases the claim.
    Abandon(Lease),
}

/// Recently forgotten addresses. They keep a late background task from recreating a forgotten entry.
#[derive(Debug, Default)]
pub(super) struct RecentForgets {
    total: u64,
    /// The latest of all counted addresses, at most [`MAX_RECENT_FORGETS`].
    addresses: VecDeque<Address>,
}

impl RecentForgets {
    pub(super) fn add(&mut self, at: &Address) {
        self.total += 1;
        self.addresses.push_back(*at);
        if self.addresses.len() > MAX_RECENT_FORGETS {
            self.addresses.pop_front();
        }
    }

    /// Whether `at` was forgotten since the total was `since`. Returns `true` if that is no longer known.
    fn was_forgotten_since(&self, at: &Address, since: u64) -> bool {
        let newer = (self.total - since) as usize;
        newer > MAX_RECENT_FORGETS || self.addresses.iter().rev().take(newer).any(|forgotten| forgotten == at)
    }
}

impl TieredInner {
    /// Runs a task in the background. The returned receiver resolves when the task ends.
    pub(super) fn spawn_background(self: &Arc<Self>, errand: BackgroundTask) -> oneshot::Receiver<()> {
        let (ended, end) = oneshot::channel();
        let Ok(permit) = self.background.clone().try_acquire_owned() else {
            self.observer.on_event(&EngineEvent::SettlementDropped(errand.address()));
            return end;
        };
        let parts = self.clone();
        let epochs = self.epochs();
        tokio::spawn(async move {
            parts.run_background(&errand, epochs).await;
            drop((permit, ended));
        });
        end
    }

    /// Runs a task in the background, and waits for it for at most [`RELEASE_WAIT`].
    pub(super) async fn spawn_and_wait_briefly(self: &Arc<Self>, errand: BackgroundTask) {
        let _ = timeout(RELEASE_WAIT, self.spawn_background(errand)).await;
    }

    /// The number of generation changes and the number of forgets so far.
    fn epochs(&self) -> (u64, u64) {
        (self.generation.epoch(), self.recent_forgets.lock().total)
    }

    async fn run_background(&self, errand: &BackgroundTask, (generation, forgets): (u64, u64)) {
        let mut pause = INITIAL_BACKOFF;
        for tried in 1.. {
            // The task was meant for an earlier generation, or would recreate a forgotten entry.
            if self.generation.epoch() != generation
                || (errand.may_recreate_entry()
                    && self.recent_forgets.lock().was_forgotten_since(errand.address(), forgets))
            {
                return;
            }
            let Err(error) = self.try_once(errand).await else { return };
            self.report_front_error("behind", &error);
            if tried == MAX_ATTEMPTS || !matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous) {
                return;
            }
            sleep(pause).await;
            pause *= 4;
        }
    }

    async fn try_once(&self, errand: &BackgroundTask) -> Result<(), StoreError> {
        let told = match errand {
            BackgroundTask::Settle { lease, copied } => self.front.settle(lease, &copied.adjusted_for_delay()).await,
            BackgroundTask::Extend { lease, duration, sent_at } => {
                self.extend_in_front(lease, duration.saturating_sub(sent_at.elapsed())).await
            }
            BackgroundTask::HoldUntil(lease, until) => {
                self.front.extend(lease, until.saturating_duration_since(Instant::now())).await
            }
            BackgroundTask::RemoveMarker(at, fence) => return self.remove_marker(at, *fence).await,
            BackgroundTask::Abandon(lease) => self.abandon_in_front(lease).await,
        };
        told.map(drop)
    }

    /// Releases a claim that the front granted. The marker is removed first. Otherwise the next holder, if it crashes
    /// between its two claims, would look like a front-only run.
    pub(super) async fn abandon_in_front(&self, lease: &Lease) -> Result<SettleOutcome, StoreError> {
        self.remove_marker(&lease.request.address, lease.fence).await?;
        self.front.settle(lease, &Settlement::Release).await
    }

    /// Extends the claim in the front. If the front has lost it, it is restored under the lease's own fence; otherwise
    /// the token identifies it.
    pub(super) async fn extend_in_front(&self, lease: &Lease, hold: Duration) -> Result<SettleOutcome, StoreError> {
        let held = self.front.extend(lease, hold).await?;
        if is_held_under_other_fence(&held) { self.front.extend(&without_fence(lease), hold).await } else { Ok(held) }
    }

    /// Converts the lease to the token that the front knows.
    pub(super) fn front_lease(&self, lease: &Lease) -> Lease {
        Lease { request: self.front_request(&lease.request), ..lease.clone() }
    }

    /// Converts the request to the token that the front knows: its own, or its replacement if that was spent there.
    pub(super) fn front_request(&self, ask: &Arc<ClaimRequest>) -> Arc<ClaimRequest> {
        match self.token_aliases.lock().get(&ask.token) {
            Some(token) => Arc::new(ClaimRequest { token: *token, ..ClaimRequest::clone(ask) }),
            None => ask.clone(),
        }
    }
}

impl BackgroundTask {
    /// Gives back a claim that the front itself granted.
    pub(super) fn release_front_claim(lease: Lease) -> Self {
        Self::Settle { lease, copied: FrontSettlement::release() }
    }

    /// Whether the task may create an entry in the front that was absent.
    fn may_recreate_entry(&self) -> bool {
        match self {
            Self::Extend { .. } => true,
            Self::Settle { copied, .. } => !matches!(copied.adjusted_for_delay(), Settlement::Release),
            Self::HoldUntil(..) | Self::RemoveMarker(..) | Self::Abandon(_) => false,
        }
    }

    fn address(&self) -> &Address {
        match self {
            Self::Settle { lease, .. } | Self::Extend { lease, .. } => &lease.request.address,
            Self::HoldUntil(lease, _) | Self::Abandon(lease) => &lease.request.address,
            Self::RemoveMarker(at, _) => at,
        }
    }
}

fn is_held_under_other_fence(held: &SettleOutcome) -> bool {
    matches!(held, SettleOutcome::ClaimLost(found) if matches!(**found, ClaimOutcome::InProgress(_) | ClaimOutcome::OutcomeUnknown(_)))
}

pub(super) fn without_fence(lease: &Lease) -> Lease {
    Lease { fence: Fence::UNSEEN, ..lease.clone() }
}
