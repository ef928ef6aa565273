//! Start-up checks of the server settings that the guarantees depend on.

use super::{connection::RedisCall, resp::Reply, *};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RedisFindings {
    /// Whether writes survive a crash of the server process.
    pub(super) durable: bool,
    pub(super) warnings: Vec<String>,
}

/// The findings before the server could be checked.
pub(super) fn unchecked_findings(why: &str) -> RedisFindings {
    RedisFindings { durable: false, warnings: vec![format!("could not be checked: {why}")] }
}

/// Checks every server that owns a bucket.
pub(super) async fn run_checks(topology: &RedisTopology, wait_replicas: u32) -> Result<RedisFindings, String> {
    topology.ensure_known().await?;
    let mut found = RedisFindings { durable: true, warnings: Vec::new() };
    for server in topology.all() {
        let one = check_server(&server, topology, wait_replicas)
            .await
            .map_err(|trouble| format!("{}: {}", server.target, error_message(&trouble)))?;
        found.durable &= one.durable;
        for wanting in one.warnings {
            let wanting = if topology.is_cluster() { format!("{}: {wanting}", server.target) } else { wanting };
            found.warnings.push(wanting);
        }
    }
    Ok(found)
}

/// Returns why this build must not use the entries, if a later version of ibid has changed their format.
pub(super) async fn find_later_format(core: &RedisCore) -> Option<String> {
    let found = core.run_command(0, &[b"GET", core.key_names.format_key().as_bytes()]).await.ok()?;
    let version = entry::reply_number(&found).ok()?;
    (version > u64::from(entry::VERSION)).then(|| entry::other_version(version))
}

async fn check_server(
    server: &Arc<RedisServer>, topology: &RedisTopology, wait_replicas: u32,
) -> Result<RedisFindings, RedisCallError> {
    let deadline = || background_deadline(topology.connector.timeout);
    let info = match server.send_plain(RedisCall::new(&[b"INFO"]), deadline()).await {
        Ok(info) => Some(parse_info(&info)),
        Err(trouble) if trouble.has_code("NOPERM") => None,
        Err(trouble) => return Err(trouble),
    };
    let mut config = HashMap::new();
    let mut denied = false;
    for name in ["appendfsync", "min-replicas-to-write"] {
        match server.send_plain(RedisCall::new(&[b"CONFIG", b"GET", name.as_bytes()]), deadline()).await {
            Ok(Reply::Array(parts)) => {
                if let [_, Reply::Bytes(value)] = &parts[..] {
                    config.insert(name, String::from_utf8_lossy(value).into_owned());
                }
            }
            Ok(_) => {}
            // Managed services do not support CONFIG.
            Err(RedisCallError::Refused { .. }) => denied = true,
            Err(trouble) => return Err(trouble),
        }
    }
    let mut found = evaluate(info.as_ref(), &config, denied, wait_replicas);
    if let Some(refused) = check_scripts(server, topology).await? {
        found.warnings.push(refused);
    }
    Ok(found)
}

/// Checks that the user may run scripts, so that start-up reports it before the first claim fails.
async fn check_scripts(server: &Arc<RedisServer>, topology: &RedisTopology) -> Result<Option<String>, RedisCallError> {
    let ask = RedisCall::new(&[b"EVAL", b"return 1", b"0"]);
    match server.send_plain(ask, background_deadline(topology.connector.timeout)).await {
        Ok(_) => Ok(None),
        Err(trouble @ RedisCallError::Refused { .. }) => {
            Ok(Some(format!("scripts are refused, so nothing works: {}", error_message(&trouble))))
        }
        Err(trouble) => Err(trouble),
    }
}

fn evaluate(
    info: Option<&HashMap<String, String>>, config: &HashMap<&str, String>, denied: bool, wait_replicas: u32,
) -> RedisFindings {
    let mut wanting = Vec::new();
    let Some(info) = info else {
        return unchecked_findings("the user may not run INFO; allow +info, and +config|get, see docs/redis.md");
    };
    let says = |name: &str| info.get(name).map_or("", String::as_str);
    if says("role") == "slave" {
        wanting.push("the server is a replica: every claim is refused; connect to its primary".into());
    }
    let version = says("redis_version");
    let major: u32 = version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
    if major < 7 {
        wanting.push(format!("the server is version {version:?}; ibid is tested with 7 and later"));
    }
    let (limit, policy) = (says("maxmemory"), says("maxmemory_policy"));
    if !matches!(limit, "" | "0") && policy != "noeviction" {
        wanting.push(format!(
            "maxmemory-policy is {policy}: a full server evicts records, and an operation may run twice; set noeviction"
        ));
    }
    let durable = says("aof_enabled") == "1";
    match config.get("appendfsync").map(String::as_str) {
        _ if !durable => wanting.push(
            "appendonly is no: a crash forgets every claim and answer since the last snapshot, and operations may run \
             twice; set appendonly yes and appendfsync always"
                .into(),
        ),
        Some("always") => {}
        Some("everysec") => wanting.push(
            "appendfsync is everysec: a crash of the server's process loses nothing, but a crash of its machine forgets up \
             to the last two seconds of claims and answers; set appendfsync always"
                .into(),
        ),
        Some(other) => wanting.push(format!(
            "appendfsync is {other}: a crash of its machine forgets what the system had not written yet, often 30 seconds \
             of claims and answers; set appendfsync always"
        )),
        None => wanting.push(
            "whether appendfsync is always could not be checked, because CONFIG GET is not allowed; if it is everysec, a crash \
             of its machine forgets up to the last two seconds"
                .into(),
        ),
    }
    let replicas: u32 = says("connected_slaves").parse().unwrap_or(0);
    if replicas < wait_replicas {
        wanting
            .push(format!("wait_replicas is {wait_replicas} and {replicas} are connected: no claim will be answered"));
    }
    let at_least: Option<u32> = config.get("min-replicas-to-write").and_then(|least| least.parse().ok());
    if replicas > 0 && at_least == Some(0) && wait_replicas == 0 {
        wanting.push(
            "replication is asynchronous: a failover can forget the last claims and answers; set wait_replicas, and \
             min-replicas-to-write so that a primary that was cut off stops"
                .into(),
        );
    } else if replicas > 0 && denied && wait_replicas == 0 {
        wanting.push(
            "replication is asynchronous: a failover can forget the last claims and answers; set wait_replicas".into(),
        );
    }
    RedisFindings { durable, warnings: wanting }
}

/// Parses `name:value` lines.
fn parse_info(info: &Reply) -> HashMap<String, String> {
    let text = info.as_bytes().map(|text| String::from_utf8_lossy(text).into_owned()).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.into(), value.trim().into()))
        .collect()
}

fn error_message(trouble: &RedisCallError) -> String {
    match trouble {
        RedisCallError::NotSent(why) | RedisCallError::Unanswered(why) => why.clone(),
        RedisCallError::Refused { code, text } => format!("{code} {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanting(info: &[(&str, &str)], fsync: Option<&str>, wait_replicas: u32) -> Vec<String> {
        let sound = [
            ("role", "master"),
            ("redis_version", "7.0.15"),
            ("maxmemory", "0"),
            ("maxmemory_policy", "noeviction"),
            ("aof_enabled", "1"),
            ("connected_slaves", "0"),
        ];
        let info = sound.iter().chain(info).map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let config = fsync.map(|fsync| ("appendfsync", fsync.to_owned())).into_iter().collect();
        evaluate(Some(&info), &config, fsync.is_none(), wait_replicas).warnings
    }

    #[test]
    fn nothing_is_wanting_on_a_sound_server() {
        assert_eq!(wanting(&[], Some("always"), 0), [""; 0]);
        assert_eq!(
            wanting(&[("maxmemory_policy", "allkeys-lru")], Some("always"), 0),
            [""; 0],
            "without a limit nothing is evicted"
        );
    }

    #[test]
    fn what_weakens_the_promise_is_said() {
        for (info, fsync, said) in [
            (("role", "slave"), "always", "is a replica"),
            (("redis_version", "6.2.1"), "always", "version \"6.2.1\""),
            (("aof_enabled", "0"), "always", "appendonly is no"),
            (("role", "master"), "everysec", "last two seconds"),
            (("role", "master"), "no", "appendfsync is no"),
        ] {
            let found = wanting(&[info], Some(fsync), 0);
            assert!(found.len() == 1 && found[0].contains(said), "{said}: {found:?}");
        }
        let found = wanting(&[("maxmemory", "1000"), ("maxmemory_policy", "volatile-lru")], Some("always"), 0);
        assert!(found[0].contains("maxmemory-policy is volatile-lru"), "{found:?}");
        assert!(wanting(&[], None, 0)[0].contains("could not be checked"));
        assert!(wanting(&[], Some("always"), 1)[0].contains("0 are connected"));
        assert!(wanting(&[("connected_slaves", "1")], None, 0)[1].contains("asynchronous"));
    }
}
