//! Tests of the proxy with blocking sockets: it runs in its own thread.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use super::*;

/// Timeout for data that must arrive.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to check for silence.
const SILENCE_DURATION: Duration = Duration::from_millis(60);

struct ProxyFixture {
    server: TcpListener,
    proxy: FaultProxy,
}

impl ProxyFixture {
    fn new() -> ProxyFixture {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = FaultProxy::to(server.local_addr().unwrap());
        ProxyFixture { server, proxy }
    }

    /// Opens a connection through the proxy and returns both ends.
    fn pair(&self) -> (SocketEnd, SocketEnd) {
        let client = self.connect();
        (client, self.accept())
    }

    fn connect(&self) -> SocketEnd {
        SocketEnd::new(TcpStream::connect(self.proxy.addr()).expect("the link accepts"))
    }

    fn accept(&self) -> SocketEnd {
        self.server.set_nonblocking(false).unwrap();
        SocketEnd::new(self.server.accept().unwrap().0)
    }

    fn has_no_connection(&self) -> bool {
        self.server.set_nonblocking(true).unwrap();
        let until = Instant::now() + SILENCE_DURATION;
        while Instant::now() < until {
            if self.server.accept().is_ok() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

struct SocketEnd(TcpStream);

impl SocketEnd {
    fn new(stream: TcpStream) -> SocketEnd {
        stream.set_nodelay(true).unwrap();
        SocketEnd(stream)
    }

    fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).expect("an open connection");
    }

    #[track_caller]
    fn expect_text(&mut self, text: &str) {
        self.0.set_read_timeout(Some(RECEIVE_TIMEOUT)).unwrap();
        let mut heard = vec![0; text.len()];
        self.0.read_exact(&mut heard).unwrap_or_else(|error| panic!("instead of {text:?}: {error}"));
        assert_eq!(String::from_utf8_lossy(&heard), text);
    }

    #[track_caller]
    fn expect_silence(&mut self) {
        self.0.set_read_timeout(Some(SILENCE_DURATION)).unwrap();
        let heard = self.0.read(&mut [0; 64]);
        let silent =
            heard.as_ref().is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
        assert!(silent, "heard {heard:?} on a silent connection");
    }

    /// Returns how the connection ended: 0 bytes for a FIN, or an error.
    fn read_end(&mut self) -> std::io::Result<usize> {
        self.0.set_read_timeout(Some(RECEIVE_TIMEOUT)).unwrap();
        self.0.read(&mut [0; 64])
    }

    #[track_caller]
    fn expect_reset(&mut self) {
        let ending = self.read_end();
        assert!(ending.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset), "{ending:?}");
    }
}

fn is_refused(link: &FaultProxy) -> bool {
    TcpStream::connect(link.addr()).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

#[track_caller]
fn exchange(client: &mut SocketEnd, server: &mut SocketEnd, n: usize) {
    client.send(&format!("ask {n}"));
    server.expect_text(&format!("ask {n}"));
    server.send(&format!("answer {n}"));
    client.expect_text(&format!("answer {n}"));
}

#[test]
fn bytes_and_ends_pass_both_ways() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    client.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.read_end().unwrap(), 0);
    server.send("still here");
    client.expect_text("still here");
    drop(server);
    assert_eq!(client.read_end().unwrap(), 0);
}

#[test]
fn a_large_transfer_arrives_whole_in_slices_and_late() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    scene.proxy.slice(5000);
    scene.proxy.delay(Duration::from_millis(20));
    let sent: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let copy = sent.clone();
    let writer = std::thread::spawn(move || {
        client.0.write_all(&copy).unwrap();
        client
    });
    let mut received = vec![0; sent.len()];
    server.0.set_read_timeout(Some(RECEIVE_TIMEOUT)).unwrap();
    server.0.read_exact(&mut received).unwrap();
    assert!(received == sent);
    drop(writer.join().unwrap());
    assert_eq!(server.read_end().unwrap(), 0);
    assert_eq!(scene.proxy.counts().bytes_to_server, 300_000);
}

#[test]
fn a_reset_of_a_peer_reaches_the_other() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    // Unread bytes turn a close into a reset.
    client.send("never read");
    std::thread::sleep(SILENCE_DURATION);
    drop(server);
    client.expect_reset();
}

#[test]
fn a_cut_is_silent_and_what_was_sent_arrives_when_it_heals() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.proxy.cut();
    client.send("ask 2");
    server.send("push");
    server.expect_silence();
    client.expect_silence();
    assert_eq!(scene.proxy.counts().bytes_to_server, 5);
    scene.proxy.heal();
    server.expect_text("ask 2");
    client.expect_text("push");
}

#[test]
fn what_a_client_sent_before_it_gave_up_still_arrives() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.proxy.cut();
    client.send("too late?");
    drop(client);
    server.expect_silence();
    scene.proxy.heal();
    server.expect_text("too late?");
    assert_eq!(server.read_end().unwrap(), 0);
}

#[test]
fn during_a_cut_new_connections_are_accepted_and_silent() {
    let scene = ProxyFixture::new();
    scene.proxy.cut();
    let mut stays = scene.connect();
    let mut leaves = scene.connect();
    stays.send("one");
    leaves.send("two");
    stays.expect_silence();
    drop(leaves);
    assert!(scene.has_no_connection());
    scene.proxy.heal();
    // The client that left never reached the server.
    scene.accept().expect_text("one");
    assert!(scene.has_no_connection());
}

#[test]
fn during_a_refusing_cut_new_connections_are_refused_and_open_ones_silent() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    scene.proxy.cut_and_refuse();
    assert!(is_refused(&scene.proxy));
    client.send("ask");
    server.expect_silence();
    scene.proxy.heal();
    server.expect_text("ask");
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
}

#[test]
fn one_way_cuts_let_the_other_way_pass() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    scene.proxy.cut_to_server();
    client.send("held");
    server.expect_silence();
    server.send("passes");
    client.expect_text("passes");
    scene.proxy.heal();
    server.expect_text("held");
    scene.proxy.cut_to_client();
    client.send("passes");
    server.expect_text("passes");
    server.send("held");
    client.expect_silence();
    scene.proxy.heal();
    client.expect_text("held");
}

#[test]
fn an_end_does_not_pass_a_cut_link_either() {
    let scene = ProxyFixture::new();
    let (mut client, server) = scene.pair();
    scene.proxy.cut_to_client();
    drop(server);
    client.expect_silence();
    scene.proxy.heal();
    assert_eq!(client.read_end().unwrap(), 0);
}

#[test]
fn a_reset_ends_open_connections_at_both_ends_and_no_later_ones() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.proxy.reset();
    assert_eq!(scene.proxy.counts().open, 0, "the reset is over when the method returns");
    client.expect_reset();
    server.expect_reset();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 2);
    scene.proxy.delay(Duration::ZERO);
    exchange(&mut client, &mut server, 3);
}

#[test]
fn a_cut_connection_can_be_reset() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.proxy.cut();
    client.send("lost for good");
    scene.proxy.reset();
    client.expect_reset();
    server.expect_reset();
}

#[test]
fn refusing_leaves_open_connections_alone_and_ends_on_the_same_port() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    scene.proxy.refuse();
    scene.proxy.refuse();
    assert!(is_refused(&scene.proxy));
    exchange(&mut client, &mut server, 1);
    scene.proxy.heal();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 2);
}

#[test]
fn a_delay_counts_each_way() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    scene.proxy.delay(Duration::from_millis(30));
    let begun = Instant::now();
    exchange(&mut client, &mut server, 1);
    assert!(begun.elapsed() >= Duration::from_millis(60), "{:?}", begun.elapsed());
}

#[test]
fn slices_arrive_one_by_one() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    scene.proxy.slice(1);
    client.send("abc");
    let mut pieces = 0;
    let mut heard = Vec::new();
    while heard.len() < 3 {
        let mut part = [0; 16];
        let n = server.0.read(&mut part).unwrap();
        pieces += 1;
        heard.extend_from_slice(&part[..n]);
    }
    assert_eq!(heard, b"abc");
    // On a busy machine two slices may be read together, but the first one comes alone.
    assert!(pieces > 1, "{pieces}");
}

#[test]
fn dropped_answers_leave_the_connection_silent_until_it_heals() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.proxy.drop_answers(1);
    client.send("ask 2");
    server.expect_text("ask 2");
    server.send("answer 2");
    client.expect_silence();
    assert_eq!(scene.proxy.answers_to_lose(), 0);
    // A later answer on this connection would be mistaken for the lost one.
    client.send("ask 3");
    server.expect_text("ask 3");
    server.send("answer 3");
    client.expect_silence();
    let (mut other, mut at_server) = scene.pair();
    exchange(&mut other, &mut at_server, 4);
    scene.proxy.heal();
    client.expect_reset();
    exchange(&mut other, &mut at_server, 5);
}

#[test]
fn only_answers_to_requests_made_since_are_dropped() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    client.send("ask 1");
    server.expect_text("ask 1");
    scene.proxy.drop_answers(1);
    server.send("answer 1");
    client.expect_text("answer 1");
    server.send("push");
    client.expect_text("push");
    assert_eq!(scene.proxy.answers_to_lose(), 1);
    scene.proxy.heal();
    exchange(&mut client, &mut server, 2);
}

#[test]
fn broken_answers_reset_the_connection_in_their_place() {
    let scene = ProxyFixture::new();
    scene.proxy.break_answers(2);
    for n in 0..2 {
        let (mut client, mut server) = scene.pair();
        client.send("ask");
        server.expect_text("ask");
        server.send("answer");
        client.expect_reset();
        assert_eq!(scene.proxy.answers_to_lose(), 1 - n);
    }
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 3);
}

#[test]
fn a_server_that_is_gone_resets_its_clients_and_another_can_take_its_place() {
    let ProxyFixture { server, proxy: link } = ProxyFixture::new();
    drop(server);
    let mut client = SocketEnd::new(TcpStream::connect(link.addr()).unwrap());
    client.expect_reset();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    link.set_target(server.local_addr().unwrap());
    let scene = ProxyFixture { server, proxy: link };
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
}

#[test]
fn round_trips_bytes_and_connections_are_counted() {
    let scene = ProxyFixture::new();
    let (mut client, mut server) = scene.pair();
    for n in 1..=3 {
        exchange(&mut client, &mut server, n);
    }
    // Requests sent together are one round trip; data from the server without a request is none.
    client.send("one");
    server.expect_text("one");
    client.send("two");
    server.expect_text("two");
    server.send("both");
    client.expect_text("both");
    server.send("push");
    client.expect_text("push");
    let (mut other, mut at_server) = scene.pair();
    exchange(&mut other, &mut at_server, 4);
    let counts = scene.proxy.counts();
    let to_client = 4 * "answer n".len() as u64 + 8;
    assert_eq!((counts.bytes_to_server, counts.bytes_to_client), (4 * 5 + 6, to_client));
    assert_eq!((counts.connections, counts.open, counts.most_open, counts.round_trips), (2, 2, 2, 5));
    let trips: Vec<_> = scene.proxy.traffic().iter().map(|one| (one.open, one.round_trips)).collect();
    assert_eq!(trips, [(true, 4), (true, 1)]);
    scene.proxy.reset();
    let (_client, _server) = scene.pair();
    let counts = scene.proxy.counts();
    assert_eq!((counts.connections, counts.open, counts.most_open), (3, 1, 2));
    assert!(!scene.proxy.traffic()[0].open);
}

#[test]
fn dropping_the_link_closes_everything() {
    let ProxyFixture { server, proxy: link } = ProxyFixture::new();
    let addr = link.addr();
    let mut client = SocketEnd::new(TcpStream::connect(addr).unwrap());
    let mut at_server = SocketEnd::new(server.accept().unwrap().0);
    exchange(&mut client, &mut at_server, 1);
    drop(link);
    assert!(matches!(client.read_end(), Ok(0) | Err(_)));
    assert!(TcpStream::connect(addr).is_err());
}

#[tokio::test(start_paused = true)]
async fn it_works_beside_a_runtime_whose_clock_stands_still() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let scene = ProxyFixture::new();
    scene.proxy.delay(Duration::from_millis(5));
    let mut client = tokio::net::TcpStream::connect(scene.proxy.addr()).await.unwrap();
    let mut server = scene.accept();
    client.write_all(b"ask").await.unwrap();
    server.expect_text("ask");
    server.send("answer");
    let mut heard = [0; 6];
    client.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"answer");
}
