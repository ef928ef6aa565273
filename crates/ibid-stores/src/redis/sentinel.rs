//! Finds the primary through sentinels.
//!
//! All sentinels are asked at once, because some may be down. Their answer is verified at the server itself, because an
//! isolated sentinel may name an old primary.

use super::{connection::RedisCall, resp::Reply, *};

/// Interval at which the connected server is compared with the sentinels' answer: an isolated old primary may keep
/// responding.
const PRIMARY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(super) async fn connect_primary(connector: &RedisConnector, name: &str) -> Result<RedisConnection, String> {
    let mut answers: FuturesUnordered<_> =
        connector.url.hosts.iter().map(|sentinel| ask_sentinel(connector, sentinel, name)).collect();
    let mut tried: Vec<RedisHost> = Vec::new();
    let mut why = Vec::new();
    while let Some(answer) = answers.next().await {
        match answer {
            Ok(host) if tried.contains(&host) => {}
            Ok(host) => {
                match connect_confirmed(connector, &host).await {
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

async fn ask_sentinel(connector: &RedisConnector, sentinel: &RedisHost, name: &str) -> Result<RedisHost, String> {
    let wire = connector.connect_sentinel(sentinel).await?;
    query_primary(&wire, connector.timeout, name).await
}

async fn query_primary(wire: &RedisConnection, patience: Duration, name: &str) -> Result<RedisHost, String> {
    let sentinel = &wire.host;
    let ask = RedisCall::new(&[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.as_bytes()]);
    let answer = timeout(patience, wire.call(ask)).await.map_err(|_| format!("sentinel {sentinel} is silent"))?;
    let answer = answer.map_err(|trouble| format!("sentinel {sentinel}: {trouble:?}"))?;
    let Reply::Array(parts) = answer else { return Err(format!("sentinel {sentinel} knows no {name:?}")) };
    let [Reply::Bytes(host), Reply::Bytes(port)] = &parts[..] else {
        return Err(format!("sentinel {sentinel} answered in a way that is not understood"));
    };
    let port = std::str::from_utf8(port).ok().and_then(|port| port.parse().ok());
    let port = port.ok_or_else(|| format!("sentinel {sentinel} named no port"))?;
    Ok(RedisHost::new(&String::from_utf8_lossy(host), port))
}

/// Connects to a server, and verifies that it is a primary.
async fn connect_confirmed(connector: &RedisConnector, host: &RedisHost) -> Result<RedisConnection, String> {
    let wire = connector.connect(host).await?;
    let role = timeout(connector.timeout, wire.call(RedisCall::new(&[b"ROLE"])));
    match role.await.map_err(|_| format!("{host} is silent"))? {
        Ok(Reply::Array(parts)) => match parts.first() {
            Some(Reply::Bytes(role)) if role == "master" => Ok(wire),
            _ => Err(format!("{host} is not a primary (any more)")),
        },
        Err(RedisCallError::NotSent(why) | RedisCallError::Unanswered(why)) => Err(format!("{host}: {why}")),
        _ => Err(format!("{host} does not say whether it is a primary; its user needs +role")),
    }
}

/// Disconnects when a sentinel names another primary than the connected one. Asks one sentinel at a time over a
/// persistent connection, and switches to the next one on failure. Ends when the server is dropped.
pub(super) async fn follow_primary(server: Weak<RedisServer>, connector: Arc<RedisConnector>) {
    let mut asked: Option<RedisConnection> = None;
    let mut nth = 0;
    loop {
        sleep(with_jitter(PRIMARY_CHECK_INTERVAL)).await;
        let Some(server) = server.upgrade() else { return };
        let (ServerTarget::Primary(name), Some(current)) = (&server.target, server.host()) else { continue };
        let wire = match asked.take().filter(RedisConnection::is_open) {
            Some(wire) => wire,
            None => {
                nth = (nth + 1) % connector.url.hosts.len();
                let Ok(wire) = connector.connect_sentinel(&connector.url.hosts[nth]).await else { continue };
                wire
            }
        };
        let Ok(named) = query_primary(&wire, connector.timeout, name).await else { continue };
        asked = Some(wire);
        if named != current && connect_confirmed(&connector, &named).await.is_ok() {
            tracing::warn!(from = %current, to = %named, "redis: the sentinels name another primary");
            server.hang_up();
        }
    }
}
