//! Somebody who has the store's files or a dump of its tables, and no key: nothing of what was planted is in there. Each
//! look is made at a store without a seal too, where all of it must be found, or the look would prove nothing.

use std::{fs, path::Path, sync::Arc, time::Duration};

use ibid::store::{ClaimOutcome, ClaimRequest, ClaimToken, EntryFilter, ListCursor, SettleOutcome, Settlement, Store};
use ibid_stores::seal::Sealer;
use tempfile::TempDir;
use testbed::{TestPostgres, TestRedis};

use super::{answered, ask, complete, expect_replayed, granted, open, sealing};

const PLANTED: [&str; 6] =
    ["planted-tenant", "planted-user", "planted-path", "planted-key", "planted-label", "planted-body"];

/// One entry of every state.
async fn write_planted_entries(store: &dyn Store) {
    let body = format!("{}{{\"card\":\"planted-body\"}}", "x".repeat(100));
    let fresh = |nth| Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ClaimRequest::clone(&ask(nth)) });
    answered(store, &ask(1), body.clone()).await;
    granted(store, &ask(2)).await;
    let parked = granted(store, &ask(3)).await;
    let park = Settlement::Park { ttl: Duration::from_secs(60), retry_in: Duration::ZERO };
    assert_eq!(store.settle(&parked, &park).await.unwrap(), SettleOutcome::Applied);
    let released = granted(store, &ask(4)).await;
    assert_eq!(store.settle(&released, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    // Resolved and replaced by operators.
    let parked = granted(store, &ask(5)).await;
    assert_eq!(store.settle(&parked, &park).await.unwrap(), SettleOutcome::Applied);
    let operators = store.admin();
    assert_eq!(
        operators.resolve(&ask(5).address, parked.fence, &complete(body.clone())).await.unwrap(),
        SettleOutcome::Applied
    );
    let again = format!("{body} again").into();
    assert_eq!(operators.replace_record(&ask(5).address, parked.fence, again).await.unwrap(), SettleOutcome::Applied);
    // All of it is there for who has the keys.
    assert_eq!(expect_replayed(store, &ask(1)).await, body);
    assert_eq!(expect_replayed(store, &ask(5)).await, format!("{body} again"));
    assert!(matches!(store.claim(&fresh(2)).await.unwrap(), ClaimOutcome::InProgress(_)));
    let filter =
        EntryFilter { user: Some("planted-user".into()), key: Some("planted-key".into()), ..EntryFilter::default() };
    let page = operators.list(&filter, ListCursor::default(), 100).await.unwrap();
    assert_eq!(page.entries.len(), 4);
    for listed in page.entries {
        assert_eq!((listed.tags.tenant(), &listed.label[..]), ("planted-tenant", &b"planted-label"[..]));
    }
}

/// Nothing of it is in a dump if it was sealed, and all of it if it was not.
#[track_caller]
fn assert_secrets_found(dump: &[u8], is_sealed: bool) {
    assert!(dump.len() > 500, "a dump of something: {} bytes", dump.len());
    for planted in PLANTED {
        let found = dump.windows(planted.len()).any(|part| part == planted.as_bytes());
        assert_eq!(found, !is_sealed, "{planted}, sealed: {is_sealed}");
    }
}

fn sealed_and_unsealed() -> [Option<Sealer>; 2] {
    [Some(sealing()), None]
}

#[tokio::test]
async fn nothing_is_seen_in_the_files_of_an_embedded_store() {
    for sealing in sealed_and_unsealed() {
        let (folder, is_sealed) = (TempDir::new().unwrap(), sealing.is_some());
        let store = open(&format!("embedded:{}", folder.path().display()), "x", sealing).await;
        write_planted_entries(&*store).await;
        drop(store);
        assert_secrets_found(&read_files(folder.path()), is_sealed);
        let mut dump = Vec::new();
        ibid_stores::embedded::dump(folder.path(), &mut dump).unwrap();
        let seen = String::from_utf8(dump).unwrap().contains("planted");
        assert_eq!(seen, !is_sealed);
    }
}

/// Without zeroes, of which there are millions.
fn read_files(folder: &Path) -> Vec<u8> {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).filter(|path| path.is_file());
    let mut all = files.map(|path| fs::read(path).unwrap()).collect::<Vec<_>>().concat();
    all.retain(|byte| *byte != 0);
    all
}

#[tokio::test]
async fn nothing_is_seen_in_redis() {
    let server = TestRedis::start();
    for sealing in sealed_and_unsealed() {
        let is_sealed = sealing.is_some();
        server.cli(&["FLUSHALL"]);
        write_planted_entries(&*open(&server.url(), "p", sealing).await).await;
        let mut dump = String::new();
        for key in server.cli(&["KEYS", "*"]).lines() {
            dump += key;
            dump += &match server.cli(&["TYPE", key]).as_str() {
                "list" => server.cli(&["LRANGE", key, "0", "-1"]),
                "zset" => server.cli(&["ZRANGE", key, "0", "-1"]),
                "string" => server.cli(&["GET", key]),
                // A list of claims was deleted meanwhile.
                "none" => String::new(),
                other => panic!("{key} is a {other}"),
            };
        }
        assert_secrets_found(dump.as_bytes(), is_sealed);
    }
}

#[tokio::test]
async fn nothing_is_seen_in_postgres() {
    let server = TestPostgres::shared();
    for sealing in sealed_and_unsealed() {
        let is_sealed = sealing.is_some();
        let database = crate::postgres::database(server);
        write_planted_entries(&*open(&server.url("gateway", &database), "p", sealing).await).await;
        // Bytes as they are, where they are text, and not in hexadecimal digits.
        let dump = server.sql(&database, "SET bytea_output = escape; SELECT * FROM ibid.idempotency_keys");
        assert_secrets_found(dump.as_bytes(), is_sealed);
    }
}
