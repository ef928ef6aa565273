//! `ibid keys`, `sweep` and `migrate`, with the real binary on real stores.
//!
//! The cases are functions of a [`Place`], and know nothing of its kind; [`on_a_store`] makes the tests of one. Every
//! record in them was made by a gateway.

use std::any::Any;

mod changing;
mod listing;
mod scene;
mod showing;
mod sweeping;
mod usage;

/// Where a store is, and whatever keeps it there.
pub(crate) struct Place {
    pub(crate) url: String,
    /// What else the table says, for a store that is more than its URL. Commands are then given the file.
    pub(crate) table: String,
    /// Whether what has expired is gone without a sweep: its server sees to it, or the store leaves it out when it is
    /// opened.
    pub(crate) expires_by_itself: bool,
    _kept: Box<dyn Any + Send + Sync>,
}

impl Place {
    /// A place that lives as long as `kept`.
    pub(crate) fn new(url: String, kept: impl Any + Send + Sync) -> Place {
        Place { url, table: String::new(), expires_by_itself: false, _kept: Box::new(kept) }
    }
}

/// A finished entry and an unknown one, as `show --json` prints them.
pub(crate) async fn finished_and_unknown() -> [serde_json::Value; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let place = Place::new(format!("embedded:{}", folder.path().join("data").display()), ());
    let scene = scene::Scene::filled(&place).await;
    let finished = scene.keys(&["show", "--key", &scene::key(0), "--json"]).await.json();
    [finished, scene.keys(&["show", "--key", scene::LOST, "--json"]).await.json()]
}

/// One test per case, each on a [`Place`] of its own.
macro_rules! on_a_store {
    ($name:ident, $place:expr, { $($module:ident :: { $($case:ident),+ $(,)? }),+ $(,)? }) => {
        mod $name {
            $($(
                #[tokio::test]
                async fn $case() {
                    super::$module::$case(&$place.await).await;
                }
            )+)+
        }
    };
}

/// All of them, on one kind of store.
macro_rules! all_cases {
    ($name:ident, $place:expr) => {
        on_a_store!($name, $place, {
            listing::{
                a_list_has_what_the_gateway_remembers,
                filters_are_all_applied,
                a_list_goes_on_where_it_ended,
                a_key_is_found_as_sent_though_it_is_stored_masked,
            },
            showing::{
                every_field_of_a_finished_one_is_shown,
                a_body_that_is_no_text_is_shown_as_hex_and_written_raw,
                an_unknown_one_has_no_answer,
                what_is_not_there_or_not_alone_is_not_shown,
            },
            changing::{
                a_forgotten_one_runs_again,
                a_released_one_runs_again,
                a_resolved_one_is_answered_as_told,
                one_that_never_happened_runs_again,
                a_finished_one_is_not_resolved,
                another_fence_changes_nothing,
                a_change_is_written_to_the_log_with_its_reason,
            },
            sweeping::{what_has_expired_is_removed, nothing_that_counts_is_removed},
        });
    };
}

all_cases!(embedded, async {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("embedded:{}", folder.path().join("data").display());
    super::Place { expires_by_itself: true, ..super::Place::new(url, folder) }
});
