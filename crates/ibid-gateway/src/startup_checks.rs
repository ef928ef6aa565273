//! What a start depends on, checked: `ibid serve` logs what is wrong, and `ibid doctor` prints everything.

use std::{
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, Version, header};
use ibid::store::{Address, Store};
use ibid_stores::StoreKind;
use ibid_tools::format::{format_duration, format_size};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::time::timeout;

use crate::{config::GatewaySettings, outbound::OutboundClient, tls};

const MIN_STORE_CHECK_TIMEOUT: Duration = Duration::from_secs(1);
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(5);
/// File descriptors besides connections: stores, logs, the admin port.
const OTHER_FILES: u64 = 100;
/// With less free space, a disk is about to be full.
const MIN_FREE_BYTES: u64 = 1 << 30;
/// Tokens and signatures allow for a difference of a minute and more.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartupVerdict {
    Passed,
    /// It works, but not as well as it should.
    Warning,
    Failed,
}

/// One line of `ibid doctor`: what was looked at, what was found, and what to do.
#[derive(Debug, Clone)]
pub struct CheckResult {
    pub subject: &'static str,
    pub verdict: StartupVerdict,
    pub message: String,
}

impl CheckResult {
    fn new(subject: &'static str, verdict: StartupVerdict, message: impl Into<String>) -> Self {
        Self { subject, verdict, message: message.into() }
    }

    pub(crate) fn passed(subject: &'static str, message: impl Into<String>) -> Self {
        Self::new(subject, StartupVerdict::Passed, message)
    }

    pub(crate) fn warning(subject: &'static str, message: impl Into<String>) -> Self {
        Self::new(subject, StartupVerdict::Warning, message)
    }

    pub(crate) fn failed(subject: &'static str, message: impl Into<String>) -> Self {
        Self::new(subject, StartupVerdict::Failed, message)
    }
}

/// Probable mistakes in the configuration.
pub(crate) fn check_settings(settings: &GatewaySettings) -> Vec<CheckResult> {
    settings.warnings.iter().map(|warning| CheckResult::warning("configuration", warning)).collect()
}

/// Whether the store answers, and what weakens its promise.
pub(crate) async fn check_store(settings: &GatewaySettings, store: &dyn Store) -> Vec<CheckResult> {
    let promise = store.guarantees();
    let mut results: Vec<CheckResult> =
        promise.warnings.iter().map(|warning| CheckResult::warning("promise", warning)).collect();
    let is_counted = settings.quota.new_keys.or(settings.quota.new_bytes).is_some();
    if is_counted && store.counters().is_none() {
        let what = "quota: this store keeps no counts, so every gateway counts on its own";
        results.push(CheckResult::warning("quota", what));
    }
    let (limit, begun) = (settings.store.timeout.max(MIN_STORE_CHECK_TIMEOUT), Instant::now());
    let answer = match timeout(limit, store.get(&Address([0; 32]))).await {
        Ok(Ok(_)) => {
            let took = begun.elapsed().as_secs_f64() * 1000.0;
            let clock = timeout(limit, store.admin().clock()).await;
            results.extend(
                clock
                    .ok()
                    .and_then(Result::ok)
                    .flatten()
                    .map(|time| check_clock("the store", SystemTime::UNIX_EPOCH + time, SystemTime::now())),
            );
            CheckResult::passed("store", format!("{} answers in {took:.1} ms", settings.store.url))
        }
        Ok(Err(why)) => CheckResult::failed("store", format!("the store cannot be used yet: {why}")),
        Err(_) => CheckResult::failed("store", format!("the store cannot be used yet: no answer within {limit:?}")),
    };
    results.push(answer);
    results
}

/// Raises the limit of open files as far as the system allows.
pub(crate) fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current < limit.maximum {
        limit.current = limit.maximum;
        // A lower limit is reported by `check_machine`.
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

/// Whether files and disk space suffice.
pub(crate) fn check_machine(settings: &GatewaySettings) -> Vec<CheckResult> {
    let upstreams = settings.upstream_urls().len() as u64;
    let wanted = settings.limits.max_connections as u64 + upstreams * settings.max_upstream as u64 + OTHER_FILES;
    // `None` is unlimited.
    let limit = getrlimit(Resource::Nofile).maximum;
    let files = match limit {
        Some(limit) if limit < wanted => CheckResult::warning(
            "open files",
            format!(
                "the limit of open files is {limit}, and limits.max_connections and max_upstream allow {wanted}; \
                 raise it (ulimit -n, LimitNOFILE), or lower them"
            ),
        ),
        _ => {
            let limit = limit.map_or("unlimited".into(), |limit| limit.to_string());
            CheckResult::passed("open files", format!("limit {limit}, at most {wanted} needed"))
        }
    };
    let mut folders: Vec<PathBuf> = settings.journal.iter().cloned().collect();
    folders.extend(embedded_folder(settings));
    let mut results = vec![files];
    results.extend(folders.iter().map(|folder| check_disk(folder)));
    results
}

/// The directory of an embedded store.
pub(crate) fn embedded_folder(settings: &GatewaySettings) -> Option<PathBuf> {
    let url = &settings.store.url;
    let is_embedded = url.store_url().kind() == StoreKind::Embedded;
    let text = url.to_string();
    let path = text.strip_prefix("embedded:")?.split('?').next()?.to_owned();
    is_embedded.then(|| path.into())
}

fn check_disk(folder: &Path) -> CheckResult {
    let shown = folder.display();
    let ancestors = folder.ancestors().map(|path| if path.as_os_str().is_empty() { Path::new(".") } else { path });
    let Some(existing) = ancestors.into_iter().find(|path| path.exists()) else {
        return CheckResult::failed("disk", format!("{shown}: no such directory"));
    };
    match rustix::fs::statvfs(existing) {
        Err(why) => CheckResult::failed("disk", format!("{shown}: {why}")),
        Ok(disk) if disk.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) => {
            CheckResult::failed("disk", format!("{shown}: the file system is read-only; name another directory"))
        }
        Ok(disk) => {
            let free = disk.f_bavail * disk.f_frsize;
            match free < MIN_FREE_BYTES {
                true => CheckResult::warning(
                    "disk",
                    format!("{shown}: only {} are free; a full disk refuses new keys", format_size(free >> 20 << 20)),
                ),
                false => CheckResult::passed("disk", format!("{shown}: {} GiB free", free >> 30)),
            }
        }
    }
}

/// Whether the ports are free.
pub(crate) fn check_ports(settings: &GatewaySettings) -> Vec<CheckResult> {
    let admin = settings.admin.as_ref().map(|admin| ("admin.listen", admin.listen));
    let check = |(setting, address): (&'static str, SocketAddr)| match TcpListener::bind(address) {
        Ok(_) => CheckResult::passed(setting, format!("{address} is free")),
        Err(why) => CheckResult::warning(setting, format!("{address}: {why}; another process, or a running gateway?")),
    };
    [("listen", settings.listen)].into_iter().chain(admin).map(check).collect()
}

/// Whether each app answers, keeps its connections open long enough, and has the same time. Sends `HEAD /`.
pub(crate) async fn check_upstreams(settings: &GatewaySettings) -> Vec<CheckResult> {
    let mut results = Vec::new();
    for url in settings.upstream_urls() {
        match send_head(url, settings).await {
            Err(why) => {
                let what = format!("{url} does not answer: {why}; start the app, or correct upstream");
                results.push(CheckResult::failed("upstream", what));
            }
            Ok(http::response::Parts { status, version, headers, .. }) => {
                results.push(CheckResult::passed("upstream", format!("{url} answers")));
                // An app that does not know the method may close the connection for that reason.
                if !matches!(status, StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED) {
                    results.push(check_keep_alive(version, &headers, settings.upstream_idle));
                }
                let date = headers.get(header::DATE).and_then(|date| date.to_str().ok());
                let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
                results.extend(date.map(|date| check_clock("the app", date, SystemTime::now())));
            }
        }
    }
    results
}

async fn send_head(url: &str, settings: &GatewaySettings) -> Result<http::response::Parts, String> {
    let tls = tls::client_config("upstream_", &settings.upstream_tls)?;
    let client = OutboundClient::with_tls(url, tls, UPSTREAM_TIMEOUT).map_err(|why| why.to_string())?;
    let request = Request::head("/").body(Bytes::new()).expect("it is valid");
    let response = timeout(UPSTREAM_TIMEOUT, client.send(request, 1 << 20)).await;
    let response = response.map_err(|_| format!("no answer within {UPSTREAM_TIMEOUT:?}"))?;
    Ok(response.map_err(|why| why.to_string())?.into_parts().0)
}

/// An app that closes connections earlier than the gateway stops reusing them loses requests.
fn check_keep_alive(version: Version, headers: &HeaderMap, idle: Duration) -> CheckResult {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_lowercase();
    let kept = text("keep-alive");
    let kept = kept.split(',').find_map(|part| part.trim().strip_prefix("timeout=")?.parse().ok());
    let (kept, reused) = (kept.map(Duration::from_secs), format_duration(idle));
    let connection = text("connection");
    let says = |word: &str| connection.split(',').any(|part| part.trim() == word);
    match kept {
        _ if says("close") || version < Version::HTTP_11 && !says("keep-alive") => CheckResult::warning(
            "keep-alive",
            "the app closes every connection after one request; switch keep-alive on, for speed",
        ),
        Some(kept) if kept <= idle => CheckResult::warning(
            "keep-alive",
            format!(
                "the app closes idle connections after {}, and upstream_idle is {reused}; set upstream_idle below it",
                format_duration(kept)
            ),
        ),
        Some(kept) => {
            CheckResult::passed("keep-alive", format!("{}; upstream_idle is {reused}", format_duration(kept)))
        }
        None => CheckResult::passed("keep-alive", format!("connections stay open; upstream_idle is {reused}")),
    }
}

/// Compares this machine's clock with another one. Tokens, signatures and displayed times depend on it; the expiry of
/// records does not.
fn check_clock(other: &str, theirs: SystemTime, now: SystemTime) -> CheckResult {
    let skew = now.duration_since(theirs).unwrap_or_else(|why| why.duration());
    match skew > MAX_CLOCK_SKEW {
        true => CheckResult::warning(
            "clock",
            format!("this machine and {other} differ by {} s; synchronise both (NTP)", skew.as_secs()),
        ),
        false => CheckResult::passed("clock", format!("as that of {other}, within {} s", MAX_CLOCK_SKEW.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_may_differ_by_seconds_in_either_direction() {
        let now = SystemTime::now();
        for (skew, verdict) in [(0, StartupVerdict::Passed), (5, StartupVerdict::Passed), (7, StartupVerdict::Warning)]
        {
            let skew = Duration::from_secs(skew);
            for theirs in [now - skew, now + skew] {
                assert_eq!(check_clock("the store", theirs, now).verdict, verdict, "{skew:?}");
            }
        }
        let told = check_clock("the store", now - Duration::from_secs(90), now).message;
        assert_eq!(told, "this machine and the store differ by 90 s; synchronise both (NTP)");
    }
}
