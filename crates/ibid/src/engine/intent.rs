//! The intent guard: after a key is granted, the request's intent is claimed in the same store, at an address of its own.
//! The entry there has the key's address in place of a fingerprint. Whoever finds it knows which key came first.
//!
//! Invariant: **an intent is free only if its key is.** It is claimed after the key and released before it. While the
//! key runs, both leases are extended; an unknown outcome leaves both unknown; a completed key leaves the intent
//! completed for the window. A crash between two of these steps leaves an intent whose lease expires. The next request
//! with the same intent then looks at the key that it names ([`Engine::is_abandoned`]).

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep};

use super::{
    BeginOutcome, ClaimedRun, Engine, MAX_TAKEOVERS, RETRY_SOON,
    refusals::{duplicate_intent, in_progress, store_unavailable},
};
use crate::{
    intent::{HELD, HeldKey},
    label::LabelText,
    observe::EngineEvent,
    policy::{IntentGuard, OnMatch, OnStoreDown, Terms},
    record::{Record, RecordBody},
    refusal::Refusal,
    settle_queue::AbandonGuard,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, EntryFilter, ErrorKind, Fence, Fingerprint, Lease, ListCursor,
        RecordSummary, SettleOutcome, Settlement, StoreError, Tags,
    },
    time::now_ms,
};

/// What the tags of an intent's entry have behind the key that it belongs to.
const TAG_SUFFIX: &str = " (intent)";
/// An intent that is held while its key runs. If it is dropped before it is settled, its outcome is unknown.
pub(super) struct HeldIntent {
    guard: AbandonGuard,
    window: Duration,
}

/// The result of claiming an intent.
enum IntentOutcome {
    Granted(Lease),
    /// An earlier run of the same key completed, and the window is not over.
    OwnCompleted,
    /// Another key has it.
    Duplicate(Address),
    /// An earlier run of the same key holds it for this long.
    InProgress(Duration),
    StoreFailed(ErrorKind),
}

impl HeldIntent {
    pub(super) fn lease(&self) -> &Lease {
        self.guard.lease()
    }

    /// How the intent is settled after its key was: `settled` is what the store said about `settlement`.
    pub(super) fn settlement(
        &self, key: &Lease, settlement: &Settlement, settled: &Result<SettleOutcome, StoreError>,
    ) -> Settlement {
        let unknown = Settlement::Park { ttl: key.request.ttl.max(key.request.lease), retry_in: Duration::ZERO };
        let (failed, summary) = match (settled, settlement) {
            (Ok(SettleOutcome::ClaimLost(entry)), _) => match &**entry {
                // The handler's own transaction completed the key.
                ClaimOutcome::Completed(entry) if entry.fence == key.fence => (entry.failed, note_summary()),
                // Another run of the key takes the intent over. If it were completed, that run would go on without it.
                _ => return unknown,
            },
            (_, Settlement::Complete { failed, summary, .. }) => (*failed, *summary),
            // Whether the handler's transaction committed is not known.
            (Err(_), Settlement::Release) => return unknown,
            (_, settlement) => return settlement.clone(),
        };
        if failed { Settlement::Release } else { completed_intent(summary, self.window) }
    }
}

/// The claim of an intent for a key's claim. Its token follows from the key's, so that another process can resume it.
fn intent_request(key: &ClaimRequest, intent: Address, shown_key: &str) -> Arc<ClaimRequest> {
    let digest = Sha256::new().chain_update(b"ibid intent ").chain_update(key.token.0).finalize();
    let (tags, shown) = (&key.tags, format!("{shown_key}{TAG_SUFFIX}"));
    Arc::new(ClaimRequest {
        address: intent,
        token: ClaimToken(*digest.first_chunk().expect("32 bytes")),
        fingerprint: Fingerprint::of_key_address(&key.address),
        tags: Tags::new(tags.tenant(), tags.user(), tags.endpoint(), &shown),
        label: key.label.clone(),
        take_over: None,
        ..*key
    })
}

fn note_summary() -> RecordSummary {
    let now = now_ms();
    RecordSummary { status: 200, requested_at_ms: now, completed_at_ms: now, took: Duration::from_micros(1) }
}

fn completed_intent(summary: RecordSummary, window: Duration) -> Settlement {
    let RecordSummary { requested_at_ms, completed_at_ms, .. } = summary;
    let (status, body, cookies) = (StatusCode::OK, RecordBody::None, Vec::new());
    let (headers, trailers) = (HeaderMap::new(), HeaderMap::new());
    let record = Record { status, requested_at_ms, completed_at_ms, headers, body, trailers, cookies }.encode();
    Settlement::Complete { failed: false, record, summary, ttl: window }
}

impl Engine {
    /// Claims the intent of a run before it starts. Refuses the run, and releases its key, if another key has the
    /// intent. `shown_key` is the run's masked key.
    pub(crate) async fn claim_intent(
        &self, policy: &Terms, guard: &IntentGuard, intent: Address, shown_key: &str, mut run: ClaimedRun,
    ) -> BeginOutcome {
        let request = intent_request(&run.lease().request, intent, shown_key);
        let first = match self.try_claim_intent(policy, guard, request).await {
            IntentOutcome::Granted(lease) => {
                run.intent = Some(self.hold_intent(policy, guard, lease));
                return self.start_in_time(policy, run).await;
            }
            IntentOutcome::OwnCompleted => return self.start_in_time(policy, run).await,
            IntentOutcome::InProgress(left) => return self.give_up(run, in_progress(left.max(RETRY_SOON))).await,
            IntentOutcome::StoreFailed(kind) => {
                if policy.on_store_down == OnStoreDown::Open && kind != ErrorKind::Corrupt {
                    return self.start_in_time(policy, run).await;
                }
                return self.give_up(run, store_unavailable()).await;
            }
            IntentOutcome::Duplicate(first) => first,
        };
        let address = run.lease().request.address;
        let report = |on_match| {
            self.observer.on_event(&EngineEvent::DuplicateIntent { address: &address, first: &first, on_match });
        };
        match guard.on_match {
            OnMatch::Count => {
                report(OnMatch::Count);
                self.start_in_time(policy, run).await
            }
            OnMatch::Reject => {
                report(OnMatch::Reject);
                let refusal = duplicate_intent(&self.key_at(&first).await, false);
                self.give_up(run, refusal).await
            }
            OnMatch::Hold => {
                if let Ok(Some(HeldKey { is_permitted: true, .. })) = HeldKey::find(&*self.store, &address).await {
                    return self.start_in_time(policy, run).await;
                }
                report(OnMatch::Hold);
                let refusal = duplicate_intent(&self.key_at(&first).await, true);
                self.hold_key(policy, run, &first, refusal).await
            }
        }
    }

    fn hold_intent(&self, policy: &Terms, guard: &IntentGuard, lease: Lease) -> Box<HeldIntent> {
        Box::new(HeldIntent { guard: self.settle_queue.guard_claim(lease, policy), window: guard.window })
    }

    /// The intent of a run that another process began. Only its token identifies it.
    pub(super) fn resume_intent(&self, policy: &Terms, guard: &IntentGuard, key: &Lease) -> Option<Box<HeldIntent>> {
        let intent = LabelText::decode(&key.request.label)?.intent?;
        let request = intent_request(&key.request, intent, &crate::mask(key.request.tags.key()));
        Some(self.hold_intent(policy, guard, Lease::unseen(&request)))
    }

    pub(super) async fn end_intent(&self, held: &mut HeldIntent, settlement: Settlement) {
        self.settle_or_queue(held.lease(), settlement).await;
        held.guard.disarm();
    }

    /// Releases the key of a run that does not start.
    async fn give_up(&self, mut run: ClaimedRun, refusal: Refusal) -> BeginOutcome {
        self.settle_or_queue(run.lease(), Settlement::Release).await;
        run.disarm();
        BeginOutcome::Refused(refusal)
    }

    async fn try_claim_intent(
        &self, policy: &Terms, guard: &IntentGuard, mut request: Arc<ClaimRequest>,
    ) -> IntentOutcome {
        let own = request.fingerprint;
        for _ in 0..MAX_TAKEOVERS {
            let (claim, _, doubtful) = self.claim(&request, Instant::now()).await;
            let (fence, named, left) = match claim {
                Err(error) => return IntentOutcome::StoreFailed(error.kind),
                // The token was released, or an operator freed the intent just now.
                Ok(_) if doubtful => return IntentOutcome::InProgress(RETRY_SOON),
                Ok(ClaimOutcome::TokenSpent) => return IntentOutcome::InProgress(RETRY_SOON),
                Ok(ClaimOutcome::Granted(lease)) => return IntentOutcome::Granted(lease),
                Ok(ClaimOutcome::Completed(entry)) if entry.fingerprint == own => return IntentOutcome::OwnCompleted,
                Ok(ClaimOutcome::Completed(entry)) => {
                    return IntentOutcome::Duplicate(Address(entry.fingerprint.digest));
                }
                Ok(ClaimOutcome::InProgress(holder)) if holder.fingerprint != own => {
                    return IntentOutcome::Duplicate(Address(holder.fingerprint.digest));
                }
                Ok(ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder)) => {
                    (holder.fence, holder.fingerprint, holder.takeover_in)
                }
            };
            let first = Address(named.digest);
            if named != own && !self.is_abandoned(guard, &request.address, fence, &first).await {
                return IntentOutcome::Duplicate(first);
            }
            // The key's own lease runs on meanwhile.
            if left > policy.lease / 3 {
                return IntentOutcome::InProgress(left);
            }
            sleep(left).await;
            request = Arc::new(ClaimRequest { take_over: Some(fence), ..ClaimRequest::clone(&request) });
        }
        IntentOutcome::InProgress(RETRY_SOON)
    }

    /// Whether the key that an expired intent names is free or failed: its gateway crashed before it could release the
    /// intent. If the key completed, the crash came before the intent was completed, which is done now: the window
    /// then counts from this request on.
    async fn is_abandoned(&self, guard: &IntentGuard, intent: &Address, seen: Fence, key: &Address) -> bool {
        match self.peek(key).await {
            Ok(None) => true,
            Ok(Some(ClaimOutcome::Completed(entry))) if entry.failed => true,
            Ok(Some(ClaimOutcome::Completed(_))) => {
                let end = completed_intent(note_summary(), guard.window);
                let resolved = self.store.admin().resolve(intent, seen, &end).await;
                let _ = resolved.inspect_err(|error| self.report_store_failure("resolve", error));
                false
            }
            Ok(Some(_)) | Err(_) => false,
        }
    }

    /// The masked key of the entry at an address.
    async fn key_at(&self, address: &Address) -> String {
        let filter = EntryFilter { address: Some(*address), ..EntryFilter::default() };
        let page = self.store.admin().list(&filter, ListCursor::default(), 1).await;
        let entries = page.map(|page| page.entries).unwrap_or_default();
        let key = entries.first().map(|entry| entry.tags.key()).filter(|key| !key.is_empty());
        key.map_or_else(|| format!("at {}", crate::mask(&address.to_string())), crate::mask)
    }

    /// Marks that the key is held, and parks it until an operator decides. The marker comes first: without it, the key
    /// would run on its next request.
    async fn hold_key(&self, policy: &Terms, mut run: ClaimedRun, first: &Address, refusal: Refusal) -> BeginOutcome {
        let key = &run.lease().request;
        let request = ClaimRequest {
            address: key.address.of_hold(),
            token: ClaimToken::mint(),
            fingerprint: Fingerprint::of_key_address(first),
            tags: Tags::new("", "", "ibid note", ""),
            label: Bytes::new(),
            take_over: None,
            ..**key
        };
        // Written by settling a claim that was never made: the store restores it.
        let marker = Lease { request: Arc::new(request), fence: Fence(1), attempt: 1, front_only: false };
        let (failed, record, summary) = (false, Bytes::from_static(HELD), note_summary());
        let ttl = policy.ttl.saturating_add(policy.lease);
        let marked = self.settle(&marker, &Settlement::Complete { failed, record, summary, ttl }, Instant::now()).await;
        if marked.is_err() {
            return self.give_up(run, store_unavailable()).await;
        }
        let held = Settlement::Park { ttl: policy.ttl, retry_in: policy.ttl };
        self.settle_or_queue(run.lease(), held).await;
        run.disarm();
        BeginOutcome::Refused(refusal)
    }

    /// Returns a refusal if an intent guard holds the key at this address, whose outcome is unknown.
    pub(super) async fn check_held(&self, key: &Address) -> Option<Refusal> {
        let held = HeldKey::find(&*self.store, key).await.ok()??;
        if held.is_permitted {
            return None;
        }
        Some(duplicate_intent(&self.key_at(&held.first).await, true))
    }
}
