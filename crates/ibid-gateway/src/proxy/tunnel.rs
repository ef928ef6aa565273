//! Upgraded connections: the allowed protocols, and the copying of bytes in both directions.
//!
//! Invariant: the gateway tunnels only the protocols in the setting `upgrades`. No policy covers requests inside a
//! tunnel, so `Upgrade: h2c` must never open one. A tunnel counts as a client connection until it ends. It ends when
//! neither side has sent anything for the limit.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use http::{HeaderMap, HeaderValue, Request, Version, header};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::{
    io::copy_bidirectional,
    time::{Instant, sleep_until},
};
use tokio_util::io::InspectReader;

use crate::upstream::UpgradedConnection;

/// Removes the protocols that are not allowed from the `Upgrade` header. If none is left, the request is an ordinary
/// one.
pub fn retain_allowed_upgrades(headers: &mut HeaderMap, version: Version, allowed: &[String]) {
    if !headers.contains_key(header::UPGRADE) {
        return;
    }
    let kept: Vec<_> = match version {
        Version::HTTP_11 => protocols(headers).filter(|name| contains_protocol(name, allowed)).collect(),
        _ => Vec::new(),
    };
    let kept = HeaderValue::from_str(&kept.join(", ")).ok().filter(|kept| !kept.is_empty());
    match kept {
        Some(kept) => drop(headers.insert(header::UPGRADE, kept)),
        None => drop(headers.remove(header::UPGRADE)),
    }
}

/// Returns the protocols that the client asks for and its connection after the upgrade. The server has already removed
/// the protocols that are not allowed.
pub(super) fn requested_upgrade<B>(request: &mut Request<B>) -> Option<(HeaderValue, OnUpgrade)> {
    if request.version() != Version::HTTP_11 {
        return None;
    }
    let named = |line: &HeaderValue| {
        let line = line.to_str().unwrap_or_default();
        line.split(',').any(|token| token.trim().eq_ignore_ascii_case("upgrade"))
    };
    let asked = request.headers().get_all(header::CONNECTION).iter().any(named);
    let protocol = request.headers().get(header::UPGRADE).filter(|_| asked)?.clone();
    Some((protocol, hyper::upgrade::on(request)))
}

/// Whether the app upgrades only to protocols that the client asked for.
pub(super) fn is_upgrade_accepted(asked: &HeaderValue, reply: &HeaderMap) -> bool {
    let asked: Vec<_> = asked.to_str().unwrap_or_default().split(',').map(|name| name.trim().to_owned()).collect();
    let mut agreed = protocols(reply).peekable();
    agreed.peek().is_some() && agreed.all(|name| contains_protocol(name, &asked))
}

fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    // A line that is not text names no allowed protocol.
    let lines = headers.get_all(header::UPGRADE).iter().map(|line| line.to_str().unwrap_or("?"));
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|name| !name.is_empty())
}

fn contains_protocol(name: &str, names: &[String]) -> bool {
    names.iter().any(|one| one.eq_ignore_ascii_case(name))
}

/// Copies bytes in both directions until one side closes, or both are silent for longer than `limit`.
pub(super) async fn copy_both_ways(client: OnUpgrade, upstream: UpgradedConnection, limit: Duration) {
    let Ok(client) = client.await else { return };
    let activity = TunnelActivity { since: Instant::now(), last_activity_ms: AtomicU64::new(0) };
    let mut client = InspectReader::new(TokioIo::new(client), |bytes: &[u8]| activity.record_read(bytes));
    let mut upstream = InspectReader::new(upstream, |bytes: &[u8]| activity.record_read(bytes));
    tokio::select! {
        // An error ends the tunnel like a close: neither side can be informed.
        _ = copy_bidirectional(&mut client, &mut upstream) => {}
        () = activity.wait_until_idle(limit) => tracing::debug!("an upgraded connection was silent for {limit:?}"),
    }
}

/// When either side last sent something.
struct TunnelActivity {
    since: Instant,
    last_activity_ms: AtomicU64,
}

impl TunnelActivity {
    fn record_read(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.last_activity_ms.store(self.since.elapsed().as_millis() as u64, Relaxed);
        }
    }

    async fn wait_until_idle(&self, limit: Duration) {
        loop {
            let due = self.since + Duration::from_millis(self.last_activity_ms.load(Relaxed)) + limit;
            if due <= Instant::now() {
                return;
            }
            sleep_until(due).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_allowed_protocols_stay() {
        let allowed = ["websocket".to_owned(), "spdy/3.1".to_owned()];
        for (version, sent, kept) in [
            (Version::HTTP_11, &["websocket"][..], Some("websocket")),
            (Version::HTTP_11, &["WebSocket"], Some("WebSocket")),
            (Version::HTTP_11, &["h2c"], None),
            (Version::HTTP_11, &["h2c, websocket"], Some("websocket")),
            (Version::HTTP_11, &["websocket", "h2c", "SPDY/3.1"], Some("websocket, SPDY/3.1")),
            (Version::HTTP_11, &["websocket/13"], None),
            (Version::HTTP_11, &[""], None),
            (Version::HTTP_11, &["\u{e9}"], None),
            (Version::HTTP_10, &["websocket"], None),
        ] {
            let mut headers = HeaderMap::new();
            for line in sent {
                headers.append(header::UPGRADE, HeaderValue::from_bytes(line.as_bytes()).unwrap());
            }
            retain_allowed_upgrades(&mut headers, version, &allowed);
            let left: Vec<_> = headers.get_all(header::UPGRADE).iter().map(|line| line.to_str().unwrap()).collect();
            assert_eq!(left, kept.into_iter().collect::<Vec<_>>(), "{sent:?}");
        }
    }

    #[test]
    fn the_app_may_agree_to_what_was_asked_for_only() {
        let asked = HeaderValue::from_static("websocket, spdy/3.1");
        for (agreed, is) in
            [("websocket", true), ("WEBSOCKET", true), ("h2c", false), ("websocket, h2c", false), ("", false)]
        {
            let mut reply = HeaderMap::new();
            reply.insert(header::UPGRADE, HeaderValue::from_static(agreed));
            assert_eq!(is_upgrade_accepted(&asked, &reply), is, "{agreed:?}");
        }
        assert!(!is_upgrade_accepted(&asked, &HeaderMap::new()));
    }
}
