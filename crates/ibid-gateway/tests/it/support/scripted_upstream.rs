use std::net::SocketAddr;

use testbed::process::GatewayProcess;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::{BIN, find, within};

/// An upstream played by the test itself, byte by byte: for what must be seen between two bytes.
pub(crate) struct ScriptedUpstream {
    listener: TcpListener,
}

impl ScriptedUpstream {
    pub(crate) async fn start() -> ScriptedUpstream {
        ScriptedUpstream { listener: TcpListener::bind("127.0.0.1:0").await.expect("a free port") }
    }

    /// With a gateway in front of it.
    pub(crate) async fn behind_gateway(config: &str) -> (ScriptedUpstream, GatewayProcess) {
        let upstream = ScriptedUpstream::start().await;
        let gateway = GatewayProcess::spawn(BIN, config, &upstream.url()).await;
        (upstream, gateway)
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.listener.local_addr().expect("it is bound")
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// The next connection, with the head of its first request and whatever of the body came with it.
    pub(crate) async fn accept_head(&self) -> ScriptedExchange {
        let work = async {
            let (stream, _) = self.listener.accept().await.expect("a connection");
            stream.set_nodelay(true).expect("a live socket");
            let mut exchange = ScriptedExchange { stream, head: String::new(), body: Vec::new() };
            loop {
                if let Some(end) = find(&exchange.body, b"\r\n\r\n") {
                    exchange.head = String::from_utf8_lossy(&exchange.body[..end]).into_owned();
                    exchange.body.drain(..end + 4);
                    return exchange;
                }
                assert!(exchange.read_more().await > 0, "closed before the head was there");
            }
        };
        within("a request at the upstream", work).await
    }

    /// The next connection, with the whole of its first request, which announces its length.
    pub(crate) async fn request(&self) -> ScriptedExchange {
        let mut exchange = self.accept_head().await;
        let lower = exchange.head.to_lowercase();
        let length = lower.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.map_or(0, |length| length.trim().parse().expect("a number"));
        while exchange.body.len() < length {
            assert!(within("the body", exchange.read_more()).await > 0, "closed before the body was there");
        }
        exchange
    }
}

/// One request at an upstream that is played by hand.
pub(crate) struct ScriptedExchange {
    pub(crate) stream: TcpStream,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl ScriptedExchange {
    /// Reads more of the body; how many bytes came.
    pub(crate) async fn read_more(&mut self) -> usize {
        let mut part = [0; 16 << 10];
        let n = self.stream.read(&mut part).await.expect("the gateway does not reset");
        self.body.extend_from_slice(&part[..n]);
        n
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        let written = within("the gateway to read", self.stream.write_all(bytes.as_ref())).await;
        written.expect("the gateway does not hang up");
    }

    pub(crate) async fn chunk(&mut self, data: &str) {
        self.write(format!("{:x}\r\n{data}\r\n", data.len())).await;
    }
}
