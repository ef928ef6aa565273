//! A TCP proxy that cuts, delays and counts.
//!
//! A [`Link`] stands between a client and a server on the loopback, and misbehaves on demand while connections are open:
//!
//! | order | open connections | new connections |
//! |---|---|---|
//! | [`cut`](Link::cut) | silent both ways | accepted, then silent |
//! | [`cut_and_refuse`](Link::cut_and_refuse) | silent both ways | refused |
//! | [`cut_to_server`](Link::cut_to_server), [`cut_to_client`](Link::cut_to_client) | silent one way | accepted; silent that way |
//! | [`reset`](Link::reset) | reset, both ends | as before |
//! | [`refuse`](Link::refuse) | as before | refused |
//! | [`delay`](Link::delay), [`slice`](Link::slice) | later; in small pieces | the same |
//! | [`drop_answers`](Link::drop_answers) | the request arrives, its answer never does | the same |
//! | [`break_answers`](Link::break_answers) | the request arrives, then a reset in its answer's place | the same |
//! | [`heal`](Link::heal) | all of that ends | accepted |
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
//! server itself would have refused it. A test that needs the refusal says [`refuse`](Link::refuse) too.
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

pub use self::wire::{Counts, Traffic};
use self::wire::{Lost, Rules, Way, Wire};

mod carry;
#[cfg(test)]
mod tests;
mod wire;

/// How long anything inside a link may take that should take no time at all.
const SOON: Duration = Duration::from_secs(10);

/// The proxy. Dropping it closes everything.
pub struct Link {
    addr: SocketAddr,
    wire: Arc<Wire>,
    orders: Option<UnboundedSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// What the link's thread is to do, and whom to tell that it is done.
struct Order {
    change: Box<dyn FnOnce(&mut Rules) + Send>,
    /// Whether new connections are accepted from now on; as before if it does not say.
    listen: Option<bool>,
    done: mpsc::Sender<()>,
}

impl Link {
    /// A link on a free port of the loopback to this server, which need not be there yet.
    ///
    /// # Panics
    ///
    /// If there is no free port, or no thread to be had.
    pub fn to(server: SocketAddr) -> Link {
        let wire = Arc::new(Wire::new(server));
        let (orders, inbox) = unbounded_channel();
        let (started, addr) = mpsc::channel();
        let shared = Arc::clone(&wire);
        let run = move || {
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime for the link");
            runtime.block_on(async {
                let socket = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free port");
                let addr = socket.local_addr().expect("a bound socket has an address");
                let listener = socket.listen(BACKLOG).expect("a bound socket can listen");
                let _ = started.send(addr);
                serve(addr, listener, shared, inbox).await;
            });
        };
        let thread = thread::Builder::new().name("link".into()).spawn(run).expect("a thread for the link");
        let addr = addr.recv_timeout(SOON).expect("the link starts");
        Link { addr, wire, orders: Some(orders), thread: Some(thread) }
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Leads new connections to this server; those that are open stay where they are.
    pub fn lead_to(&self, server: SocketAddr) {
        *self.wire.server.lock() = server;
    }

    /// Silence, both ways. New connections are accepted, and silent.
    pub fn cut(&self) {
        self.order(None, |rules| rules.open = [false, false]);
    }

    /// Silence, both ways. New connections are refused.
    pub fn cut_and_refuse(&self) {
        self.order(Some(false), |rules| rules.open = [false, false]);
    }

    /// Nothing reaches the server any more; what it sends still arrives.
    pub fn cut_to_server(&self) {
        self.order(None, |rules| rules.open[Way::ToServer as usize] = false);
    }

    /// Nothing reaches the client any more; what it sends still arrives.
    pub fn cut_to_client(&self) {
        self.order(None, |rules| rules.open[Way::ToClient as usize] = false);
    }

    /// Resets every connection that is open now, at both ends.
    pub fn reset(&self) {
        self.order(None, |rules| rules.resets += 1);
    }

    /// Refuses new connections; those that are open go on.
    pub fn refuse(&self) {
        self.order(Some(false), |_| ());
    }

    /// Everything arrives this much later, each way. Throughput stays the same.
    pub fn delay(&self, by: Duration) {
        self.order(None, move |rules| rules.delay = by);
    }

    /// Everything arrives in pieces of at most this many bytes, a millisecond apart.
    ///
    /// # Panics
    ///
    /// If `bytes` is 0.
    pub fn slice(&self, bytes: usize) {
        assert!(bytes > 0, "a slice has at least one byte");
        self.order(None, move |rules| rules.slice = Some(bytes));
    }

    /// Delivers the next `n` requests and swallows their answers; the connections stay open, and silent. Requests on
    /// such a connection still arrive, and count as long as any of the `n` are left.
    pub fn drop_answers(&self, n: usize) {
        self.lose(n, Lost::InSilence);
    }

    /// Delivers the next `n` requests; each connection is reset when its answer comes.
    pub fn break_answers(&self, n: usize) {
        self.lose(n, Lost::WithReset);
    }

    fn lose(&self, n: usize, how: Lost) {
        let wire = Arc::clone(&self.wire);
        self.order(None, move |_| wire.lose_answers(n, how));
    }

    /// How many answers are still to be lost.
    pub fn answers_to_lose(&self) -> usize {
        self.wire.answers_to_lose()
    }

    /// Ends all of it: what was held back arrives, new connections are accepted, connections whose answer was swallowed
    /// are reset.
    pub fn heal(&self) {
        let wire = Arc::clone(&self.wire);
        self.order(Some(true), move |rules| {
            wire.lose_answers(0, Lost::InSilence);
            *rules = Rules { resets: rules.resets, heals: rules.heals + 1, ..Rules::default() };
        });
    }

    /// What went through so far, all connections together.
    pub fn counts(&self) -> Counts {
        self.wire.counts()
    }

    /// What went through so far by connection, the oldest first; of those that are closed only the last few thousand.
    pub fn traffic(&self) -> Vec<Traffic> {
        self.wire.traffic()
    }

    fn order(&self, listen: Option<bool>, change: impl FnOnce(&mut Rules) + Send + 'static) {
        let (done, wait) = mpsc::channel();
        let sent =
            self.orders.as_ref().expect("open until dropped").send(Order { change: Box::new(change), listen, done });
        assert!(sent.is_ok() && wait.recv_timeout(SOON).is_ok(), "the link's thread has died; it said why above");
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = *self.wire.server.lock();
        f.debug_struct("Link")
            .field("addr", &self.addr)
            .field("server", &server)
            .field("counts", &self.counts())
            .finish()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const BACKLOG: u32 = 1024;

/// Open for connections, or holding the port so that nobody else gets it.
enum Door {
    Open(TcpListener),
    Shut(TcpSocket),
}

/// Until the link is dropped; its connections end with it, for they are tasks of the set.
async fn serve(addr: SocketAddr, listener: TcpListener, wire: Arc<Wire>, mut inbox: UnboundedReceiver<Order>) {
    let mut connections = JoinSet::new();
    let mut door = Door::Open(listener);
    loop {
        let accepted = async {
            match &door {
                Door::Open(listener) => listener.accept().await,
                Door::Shut(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            order = inbox.recv() => {
                let Some(Order { change, listen, done }) = order else { return };
                if let Some(open) = listen {
                    door = turned(addr, door, open).await;
                }
                wire.rules.send_modify(change);
                until_reset(&wire).await;
                let _ = done.send(());
            }
            accepted = accepted => match accepted {
                Ok((client, _)) => {
                    while connections.try_join_next().is_some() {}
                    connections.spawn(carry::carry(client, Arc::clone(&wire)));
                }
                // Out of descriptors, say: it may pass.
                Err(_) => sleep(Duration::from_millis(10)).await,
            },
        }
    }
}

async fn turned(addr: SocketAddr, door: Door, open: bool) -> Door {
    match (door, open) {
        (Door::Shut(socket), true) => Door::Open(socket.listen(BACKLOG).expect("a bound socket can listen")),
        (Door::Open(listener), false) => {
            drop(listener);
            let until = Instant::now() + SOON;
            loop {
                match bind(addr) {
                    Ok(socket) => return Door::Shut(socket),
                    Err(error) => assert!(Instant::now() < until, "{addr} was taken by another process: {error}"),
                }
                sleep(Duration::from_millis(1)).await;
            }
        }
        (door, _) => door,
    }
}

/// Returns once every connection that the present rules reset is gone: their tasks run in this same thread.
async fn until_reset(wire: &Wire) {
    let gone = async {
        while wire.has_to_reset() {
            yield_now().await;
        }
    };
    timeout(SOON, gone).await.expect("connections end when they are reset");
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // The connections that go on would otherwise keep the port.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}
