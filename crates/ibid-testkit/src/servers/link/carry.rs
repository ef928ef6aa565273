//! One connection of a link.
//!
//! Each way has a reader, which notes when each piece is due, and a writer, which delivers it then, if the way is open.
//! What a peer does to its connection (an end, a reset) is such a piece too, so that it passes a cut link no sooner than
//! bytes would.

use std::{io, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{
        mpsc::{Receiver, Sender, channel},
        watch,
    },
    time::{Instant, sleep, sleep_until},
};

use super::wire::{Fate, Open, Rules, Way, Wire};

const PIECE_BYTES: usize = 16 << 10;
/// How many pieces may be on their way at once, each way; then the sender is slowed down.
const PIECES: usize = 64;
/// How much is taken from a client whose connection cannot reach the server yet.
const EARLY_BYTES: usize = 1 << 20;
/// Between two slices, so that they are received one by one.
const BETWEEN_SLICES: Duration = Duration::from_millis(1);

enum Piece {
    Data(Bytes),
    End,
    Reset,
}

/// Carries a connection to its end.
pub(super) async fn carry(mut client: TcpStream, wire: Arc<Wire>) {
    let open = wire.opened();
    let mut rules = wire.rules.subscribe();
    let mut early = BytesMut::new();
    let reached = tokio::select! {
        biased;
        () = until_reset(&mut rules, &open) => None,
        reached = reach(&mut client, &mut early, &wire) => match reached {
            // It gave up before anything of it could reach the server.
            Ok(None) => return,
            Ok(server) => server,
            Err(_) => None,
        },
    };
    let Some(mut server) = reached else {
        let _ = client.set_zero_linger();
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ended = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        tokio::select! {
            biased;
            () = until_reset(&mut rules, &open) => Err(Severed),
            ended = async {
                tokio::try_join!(
                    flow(from_client, to_server, Way::ToServer, &open, early.freeze()),
                    flow(from_server, to_client, Way::ToClient, &open, Bytes::new()),
                )
            } => ended,
        }
    };
    if ended.is_err() {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// The connection is to be reset at both ends.
#[derive(Debug)]
struct Severed;

async fn until_reset(rules: &mut watch::Receiver<Rules>, open: &Open) {
    // The link's thread holds the sender for as long as any connection lives.
    let _ = rules.wait_for(|rules| open.is_reset_by(rules)).await;
}

/// Connects to the server once that is possible; nothing if the client leaves before.
async fn reach(client: &mut TcpStream, early: &mut BytesMut, wire: &Wire) -> io::Result<Option<TcpStream>> {
    let mut rules = wire.rules.subscribe();
    loop {
        let full = early.len() >= EARLY_BYTES;
        tokio::select! {
            biased;
            _ = rules.wait_for(|rules| rules.open[Way::ToServer as usize]) => break,
            read = client.read_buf(early), if !full => if read? == 0 { return Ok(None) },
        }
    }
    let server = *wire.server.lock();
    TcpStream::connect(server).await.map(Some)
}

async fn flow(from: ReadHalf<'_>, to: WriteHalf<'_>, way: Way, open: &Open, early: Bytes) -> Result<(), Severed> {
    let (sender, receiver) = channel(PIECES);
    let rules = open.wire.rules.subscribe();
    let reading = async {
        read(from, sender, &open.wire, early).await;
        Ok(())
    };
    tokio::try_join!(reading, write(to, receiver, rules, way, open)).map(drop)
}

async fn read(mut from: ReadHalf<'_>, to: Sender<(Instant, Piece)>, wire: &Wire, early: Bytes) {
    let due = || Instant::now() + wire.rules.borrow().delay;
    if !early.is_empty() && to.send((due(), Piece::Data(early))).await.is_err() {
        return;
    }
    loop {
        let mut buffer = BytesMut::with_capacity(PIECE_BYTES);
        let piece = match from.read_buf(&mut buffer).await {
            Ok(0) => Piece::End,
            Ok(_) => Piece::Data(buffer.freeze()),
            Err(_) => Piece::Reset,
        };
        let last = !matches!(piece, Piece::Data(_));
        if to.send((due(), piece)).await.is_err() || last {
            return;
        }
    }
}

async fn write(
    mut to: WriteHalf<'_>, mut from: Receiver<(Instant, Piece)>, mut rules: watch::Receiver<Rules>, way: Way,
    open: &Open,
) -> Result<(), Severed> {
    while let Some((due, piece)) = from.recv().await {
        sleep_until(due).await;
        match piece {
            Piece::Data(bytes) => deliver(&mut to, bytes, &mut rules, way, open).await?,
            Piece::End => {
                until_open(&mut rules, way).await;
                let _ = to.shutdown().await;
            }
            Piece::Reset => {
                until_open(&mut rules, way).await;
                return Err(Severed);
            }
        }
    }
    Ok(())
}

async fn deliver(
    to: &mut WriteHalf<'_>, mut bytes: Bytes, rules: &mut watch::Receiver<Rules>, way: Way, open: &Open,
) -> Result<(), Severed> {
    until_open(rules, way).await;
    if way == Way::ToClient {
        match open.answering() {
            Fate::Deliver => {}
            Fate::Swallow => return Ok(()),
            Fate::Reset => return Err(Severed),
        }
    }
    while !bytes.is_empty() {
        until_open(rules, way).await;
        let slice = rules.borrow_and_update().slice;
        let piece = &bytes[..slice.unwrap_or(usize::MAX).min(bytes.len())];
        tokio::select! {
            biased;
            _ = rules.changed() => continue,
            _ = to.writable() => {}
        }
        let written = match open.deliver(way, || to.try_write(piece)) {
            Ok(written) => written,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            // A peer that is gone says so where it is read from; that end of the connection decides.
            Err(_) => return Ok(()),
        };
        bytes = bytes.slice(written..);
        if slice.is_some() && !bytes.is_empty() {
            sleep(BETWEEN_SLICES).await;
        }
    }
    Ok(())
}

async fn until_open(rules: &mut watch::Receiver<Rules>, way: Way) {
    let _ = rules.wait_for(|rules| rules.open[way as usize]).await;
}
