//! What is done in `first` behind the answers: best effort, bounded in number and in tries.
//!
//! Order does not matter: every one of these calls is bound to a token, and a claim that has ended in `first`, or whose
//! entry is somebody else's by now, is not changed by a late one.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use ibid::{
    EngineEvent,
    store::{Address, ClaimOutcome, ClaimRequest, ErrorKind, Fence, Lease, SettleOutcome, Settlement, StoreError},
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};

use super::{TieredInner, front_copy::FrontSettlement};

/// How often `first` is told before it is left to lapse.
const MAX_ATTEMPTS: u32 = 4;
const INITIAL_BACKOFF: Duration = Duration::from_millis(50);
/// How long a release waits for `first`.
const RELEASE_WAIT: Duration = Duration::from_millis(50);

/// So many forgotten addresses are known by name.
const MAX_RECENT_FORGETS: usize = 256;

/// What to do in `first`.
#[derive(Debug, Clone)]
pub(super) enum BackgroundTask {
    /// End the claim of this lease's token. What is not there is not put back: it may have been forgotten since.
    SettleByToken { lease: Lease, copied: FrontSettlement },
    /// Keep it alive, or put it back, for `hold` from `told` on.
    Extend { lease: Lease, duration: Duration, sent_at: Instant },
    /// End the claim of this lease, which is one of `first`'s own.
    SettleFrontClaim { lease: Lease, copied: FrontSettlement },
    /// Hold the claim of this lease, which is one of `first`'s own, until then: until now, to let it lapse.
    HoldUntil(Lease, Instant),
    /// Take the marker of a holder away, if it is still the latest.
    RemoveMarker(Address, Fence),
    /// A claim that is one of `first`'s own and may be marked: take the marker away, then release.
    Abandon(Lease),
}

/// What operators have freed lately, so that nothing that is still on its way to `first` brings it back.
#[derive(Debug, Default)]
pub(super) struct RecentForgets {
    total: u64,
    /// At most [`MAX_RECENT_FORGETS`]; the last of all that were counted.
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

    /// Whether it was forgotten since there were so many; yes, if nobody knows any more.
    fn was_forgotten_since(&self, at: &Address, since: u64) -> bool {
        let newer = (self.total - since) as usize;
        newer > MAX_RECENT_FORGETS || self.addresses.iter().rev().take(newer).any(|forgotten| forgotten == at)
    }
}

impl TieredInner {
    /// Runs an errand in the background. The returned receiver ends when it has.
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

    /// The same, and waits a moment for it.
    pub(super) async fn spawn_and_wait_briefly(self: &Arc<Self>, errand: BackgroundTask) {
        let _ = timeout(RELEASE_WAIT, self.spawn_background(errand)).await;
    }

    /// How often `first` was put under another generation, and how often something was forgotten.
    fn epochs(&self) -> (u64, u64) {
        (self.generation.epoch(), self.recent_forgets.lock().total)
    }

    async fn run_background(&self, errand: &BackgroundTask, (generation, forgets): (u64, u64)) {
        let mut pause = INITIAL_BACKOFF;
        for tried in 1.. {
            // What was meant for another generation is nobody's here, and what was forgotten must not come back.
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
        match errand {
            BackgroundTask::SettleByToken { lease, copied } => {
                self.front.settle(&without_fence(lease), &copied.adjusted_for_delay()).await.map(drop)
            }
            BackgroundTask::Extend { lease, duration: hold, sent_at: told } => {
                self.extend_in_front(lease, hold.saturating_sub(told.elapsed())).await.map(drop)
            }
            BackgroundTask::SettleFrontClaim { lease, copied } => {
                self.front.settle(lease, &copied.adjusted_for_delay()).await.map(drop)
            }
            BackgroundTask::HoldUntil(lease, until) => {
                self.front.extend(lease, until.saturating_duration_since(Instant::now())).await.map(drop)
            }
            BackgroundTask::RemoveMarker(at, fence) => self.remove_marker(at, *fence).await,
            BackgroundTask::Abandon(lease) => self.abandon_in_front(lease).await.map(drop),
        }
    }

    /// Releases a claim that is one of `first`'s own. Its marker goes before: else whoever comes next and falls silent
    /// between its two claims would pass for one that ran solo.
    pub(super) async fn abandon_in_front(&self, lease: &Lease) -> Result<SettleOutcome, StoreError> {
        self.remove_marker(&lease.request.address, lease.fence).await?;
        self.front.settle(lease, &Settlement::Release).await
    }

    /// Keeps the claim of this lease alive in `first`. Where `first` has lost it, it is put back under the lease's own
    /// fence; where it has it, it goes by the token.
    pub(super) async fn extend_in_front(&self, lease: &Lease, hold: Duration) -> Result<SettleOutcome, StoreError> {
        let held = self.front.extend(lease, hold).await?;
        if is_held_under_other_fence(&held) { self.front.extend(&without_fence(lease), hold).await } else { Ok(held) }
    }

    /// The lease as `first` knows it.
    pub(super) fn front_lease(&self, lease: &Lease) -> Lease {
        Lease { request: self.front_request(&lease.request), ..lease.clone() }
    }

    /// The ask as `first` knows it: under its own token; or, where that was spent there, under its other name.
    pub(super) fn front_request(&self, ask: &Arc<ClaimRequest>) -> Arc<ClaimRequest> {
        match self.token_aliases.lock().get(&ask.token) {
            Some(token) => Arc::new(ClaimRequest { token: *token, ..ClaimRequest::clone(ask) }),
            None => ask.clone(),
        }
    }
}

impl BackgroundTask {
    /// Whether `first` would have something afterwards that it may not have had.
    fn may_recreate_entry(&self) -> bool {
        match self {
            Self::Extend { .. } => true,
            Self::SettleByToken { copied, .. } | Self::SettleFrontClaim { copied, .. } => {
                !matches!(copied.adjusted_for_delay(), Settlement::Release)
            }
            Self::HoldUntil(..) | Self::RemoveMarker(..) | Self::Abandon(_) => false,
        }
    }

    fn address(&self) -> &Address {
        match self {
            Self::SettleByToken { lease, .. }
            | Self::Extend { lease, .. }
            | Self::SettleFrontClaim { lease, .. }
            | Self::HoldUntil(lease, _)
            | Self::Abandon(lease) => &lease.request.address,
            Self::RemoveMarker(at, _) => at,
        }
    }
}

/// Somebody is there who has not finished, under another fence.
fn is_held_under_other_fence(held: &SettleOutcome) -> bool {
    matches!(held, SettleOutcome::ClaimLost(found) if matches!(**found, ClaimOutcome::InProgress(_) | ClaimOutcome::OutcomeUnknown(_)))
}

fn without_fence(lease: &Lease) -> Lease {
    Lease { fence: Fence::UNSEEN, ..lease.clone() }
}
