//! `ibid keys`, `sweep` and `migrate`, with the real binary on real stores.
//!
//! The cases are functions of a [`Place`], and know nothing of its kind; [`on_a_store`] makes the tests of one. Every
//! record in them was made by a gateway.

use std::{
    any::Any,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

use testbed::{TestPostgres, TestRedis};

use crate::support::run_ibid;

mod changing;
mod common;
mod concurrent_gateway;
mod listing;
mod showing;
mod sweeping;
mod usage;

/// Where a store is, and whatever keeps it there.
pub(crate) struct TestStore {
    pub(crate) url: String,
    /// What else the table says, for a store that is more than its URL. Commands are then given the file.
    pub(crate) table: String,
    /// Whether what has expired is gone without a sweep: its server sees to it, or the store leaves it out when it is
    /// opened.
    pub(crate) expires_by_itself: bool,
    /// Whether commands ask a gateway that has it, over its admin API.
    pub(crate) via_admin: bool,
    _kept: Box<dyn Any + Send + Sync>,
}

impl TestStore {
    /// A place that lives as long as `kept`.
    pub(crate) fn new(url: String, kept: impl Any + Send + Sync) -> TestStore {
        TestStore { url, table: String::new(), expires_by_itself: false, via_admin: false, _kept: Box::new(kept) }
    }
}

/// A finished entry and an unknown one, as `show --json` prints them.
pub(crate) async fn finished_and_unknown() -> [serde_json::Value; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let place = TestStore::new(format!("embedded:{}", folder.path().join("data").display()), ());
    let scene = common::KeysFixture::start_filled(&place).await;
    let finished = scene.run_keys(&["show", "--key", &common::key(0), "--json"]).await.json();
    [finished, scene.run_keys(&["show", "--key", common::UNKNOWN_KEY, "--json"]).await.json()]
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

/// All of them, on one kind of store. With `without_sweeps`, those that also work over the admin API.
macro_rules! all_cases {
    ($name:ident, $place:expr) => {
        all_cases!(without_sweeps $name, $place, sweeping::{what_has_expired_is_removed, nothing_that_counts_is_removed});
    };
    (without_sweeps $name:ident, $place:expr $(, $($more:tt)*)?) => {
        on_a_store!($name, $place, {
            listing::{
                a_list_has_what_the_gateway_remembers,
                filters_are_all_applied,
                a_list_goes_on_where_it_ended,
                a_key_is_found_as_sent_though_it_is_stored_masked,
                addresses_and_keys_are_found_by_their_beginning,
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
            $($($more)*)?
        });
    };
}

all_cases!(embedded, async {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("embedded:{}", folder.path().join("data").display());
    super::TestStore { expires_by_itself: true, ..super::TestStore::new(url, folder) }
});

/// The same over the admin API of a gateway that has the store open meanwhile.
macro_rules! cases_over_the_api {
    ($name:ident, $place:expr) => {
        all_cases!(without_sweeps $name, async { super::TestStore { via_admin: true, ..$place.await } });
    };
}

cases_over_the_api!(over_the_api_on_embedded, async {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("embedded:{}", folder.path().join("data").display());
    super::TestStore::new(url, folder)
});
cases_over_the_api!(over_the_api_on_redis, super::redis());
cases_over_the_api!(over_the_api_on_postgres, super::postgres());
all_cases!(on_sealed_embedded, async {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("embedded:{}", folder.path().join("data").display());
    super::sealed(super::TestStore { expires_by_itself: true, ..super::TestStore::new(url, folder) })
});

/// Those of a store that several processes share.
macro_rules! shared_cases {
    ($name:ident, $place:expr) => {
        on_a_store!($name, $place, {
            concurrent_gateway::{
                a_running_one_is_neither_released_nor_resolved,
                a_gateway_sees_what_was_changed_beside_it,
                a_sweep_beside_a_gateway_takes_nothing_from_it,
            },
        });
    };
}

/// One Redis for all tests: each has a prefix of its own.
pub(crate) async fn redis() -> TestStore {
    static PLACES: AtomicUsize = AtomicUsize::new(0);
    let table = format!("prefix = \"keys-{}\"", PLACES.fetch_add(1, SeqCst));
    TestStore { table, expires_by_itself: true, ..TestStore::new(TestRedis::shared().url(), ()) }
}

/// A database of its own, migrated by `ibid migrate`.
pub(crate) async fn postgres() -> TestStore {
    let server = TestPostgres::shared();
    let database = server.create_database();
    let migrate = |how: &'static [&'static str]| {
        let url = server.url("migrator", &database);
        async move { run_ibid(&[&["migrate", "--store", &url], how].concat(), &[]).await }
    };
    let dry = migrate(&["--dry-run"]).await;
    assert_eq!((dry.code, dry.stdout.is_empty()), (Some(0), false), "{dry:?}");
    assert_eq!(server.sql(&database, "SELECT to_regnamespace('ibid') IS NULL"), "t", "nothing was made");
    let done = migrate(&[]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    TestStore::new(server.url("gateway", &database), ())
}

/// PostgreSQL behind Redis.
pub(crate) async fn fallback() -> TestStore {
    let (redis, postgres) = (redis().await, postgres().await);
    TestStore { table: format!("{}\nfallback = {:?}", redis.table, postgres.url), ..redis }
}

/// Redis before PostgreSQL.
async fn cache() -> TestStore {
    let (redis, postgres) = (redis().await, postgres().await);
    TestStore { table: format!("{}\ncache = {:?}", redis.table, redis.url), ..postgres }
}

/// The same store, sealed; commands have the keys.
fn sealed(place: TestStore) -> TestStore {
    TestStore { table: format!("{}\n{}", place.table, crate::sealing::table(&["2026-11"])), ..place }
}

all_cases!(on_redis, super::redis());
shared_cases!(beside_redis, super::redis());
all_cases!(on_postgres, super::postgres());
shared_cases!(beside_postgres, super::postgres());
all_cases!(on_redis_with_fallback, super::fallback());
shared_cases!(beside_redis_with_fallback, super::fallback());
all_cases!(on_postgres_with_cache, super::cache());
shared_cases!(beside_postgres_with_cache, super::cache());
all_cases!(on_sealed_redis, async { super::sealed(super::redis().await) });
shared_cases!(beside_sealed_redis, async { super::sealed(super::redis().await) });
all_cases!(on_sealed_postgres_with_cache, async { super::sealed(super::cache().await) });
