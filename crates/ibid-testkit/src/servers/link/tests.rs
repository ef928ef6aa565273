//! The link on itself, with blocking sockets: whatever it does, it does from a thread of its own.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use super::*;

/// Long enough for what should come to come.
const SURELY: Duration = Duration::from_secs(10);
/// How long silence is listened to.
const A_WHILE: Duration = Duration::from_millis(60);

struct Scene {
    server: TcpListener,
    link: Link,
}

impl Scene {
    fn new() -> Scene {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = Link::to(server.local_addr().unwrap());
        Scene { server, link }
    }

    /// A connection through the link, both ends.
    fn pair(&self) -> (End, End) {
        let client = self.connect();
        (client, self.accept())
    }

    fn connect(&self) -> End {
        End::new(TcpStream::connect(self.link.addr()).expect("the link accepts"))
    }

    fn accept(&self) -> End {
        self.server.set_nonblocking(false).unwrap();
        End::new(self.server.accept().unwrap().0)
    }

    fn nobody_comes(&self) -> bool {
        self.server.set_nonblocking(true).unwrap();
        let until = Instant::now() + A_WHILE;
        while Instant::now() < until {
            if self.server.accept().is_ok() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

struct End(TcpStream);

impl End {
    fn new(stream: TcpStream) -> End {
        stream.set_nodelay(true).unwrap();
        End(stream)
    }

    fn says(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).expect("an open connection");
    }

    #[track_caller]
    fn hears(&mut self, text: &str) {
        self.0.set_read_timeout(Some(SURELY)).unwrap();
        let mut heard = vec![0; text.len()];
        self.0.read_exact(&mut heard).unwrap_or_else(|error| panic!("instead of {text:?}: {error}"));
        assert_eq!(String::from_utf8_lossy(&heard), text);
    }

    #[track_caller]
    fn hears_nothing(&mut self) {
        self.0.set_read_timeout(Some(A_WHILE)).unwrap();
        let heard = self.0.read(&mut [0; 64]);
        let silent =
            heard.as_ref().is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
        assert!(silent, "heard {heard:?} on a silent connection");
    }

    /// How the connection ended: 0 bytes in order, or an error.
    fn ending(&mut self) -> std::io::Result<usize> {
        self.0.set_read_timeout(Some(SURELY)).unwrap();
        self.0.read(&mut [0; 64])
    }

    #[track_caller]
    fn is_reset(&mut self) {
        let ending = self.ending();
        assert!(ending.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset), "{ending:?}");
    }
}

fn refused(link: &Link) -> bool {
    TcpStream::connect(link.addr()).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

#[track_caller]
fn exchange(client: &mut End, server: &mut End, n: usize) {
    client.says(&format!("ask {n}"));
    server.hears(&format!("ask {n}"));
    server.says(&format!("answer {n}"));
    client.hears(&format!("answer {n}"));
}

#[test]
fn bytes_and_ends_pass_both_ways() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    client.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.ending().unwrap(), 0);
    server.says("still here");
    client.hears("still here");
    drop(server);
    assert_eq!(client.ending().unwrap(), 0);
}

#[test]
fn a_large_transfer_arrives_whole_in_slices_and_late() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    scene.link.slice(5000);
    scene.link.delay(Duration::from_millis(20));
    let sent: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let copy = sent.clone();
    let writer = std::thread::spawn(move || {
        client.0.write_all(&copy).unwrap();
        client
    });
    let mut received = vec![0; sent.len()];
    server.0.set_read_timeout(Some(SURELY)).unwrap();
    server.0.read_exact(&mut received).unwrap();
    assert!(received == sent);
    drop(writer.join().unwrap());
    assert_eq!(server.ending().unwrap(), 0);
    assert_eq!(scene.link.counts().bytes_to_server, 300_000);
}

#[test]
fn a_reset_of_a_peer_reaches_the_other() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    // Unread bytes turn a close into a reset.
    client.says("never read");
    std::thread::sleep(A_WHILE);
    drop(server);
    client.is_reset();
}

#[test]
fn a_cut_is_silent_and_what_was_sent_arrives_when_it_heals() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.link.cut();
    client.says("ask 2");
    server.says("push");
    server.hears_nothing();
    client.hears_nothing();
    assert_eq!(scene.link.counts().bytes_to_server, 5);
    scene.link.heal();
    server.hears("ask 2");
    client.hears("push");
}

#[test]
fn what_a_client_sent_before_it_gave_up_still_arrives() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.link.cut();
    client.says("too late?");
    drop(client);
    server.hears_nothing();
    scene.link.heal();
    server.hears("too late?");
    assert_eq!(server.ending().unwrap(), 0);
}

#[test]
fn during_a_cut_new_connections_are_accepted_and_silent() {
    let scene = Scene::new();
    scene.link.cut();
    let mut stays = scene.connect();
    let mut leaves = scene.connect();
    stays.says("one");
    leaves.says("two");
    stays.hears_nothing();
    drop(leaves);
    assert!(scene.nobody_comes());
    scene.link.heal();
    // The one that left never reached the server.
    scene.accept().hears("one");
    assert!(scene.nobody_comes());
}

#[test]
fn during_a_refusing_cut_new_connections_are_refused_and_open_ones_silent() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    scene.link.cut_and_refuse();
    assert!(refused(&scene.link));
    client.says("ask");
    server.hears_nothing();
    scene.link.heal();
    server.hears("ask");
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
}

#[test]
fn one_way_cuts_let_the_other_way_pass() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    scene.link.cut_to_server();
    client.says("held");
    server.hears_nothing();
    server.says("passes");
    client.hears("passes");
    scene.link.heal();
    server.hears("held");
    scene.link.cut_to_client();
    client.says("passes");
    server.hears("passes");
    server.says("held");
    client.hears_nothing();
    scene.link.heal();
    client.hears("held");
}

#[test]
fn an_end_does_not_pass_a_cut_link_either() {
    let scene = Scene::new();
    let (mut client, server) = scene.pair();
    scene.link.cut_to_client();
    drop(server);
    client.hears_nothing();
    scene.link.heal();
    assert_eq!(client.ending().unwrap(), 0);
}

#[test]
fn a_reset_ends_open_connections_at_both_ends_and_no_later_ones() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.link.reset();
    assert_eq!(scene.link.counts().open, 0, "the reset is over when the method returns");
    client.is_reset();
    server.is_reset();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 2);
    scene.link.delay(Duration::ZERO);
    exchange(&mut client, &mut server, 3);
}

#[test]
fn a_cut_connection_can_be_reset() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.link.cut();
    client.says("lost for good");
    scene.link.reset();
    client.is_reset();
    server.is_reset();
}

#[test]
fn refusing_leaves_open_connections_alone_and_ends_on_the_same_port() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    scene.link.refuse();
    scene.link.refuse();
    assert!(refused(&scene.link));
    exchange(&mut client, &mut server, 1);
    scene.link.heal();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 2);
}

#[test]
fn a_delay_counts_each_way() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    scene.link.delay(Duration::from_millis(30));
    let begun = Instant::now();
    exchange(&mut client, &mut server, 1);
    assert!(begun.elapsed() >= Duration::from_millis(60), "{:?}", begun.elapsed());
}

#[test]
fn slices_arrive_one_by_one() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    scene.link.slice(1);
    client.says("abc");
    let mut pieces = 0;
    let mut heard = Vec::new();
    while heard.len() < 3 {
        let mut part = [0; 16];
        let n = server.0.read(&mut part).unwrap();
        pieces += 1;
        heard.extend_from_slice(&part[..n]);
    }
    assert_eq!(heard, b"abc");
    // On a busy machine two of them may be read together, but the first comes alone.
    assert!(pieces > 1, "{pieces}");
}

#[test]
fn dropped_answers_leave_the_connection_silent_until_it_heals() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
    scene.link.drop_answers(1);
    client.says("ask 2");
    server.hears("ask 2");
    server.says("answer 2");
    client.hears_nothing();
    assert_eq!(scene.link.answers_to_lose(), 0);
    // A later answer on it would be taken for the lost one.
    client.says("ask 3");
    server.hears("ask 3");
    server.says("answer 3");
    client.hears_nothing();
    let (mut other, mut at_server) = scene.pair();
    exchange(&mut other, &mut at_server, 4);
    scene.link.heal();
    client.is_reset();
    exchange(&mut other, &mut at_server, 5);
}

#[test]
fn only_answers_to_requests_made_since_are_dropped() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    client.says("ask 1");
    server.hears("ask 1");
    scene.link.drop_answers(1);
    server.says("answer 1");
    client.hears("answer 1");
    server.says("push");
    client.hears("push");
    assert_eq!(scene.link.answers_to_lose(), 1);
    scene.link.heal();
    exchange(&mut client, &mut server, 2);
}

#[test]
fn broken_answers_reset_the_connection_in_their_place() {
    let scene = Scene::new();
    scene.link.break_answers(2);
    for n in 0..2 {
        let (mut client, mut server) = scene.pair();
        client.says("ask");
        server.hears("ask");
        server.says("answer");
        client.is_reset();
        assert_eq!(scene.link.answers_to_lose(), 1 - n);
    }
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 3);
}

#[test]
fn a_server_that_is_gone_resets_its_clients_and_another_can_take_its_place() {
    let Scene { server, link } = Scene::new();
    drop(server);
    let mut client = End::new(TcpStream::connect(link.addr()).unwrap());
    client.is_reset();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    link.lead_to(server.local_addr().unwrap());
    let scene = Scene { server, link };
    let (mut client, mut server) = scene.pair();
    exchange(&mut client, &mut server, 1);
}

#[test]
fn round_trips_bytes_and_connections_are_counted() {
    let scene = Scene::new();
    let (mut client, mut server) = scene.pair();
    for n in 1..=3 {
        exchange(&mut client, &mut server, n);
    }
    // Sent together: one trip. Said unasked: none.
    client.says("one");
    server.hears("one");
    client.says("two");
    server.hears("two");
    server.says("both");
    client.hears("both");
    server.says("push");
    client.hears("push");
    let (mut other, mut at_server) = scene.pair();
    exchange(&mut other, &mut at_server, 4);
    let counts = scene.link.counts();
    let to_client = 4 * "answer n".len() as u64 + 8;
    assert_eq!((counts.bytes_to_server, counts.bytes_to_client), (4 * 5 + 6, to_client));
    assert_eq!((counts.connections, counts.open, counts.most_open, counts.round_trips), (2, 2, 2, 5));
    let trips: Vec<_> = scene.link.traffic().iter().map(|one| (one.open, one.round_trips)).collect();
    assert_eq!(trips, [(true, 4), (true, 1)]);
    scene.link.reset();
    let (_client, _server) = scene.pair();
    let counts = scene.link.counts();
    assert_eq!((counts.connections, counts.open, counts.most_open), (3, 1, 2));
    assert!(!scene.link.traffic()[0].open);
}

#[test]
fn dropping_the_link_closes_everything() {
    let Scene { server, link } = Scene::new();
    let addr = link.addr();
    let mut client = End::new(TcpStream::connect(addr).unwrap());
    let mut at_server = End::new(server.accept().unwrap().0);
    exchange(&mut client, &mut at_server, 1);
    drop(link);
    assert!(matches!(client.ending(), Ok(0) | Err(_)));
    assert!(TcpStream::connect(addr).is_err());
}

#[tokio::test(start_paused = true)]
async fn it_works_beside_a_runtime_whose_clock_stands_still() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let scene = Scene::new();
    scene.link.delay(Duration::from_millis(5));
    let mut client = tokio::net::TcpStream::connect(scene.link.addr()).await.unwrap();
    let mut server = scene.accept();
    client.write_all(b"ask").await.unwrap();
    server.hears("ask");
    server.says("answer");
    let mut heard = [0; 6];
    client.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"answer");
}
