//! What people do to a store that nobody has open.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{ClaimOutcome, RecordSummary, Settlement, Store};
use ibid_stores::embedded::{Embedded, EmbeddedOptions, check, compact, dump};
use tempfile::TempDir;

use crate::crash::{MINUTE, address, ask};

const KEYS: usize = 200;

/// A store in which every tenth key is remembered for long, and the others have been forgotten.
async fn write_store(path: &TempDir) {
    let options = EmbeddedOptions { segment_size: 64 << 10, ..EmbeddedOptions::default() };
    let store = Embedded::open(path.path(), options).unwrap();
    for nth in 0..KEYS {
        let ClaimOutcome::Granted(lease) = store.claim(&Arc::new(ask(address(nth), Duration::ZERO))).await.unwrap()
        else {
            panic!("key {nth} is fresh")
        };
        let keep = if nth.is_multiple_of(10) { MINUTE * 90 } else { Duration::from_millis(1) };
        let record = Bytes::from(vec![nth as u8; 900]);
        let outline = RecordSummary { status: 201, ..RecordSummary::default() };
        let _ = store
            .settle(&lease, &Settlement::Complete { failed: false, record, summary: outline, ttl: keep })
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_store_is_checked_dumped_and_compacted() {
    let path = TempDir::new().unwrap();
    write_store(&path).await;
    let report = check(path.path()).unwrap();
    assert_eq!((report.entries, &report.found[..]), (KEYS as u64 * 2, &[][..]));
    assert!(report.to_string().contains("400 entries"), "{report}");

    let mut lines = Vec::new();
    dump(path.path(), &mut lines).unwrap();
    let lines = String::from_utf8(lines).unwrap();
    let done = lines.lines().filter(|line| line.contains(r#""status":201,"record_bytes":900}"#)).count();
    assert!(done >= KEYS / 10, "{lines}");
    let first = format!(r#"{{"address":"{}","kind":"done","fence":"#, address(0));
    assert!(lines.contains(&first) && lines.contains(r#""endpoint":"POST /payments","key":"k""#), "{lines}");

    let compacted = compact(path.path()).unwrap();
    assert!(compacted.after < compacted.before, "{compacted:?}");
    assert_eq!(check(path.path()).unwrap().found, []);
    let store = Embedded::open(path.path(), EmbeddedOptions::default()).unwrap();
    assert!(matches!(check(path.path()), Err(error) if error.to_string().contains("in use by process")));
    for nth in (0..KEYS).step_by(10) {
        let found = store.get(&address(nth)).await.unwrap();
        assert!(
            matches!(&found, Some(ClaimOutcome::Completed(done)) if done.record == vec![nth as u8; 900]),
            "{nth}: {found:?}"
        );
    }
}

#[test]
fn what_is_no_store_is_not_made_one() {
    let path = TempDir::new().unwrap();
    let missing = path.path().join("missing");
    assert!(check(&missing).is_err());
    assert!(!missing.exists());
}
