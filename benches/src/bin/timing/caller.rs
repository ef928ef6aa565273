//! One caller's connection, and how long its answers take.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use ibid_bench::wire;

/// Connections of a caller that is not in a hurry to be measured.
const SETUP_CONNECTIONS: usize = 8;

#[derive(Clone, Copy, Debug)]
pub(super) enum TimingCaller {
    A,
    B,
}

/// What is sent: requests that differ in nothing are the same request.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimingRequest<'a> {
    pub(super) path: &'a str,
    pub(super) key: &'a str,
    pub(super) body: &'a str,
}

pub(super) struct TimingConnection {
    socket: TcpStream,
    caller: TimingCaller,
    received: Vec<u8>,
}

impl TimingConnection {
    pub(super) fn open(to: SocketAddr, caller: TimingCaller) -> Result<Self, String> {
        let socket = TcpStream::connect(to).and_then(|socket| {
            socket.set_nodelay(true)?;
            socket.set_read_timeout(Some(Duration::from_secs(15)))?;
            Ok(socket)
        });
        let socket = socket.map_err(|why| format!("no connection to the gateway: {why}"))?;
        Ok(Self { socket, caller, received: Vec::new() })
    }

    pub(super) fn send(&mut self, ask: TimingRequest<'_>) -> Result<(), String> {
        let bytes = self.request_bytes(ask);
        self.socket.write_all(&bytes).map_err(|why| format!("the request is not taken: {why}"))
    }

    /// The status of the answer and how long it took, in microseconds.
    pub(super) fn send_timed(&mut self, ask: TimingRequest<'_>) -> Result<(u16, f64), String> {
        let bytes = self.request_bytes(ask);
        let sent = Instant::now();
        self.socket.write_all(&bytes).map_err(|why| format!("the request is not taken: {why}"))?;
        let status = self.read_status()?;
        Ok((status, sent.elapsed().as_secs_f64() * 1e6))
    }

    pub(super) fn read_status(&mut self) -> Result<u16, String> {
        self.received.clear();
        loop {
            let mut some = [0; 4096];
            let count = self.socket.read(&mut some).map_err(|why| format!("no answer: {why}"))?;
            self.received.extend_from_slice(&some[..count]);
            match wire::parse_response(&self.received) {
                Ok(Some(response)) => return Ok(response.status),
                Ok(None) if count == 0 => return Err("the gateway hung up".into()),
                Ok(None) => {}
                Err(wire::MalformedResponse(why)) => return Err(format!("an answer that is none: {why}")),
            }
        }
    }

    fn request_bytes(&self, TimingRequest { path, key, body }: TimingRequest<'_>) -> Vec<u8> {
        let (who, length) = (self.caller, body.len());
        format!(
            "POST {path} HTTP/1.1\r\nHost: shop.test\r\nAuthorization: Bearer {who:?}\r\nIdempotency-Key: {key}\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .into_bytes()
    }
}

/// Sends a request for each key, several at a time, and expects this answer to each.
pub(super) fn use_keys(
    to: SocketAddr, caller: TimingCaller, path: &str, keys: &[String], body: &str, expected: u16,
) -> Result<(), String> {
    let share = keys.len().div_ceil(SETUP_CONNECTIONS).max(1);
    thread::scope(|scope| {
        let threads: Vec<_> = keys
            .chunks(share)
            .map(|keys| {
                scope.spawn(move || {
                    let mut connection = TimingConnection::open(to, caller)?;
                    for key in keys {
                        let (status, _) = connection.send_timed(TimingRequest { path, key, body })?;
                        if status != expected {
                            return Err(format!("{caller:?} got {status} instead of {expected}"));
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
    })
}
