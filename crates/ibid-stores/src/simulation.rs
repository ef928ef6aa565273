//! Lets a simulation replace the network and the clock of the Redis and PostgreSQL clients, on the threads where it asks
//! for that.
//!
//! Only what is beneath the clients changes: they take the byte streams of their connections from here instead of from
//! TCP, and the Redis client's `boot_micros` reads tokio's clock, which a simulation pauses.

use std::{cell::RefCell, io, pin::Pin, sync::Arc};

use tokio::{io::DuplexStream, time::Instant};

/// The time that a simulation starts at, in microseconds: longer than everything that is subtracted from it.
const START_MICROS: u64 = 1_000_000_000;

/// A connection that is being opened.
pub type SimulatedConnecting = Pin<Box<dyn Future<Output = io::Result<DuplexStream>> + Send>>;
/// Opens a connection to the host of this name.
pub type SimulatedConnect = Arc<dyn Fn(&str) -> SimulatedConnecting + Send + Sync>;

thread_local!(static SIMULATION: RefCell<Option<ThreadSimulation>> = const { RefCell::new(None) });

struct ThreadSimulation {
    connect: SimulatedConnect,
    started_at: Instant,
}

/// Makes this function open every connection that a store opens on this thread from now on.
pub fn simulate_connections(connect: SimulatedConnect) {
    SIMULATION.set(Some(ThreadSimulation { connect, started_at: Instant::now() }));
}

/// Starts to connect, if this thread simulates.
pub(crate) fn connect(host: &str) -> Option<SimulatedConnecting> {
    SIMULATION.with_borrow(|simulation| simulation.as_ref().map(|simulation| (simulation.connect)(host)))
}

/// The simulated time, if this thread simulates.
pub(crate) fn now_micros() -> Option<u64> {
    SIMULATION.with_borrow(|simulation| {
        simulation.as_ref().map(|simulation| START_MICROS + simulation.started_at.elapsed().as_micros() as u64)
    })
}
