//! The store contract as test cases. Every implementation of [`Store`] passes all of them.
//!
//! Each case is an `async fn(&dyn Store)` that panics with a description. Invariants: a case uses only fresh random
//! addresses, so one store may serve all cases concurrently; and no case assumes the speed of a clock or a machine: a
//! case measures what must not happen early from before the call that started it, and polls for what must happen.
//!
//! ```
//! mod store_contract {
//!     use ibid::store::Memory;
//!
//!     ibid_testkit::contract_tests!(memory, async { Memory::default() });
//! }
//! ```
//!
//! One case needs its own store and is therefore not in the table: [`admin::sweeps_count_what_they_remove`].

use std::sync::Arc;

pub use futures_util::future::BoxFuture;
use ibid::store::Store;

pub mod admin;
pub mod claims;
mod common;
pub mod counters;
pub mod ends;
pub mod lifetimes;
pub mod reading;
pub mod takeovers;
pub mod unseen_claims;
pub mod waiting;

/// A case that can run on any store.
pub type ContractCase = fn(Arc<dyn Store>) -> BoxFuture<'static, ()>;

/// All cases by name, for callers that run them in a loop.
pub fn cases() -> Vec<(&'static str, ContractCase)> {
    crate::__each_case!(__as_list)
}

/// Expands into a module with one test for each case of the [contract](crate::contract), each on its own
/// store: `contract_tests!(name_of_the_module, future_of_a_store)`.
///
/// The future's expression is evaluated within that module, which sees everything that its parent sees. The tests are
/// `#[tokio::test]`s: the calling crate depends on `tokio` with `macros` and `rt`.
#[macro_export]
macro_rules! contract_tests {
    ($name:ident, $make_store:expr $(,)?) => {
        $crate::__each_case!(__as_tests $name, $make_store);
    };
}

/// Passes the table of cases to the named macro. No other place lists them.
#[doc(hidden)]
#[macro_export]
macro_rules! __each_case {
    ($then:ident $($with:tt)*) => {
        $crate::$then! {
            [$($with)*]
            claims::a_first_claim_is_granted_as_attempt_1;
            claims::the_same_token_gets_the_same_lease;
            claims::another_token_finds_the_holder_busy;
            claims::a_refused_token_is_granted_once_it_is_free;
            claims::of_64_concurrent_claims_exactly_one_is_granted;
            claims::concurrent_copies_of_one_claim_get_one_lease;
            claims::addresses_do_not_disturb_each_other;
            claims::a_takeover_of_nobody_is_a_plain_claim;
            claims::live_entries_are_not_evicted_by_new_ones;
            ends::a_completed_claim_is_done_with_its_record;
            ends::complete_is_repeatable_and_the_first_record_stays;
            ends::a_finished_entry_cannot_be_undone;
            ends::a_stale_settle_is_lost_and_writes_nothing;
            ends::a_settle_needs_both_fence_and_token;
            ends::after_a_release_the_next_claim_is_granted;
            ends::a_released_token_is_spent;
            ends::a_spent_token_stays_spent_when_others_come_and_go;
            ends::a_released_token_is_spent_beyond_hold_and_keep;
            ends::a_release_is_repeatable_when_others_have_come;
            ends::after_a_release_only_a_release_is_held;
            ends::a_parked_claim_is_unknown;
            ends::a_holder_may_complete_after_its_own_park;
            ends::a_release_after_its_own_park_does_not_free;
            ends::an_empty_record_comes_back_empty;
            ends::a_large_record_comes_back_whole;
            takeovers::a_lapsed_claim_is_unknown_and_never_free;
            takeovers::a_lapsed_holder_that_asks_again_is_still_itself;
            takeovers::a_lapsed_claim_can_be_taken_over;
            takeovers::a_takeover_that_names_another_holder_is_refused;
            takeovers::a_live_holder_is_not_taken_over;
            takeovers::a_parked_claim_is_not_taken_over_before_retry_in;
            takeovers::of_concurrent_takeovers_exactly_one_is_granted;
            takeovers::a_late_completion_is_held_if_nobody_took_over;
            takeovers::extend_keeps_a_claim_alive;
            takeovers::extend_moves_the_expiry_too;
            takeovers::extend_revives_a_lapsed_claim;
            takeovers::extend_after_a_takeover_is_lost;
            takeovers::a_released_takeover_is_unknown_again;
            takeovers::a_takeover_that_completes_is_done;
            lifetimes::a_finished_entry_answers_for_keep_and_is_gone_afterwards;
            lifetimes::keep_counts_from_completion;
            lifetimes::an_unfinished_entry_is_kept_after_its_lease;
            lifetimes::a_parked_entry_is_kept_for_its_own_keep;
            lifetimes::extend_puts_an_absent_entry_back;
            lifetimes::complete_puts_an_absent_entry_back;
            lifetimes::a_holder_is_put_back_where_somebody_else_came_and_went;
            lifetimes::fences_grow_after_a_restored_entry;
            lifetimes::a_takeover_released_after_expiry_is_unknown;
            lifetimes::a_release_after_expiry_spends_the_token;
            lifetimes::endless_lifetimes_do_not_overflow;
            lifetimes::fences_strictly_grow_over_a_long_history;
            unseen_claims::an_unseen_release_frees_a_claim_that_was_applied;
            unseen_claims::an_unseen_release_spends_a_claim_that_never_came;
            unseen_claims::an_unseen_release_with_a_foreign_token_changes_nothing;
            unseen_claims::an_unseen_release_spends_its_token_beside_another_holder;
            unseen_claims::an_unseen_release_of_a_takeover_is_unknown_again;
            unseen_claims::an_unseen_release_of_a_refused_takeover_changes_nothing;
            unseen_claims::an_unseen_complete_of_a_claim_that_never_came_is_lost;
            waiting::wait_returns_at_once_unless_seen_runs;
            waiting::wait_returns_soon_after_the_holder_settles;
            waiting::wait_returns_soon_after_a_forget;
            waiting::wait_returns_soon_after_the_lease_lapses;
            waiting::wait_goes_on_while_the_lease_is_extended;
            waiting::wait_returns_after_its_limit;
            waiting::all_of_200_waiters_wake;
            waiting::waiters_of_the_next_holder_are_not_lost;
            waiting::a_waiter_that_gives_up_disturbs_nobody;
            reading::get_is_read_only;
            reading::get_after_a_release_is_none;
            reading::a_listed_entry_carries_what_was_given;
            reading::a_listing_filters_by_state;
            reading::a_listing_filters_by_tags_and_address;
            reading::a_listing_filters_by_age;
            reading::paging_shows_every_entry_once;
            reading::counts_follow_what_is_there;
            reading::an_expired_entry_is_not_listed;
            admin::resolve_as_complete_makes_an_unknown_entry_done;
            admin::a_holder_comes_back_too_late_after_resolve_as_complete;
            admin::resolve_as_release_frees_an_unknown_entry;
            admin::resolve_as_release_frees_a_takeover;
            admin::a_released_takeover_stays_spent_when_it_is_resolved;
            admin::resolve_need_not_wait_for_retry_in;
            admin::resolve_is_refused_unless_it_is_unknown_and_seen;
            admin::forget_takes_a_running_entry_from_its_holder;
            admin::forget_works_in_every_state;
            admin::forget_with_a_wrong_fence_is_lost;
            admin::replace_swaps_bytes_and_keeps_life;
            admin::replace_of_anything_else_is_lost;
            admin::sweep_removes_only_what_has_expired;
            counters::what_is_reserved_adds_up;
            counters::a_window_ends_by_itself;
            counters::endless_windows_do_not_overflow;
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __as_tests {
    ([$name:ident, $make_store:expr] $($file:ident :: $case:ident;)*) => {
        mod $name {
            #[allow(unused_imports, reason = "the expression may need none of it")]
            use super::*;

            $(
                #[::tokio::test]
                async fn $case() {
                    $crate::contract::$file::$case(&$make_store.await).await;
                }
            )*
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __as_list {
    ([] $($file:ident :: $case:ident;)*) => {
        vec![$((
            stringify!($case),
            (|store| Box::pin(async move { $crate::contract::$file::$case(&*store).await })) as $crate::contract::ContractCase,
        )),*]
    };
}
