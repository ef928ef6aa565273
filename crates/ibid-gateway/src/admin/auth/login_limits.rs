//! Limits failed log-ins per client address: a token bucket that refills over a minute.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    time::Duration,
};

use tokio::time::Instant;

use super::{AuthError, TokenHash};

/// Failed log-ins per minute after which a client is rate-limited.
pub const MAX_FAILED_LOGINS_PER_MINUTE: u32 = 30;
/// Time in which the allowance refills completely.
pub(super) const FAILED_LOGIN_WINDOW: Duration = Duration::from_secs(60);
/// Clients that are tracked; above it, the less recently active half is dropped.
pub(super) const MAX_TRACKED_CLIENTS: usize = 4096;
pub(super) struct LoginAttempts {
    /// Failures still allowed, as of `updated_at`.
    failures_left: f64,
    updated_at: Instant,
    /// Tokens that the client has used successfully. The limit does not apply to them.
    pub(super) verified_tokens: Vec<TokenHash>,
}

pub(super) fn client_entry(clients: &mut HashMap<IpAddr, LoginAttempts>, client: IpAddr) -> &mut LoginAttempts {
    let client = client_network(client);
    if clients.len() >= MAX_TRACKED_CLIENTS && !clients.contains_key(&client) {
        let mut ages: Vec<Instant> = clients.values().map(|client| client.updated_at).collect();
        let half = *ages.select_nth_unstable(MAX_TRACKED_CLIENTS / 2).1;
        clients.retain(|_, client| client.updated_at > half);
    }
    let fresh = || LoginAttempts {
        failures_left: f64::from(MAX_FAILED_LOGINS_PER_MINUTE),
        updated_at: Instant::now(),
        verified_tokens: Vec::new(),
    };
    clients.entry(client).or_insert_with(fresh)
}

impl LoginAttempts {
    /// Refills the allowance, and returns how many failures are left.
    pub(super) fn refill(&mut self) -> f64 {
        let now = Instant::now();
        let more = (now - self.updated_at).as_secs_f64() * f64::from(MAX_FAILED_LOGINS_PER_MINUTE)
            / FAILED_LOGIN_WINDOW.as_secs_f64();
        self.failures_left = (self.failures_left + more).min(f64::from(MAX_FAILED_LOGINS_PER_MINUTE));
        self.updated_at = now;
        self.failures_left
    }

    pub(super) fn record_failure(&mut self) -> AuthError {
        if self.refill() < 1.0 {
            return self.rate_limit_error();
        }
        self.failures_left -= 1.0;
        AuthError::InvalidToken
    }

    pub(super) fn rate_limit_error(&self) -> AuthError {
        let missing = (1.0 - self.failures_left).max(0.0) * FAILED_LOGIN_WINDOW.as_secs_f64()
            / f64::from(MAX_FAILED_LOGINS_PER_MINUTE);
        AuthError::RateLimited { retry_after: Duration::from_secs(missing.ceil().max(1.0) as u64) }
    }
}

/// Groups IPv6 addresses by /64 network, because one machine can use any address of it.
fn client_network(client: IpAddr) -> IpAddr {
    match client {
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => address.into(),
            None => Ipv6Addr::from_bits(address.to_bits() & !(u128::MAX >> 64)).into(),
        },
        address => address,
    }
}
