//! What version 0.2.0 has written to each store, kept as it was: every later version must read it.
//!
//! Each store has entries of every state twice, in clear and sealed. `cargo test -p ibid-stores --test it -- --ignored
//! write_the_fixtures` wrote the files in `tests/fixtures/0.2.0`. They are not written again: a version that changes a
//! format changes [`VERSION`], writes files of its own, and reads both.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    journal::{Journal, JournalSeal as _},
    observe::NoopObserver,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, EntryFilter, EntryState, Fingerprint, ListCursor,
        RecordSummary, SettleOutcome, Settlement, Store, Tags,
    },
};
use ibid_stores::{
    RemoteOptions,
    embedded::{Embedded, EmbeddedOptions},
    postgres::Postgres,
    redis::Redis,
    seal::{SealKey, SealOptions, SealedStore, Sealer},
};
use tempfile::TempDir;
use testbed::{TestPostgres, TestRedis};

use crate::{crash::ManualClock, local_cache::granted, postgres::database, small};

const VERSION: &str = "0.2.0";
const READ_VERSIONS: [&str; 1] = [VERSION];
/// All that is stored lives for this long.
const LIFE: Duration = Duration::from_secs(40 * 365 * 24 * 60 * 60);
/// When the embedded store was written, by its own clock.
const THEN: u64 = 1_800_000_000_000_000;
/// The version of a fingerprint that names a key: an intent's.
const KEY_ADDRESS_VERSION: u8 = 100;

const IN_PROGRESS: u8 = 1;
const COMPLETED: u8 = 2;
const FAILED: u8 = 3;
const UNKNOWN: u8 = 4;
const RELEASED: u8 = 5;
const RESOLVED: u8 = 6;
const INTENT: u8 = 7;
/// What is added to the numbers of sealed entries.
const SEALED: u8 = 100;

fn fixture(version: &str, name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(version).join(name)
}

fn sealer() -> Sealer {
    Sealer::new(SealKey::new("2026-11", [7; 32]).unwrap(), Vec::new(), &[9; 32], SealOptions::default())
}

fn seal(store: &Arc<dyn Store>) -> SealedStore {
    SealedStore::new(store.clone(), sealer(), Arc::new(NoopObserver))
}

fn ask(nth: u8) -> Arc<ClaimRequest> {
    let is_intent = nth % SEALED == INTENT;
    let fingerprint = match is_intent {
        true => Fingerprint { version: KEY_ADDRESS_VERSION, digest: [nth - INTENT + COMPLETED; 32] },
        false => Fingerprint { version: 1, digest: [!nth; 32] },
    };
    let key = if is_intent { "550e****0000 (intent)" } else { "550e****0000" };
    Arc::new(ClaimRequest {
        address: Address([nth; 32]),
        token: ClaimToken([nth; 16]),
        fingerprint,
        tags: Tags::new("acme", "üser", "POST /payments", key),
        label: Bytes::from(format!("label {nth}")),
        lease: LIFE,
        ttl: LIFE,
        take_over: None,
    })
}

fn record(nth: u8) -> Bytes {
    Bytes::from(format!("record {nth}"))
}

fn complete(nth: u8, failed: bool) -> Settlement {
    let took = Duration::from_millis(3);
    let summary = RecordSummary { status: 201, requested_at_ms: 1, completed_at_ms: 2, took };
    Settlement::Complete { failed, record: record(nth), summary, ttl: LIFE }
}

fn is_completed(state: EntryState) -> bool {
    matches!(state, EntryState::Done | EntryState::Failed)
}

async fn write_entries(store: &dyn Store, from: u8) {
    granted(store, &ask(from + IN_PROGRESS)).await;
    let park = Settlement::Park { ttl: LIFE, retry_in: Duration::from_secs(60) };
    for (nth, end) in [
        (COMPLETED, complete(from + COMPLETED, false)),
        (FAILED, complete(from + FAILED, true)),
        (UNKNOWN, park.clone()),
        (RELEASED, Settlement::Release),
        (RESOLVED, park),
        (INTENT, complete(from + INTENT, false)),
    ] {
        let lease = granted(store, &ask(from + nth)).await;
        assert_eq!(store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied);
        if nth == RESOLVED {
            let end = complete(from + nth, false);
            let resolved = store.admin().resolve(&lease.request.address, lease.fence, &end).await.unwrap();
            assert_eq!(resolved, SettleOutcome::Applied);
        }
    }
}

/// `running`: how the store shows a claim that was in progress.
async fn check_entries(store: &dyn Store, from: u8, running: EntryState) {
    for (nth, state) in [
        (IN_PROGRESS, running),
        (COMPLETED, EntryState::Done),
        (FAILED, EntryState::Failed),
        (UNKNOWN, EntryState::Unknown),
        (RESOLVED, EntryState::Done),
        (INTENT, EntryState::Done),
    ] {
        let asked = ask(from + nth);
        let filter = EntryFilter { address: Some(asked.address), ..EntryFilter::default() };
        let page = store.admin().list(&filter, ListCursor::default(), 10).await.unwrap();
        let [entry] = &page.entries[..] else { panic!("entry {nth}: {page:?}") };
        assert_eq!((entry.state, &entry.label, &entry.tags), (state, &asked.label, &asked.tags), "entry {nth}");
        assert_eq!((entry.attempt, entry.fingerprint), (1, asked.fingerprint), "entry {nth}");
        assert_eq!(entry.summary.map(|summary| summary.status), is_completed(state).then_some(201), "entry {nth}");
        match store.claim(&Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ClaimRequest::clone(&asked) })).await {
            Ok(ClaimOutcome::InProgress(_)) => assert_eq!(state, EntryState::Processing, "entry {nth}"),
            Ok(ClaimOutcome::OutcomeUnknown(holder)) => {
                assert_eq!((state, holder.fence), (EntryState::Unknown, entry.fence), "entry {nth}");
            }
            Ok(ClaimOutcome::Completed(found)) => {
                assert!(is_completed(state), "entry {nth}");
                assert_eq!((found.record, found.failed), (record(from + nth), nth == FAILED), "entry {nth}");
            }
            other => panic!("entry {nth}: {other:?}"),
        }
    }
    let released = ask(from + RELEASED);
    assert_eq!(store.get(&released.address).await.unwrap(), None);
    assert_eq!(store.claim(&released).await.unwrap(), ClaimOutcome::TokenSpent, "its token is remembered");
}

async fn write_all(store: &Arc<dyn Store>) {
    write_entries(store, 0).await;
    write_entries(&seal(store), SEALED).await;
}

async fn check_all(store: &Arc<dyn Store>, running: EntryState) {
    check_entries(store, 0, running).await;
    check_entries(&seal(store), SEALED, running).await;
}

/// One line per entry: its key, the milliseconds until it expires, and its value in hexadecimal digits.
const DUMP_REDIS: &str = r"local out = {}
for _, key in ipairs(redis.call('KEYS', 'idempotency:{*}:*')) do
  if #key == #'idempotency:{00}:' + 64 then
    local value = string.gsub(redis.call('GET', key), '.', function(c) return string.format('%02x', string.byte(c)) end)
    out[#out + 1] = key .. ' ' .. redis.call('PTTL', key) .. ' ' .. value
  end
end
table.sort(out)
return out";

const LOAD_REDIS: &str = r"local value = string.gsub(ARGV[2], '..', function(h) return string.char(tonumber(h, 16)) end)
return redis.call('SET', KEYS[1], value, 'PX', ARGV[1])";

#[tokio::test]
#[ignore = "writes the files that are kept"]
async fn write_the_fixtures() {
    fs::create_dir_all(fixture(VERSION, "embedded")).unwrap();
    let clock = ManualClock::at(THEN);
    let embedded = Embedded::open(fixture(VERSION, "embedded"), EmbeddedOptions { time: clock.source(), ..small() });
    write_all(&(Arc::new(embedded.unwrap()) as Arc<dyn Store>)).await;

    let server = TestRedis::start();
    let redis = Redis::open(&server.url(), RemoteOptions::default()).await.unwrap();
    write_all(&(Arc::new(redis) as Arc<dyn Store>)).await;
    fs::write(fixture(VERSION, "redis.txt"), server.cli(&["EVAL", DUMP_REDIS, "0"]).trim_end().to_owned() + "\n")
        .unwrap();

    let server = TestPostgres::start();
    let name = database(&server);
    let postgres = Postgres::open(&server.url("gateway", &name), RemoteOptions::default()).await.unwrap();
    write_all(&(Arc::new(postgres) as Arc<dyn Store>)).await;
    let columns = "SELECT string_agg(column_name, ', ' ORDER BY ordinal_position) FROM information_schema.columns \
        WHERE table_schema = 'ibid' AND table_name = 'idempotency_keys'";
    let columns = server.sql(&name, columns);
    let rows =
        server.sql(&name, &format!("COPY (SELECT {columns} FROM ibid.idempotency_keys ORDER BY address) TO STDOUT"));
    let sql = format!("COPY ibid.idempotency_keys ({columns}) FROM stdin;\n{rows}\n\\.\n");
    fs::write(fixture(VERSION, "postgres.sql"), sql).unwrap();

    let (at, plain) = plain_journal_file();
    fs::write(fixture(VERSION, &format!("{at}.answer")), sealer().seal(&at, &plain)).unwrap();
}

/// The journal's file in clear, which the tests of the journal read.
fn plain_journal_file() -> (Address, Vec<u8>) {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../ibid/tests/fixtures/journal-v1.answer");
    (Address([1; 32]), fs::read(file).unwrap())
}

#[tokio::test]
async fn an_embedded_store_of_every_version_opens() {
    for version in READ_VERSIONS {
        let folder = TempDir::new().unwrap();
        for file in fs::read_dir(fixture(version, "embedded")).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
        let clock = ManualClock::at(THEN + 1_000_000);
        let store = Embedded::open(folder.path(), EmbeddedOptions { time: clock.source(), ..small() }).unwrap();
        // Its process has ended.
        check_all(&(Arc::new(store) as Arc<dyn Store>), EntryState::Unknown).await;
    }
}

#[tokio::test]
async fn values_of_every_version_in_redis_are_read() {
    for version in READ_VERSIONS {
        let server = TestRedis::start();
        for line in fs::read_to_string(fixture(version, "redis.txt")).unwrap().lines() {
            let [key, pttl, value] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            assert_eq!(server.cli(&["EVAL", LOAD_REDIS, "1", key, pttl, value]).trim(), "OK");
        }
        let store = Redis::open(&server.url(), RemoteOptions::default()).await.unwrap();
        check_all(&(Arc::new(store) as Arc<dyn Store>), EntryState::Processing).await;
    }
}

#[tokio::test]
async fn rows_of_every_version_in_postgres_are_read() {
    for version in READ_VERSIONS {
        let server = TestPostgres::shared();
        let name = database(server);
        server.sql_file("postgres", &name, &fixture(version, "postgres.sql")).unwrap();
        let store = Postgres::open(&server.url("gateway", &name), RemoteOptions::default()).await.unwrap();
        check_all(&(Arc::new(store) as Arc<dyn Store>), EntryState::Processing).await;
    }
}

#[test]
fn sealed_journal_files_of_every_version_are_read() {
    for version in READ_VERSIONS {
        let folder = TempDir::new().unwrap();
        let name = format!("{}.answer", plain_journal_file().0);
        fs::copy(fixture(version, &name), folder.path().join(&name)).unwrap();
        let journal = Journal::open_sealed(folder.path(), Arc::new(sealer())).unwrap();
        assert_eq!((journal.len(), journal.unreadable().len()), (1, 0));
    }
}

/// A value of a later version is refused by name and left as it is, whatever is asked of it.
#[tokio::test]
async fn a_value_of_a_later_version_in_redis_is_refused() {
    let server = TestRedis::start();
    let store = Redis::open(&server.url(), RemoteOptions::default()).await.unwrap();
    let asked = ask(IN_PROGRESS);
    let lease = granted(&store, &asked).await;
    let key = format!("idempotency:{{01}}:{}", asked.address);
    server.cli(&["SETRANGE", &key, "0", "\u{2}"]);
    let before = server.cli(&["GET", &key]);
    let other = Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ClaimRequest::clone(&asked) });
    let over = Arc::new(ClaimRequest { take_over: Some(lease.fence), ..ClaimRequest::clone(&other) });
    for why in [
        store.claim(&other).await.unwrap_err(),
        store.claim(&over).await.unwrap_err(),
        store.get(&asked.address).await.unwrap_err(),
        store.extend(&lease, LIFE).await.unwrap_err(),
        store.settle(&lease, &complete(IN_PROGRESS, false)).await.unwrap_err(),
        store.settle(&lease, &Settlement::Release).await.unwrap_err(),
        store.admin().forget(&asked.address, lease.fence).await.unwrap_err(),
    ] {
        assert_eq!(why.kind, ibid::store::ErrorKind::Corrupt, "{why}");
        let why = why.to_string();
        assert!(why.contains("format version 2, and this ibid reads version 1; use the ibid that wrote"), "{why}");
    }
    assert_eq!(server.cli(&["GET", &key]), before);
}
