//! Relays one connection of a proxy.
//!
//! Each direction has a reader, which records when each piece is due, and a writer, which delivers it then, if the
//! direction is open. A FIN or reset is queued like data, so a cut proxy delays it like data.

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

use super::state::{DeliveryAction, OpenProxyConnection, ProxyDirection, ProxyRules, ProxyState};

const CHUNK_BYTES: usize = 16 << 10;
/// Maximum number of queued pieces per direction; then the sender is slowed down.
const MAX_QUEUED_CHUNKS: usize = 64;
/// Maximum bytes to read from a client whose connection cannot reach the server yet.
const MAX_EARLY_BYTES: usize = 1 << 20;
/// Interval between two slices, so that they are received separately.
const SLICE_INTERVAL: Duration = Duration::from_millis(1);

/// When bytes are due. No bytes are a FIN, an error is a reset.
type RelayedChunk = (Instant, io::Result<Bytes>);

pub(super) async fn relay_connection(mut client: TcpStream, wire: Arc<ProxyState>) {
    let open = wire.open_connection();
    let mut rules = wire.rules.subscribe();
    let mut early = BytesMut::new();
    let reached = tokio::select! {
        biased;
        () = wait_until_reset(&mut rules, &open) => None,
        reached = connect_to_server(&mut client, &mut early, &wire) => match reached {
            // The client gave up before anything could reach the server.
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
            () = wait_until_reset(&mut rules, &open) => Err(ProxyReset),
            ended = async {
                tokio::try_join!(
                    relay_direction(from_client, to_server, ProxyDirection::ToServer, &open, early.freeze()),
                    relay_direction(from_server, to_client, ProxyDirection::ToClient, &open, Bytes::new()),
                )
            } => ended,
        }
    };
    if ended.is_err() {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// The connection must be reset at both ends.
#[derive(Debug)]
struct ProxyReset;

async fn wait_until_reset(rules: &mut watch::Receiver<ProxyRules>, open: &OpenProxyConnection) {
    // The proxy's thread holds the sender for as long as any connection lives.
    let _ = rules.wait_for(|rules| open.connection.lock().is_reset_by(rules)).await;
}

/// Connects to the server once that is possible. Returns nothing if the client leaves first.
async fn connect_to_server(
    client: &mut TcpStream, early: &mut BytesMut, wire: &ProxyState,
) -> io::Result<Option<TcpStream>> {
    let mut rules = wire.rules.subscribe();
    loop {
        let full = early.len() >= MAX_EARLY_BYTES;
        tokio::select! {
            biased;
            _ = rules.wait_for(|rules| rules.open[ProxyDirection::ToServer as usize]) => break,
            read = client.read_buf(early), if !full => if read? == 0 { return Ok(None) },
        }
    }
    let server = *wire.server.lock();
    TcpStream::connect(server).await.map(Some)
}

async fn relay_direction(
    from: ReadHalf<'_>, to: WriteHalf<'_>, way: ProxyDirection, open: &OpenProxyConnection, early: Bytes,
) -> Result<(), ProxyReset> {
    let (sender, receiver) = channel(MAX_QUEUED_CHUNKS);
    let reading = async {
        read_chunks(from, sender, &open.state, early).await;
        Ok(())
    };
    tokio::try_join!(reading, write_chunks(to, receiver, way, open)).map(drop)
}

async fn read_chunks(mut from: ReadHalf<'_>, to: Sender<RelayedChunk>, wire: &ProxyState, early: Bytes) {
    let due = || Instant::now() + wire.rules.borrow().delay;
    if !early.is_empty() && to.send((due(), Ok(early))).await.is_err() {
        return;
    }
    loop {
        let mut buffer = BytesMut::with_capacity(CHUNK_BYTES);
        let read = from.read_buf(&mut buffer).await;
        let (last, piece) = (!matches!(read, Ok(1..)), read.map(|_| buffer.freeze()));
        if to.send((due(), piece)).await.is_err() || last {
            return;
        }
    }
}

async fn write_chunks(
    mut to: WriteHalf<'_>, mut from: Receiver<RelayedChunk>, way: ProxyDirection, open: &OpenProxyConnection,
) -> Result<(), ProxyReset> {
    let mut rules = open.state.rules.subscribe();
    while let Some((due, piece)) = from.recv().await {
        sleep_until(due).await;
        wait_until_open(&mut rules, way).await;
        let bytes = piece.map_err(|_| ProxyReset)?;
        if bytes.is_empty() {
            let _ = to.shutdown().await;
        } else {
            deliver_chunk(&mut to, bytes, &mut rules, way, open).await?;
        }
    }
    Ok(())
}

async fn deliver_chunk(
    to: &mut WriteHalf<'_>, mut bytes: Bytes, rules: &mut watch::Receiver<ProxyRules>, way: ProxyDirection,
    open: &OpenProxyConnection,
) -> Result<(), ProxyReset> {
    if way == ProxyDirection::ToClient {
        match open.next_delivery() {
            DeliveryAction::Deliver => {}
            DeliveryAction::Drop => return Ok(()),
            DeliveryAction::Reset => return Err(ProxyReset),
        }
    }
    while !bytes.is_empty() {
        wait_until_open(rules, way).await;
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
            // A peer that is gone is detected by the reader of its direction.
            Err(_) => return Ok(()),
        };
        bytes = bytes.slice(written..);
        if slice.is_some() && !bytes.is_empty() {
            sleep(SLICE_INTERVAL).await;
        }
    }
    Ok(())
}

async fn wait_until_open(rules: &mut watch::Receiver<ProxyRules>, way: ProxyDirection) {
    let _ = rules.wait_for(|rules| rules.open[way as usize]).await;
}
