//! The app behind the gateway: answers at once, 20 µs later, with a 502, or when it is told to.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

/// Answers at once.
pub(super) const IMMEDIATE_PATH: &str = "/pay0";
/// Answers a little later.
pub(super) const DELAYED_PATH: &str = "/pay2";
/// Answers that a gateway behind it has lost the answer.
pub(super) const LOST_PATH: &str = "/lost";
/// Answers when it is released.
pub(super) const HELD_PATH: &str = "/held";

const RESPONSE_DELAY: Duration = Duration::from_micros(20);

pub(super) struct TimingApp {
    addr: SocketAddr,
    gate: Arc<TimingGate>,
}

#[derive(Default)]
struct TimingGate {
    /// How many wait, and whether they may go.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl TimingApp {
    /// Its threads end with the process.
    pub(super) fn start() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (addr, gate) = (listener.local_addr()?, Arc::<TimingGate>::default());
        let app = Self { addr, gate: gate.clone() };
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let gate = gate.clone();
                // A connection that breaks is the gateway's to tell of.
                thread::spawn(move || drop(serve(&socket, &gate)));
            }
        });
        Ok(app)
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Holds those who come to [`HELD_PATH`] from now on.
    pub(super) fn close_gate(&self) {
        *self.gate.state.lock() = (0, false);
    }

    /// Whether so many are held, within ten seconds.
    pub(super) fn wait_for_held(&self, count: usize) -> bool {
        let (until, mut state) = (Instant::now() + Duration::from_secs(10), self.gate.state.lock());
        while state.0 < count {
            if self.gate.changed.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        true
    }

    pub(super) fn open_gate(&self) {
        self.gate.state.lock().1 = true;
        self.gate.changed.notify_all();
    }
}

fn serve(mut socket: &TcpStream, gate: &TimingGate) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let mut reader = BufReader::new(socket.try_clone()?);
    let mut line = String::new();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut length = 0;
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().map_err(io::Error::other)?;
            }
        }
        io::copy(&mut (&mut reader).take(length), &mut io::sink())?;
        let arrived = Instant::now();
        match &*path {
            DELAYED_PATH => while arrived.elapsed() < RESPONSE_DELAY {},
            HELD_PATH => wait(gate),
            _ => {}
        }
        let status = if path == LOST_PATH { "502 Bad Gateway" } else { "201 Created" };
        let body = "x".repeat(300);
        let answer = format!("HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: 300\r\n\r\n{body}");
        socket.write_all(answer.as_bytes())?;
    }
}

fn wait(gate: &TimingGate) {
    let mut state = gate.state.lock();
    state.0 += 1;
    gate.changed.notify_all();
    while !state.1 {
        gate.changed.wait(&mut state);
    }
}
