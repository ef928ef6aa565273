//! `ibid sweep`.

use std::time::Duration;

use tokio::time::sleep;

use super::{
    TestStore,
    common::{ENTRY_COUNT, KeysFixture, send},
};

async fn sweep(scene: &KeysFixture<'_>) -> u64 {
    let done = scene.run_on_store(&["sweep"]).await;
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    let text = done.text();
    let removed = text.strip_prefix("removed ").and_then(|rest| rest.split(',').next()?.parse().ok());
    removed.unwrap_or_else(|| panic!("{text}"))
}

pub(super) async fn what_has_expired_is_removed(place: &TestStore) {
    const SHORT: u64 = 7;
    let scene = KeysFixture::start_filled(place).await;
    let gateway = scene.start_gateway().await;
    for nth in 0..SHORT {
        let answer = send(gateway.addr(), &format!("/short/{nth}"), &format!("short-lived-{nth}")).send().await;
        assert_eq!(answer.status, 201, "{answer:?}");
    }
    scene.stop_gateway(gateway).await;
    // What a store remembers beyond an answer's life, so that late copies find nothing to do, goes with it.
    sleep(Duration::from_millis(200)).await;
    let mut removed = 0;
    for _ in 0..20 {
        removed += sweep(&scene).await;
        if removed >= SHORT {
            break;
        }
        sleep(Duration::from_millis(100)).await;
    }
    assert!(removed >= SHORT || place.expires_by_itself, "{removed} were removed");
    assert_eq!(scene.list(&[]).await.len(), ENTRY_COUNT, "the others are still there");
    let shown = scene.list(&["--endpoint", "POST /short/*"]).await;
    assert!(shown.is_empty(), "{shown:?}");
}

pub(super) async fn nothing_that_counts_is_removed(place: &TestStore) {
    let scene = KeysFixture::start_filled(place).await;
    let before = scene.list(&[]).await;
    assert_eq!(sweep(&scene).await, 0);
    let addresses =
        |records: &[serde_json::Value]| records.iter().map(|one| one["address"].clone()).collect::<Vec<_>>();
    assert_eq!(addresses(&scene.list(&[]).await), addresses(&before));
}
