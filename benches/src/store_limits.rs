//! What a store's server can do at most, and what a store makes of it: loads that are no HTTP requests.
//!
//! Each runs in the same rounds as the gateways, with the same number of calls in flight, so that the ratio of the two is
//! worth as much as any other.
//!
//! Invariant: a figure is reported only if the server did what was counted: as many entries were made as claims were
//! sent, none by replays.

use std::{
    io,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{Address, ClaimRequest, ClaimToken, Fingerprint, RecordSummary, Settlement, Tags};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};

use crate::{
    args::BenchArgs,
    cpu::{self, MachineTimes},
    stores::{SharedStores, StoreServers},
};

mod in_process;
mod postgres;
mod redis;

/// Size of the records with which entries end: about what is kept of an answer of 300 bytes with its headers.
const RECORD_BYTES: usize = 600;

/// No tool runs for longer.
const TOOL_TIMEOUT: Duration = Duration::from_secs(300);

/// A load on a store, or on its server directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreLimit {
    /// `redis-benchmark` of the command by which the store claims, so many deep.
    RedisClaims {
        /// Redis or Valkey.
        on: SharedStores,
        /// How many calls a connection has under way.
        deep: u32,
    },
    /// `pgbench` of the statement by which the store claims, for so many entries at once. As many claims are in flight as
    /// in the other runs.
    PostgresClaims {
        /// How many entries one statement claims.
        rows: u32,
    },
    /// `pgbench` of a claim and its end, one entry at a time: what a first request takes.
    PostgresMisses,
    /// `pgbench` of claims that find an answer, one at a time.
    PostgresReplays,
    /// The store itself, in this process, with as many callers.
    InProcess(SharedStores),
}

impl StoreLimit {
    /// The stores whose servers it needs.
    #[must_use]
    pub fn stores(self) -> SharedStores {
        match self {
            Self::RedisClaims { on, .. } => on,
            Self::PostgresClaims { .. } | Self::PostgresMisses | Self::PostgresReplays => SharedStores::Postgres,
            Self::InProcess(stores) => stores,
        }
    }

    /// What it takes besides its servers, with the Debian package that has it.
    #[must_use]
    pub fn program(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::RedisClaims { .. } => Some(("redis-benchmark", "redis-tools")),
            Self::PostgresClaims { .. } | Self::PostgresMisses | Self::PostgresReplays => {
                Some(("pgbench", "postgresql-15"))
            }
            Self::InProcess(_) => None,
        }
    }

    /// Measures it.
    ///
    /// # Errors
    /// Why it could not be measured, or does not count.
    pub async fn measure(self, args: &BenchArgs, backing: &StoreServers<'_>) -> Result<LimitResult, String> {
        match self {
            Self::RedisClaims { deep, .. } => redis::claims(args, backing, deep).await,
            Self::PostgresClaims { rows } => postgres::claims(args, backing, rows).await,
            Self::PostgresMisses => postgres::misses(args, backing).await,
            Self::PostgresReplays => postgres::replays(args, backing).await,
            Self::InProcess(stores) => in_process::claims(args, backing, stores).await,
        }
    }
}

/// What a load came to.
#[derive(Clone, Copy, Debug)]
pub struct LimitResult {
    /// Claims, or pairs of a claim and its end, per second.
    pub per_second: f64,
    /// How many there were.
    pub operations: u64,
    /// Median and 99th percentile, where they are told.
    pub latency: Option<[Duration; 2]>,
    /// CPU time of the store's servers meanwhile.
    pub store_cpu: Duration,
    /// CPU time of this process and of the tool that it ran.
    pub own_cpu: Duration,
    /// Two looks at the machine.
    pub machine: [MachineTimes; 2],
}

/// What is looked at before and after.
struct Watch<'a> {
    backing: &'a StoreServers<'a>,
    machine: MachineTimes,
    store: Duration,
    own: Duration,
}

impl<'a> Watch<'a> {
    fn begin(backing: &'a StoreServers<'a>) -> Result<Self, String> {
        let look = || io::Result::Ok((cpu::read_machine()?, backing.cpu()?, own_cpu_time()?));
        let (machine, store, own) = look().map_err(|error| error.to_string())?;
        Ok(Self { backing, machine, store, own })
    }

    fn end(self, per_second: f64, operations: u64, latency: Option<[Duration; 2]>) -> Result<LimitResult, String> {
        let look = || io::Result::Ok((cpu::read_machine()?, self.backing.cpu()?, own_cpu_time()?));
        let (machine, store, own) = look().map_err(|error| error.to_string())?;
        if !(per_second.is_finite() && per_second > 0.0) {
            return Err(format!("{operations} operations are {per_second} per second"));
        }
        Ok(LimitResult {
            per_second,
            operations,
            latency,
            store_cpu: store.saturating_sub(self.store),
            own_cpu: own.saturating_sub(self.own),
            machine: [self.machine, machine],
        })
    }
}

/// Of this process, and of those that it waited for.
fn own_cpu_time() -> io::Result<Duration> {
    let this = std::process::id();
    Ok(cpu::cpu_time(this)? + cpu::reaped_cpu_time(this)?)
}

/// A tool that runs; killed if nobody waits for its end.
struct ToolProcess {
    name: String,
    child: Option<Child>,
}

/// Starts a tool.
fn started(command: &mut Command) -> Result<ToolProcess, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(|error| format!("{name}: {error}"))?;
    Ok(ToolProcess { name, child: Some(child) })
}

impl ToolProcess {
    /// Waits for its end, and leaves this thread to others meanwhile. What it says fits a pipe.
    async fn ended(mut self) -> Result<Output, String> {
        let failed = |error: io::Error| error.to_string();
        let until = Instant::now() + TOOL_TIMEOUT;
        while let Some(child) = &mut self.child
            && child.try_wait().map_err(failed)?.is_none()
        {
            if Instant::now() > until {
                return Err(format!("{} does not end; it was killed after {TOOL_TIMEOUT:?}", self.name));
            }
            sleep(Duration::from_millis(10)).await;
        }
        let Some(child) = self.child.take() else { return Err(format!("{} was waited for twice", self.name)) };
        let output = child.wait_with_output().map_err(failed)?;
        if output.status.success() {
            return Ok(output);
        }
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        Err(format!("{} failed ({}): {} {}", self.name, output.status, said(&output.stderr), said(&output.stdout)))
    }
}

impl Drop for ToolProcess {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// An address for every number: they spread as real ones do.
pub(crate) fn address(n: u64) -> Address {
    Address(Sha256::digest(n.to_be_bytes()).into())
}

/// A claim like the gateway's for a request of this benchmark.
pub(crate) fn claim_request(address: Address) -> Arc<ClaimRequest> {
    let key: String = address.to_string().chars().take(32).collect();
    Arc::new(ClaimRequest {
        address,
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest: [7; 32] },
        tags: Tags::new("acme", "u1", "POST /orders", &key),
        label: Bytes::new(),
        lease: Duration::from_secs(30),
        ttl: Duration::from_secs(24 * 60 * 60),
        take_over: None,
    })
}

/// How a run of it ends.
pub(crate) fn completed_settlement() -> Settlement {
    let outline =
        RecordSummary { status: 201, requested_at_ms: 1000, completed_at_ms: 2000, took: Duration::from_secs(1) };
    Settlement::Complete {
        failed: false,
        record: vec![b'r'; RECORD_BYTES].into(),
        summary: outline,
        ttl: Duration::from_secs(24 * 60 * 60),
    }
}
