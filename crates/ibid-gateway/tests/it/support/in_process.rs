//! The gateway in the test's own process, on a store that fails on demand.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use ibid::{
    Observer,
    observe::EngineEvent,
    store::{ClaimOutcome, EntryFilter, ListCursor, Memory, Store},
};
use ibid_gateway::{
    commands::serve,
    config::{Env, GatewaySettings, ServeArgs},
    metrics::MetricsObserver,
};
use ibid_stores::OpenedStore;
use ibid_testkit::wrappers::FailingStore;
use parking_lot::Mutex;
use testbed::{
    client::{TestRequest, TestResponse, get, post},
    upstream::TestUpstream,
};

use super::until;

pub(crate) type SharedFailingStore = Arc<FailingStore<Memory>>;

pub(crate) fn failing_store() -> SharedFailingStore {
    Arc::new(FailingStore::new(Memory::default()))
}

/// A gateway in this process.
pub(crate) struct InProcessGateway {
    pub(crate) gateway: serve::RunningGateway,
    pub(crate) store: SharedFailingStore,
    pub(crate) told: Arc<EventLog>,
}

impl InProcessGateway {
    pub(crate) async fn start(config: &str, upstream: &TestUpstream) -> InProcessGateway {
        InProcessGateway::start_on_store(failing_store(), config, upstream).await
    }

    pub(crate) async fn start_on_store(
        store: SharedFailingStore, config: &str, upstream: &TestUpstream,
    ) -> InProcessGateway {
        let told = Arc::new(EventLog::default());
        let gateway = start_in_process(config, upstream, store.clone(), told.clone()).await;
        InProcessGateway { gateway, store, told }
    }

    pub(crate) fn pay(&self, key: &str) -> TestRequest {
        anonymous_pay(self.gateway.address, key)
    }

    pub(crate) async fn ready(&self) -> TestResponse {
        get(self.gateway.admin.expect("it has an admin port"), "/readyz").send().await
    }

    /// What the store really holds.
    pub(crate) async fn entries(&self) -> Vec<ClaimOutcome> {
        entries(&self.store).await
    }
}

/// Starts a gateway in this process, on free ports.
pub(crate) async fn start_in_process(
    config: &str, upstream: &TestUpstream, store: Arc<dyn Store>, observer: Arc<dyn Observer>,
) -> serve::RunningGateway {
    start_on_opened_store(config, upstream, OpenedStore::plain(store), observer).await
}

pub(crate) async fn start_on_opened_store(
    config: &str, upstream: &TestUpstream, store: OpenedStore, observer: Arc<dyn Observer>,
) -> serve::RunningGateway {
    let args = ServeArgs {
        listen: Some("127.0.0.1:0".into()),
        admin: Some("127.0.0.1:0".into()),
        upstream: Some(upstream.url()),
        store: Some("memory:".into()),
        ..ServeArgs::default()
    };
    let settings =
        GatewaySettings::from_text(config, None, &args, &Env::from_pairs(&[])).expect("a valid configuration");
    let observer = MetricsObserver::with_shared_observer(observer);
    serve::RunningGateway::start(settings, args, store, observer).await.expect("the gateway starts")
}

pub(crate) async fn entries(store: &SharedFailingStore) -> Vec<ClaimOutcome> {
    let inner = store.inner();
    let page = inner.admin().list(&EntryFilter::default(), ListCursor::default(), 100).await.expect("memory answers");
    let mut found = Vec::new();
    for listed in page.entries {
        found.extend(inner.get(&listed.address).await.expect("memory answers"));
    }
    found
}

/// A payment of somebody without a credential.
pub(crate) fn anonymous_pay(addr: SocketAddr, key: &str) -> TestRequest {
    post(addr, "/pay").key(key).json(r#"{"amount":1}"#)
}

/// Remembers what it is told.
#[derive(Default)]
pub(crate) struct EventLog(Mutex<Vec<String>>);

impl EventLog {
    pub(crate) fn count(&self, part: &str) -> usize {
        self.0.lock().iter().filter(|notice| notice.contains(part)).count()
    }

    pub(crate) async fn wait_for(&self, part: &str) {
        until(part, || self.count(part) > 0).await;
    }
}

impl Observer for EventLog {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        self.0.lock().push(notice.to_string());
    }
}

/// Heals the store once that many calls of a kind have failed.
pub(crate) struct HealAfterFailures {
    call: &'static str,
    failures_left: AtomicUsize,
    store: SharedFailingStore,
}

impl HealAfterFailures {
    pub(crate) fn new(call: &'static str, failures: usize, store: &SharedFailingStore) -> Arc<HealAfterFailures> {
        Arc::new(HealAfterFailures { call, failures_left: AtomicUsize::new(failures), store: store.clone() })
    }
}

impl Observer for HealAfterFailures {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        let EngineEvent::StoreFailed(call, ..) = notice else { return };
        if *call == self.call && self.failures_left.fetch_sub(1, SeqCst) == 1 {
            self.store.heal();
        }
    }
}
