//! Asking sentinels who the primary is.
//!
//! All are asked at once, because some may be down. What they say is verified at the server itself: a sentinel that was
//! cut off names the primary of yesterday.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use redis::Value;
use tokio::time::{sleep, timeout};

use super::{
    dial::{Dialer, Wire},
    link::{Link, Target},
    place::Host,
    trouble::checked,
};
use crate::breaker::jittered;

/// How often a connection's server is compared with what the sentinels say: an old primary that was cut off from them
/// may go on answering.
const COMPARED: Duration = Duration::from_secs(1);

/// A connection to the primary of that name.
pub(super) async fn primary(dialer: &Dialer, name: &str) -> Result<Wire, String> {
    let mut answers: FuturesUnordered<_> =
        dialer.place.hosts.iter().map(|sentinel| named_by(dialer, sentinel, name)).collect();
    let mut tried: Vec<Host> = Vec::new();
    let mut why = Vec::new();
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(host) if tried.contains(&host) => {}
            Ok(host) => {
                match confirmed(dialer, &host).await {
                    Ok(wire) => return Ok(wire),
                    Err(reason) => why.push(reason),
                }
                tried.push(host);
            }
            Err(reason) => why.push(reason),
        }
    }
    Err(format!("no primary {name:?} was found: {}", why.join("; ")))
}

/// Whom a sentinel names.
async fn named_by(dialer: &Dialer, sentinel: &Host, name: &str) -> Result<Host, String> {
    let wire = dialer.dial_sentinel(sentinel).await?;
    named_on(&wire, dialer.timeout, name).await
}

async fn named_on(wire: &Wire, patience: Duration, name: &str) -> Result<Host, String> {
    let sentinel = &wire.host;
    let mut ask = redis::cmd("SENTINEL");
    ask.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    let answer = timeout(patience, wire.ask(&ask)).await.map_err(|_| format!("sentinel {sentinel} is silent"))?;
    match checked(answer.map_err(|error| format!("sentinel {sentinel}: {error}"))?) {
        Ok(Value::Array(parts)) => match &parts[..] {
            [Value::BulkString(host), Value::BulkString(port)] => {
                let port = std::str::from_utf8(port).ok().and_then(|port| port.parse().ok());
                let port = port.ok_or_else(|| format!("sentinel {sentinel} named no port"))?;
                Ok(Host::new(&String::from_utf8_lossy(host), port))
            }
            _ => Err(format!("sentinel {sentinel} answered in a way that is not understood")),
        },
        Ok(_) => Err(format!("sentinel {sentinel} knows no {name:?}")),
        Err(trouble) => Err(format!("sentinel {sentinel}: {trouble:?}")),
    }
}

/// A connection to a server that says itself that it is a primary.
async fn confirmed(dialer: &Dialer, host: &Host) -> Result<Wire, String> {
    let wire = dialer.dial(host).await?;
    let answer =
        timeout(dialer.timeout, wire.ask(&redis::cmd("ROLE"))).await.map_err(|_| format!("{host} is silent"))?;
    match answer.map_err(|error| format!("{host}: {error}")).map(checked)? {
        Ok(Value::Array(parts)) => match parts.first() {
            Some(Value::BulkString(role)) if role == b"master" => Ok(wire),
            _ => Err(format!("{host} is not a primary (any more)")),
        },
        _ => Err(format!("{host} does not say whether it is a primary; its user needs +role")),
    }
}

/// Hangs up when a sentinel names another primary than the one that is talked to. One sentinel is asked at a time, over a
/// connection that is kept; the next takes its place when it is gone. Ends with the link.
pub(super) async fn follow(link: Weak<Link>, dialer: Arc<Dialer>) {
    let mut asked: Option<Wire> = None;
    let mut nth = 0;
    loop {
        sleep(jittered(COMPARED)).await;
        let Some(link) = link.upgrade() else { return };
        let (Target::Primary(name), Some(current)) = (link.target(), link.host()) else { continue };
        let wire = match asked.take().filter(Wire::is_open) {
            Some(wire) => wire,
            None => {
                nth = (nth + 1) % dialer.place.hosts.len();
                let Ok(wire) = dialer.dial_sentinel(&dialer.place.hosts[nth]).await else { continue };
                wire
            }
        };
        let Ok(named) = named_on(&wire, dialer.timeout, name).await else { continue };
        asked = Some(wire);
        if named != current && confirmed(&dialer, &named).await.is_ok() {
            tracing::warn!(from = %current, to = %named, "redis: the sentinels name another primary");
            link.hang_up();
        }
    }
}
