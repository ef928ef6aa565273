//! A TCP proxy that cuts, delays and counts.
//!
//! A [`FaultProxy`] is between a client and a server on the loopback interface, and injects faults while connections
//! are open:
//!
//! | command | open connections | new connections |
//! |---|---|---|
//! | [`cut`](FaultProxy::cut) | silent both ways | accepted, then silent |
//! | [`cut_and_refuse`](FaultProxy::cut_and_refuse) | silent both ways | refused |
//! | [`cut_to_server`](FaultProxy::cut_to_server) | silent to the server | accepted; silent to the server |
//! | [`cut_to_client`](FaultProxy::cut_to_client) | silent to the client | accepted; silent to the client |
//! | [`reset`](FaultProxy::reset) | reset, both ends | as before |
//! | [`refuse`](FaultProxy::refuse) | as before | refused |
//! | [`delay`](FaultProxy::delay), [`slice`](FaultProxy::slice) | later; in small pieces | the same |
//! | [`drop_answers`](FaultProxy::drop_answers) | the request arrives, its answer never does | the same |
//! | [`break_answers`](FaultProxy::break_answers) | the request arrives, then a reset, no answer | the same |
//! | [`heal`](FaultProxy::heal) | all of that ends | accepted |
//!
//! A cut behaves as on a network: data that is sent meanwhile is late, not lost, and arrives once the proxy is healed,
//! unless its connection was reset by then. It arrives even if its sender has closed the connection, because TCP
//! would deliver it too. A connection that is opened and closed during a cut never reaches the server.
//! Bytes in the middle of a connection are never lost: after a dropped answer it stays silent, and `heal` resets it.
//!
//! Invariants: a command has taken effect when its method returns, so no byte passes after `cut`; the
//! proxy runs in its own thread, so it neither needs nor disturbs the test's runtime and clock; dropping it
//! closes everything.
//!
//! Limit of a proxy: if the *server* is gone, the client's connection is accepted and then reset, where the
//! server itself would refuse it. A test that needs the refusal also calls [`refuse`](FaultProxy::refuse).
//!
//! ```
//! use std::{io::{Read as _, Write as _}, net::{TcpListener, TcpStream}};
//!
//! use testbed::FaultProxy;
//!
//! let server = TcpListener::bind("127.0.0.1:0")?;
//! let proxy = FaultProxy::to(server.local_addr()?);
//! let mut client = TcpStream::connect(proxy.addr())?;
//! let (mut at_server, _) = server.accept()?;
//! client.write_all(b"ping")?;
//! at_server.read_exact(&mut [0; 4])?;
//! at_server.write_all(b"pong")?;
//! client.read_exact(&mut [0; 4])?;
//! let counts = proxy.counts();
//! assert_eq!((counts.connections, counts.bytes_to_server, counts.round_trips), (1, 4, 1));
//! # std::io::Result::Ok(())
//! ```

use std::{
    net::SocketAddr,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    runtime::{Builder, Runtime},
    task::yield_now,
    time::timeout,
};

use self::state::{AnswerLoss, ProxyDirection, ProxyRules, ProxyState};
pub use self::state::{ConnectionTraffic, ProxyCounts};
use crate::loopback::LoopbackPort;

mod relay;
mod state;
#[cfg(test)]
mod tests;

/// Timeout of a command to the proxy's thread, which should be instantaneous.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// The proxy. Dropping it closes everything.
#[derive(Debug)]
pub struct FaultProxy {
    port: Arc<LoopbackPort>,
    state: Arc<ProxyState>,
    /// Has one thread, so that a command and the connections take turns. Locked during a command.
    runtime: Mutex<Option<Runtime>>,
}

/// Methods that change the rules: whether to accept new connections from now on (`None` changes nothing), and the
/// change.
macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty)?): $listen:expr, |$rules:ident, $state:ident| $change:expr;)*) => { $(
        $(#[$doc])*
        pub fn $name(&self $(, $arg: $type)?) {
            self.send_command($listen, move |$rules, $state| $change);
        }
    )* };
}

impl FaultProxy {
    /// Starts a proxy on a free loopback port to this server, which need not run yet.
    pub fn to(server: SocketAddr) -> FaultProxy {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("link").enable_all().build();
        let runtime = Mutex::new(Some(runtime.expect("a runtime for the link")));
        let (port, state) = (Arc::new(LoopbackPort::reserve()), Arc::new(ProxyState::new(server)));
        let proxy = FaultProxy { port, state, runtime };
        proxy.send_command(Some(true), |_, _| ());
        proxy
    }

    pub fn addr(&self) -> SocketAddr {
        self.port.addr
    }

    /// Directs new connections to this server; open ones stay where they are.
    pub fn set_target(&self, server: SocketAddr) {
        *self.state.server.lock() = server;
    }

    commands! {
        cut(): None, |rules, _state| rules.open = [false, false];
        cut_and_refuse(): Some(false), |rules, _state| rules.open = [false, false];
        cut_to_server(): None, |rules, _state| rules.open[ProxyDirection::ToServer as usize] = false;
        cut_to_client(): None, |rules, _state| rules.open[ProxyDirection::ToClient as usize] = false;
        reset(): None, |rules, _state| rules.resets += 1;
        refuse(): Some(false), |_rules, _state| ();
        delay(by: Duration): None, |rules, _state| rules.delay = by;
        /// Delivers the next `n` requests and drops their answers. The connections stay open and silent. Further requests
        /// on such a connection still arrive, and count while any of the `n` are left.
        drop_answers(n: usize): None, |_rules, state| state.lose_answers(n, AnswerLoss::Dropped);
        break_answers(n: usize): None, |_rules, state| state.lose_answers(n, AnswerLoss::Reset);
        /// Ends all faults: delayed data arrives, new connections are accepted, and connections with a dropped answer
        /// are reset.
        heal(): Some(true), |rules, state| {
            state.lose_answers(0, AnswerLoss::Dropped);
            *rules = ProxyRules { resets: rules.resets, heals: rules.heals + 1, ..ProxyRules::default() };
        };
    }

    /// Delivers everything in pieces of at most this many bytes, a millisecond apart.
    pub fn slice(&self, bytes: usize) {
        assert!(bytes > 0, "a slice has at least one byte");
        self.send_command(None, move |rules, _| rules.slice = Some(bytes));
    }

    pub fn answers_to_lose(&self) -> usize {
        self.state.ledger.lock().answers_to_lose
    }

    pub fn counts(&self) -> ProxyCounts {
        self.state.ledger.lock().counts()
    }

    /// The traffic so far by connection, the oldest first.
    pub fn traffic(&self) -> Vec<ConnectionTraffic> {
        self.state.ledger.lock().traffic()
    }

    fn send_command(&self, listen: Option<bool>, change: impl FnOnce(&mut ProxyRules, &ProxyState) + Send + 'static) {
        let (done, wait) = mpsc::channel();
        let (port, state) = (Arc::clone(&self.port), Arc::clone(&self.state));
        let runtime = self.runtime.lock();
        runtime.as_ref().expect("open until dropped").spawn(async move {
            let connections = Arc::clone(&state);
            match listen {
                Some(true) => port.listen(move |client| {
                    tokio::spawn(relay::relay_connection(client, Arc::clone(&connections)));
                }),
                Some(false) => port.refuse().await,
                None => {}
            }
            state.rules.send_modify(|rules| change(rules, &state));
            // The connections that these rules reset end in this thread.
            let gone = async {
                while state.has_connection_to_reset() {
                    yield_now().await;
                }
            };
            timeout(COMMAND_TIMEOUT, gone).await.expect("connections end when they are reset");
            let _ = done.send(());
        });
        assert!(wait.recv_timeout(COMMAND_TIMEOUT).is_ok(), "the link's thread has died; it said why above");
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        // A runtime cannot be dropped within the test's own.
        let runtime = self.runtime.lock().take();
        let _ = thread::spawn(move || drop(runtime)).join();
    }
}
