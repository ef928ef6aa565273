//! What is done in `first` behind the answers: best effort, bounded in number and in tries.
//!
//! Order does not matter: every one of these calls is bound to a token, and a claim that has ended in `first`, or whose
//! entry is somebody else's by now, is not changed by a late one.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use ibid::{
    Notice,
    store::{Address, Ask, Claim, End, ErrorKind, Fence, Held, Lease, StoreError},
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};

use super::{Parts, copy::Copied};

/// How often `first` is told before it is left to lapse.
const TRIES: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// How long a release waits for `first`.
const MOMENT: Duration = Duration::from_millis(50);

/// So many forgotten addresses are known by name.
const RECENT: usize = 256;

/// What to do in `first`.
#[derive(Debug, Clone)]
pub(super) enum Errand {
    /// End the claim of this lease's token. What is not there is not put back: it may have been forgotten since.
    End { lease: Lease, copied: Copied },
    /// Keep it alive, or put it back, for `hold` from `told` on.
    Extend { lease: Lease, hold: Duration, told: Instant },
    /// End the claim of this lease, which is one of `first`'s own.
    Own { lease: Lease, copied: Copied },
    /// Hold the claim of this lease, which is one of `first`'s own, until then: until now, to let it lapse.
    Hold(Lease, Instant),
    /// Take the marker of a holder away, if it is still the latest.
    Unmark(Address, Fence),
    /// A claim that is one of `first`'s own and may be marked: take the marker away, then release.
    Abandon(Lease),
}

/// What operators have freed lately, so that nothing that is still on its way to `first` brings it back.
#[derive(Debug, Default)]
pub(super) struct Forgets {
    count: u64,
    /// At most [`RECENT`]; the last of all that were counted.
    recent: VecDeque<Address>,
}

impl Forgets {
    pub(super) fn add(&mut self, at: &Address) {
        self.count += 1;
        self.recent.push_back(*at);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    /// Whether it was forgotten since there were so many; yes, if nobody knows any more.
    fn has(&self, at: &Address, since: u64) -> bool {
        let newer = (self.count - since) as usize;
        newer > RECENT || self.recent.iter().rev().take(newer).any(|forgotten| forgotten == at)
    }
}

impl Parts {
    /// Runs an errand in the background. The returned receiver ends when it has.
    pub(super) fn behind(self: &Arc<Self>, errand: Errand) -> oneshot::Receiver<()> {
        let (ended, end) = oneshot::channel();
        let Ok(permit) = self.behind.clone().try_acquire_owned() else {
            self.observer.noticed(&Notice::Dropped(errand.address()));
            return end;
        };
        let parts = self.clone();
        let epochs = self.epochs();
        tokio::spawn(async move {
            parts.run(&errand, epochs).await;
            drop((permit, ended));
        });
        end
    }

    /// The same, and waits a moment for it.
    pub(super) async fn soon(self: &Arc<Self>, errand: Errand) {
        let _ = timeout(MOMENT, self.behind(errand)).await;
    }

    /// How often `first` was put under another generation, and how often something was forgotten.
    fn epochs(&self) -> (u64, u64) {
        (self.trust.epoch(), self.forgets.lock().count)
    }

    async fn run(&self, errand: &Errand, (generation, forgets): (u64, u64)) {
        let mut pause = FIRST_PAUSE;
        for tried in 1.. {
            // What was meant for another generation is nobody's here, and what was forgotten must not come back.
            if self.trust.epoch() != generation
                || (errand.remembers() && self.forgets.lock().has(errand.address(), forgets))
            {
                return;
            }
            let Err(error) = self.try_once(errand).await else { return };
            self.fell_back("behind", &error);
            if tried == TRIES || !matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous) {
                return;
            }
            sleep(pause).await;
            pause *= 4;
        }
    }

    async fn try_once(&self, errand: &Errand) -> Result<(), StoreError> {
        match errand {
            Errand::End { lease, copied } => self.first.settle(&unseen(lease), &copied.now()).await.map(drop),
            Errand::Extend { lease, hold, told } => {
                self.extend_in_first(lease, hold.saturating_sub(told.elapsed())).await.map(drop)
            }
            Errand::Own { lease, copied } => self.first.settle(lease, &copied.now()).await.map(drop),
            Errand::Hold(lease, until) => {
                self.first.extend(lease, until.saturating_duration_since(Instant::now())).await.map(drop)
            }
            Errand::Unmark(at, fence) => self.unmark(at, *fence).await,
            Errand::Abandon(lease) => self.abandon_in_first(lease).await.map(drop),
        }
    }

    /// Releases a claim that is one of `first`'s own. Its marker goes before: else whoever comes next and falls silent
    /// between its two claims would pass for one that ran solo.
    pub(super) async fn abandon_in_first(&self, lease: &Lease) -> Result<Held, StoreError> {
        self.unmark(&lease.ask.address, lease.fence).await?;
        self.first.settle(lease, &End::Release).await
    }

    /// Keeps the claim of this lease alive in `first`. Where `first` has lost it, it is put back under the lease's own
    /// fence; where it has it, it goes by the token.
    pub(super) async fn extend_in_first(&self, lease: &Lease, hold: Duration) -> Result<Held, StoreError> {
        let held = self.first.extend(lease, hold).await?;
        if is_held_otherwise(&held) { self.first.extend(&unseen(lease), hold).await } else { Ok(held) }
    }

    /// The lease as `first` knows it.
    pub(super) fn in_first(&self, lease: &Lease) -> Lease {
        Lease { ask: self.ask_in_first(&lease.ask), ..lease.clone() }
    }

    /// The ask as `first` knows it: under its own token; or, where that was spent there, under its other name.
    pub(super) fn ask_in_first(&self, ask: &Arc<Ask>) -> Arc<Ask> {
        match self.other_names.lock().get(&ask.token) {
            Some(token) => Arc::new(Ask { token: *token, ..Ask::clone(ask) }),
            None => ask.clone(),
        }
    }
}

impl Errand {
    /// Whether `first` would have something afterwards that it may not have had.
    fn remembers(&self) -> bool {
        match self {
            Self::Extend { .. } => true,
            Self::End { copied, .. } | Self::Own { copied, .. } => !matches!(copied.now(), End::Release),
            Self::Hold(..) | Self::Unmark(..) | Self::Abandon(_) => false,
        }
    }

    fn address(&self) -> &Address {
        match self {
            Self::End { lease, .. }
            | Self::Extend { lease, .. }
            | Self::Own { lease, .. }
            | Self::Hold(lease, _)
            | Self::Abandon(lease) => &lease.ask.address,
            Self::Unmark(at, _) => at,
        }
    }
}

/// Somebody is there who has not finished, under another fence.
fn is_held_otherwise(held: &Held) -> bool {
    matches!(held, Held::Lost(found) if matches!(**found, Claim::Busy(_) | Claim::Unknown(_)))
}

fn unseen(lease: &Lease) -> Lease {
    Lease { fence: Fence::UNSEEN, ..lease.clone() }
}
