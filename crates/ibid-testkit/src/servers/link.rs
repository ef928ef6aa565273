//! A TCP proxy that cuts, delays and counts.
//!
//! A [`FaultProxy`] stands between a client and a server on the loopback, and misbehaves on demand while connections are open:
//!
//! | order | open connections | new connections |
//! |---|---|---|
//! | [`cut`](FaultProxy::cut) | silent both ways | accepted, then silent |
//! | [`cut_and_refuse`](FaultProxy::cut_and_refuse) | silent both ways | refused |
//! | [`cut_to_server`](FaultProxy::cut_to_server), [`cut_to_client`](FaultProxy::cut_to_client) | silent one way | accepted; silent that way |
//! | [`reset`](FaultProxy::reset) | reset, both ends | as before |
//! | [`refuse`](FaultProxy::refuse) | as before | refused |
//! | [`delay`](FaultProxy::delay), [`slice`](FaultProxy::slice) | later; in small pieces | the same |
//! | [`drop_answers`](FaultProxy::drop_answers) | the request arrives, its answer never does | the same |
//! | [`break_answers`](FaultProxy::break_answers) | the request arrives, then a reset in its answer's place | the same |
//! | [`heal`](FaultProxy::heal) | all of that ends | accepted |
//!
//! A cut is what a cut is on a network: what was sent meanwhile is late, not lost, and arrives once the link is healed,
//! unless its connection was reset by then. It arrives even if its sender has given up on the connection, because TCP
//! would deliver it too. A connection opened during a cut and closed before its end never reached the server at all.
//! Bytes in the middle of a connection are never lost: after a dropped answer it stays silent, and `heal` resets it.
//!
//! Invariants: an order has taken effect when its method returns, so that not one byte passes a link after `cut`; the
//! link works in a thread of its own, so it neither needs nor disturbs the test's runtime and its clock; dropping it
//! closes everything.
//!
//! One thing a proxy cannot do: if the *server* is gone, the client's connection is accepted and then reset, where the
//! server itself would have refused it. A test that needs the refusal says [`refuse`](FaultProxy::refuse) too.
//!
//! ```
//! use std::{io::{Read as _, Write as _}, net::{TcpListener, TcpStream}};
//!
//! use ibid_testkit::servers::link::Link;
//!
//! let server = TcpListener::bind("127.0.0.1:0")?;
//! let link = Link::to(server.local_addr()?);
//! let mut client = TcpStream::connect(link.addr())?;
//! let (mut at_server, _) = server.accept()?;
//! client.write_all(b"ping")?;
//! at_server.read_exact(&mut [0; 4])?;
//! at_server.write_all(b"pong")?;
//! client.read_exact(&mut [0; 4])?;
//! let counts = link.counts();
//! assert_eq!((counts.connections, counts.bytes_to_server, counts.round_trips), (1, 4, 1));
//! # std::io::Result::Ok(())
//! ```

use std::{
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpSocket},
    runtime::Builder,
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::{JoinSet, yield_now},
    time::{Instant, sleep, timeout},
};

use self::wire::{AnswerLoss, ProxyDirection, ProxyRules, ProxyState};
pub use self::wire::{ConnectionTraffic, ProxyCounts};

mod relay;
#[cfg(test)]
mod tests;
mod wire;

/// How long anything inside a link may take that should take no time at all.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// The proxy. Dropping it closes everything.
pub struct FaultProxy {
    addr: SocketAddr,
    state: Arc<ProxyState>,
    commands: Option<UnboundedSender<ProxyCommand>>,
    thread: Option<JoinHandle<()>>,
}

/// What the link's thread is to do, and whom to tell that it is done.
struct ProxyCommand {
    change: Box<dyn FnOnce(&mut ProxyRules) + Send>,
    /// Whether new connections are accepted from now on; as before if it does not say.
    listen: Option<bool>,
    done: mpsc::Sender<()>,
}

impl FaultProxy {
    /// A link on a free port of the loopback to this server, which need not be there yet.
    ///
    /// # Panics
    ///
    /// If there is no free port, or no thread to be had.
    pub fn to(server: SocketAddr) -> FaultProxy {
        let state = Arc::new(ProxyState::new(server));
        let (orders, inbox) = unbounded_channel();
        let (started, addr) = mpsc::channel();
        let shared = Arc::clone(&state);
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime for the link");
            runtime.block_on(async {
                let socket = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free port");
                let addr = socket.local_addr().expect("a bound socket has an address");
                let listener = socket.listen(BACKLOG).expect("a bound socket can listen");
                let _ = started.send(addr);
                run_proxy(addr, listener, shared, inbox).await;
            });
        };
        let thread = thread::Builder::new().name("link".into()).spawn(run).expect("a thread for the link");
        let addr = addr.recv_timeout(COMMAND_TIMEOUT).expect("the link starts");
        FaultProxy { addr, state, commands: Some(orders), thread: Some(thread) }
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Leads new connections to this server; those that are open stay where they are.
    pub fn set_target(&self, server: SocketAddr) {
        *self.state.server.lock() = server;
    }

    /// Silence, both ways. New connections are accepted, and silent.
    pub fn cut(&self) {
        self.send_command(None, |rules| rules.open = [false, false]);
    }

    /// Silence, both ways. New connections are refused.
    pub fn cut_and_refuse(&self) {
        self.send_command(Some(false), |rules| rules.open = [false, false]);
    }

    /// Nothing reaches the server any more; what it sends still arrives.
    pub fn cut_to_server(&self) {
        self.send_command(None, |rules| rules.open[ProxyDirection::ToServer as usize] = false);
    }

    /// Nothing reaches the client any more; what it sends still arrives.
    pub fn cut_to_client(&self) {
        self.send_command(None, |rules| rules.open[ProxyDirection::ToClient as usize] = false);
    }

    /// Resets every connection that is open now, at both ends.
    pub fn reset(&self) {
        self.send_command(None, |rules| rules.resets += 1);
    }

    /// Refuses new connections; those that are open go on.
    pub fn refuse(&self) {
        self.send_command(Some(false), |_| ());
    }

    /// Everything arrives this much later, each way. Throughput stays the same.
    pub fn delay(&self, by: Duration) {
        self.send_command(None, move |rules| rules.delay = by);
    }

    /// Everything arrives in pieces of at most this many bytes, a millisecond apart.
    ///
    /// # Panics
    ///
    /// If `bytes` is 0.
    pub fn slice(&self, bytes: usize) {
        assert!(bytes > 0, "a slice has at least one byte");
        self.send_command(None, move |rules| rules.slice = Some(bytes));
    }

    /// Delivers the next `n` requests and swallows their answers; the connections stay open, and silent. Requests on
    /// such a connection still arrive, and count as long as any of the `n` are left.
    pub fn drop_answers(&self, n: usize) {
        self.lose_next_answers(n, AnswerLoss::Dropped);
    }

    /// Delivers the next `n` requests; each connection is reset when its answer comes.
    pub fn break_answers(&self, n: usize) {
        self.lose_next_answers(n, AnswerLoss::Reset);
    }

    fn lose_next_answers(&self, n: usize, how: AnswerLoss) {
        let wire = Arc::clone(&self.state);
        self.send_command(None, move |_| wire.lose_answers(n, how));
    }

    /// How many answers are still to be lost.
    pub fn answers_to_lose(&self) -> usize {
        self.state.answers_to_lose()
    }

    /// Ends all of it: what was held back arrives, new connections are accepted, connections whose answer was swallowed
    /// are reset.
    pub fn heal(&self) {
        let wire = Arc::clone(&self.state);
        self.send_command(Some(true), move |rules| {
            wire.lose_answers(0, AnswerLoss::Dropped);
            *rules = ProxyRules { resets: rules.resets, heals: rules.heals + 1, ..ProxyRules::default() };
        });
    }

    /// What went through so far, all connections together.
    pub fn counts(&self) -> ProxyCounts {
        self.state.counts()
    }

    /// What went through so far by connection, the oldest first; of those that are closed only the last few thousand.
    pub fn traffic(&self) -> Vec<ConnectionTraffic> {
        self.state.traffic()
    }

    fn send_command(&self, listen: Option<bool>, change: impl FnOnce(&mut ProxyRules) + Send + 'static) {
        let (done, wait) = mpsc::channel();
        let sent = self.commands.as_ref().expect("open until dropped").send(ProxyCommand {
            change: Box::new(change),
            listen,
            done,
        });
        assert!(
            sent.is_ok() && wait.recv_timeout(COMMAND_TIMEOUT).is_ok(),
            "the link's thread has died; it said why above"
        );
    }
}

impl fmt::Debug for FaultProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = *self.state.server.lock();
        f.debug_struct("FaultProxy")
            .field("addr", &self.addr)
            .field("server", &server)
            .field("counts", &self.counts())
            .finish()
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        drop(self.commands.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const BACKLOG: u32 = 1024;

/// Open for connections, or holding the port so that nobody else gets it.
enum ProxyListener {
    Open(TcpListener),
    Shut(TcpSocket),
}

/// Until the link is dropped; its connections end with it, for they are tasks of the set.
async fn run_proxy(
    addr: SocketAddr, listener: TcpListener, wire: Arc<ProxyState>, mut inbox: UnboundedReceiver<ProxyCommand>,
) {
    let mut connections = JoinSet::new();
    let mut door = ProxyListener::Open(listener);
    loop {
        let accepted = async {
            match &door {
                ProxyListener::Open(listener) => listener.accept().await,
                ProxyListener::Shut(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            order = inbox.recv() => {
                let Some(ProxyCommand { change, listen, done }) = order else { return };
                if let Some(open) = listen {
                    door = set_listening(addr, door, open).await;
                }
                wire.rules.send_modify(change);
                wait_until_reset(&wire).await;
                let _ = done.send(());
            }
            accepted = accepted => match accepted {
                Ok((client, _)) => {
                    while connections.try_join_next().is_some() {}
                    connections.spawn(relay::relay_connection(client, Arc::clone(&wire)));
                }
                // Out of descriptors, say: it may pass.
                Err(_) => sleep(Duration::from_millis(10)).await,
            },
        }
    }
}

async fn set_listening(addr: SocketAddr, door: ProxyListener, open: bool) -> ProxyListener {
    match (door, open) {
        (ProxyListener::Shut(socket), true) => {
            ProxyListener::Open(socket.listen(BACKLOG).expect("a bound socket can listen"))
        }
        (ProxyListener::Open(listener), false) => {
            drop(listener);
            let until = Instant::now() + COMMAND_TIMEOUT;
            loop {
                match bind(addr) {
                    Ok(socket) => return ProxyListener::Shut(socket),
                    Err(error) => assert!(Instant::now() < until, "{addr} was taken by another process: {error}"),
                }
                sleep(Duration::from_millis(1)).await;
            }
        }
        (door, _) => door,
    }
}

/// Returns once every connection that the present rules reset is gone: their tasks run in this same thread.
async fn wait_until_reset(wire: &ProxyState) {
    let gone = async {
        while wire.has_connection_to_reset() {
            yield_now().await;
        }
    };
    timeout(COMMAND_TIMEOUT, gone).await.expect("connections end when they are reset");
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // The connections that go on would otherwise keep the port.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}
