//! The inbox over every store, as services have them: with finished answers near, and PostgreSQL with Redis before it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use ibid::{
    inbox::{HandleError, HandleOutcome, Inbox, InboxEvent},
    observe::NoopObserver,
    store::{ClaimToken, Store},
};
use ibid_stores::{StoreConfig, StoreOptions, local_cache::MAX_UNCONFIRMED_AGE};
use testbed::TestRedis;
use tokio::time::{Instant, sleep, timeout};

const LEASE: Duration = Duration::from_millis(800);

fn store_config(url: &str, cache: Option<&str>, prefix: &str) -> StoreConfig {
    let parts = StoreOptions {
        url: url.parse().unwrap(),
        fallback: None,
        cache: cache.map(|cache| cache.parse().unwrap()),
        prefix: prefix.into(),
        timeout: Duration::from_secs(20),
        wait_replicas: 0,
        local_cache: None,
    };
    StoreConfig::new(parts).unwrap()
}

fn prefix() -> String {
    ClaimToken::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn open(layout: &StoreConfig) -> Arc<dyn Store> {
    layout.open(Arc::new(NoopObserver)).await.unwrap().store
}

#[tokio::test]
async fn embedded() {
    let folder = tempfile::TempDir::new().unwrap();
    let store = open(&store_config(&format!("embedded:{}", folder.path().display()), None, &prefix())).await;
    check_inbox([store.clone(), store]).await;
}

#[tokio::test]
async fn redis() {
    let layout = store_config(&TestRedis::shared().url(), None, &prefix());
    check_inbox([open(&layout).await, open(&layout).await]).await;
}

#[tokio::test]
async fn postgres() {
    let layout = store_config(&crate::postgres::url(), None, &prefix());
    check_inbox([open(&layout).await, open(&layout).await]).await;
}

#[tokio::test]
async fn postgres_with_redis_before_it() {
    let layout = store_config(&crate::postgres::url(), Some(&TestRedis::shared().url()), &prefix());
    check_inbox([open(&layout).await, open(&layout).await]).await;
}

fn inbox(store: Arc<dyn Store>) -> Inbox {
    Inbox::new(store).timeouts(Duration::from_secs(60), LEASE).poison_after(3)
}

/// Two services with a store in common, where it can be.
async fn check_inbox(stores: [Arc<dyn Store>; 2]) {
    // Stories share servers, and may share a database.
    let consumer = format!("mailer-{}", prefix());
    let event = |id: &str| InboxEvent::new(&consumer, "/orders", id).unwrap();
    let doomed = inbox(stores[0].clone());
    let [one, two] = stores.map(inbox);
    let ran = Arc::new(AtomicU32::new(0));
    let handle = async |inbox: &Inbox, id: &str, ends: Result<(), &'static str>| {
        let ran = ran.clone();
        let handler = move |_attempt| async move {
            ran.fetch_add(1, SeqCst);
            ends
        };
        inbox.handle(&event(id), handler).await
    };

    // Of many deliveries to both, one is handled.
    let all = join_all((0..20).map(|nth| handle(if nth % 2 == 0 { &one } else { &two }, "many", Ok(())))).await;
    assert_eq!(all.iter().filter(|one| matches!(one, Ok(HandleOutcome::Handled))).count(), 1, "{all:?}");
    assert_eq!(handle(&two, "many", Ok(())).await.unwrap(), HandleOutcome::Duplicate);
    assert_eq!(ran.swap(0, SeqCst), 1);

    // A failure at the one is run again at the other, and what fails too often at both is poisoned at both.
    for (nth, inbox) in [&one, &two, &one].into_iter().enumerate() {
        let failed = handle(inbox, "fails", Err("no")).await;
        let Err(HandleError::Failed { attempt, poisoned, .. }) = failed else { panic!("{failed:?}") };
        assert_eq!((attempt, poisoned), (nth as u32 + 1, nth == 2));
    }
    for inbox in [&one, &two] {
        let dead = handle(inbox, "fails", Ok(())).await;
        assert_eq!(dead.unwrap(), HandleOutcome::Poisoned { attempts: 3, error: "no".into() });
    }
    assert!(two.forget(&event("fails")).await.unwrap());
    // Copies near the other may answer for a few seconds more.
    let until = Instant::now() + MAX_UNCONFIRMED_AGE * 4;
    let again = loop {
        match handle(&one, "fails", Err("no")).await {
            Ok(HandleOutcome::Poisoned { .. }) if Instant::now() < until => sleep(Duration::from_millis(100)).await,
            again => break again,
        }
    };
    assert!(matches!(again, Err(HandleError::Failed { attempt: 1, poisoned: false, .. })), "{again:?}");
    assert_eq!(handle(&two, "fails", Ok(())).await.unwrap(), HandleOutcome::Handled);
    assert_eq!(handle(&one, "fails", Ok(())).await.unwrap(), HandleOutcome::Duplicate);
    assert_eq!(ran.swap(0, SeqCst), 5);

    // A crash: busy until the lease has lapsed, then run again.
    crash(doomed, event("crashes")).await;
    let busy = handle(&two, "crashes", Ok(())).await;
    assert!(matches!(busy, Ok(HandleOutcome::InProgress { .. })), "{busy:?}");
    let rerun = timeout(Duration::from_secs(60), async {
        loop {
            match handle(&two, "crashes", Ok(())).await.unwrap() {
                HandleOutcome::InProgress { .. } => sleep(Duration::from_millis(100)).await,
                other => return other,
            }
        }
    });
    assert_eq!(rerun.await.unwrap(), HandleOutcome::Handled);
    assert_eq!(handle(&one, "crashes", Ok(())).await.unwrap(), HandleOutcome::Duplicate);
    assert_eq!(ran.load(SeqCst), 1);
}

/// A handler that starts and is never heard of again: what would extend its claim, or say how it ended, ends with it.
async fn crash(inbox: Inbox, event: InboxEvent) {
    let (started, begun) = tokio::sync::oneshot::channel();
    let endless = move |_attempt| async move {
        started.send(()).unwrap();
        std::future::pending::<Result<(), String>>().await
    };
    let crashing = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            tokio::select! {
                _ = inbox.handle(&event, endless) => unreachable!("it never ends"),
                _ = begun => {}
            }
        });
        runtime.shutdown_background();
    });
    crashing.await.unwrap();
}
