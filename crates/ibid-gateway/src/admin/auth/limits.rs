//! How often a client may fail to log in, by its address.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use tokio::time::Instant;

use super::{Denied, Hash};

/// Failed log-ins of one client in a minute, beyond which it is limited.
pub const FAILURES: u32 = 30;
/// The time in which so many may fail.
pub(super) const MINUTE: Duration = Duration::from_secs(60);
/// Clients that are told apart; beyond it those that have been quiet for longest are forgotten.
pub(super) const CLIENTS: usize = 4096;
/// One that asks, by its address.
pub(super) struct Client {
    /// How many may still fail, as of `at`.
    left: f64,
    at: Instant,
    /// Tokens that it has shown to have.
    pub(super) shown: Vec<Hash>,
}

/// What is known of a client.
pub(super) fn entry(clients: &mut HashMap<IpAddr, Client>, client: IpAddr) -> &mut Client {
    let client = one_client(client);
    if clients.len() >= CLIENTS && !clients.contains_key(&client) {
        let mut ages: Vec<Instant> = clients.values().map(|client| client.at).collect();
        let half = *ages.select_nth_unstable(CLIENTS / 2).1;
        clients.retain(|_, client| client.at > half);
    }
    let fresh = || Client { left: f64::from(FAILURES), at: Instant::now(), shown: Vec::new() };
    clients.entry(client).or_insert_with(fresh)
}

impl Client {
    /// How many may fail now.
    pub(super) fn refilled(&mut self) -> f64 {
        let now = Instant::now();
        let more = (now - self.at).as_secs_f64() * f64::from(FAILURES) / MINUTE.as_secs_f64();
        self.left = (self.left + more).min(f64::from(FAILURES));
        self.at = now;
        self.left
    }

    pub(super) fn fail<T>(&mut self, why: Denied) -> Result<T, Denied> {
        if self.refilled() < 1.0 {
            return Err(self.limited());
        }
        self.left -= 1.0;
        Err(why)
    }

    pub(super) fn limited(&self) -> Denied {
        let missing = (1.0 - self.left).max(0.0) * MINUTE.as_secs_f64() / f64::from(FAILURES);
        Denied::Limited { retry_after: Duration::from_secs(missing.ceil().max(1.0) as u64) }
    }
}

/// Of an IPv6 network one machine may have any address.
fn one_client(client: IpAddr) -> IpAddr {
    match client {
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => address.into(),
            None => Ipv6Addr::from_bits(address.to_bits() & !(u128::MAX >> 64)).into(),
        },
        address => address,
    }
}
