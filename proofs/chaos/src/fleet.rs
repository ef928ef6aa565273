//! The gateways of a run, each behind a link of its own.
//!
//! A gateway has another port after each restart; its link has one address for ever. So clients always know where it is,
//! a killed gateway refuses connections instead of leaving its port to somebody else's process, and the way between the
//! clients and a gateway can be torn like any other.

use std::{
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use ibid_testkit::{
    client::get,
    process::{Gateway, Signal},
    servers::link::Link,
};
use tokio::{
    sync::Mutex,
    time::{sleep, timeout},
};

/// What a gateway logs when it finds that an operation may have run twice.
const POSSIBLY_TWICE: &str = "may have run twice";

/// How long a gateway may take to say how it is.
const ONE_LOOK: Duration = Duration::from_secs(2);

/// What a gateway says about itself on `/readyz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Whether its store answers.
    pub ready: bool,
    /// How many requests with a key are at work.
    pub running: usize,
    /// How many ends its store has not taken yet.
    pub waiting: usize,
}

/// The gateways.
pub struct Fleet {
    members: Vec<Member>,
}

struct Member {
    link: Arc<Link>,
    /// Held by the one fault that is at work on it.
    gateway: Mutex<Gateway>,
}

impl Fleet {
    /// Starts one gateway per configuration, all in front of the same upstream.
    ///
    /// # Panics
    ///
    /// If one of them does not start, with all that it printed.
    pub async fn start(bin: &Path, configs: &[String], upstream: &str) -> Arc<Fleet> {
        let mut members = Vec::with_capacity(configs.len());
        for config in configs {
            let gateway = Gateway::launch(bin).config(config).upstream(upstream).start().await;
            let link = Arc::new(Link::to(gateway.addr()));
            members.push(Member { link, gateway: Mutex::new(gateway) });
        }
        Arc::new(Fleet { members })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Where clients reach the nth, always.
    pub fn addr(&self, nth: usize) -> SocketAddr {
        self.members[nth].link.addr()
    }

    /// The way between the clients and the nth.
    pub fn link(&self, nth: usize) -> &Arc<Link> {
        &self.members[nth].link
    }

    /// Kills the nth, as a crash would.
    pub async fn kill(&self, nth: usize) {
        let Member { link, gateway } = &self.members[nth];
        // First nothing new, or a connection could reach whoever gets the port next.
        link.refuse();
        gateway.lock().await.kill().await;
        link.reset();
    }

    /// Starts the nth again, in its own folder.
    ///
    /// # Panics
    ///
    /// If it does not start, with all that it printed.
    pub async fn restart(&self, nth: usize) {
        let Member { link, gateway } = &self.members[nth];
        let mut gateway = gateway.lock().await;
        gateway.restart().await;
        link.lead_to(gateway.addr());
        link.heal();
    }

    /// Stops the nth without its noticing.
    pub async fn pause(&self, nth: usize) {
        self.members[nth].gateway.lock().await.signal(Signal::Stop);
    }

    /// Lets the nth go on.
    pub async fn resume(&self, nth: usize) {
        self.members[nth].gateway.lock().await.signal(Signal::Cont);
    }

    /// The nth that ended without having been killed, if any: a crash of its own.
    pub async fn crashed(&self) -> Option<usize> {
        for (nth, member) in self.members.iter().enumerate() {
            if member.gateway.lock().await.has_exited() {
                return Some(nth);
            }
        }
        None
    }

    /// What the nth says about itself; nothing if it does not answer.
    pub async fn health(&self, nth: usize) -> Option<Health> {
        let admin = self.members[nth].gateway.lock().await.admin_addr();
        let answer = timeout(ONE_LOOK, get(admin, "/readyz").try_send()).await.ok()?.ok()?;
        let said = answer.json();
        let number = |value: &serde_json::Value| value.as_u64().map(|number| number as usize);
        // Of two stores, both.
        let ready = said["ready"].as_bool()? && said["store"]["degraded"].is_null();
        Some(Health { ready, running: number(&said["running"])?, waiting: number(&said["store"]["waiting"])? })
    }

    /// Waits until every gateway is ready, runs nothing, and has nothing left to tell its store; else says which does not.
    pub async fn settle(&self, within: Duration) -> Result<(), String> {
        let end = Instant::now() + within;
        for nth in 0..self.len() {
            loop {
                let health = self.health(nth).await;
                if health.is_some_and(|health| health.ready && health.running == 0 && health.waiting == 0) {
                    break;
                }
                if Instant::now() >= end {
                    return Err(format!("gateway {nth} has not settled within {within:?}: {health:?}"));
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    /// How often the gateways themselves said that an operation may have run twice.
    pub async fn announced(&self) -> usize {
        let mut announced = 0;
        for member in &self.members {
            announced += member.gateway.lock().await.logs().iter().filter(|line| line.contains(POSSIBLY_TWICE)).count();
        }
        announced
    }
}
