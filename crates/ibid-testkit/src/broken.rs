//! Stores with one bug each. The [contract](crate::contract) must fail every one of them, or it checks too little.
//!
//! Invariant: each bug is a plausible mistake, and names a case that must catch it. Other cases may
//! catch it too, but an accidental failure elsewhere does not count.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use ibid::store::Memory;
//! use ibid_testkit::broken::failing_cases;
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! assert!(failing_cases(Arc::new(Memory::default()), Duration::from_secs(30)).await.is_empty());
//! # });
//! ```

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use ibid::store::Store;

pub use self::store::FaultyStore;
use crate::contract::cases;

mod store;

/// Defines the bugs, each with a case that must catch it.
macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident: $case:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$doc])* $bug,)*
        }

        /// All bugs, each with a case that must catch it.
        pub const BUGS: &[(Bug, &str)] = &[$((Bug::$bug, $case)),*];
    };
}
bugs! {
    GrantsEveryone: "another_token_finds_the_holder_busy",
    /// Reads, then claims: grants every claim that read nothing.
    ChecksThenActs: "of_64_concurrent_claims_exactly_one_is_granted",
    /// Reports the holder's own token as in progress.
    ForgetsTokens: "the_same_token_gets_the_same_lease",
    /// Grants a claim with an expired lease to anyone.
    LapsedIsFree: "a_lapsed_claim_is_unknown_and_never_free",
    TakeoverIgnoresFence: "a_takeover_that_names_another_holder_is_refused",
    /// Grants a takeover of a parked claim before `retry_in`.
    TakeoverIgnoresRetryIn: "a_parked_claim_is_not_taken_over_before_retry_in",
    /// Grants a takeover to several claims.
    TakeoverRaces: "of_concurrent_takeovers_exactly_one_is_granted",
    /// Applies a settlement of a stale holder.
    SettleIgnoresHolder: "a_stale_settle_is_lost_and_writes_nothing",
    /// Extends the lease for anyone.
    ExtendIgnoresHolder: "extend_after_a_takeover_is_lost",
    NeverRestores: "complete_puts_an_absent_entry_back",
    /// Forgets the token at a release, so that it can claim again.
    ReleaseLeavesNothing: "a_released_token_is_spent",
    /// Frees the entry when a takeover is released.
    ReleasedTakeoverIsFree: "a_released_takeover_is_unknown_again",
    /// Lets an unseen release free another holder's entry.
    UnseenReleaseIgnoresToken: "an_unseen_release_with_a_foreign_token_changes_nothing",
    /// Frees a parked entry.
    ParkIsRelease: "a_parked_claim_is_unknown",
    /// Never ends a wait before its limit.
    WaitSleeps: "wait_returns_soon_after_the_holder_settles",
    /// Ends a wait at once.
    WaitReturns: "wait_returns_after_its_limit",
    /// Counts a record's ttl from the claim.
    TtlCountsFromClaim: "keep_counts_from_completion",
    /// Restarts fences with each life of an entry.
    FencesRestart: "a_finished_entry_answers_for_keep_and_is_gone_afterwards",
    /// Lets a second completion overwrite the first.
    CompleteOverwrites: "complete_is_repeatable_and_the_first_record_stays",
    /// Truncates a record to one mebibyte.
    TruncatesRecords: "a_large_record_comes_back_whole",
    /// Returns the first page for every cursor.
    ListIgnoresCursor: "paging_shows_every_entry_once",
    /// Has an answer at hand although its entry was replaced.
    StaleAnswerAtHand: "replace_swaps_bytes_and_keeps_life",
    /// Ignores the page size.
    ListIgnoresAtMost: "paging_shows_every_entry_once",
    /// Forgets an entry whatever its fence.
    ForgetIgnoresSeen: "forget_with_a_wrong_fence_is_lost",
    /// Resolves an entry that is in progress.
    ResolveKillsLive: "resolve_is_refused_unless_it_is_unknown_and_seen",
    /// Drops old entries to make room for new ones.
    EvictsLive: "live_entries_are_not_evicted_by_new_ones",
    /// Sweeps completed entries, expired or not.
    SweepsFinished: "sweep_removes_only_what_has_expired",
    /// Reads, then counts: loses concurrent reservations.
    CountsRace: "what_is_reserved_adds_up",
    CountsAllTenantsTogether: "what_is_reserved_adds_up",
    /// Restarts the window with every reservation.
    WindowsSlide: "a_window_ends_by_itself",
    WindowsNeverEnd: "a_window_ends_by_itself",
    /// Overflows at the end of a long window.
    WindowsOverflow: "endless_windows_do_not_overflow",
}

/// Runs all cases concurrently on one store. Returns the names of those that failed or took longer than `limit`.
pub async fn failing_cases(store: Arc<dyn Store>, limit: Duration) -> Vec<&'static str> {
    let runs = cases().into_iter().map(|(name, case)| {
        let run = tokio::spawn(tokio::time::timeout(limit, case(store.clone())));
        async move { (name, matches!(run.await, Ok(Ok(())))) }
    });
    join_all(runs).await.into_iter().filter(|(_, passed)| !passed).map(|(name, _)| name).collect()
}
