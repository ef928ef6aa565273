//! The one table of what is measured: scenes, their contenders, their rows and the targets.
//!
//! A *scene* is a set of contenders that are loaded in turn with the same request. A *row* judges one contender of a
//! scene against others of the same round.

use crate::{
    load::LoadProtocol,
    peers::{IDEMPOTENT_PROXY_PATH, PeerProxy},
    store_limits::StoreLimit,
    stores::SharedStores,
};

/// Contenders that run interleaved under the same load.
#[derive(Debug)]
pub struct Benchmark {
    /// For progress messages and reference lines.
    pub name: &'static str,
    /// What all contenders are spoken to in.
    pub protocol: LoadProtocol,
    /// Size of the request's JSON body; of its message, in a gRPC call.
    pub body_bytes: usize,
    /// Who takes part, if a chosen row needs it.
    pub contenders: &'static [Contender],
    /// What is judged.
    pub rows: &'static [BenchmarkRow],
}

/// One way to have the same requests answered.
#[derive(Debug)]
pub struct Contender {
    /// Unique within the scene.
    pub name: &'static str,
    /// The process to start for it; each contender has its own, so that none inherits another's heap or records.
    pub program: ContenderProgram,
    /// The path to POST to.
    pub path: &'static str,
    /// The keys, and with them how often the app must execute.
    pub traffic: KeyTraffic,
}

/// Which binary a contender runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContenderProgram {
    /// `bare-upstream` of this package.
    Upstream,
    /// `--proxy-bin`, in front of an upstream.
    Proxy,
    /// `--ibid-bin` that logs only warnings, in front of an upstream: what the others log is nothing.
    Ibid,
    /// The same as it is by default, with one line of log per request.
    IbidLogging,
    /// As `Ibid`, on the embedded store in a fresh folder, synced before every claim is answered.
    IbidEmbedded,
    /// As `Ibid`, with one route, for the gRPC method `Covered`, in front of `layer-app`.
    IbidGrpc,
    /// As `Ibid`, whose exchange API is called in place of the gateway, by the load generator as the app.
    IbidApi,
    /// As `Ibid`, on shared stores, whose servers are started or emptied for the run.
    IbidOn(SharedStores),
    /// `layer-app` of this package.
    LayerApp,
    /// Another proxy, in front of an upstream.
    Peer(PeerProxy),
    /// Envoy as `deploy/envoy/envoy.yaml` configures it, with `Ibid` as its external processor, in front of an upstream.
    EnvoyExtProc,
    /// `idempotent-proxy-server` of crates.io, on a Redis as in [`SharedStores::Redis`], in front of an upstream.
    IdempotentProxy,
    /// No server that is sent requests, but a load on a store or on its server.
    Limit(StoreLimit),
}

impl ContenderProgram {
    /// The app that it needs behind it, if it is a gateway.
    #[must_use]
    pub fn upstream(self) -> Option<Self> {
        match self {
            Self::Proxy
            | Self::Peer(_)
            | Self::EnvoyExtProc
            | Self::IdempotentProxy
            | Self::Ibid
            | Self::IbidLogging
            | Self::IbidEmbedded
            | Self::IbidApi
            | Self::IbidOn(_) => Some(Self::Upstream),
            Self::IbidGrpc => Some(Self::LayerApp),
            Self::Upstream | Self::LayerApp | Self::Limit(_) => None,
        }
    }

    /// The shared stores that it needs.
    #[must_use]
    pub fn stores(self) -> Option<SharedStores> {
        match self {
            Self::IbidOn(stores) => Some(stores),
            Self::IdempotentProxy => Some(SharedStores::Redis),
            Self::Limit(limit) => Some(limit.stores()),
            _ => None,
        }
    }
}

/// What a contender is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyTraffic {
    /// A new key per request: the app must execute each.
    Miss,
    /// Keys that were answered before: the app must execute none.
    Replay,
}

/// A line of the result that can be met or missed.
#[derive(Debug)]
pub struct BenchmarkRow {
    /// What `--rows` selects by.
    pub name: &'static str,
    /// The contender judged.
    pub contender: &'static str,
    /// Judgements, each against a baseline of the same scene.
    pub targets: &'static [BenchmarkTarget],
    /// Whether it runs without being named in `--rows`.
    pub by_default: bool,
}

/// One judgement.
#[derive(Debug)]
pub struct BenchmarkTarget {
    /// The contender compared with.
    pub baseline: &'static str,
    /// What is compared, and the bound.
    pub measure: TargetMeasure,
}

/// What a target compares, per round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TargetMeasure {
    /// Requests per second as a multiple of the baseline's: at least this.
    Speed(f64),
    /// Server CPU per request as a multiple of the baseline's: at most this.
    CpuRatio(f64),
    /// The speed as above, shown and not judged.
    SpeedNotJudged,
}

impl BenchmarkRow {
    /// The contenders that must run for this row.
    pub fn needs(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.contender).chain(self.targets.iter().map(|target| target.baseline))
    }
}

/// Scenes with the rows that `patterns` select: those whose name contains one of them, or the defaults if there is none.
///
/// # Errors
/// A sentence for the user, if a pattern selects nothing.
pub fn select(patterns: &[String]) -> Result<Vec<(&'static Benchmark, Vec<&'static BenchmarkRow>)>, String> {
    let known = || BENCHMARKS.iter().flat_map(|scene| scene.rows);
    if let Some(lost) = patterns.iter().find(|pattern| !known().any(|row| row.name.contains(pattern.as_str()))) {
        let names: Vec<_> = known().map(|row| row.name).collect();
        return Err(format!("no row is named like {lost:?}; rows: {}", names.join(", ")));
    }
    let chosen = |row: &&BenchmarkRow| match patterns {
        [] => row.by_default,
        _ => patterns.iter().any(|pattern| row.name.contains(pattern.as_str())),
    };
    Ok(BENCHMARKS
        .iter()
        .map(|scene| (scene, scene.rows.iter().filter(chosen).collect::<Vec<_>>()))
        .filter(|(_, rows)| !rows.is_empty())
        .collect())
}

const fn contender(
    name: &'static str, program: ContenderProgram, path: &'static str, traffic: KeyTraffic,
) -> Contender {
    Contender { name, program, path, traffic }
}

/// A load on a store or its server. It has no path, and its keys are its own business.
const fn limit(name: &'static str, limit: StoreLimit) -> Contender {
    contender(name, ContenderProgram::Limit(limit), "", KeyTraffic::Miss)
}

const fn row(name: &'static str, contender: &'static str, targets: &'static [BenchmarkTarget]) -> BenchmarkRow {
    BenchmarkRow { name, contender, targets, by_default: true }
}

/// A row that runs only if it is named in `--rows`.
const fn row_on_demand(
    name: &'static str, contender: &'static str, targets: &'static [BenchmarkTarget],
) -> BenchmarkRow {
    BenchmarkRow { name, contender, targets, by_default: false }
}

const fn speed(baseline: &'static str, at_least: f64) -> BenchmarkTarget {
    BenchmarkTarget { baseline, measure: TargetMeasure::Speed(at_least) }
}

const fn cpu_ratio(baseline: &'static str, at_most: f64) -> BenchmarkTarget {
    BenchmarkTarget { baseline, measure: TargetMeasure::CpuRatio(at_most) }
}

const fn shown(baseline: &'static str) -> BenchmarkTarget {
    BenchmarkTarget { baseline, measure: TargetMeasure::SpeedNotJudged }
}

const PLAIN_CALL: &str = "/bench.Orders/Plain";
/// Covered by the app's own layer.
const GUARDED_CALL: &str = "/bench.Orders/Guarded";
/// Covered by the gateway. The app executes it as it does [`PLAIN_CALL`].
const COVERED_CALL: &str = "/bench.Orders/Covered";

const GATEWAY: &[Contender] = &[
    contender("upstream", ContenderProgram::Upstream, "/orders", KeyTraffic::Miss),
    contender("nginx", ContenderProgram::Peer(PeerProxy::Nginx), "/orders", KeyTraffic::Miss),
    contender("haproxy", ContenderProgram::Peer(PeerProxy::Haproxy), "/orders", KeyTraffic::Miss),
    contender("envoy", ContenderProgram::Peer(PeerProxy::Envoy), "/orders", KeyTraffic::Miss),
    contender("proxy", ContenderProgram::Proxy, "/orders", KeyTraffic::Miss),
    contender("ibid-miss", ContenderProgram::Ibid, "/orders", KeyTraffic::Miss),
    contender("ibid-replay", ContenderProgram::Ibid, "/orders", KeyTraffic::Replay),
    contender("api-miss", ContenderProgram::IbidApi, "/orders", KeyTraffic::Miss),
    contender("api-replay", ContenderProgram::IbidApi, "/orders", KeyTraffic::Replay),
    contender("ibid-logging-miss", ContenderProgram::IbidLogging, "/orders", KeyTraffic::Miss),
    contender("embedded-miss", ContenderProgram::IbidEmbedded, "/orders", KeyTraffic::Miss),
    contender("embedded-replay", ContenderProgram::IbidEmbedded, "/orders", KeyTraffic::Replay),
    contender("envoy-ibid-miss", ContenderProgram::EnvoyExtProc, "/orders", KeyTraffic::Miss),
    contender("envoy-ibid-replay", ContenderProgram::EnvoyExtProc, "/orders", KeyTraffic::Replay),
];
const SHARED_STORES: &[Contender] = &[
    contender("upstream", ContenderProgram::Upstream, "/orders", KeyTraffic::Miss),
    contender("proxy", ContenderProgram::Proxy, "/orders", KeyTraffic::Miss),
    contender("memory-replay", ContenderProgram::Ibid, "/orders", KeyTraffic::Replay),
    contender("redis-miss", ContenderProgram::IbidOn(SharedStores::Redis), "/orders", KeyTraffic::Miss),
    contender("redis-replay", ContenderProgram::IbidOn(SharedStores::Redis), "/orders", KeyTraffic::Replay),
    contender(
        "redis-near-replay",
        ContenderProgram::IbidOn(SharedStores::RedisLocalCache),
        "/orders",
        KeyTraffic::Replay,
    ),
    contender("redis-near-miss", ContenderProgram::IbidOn(SharedStores::RedisLocalCache), "/orders", KeyTraffic::Miss),
    contender("valkey-miss", ContenderProgram::IbidOn(SharedStores::Valkey), "/orders", KeyTraffic::Miss),
    contender("valkey-replay", ContenderProgram::IbidOn(SharedStores::Valkey), "/orders", KeyTraffic::Replay),
    contender("sentinel-miss", ContenderProgram::IbidOn(SharedStores::Sentinel), "/orders", KeyTraffic::Miss),
    contender("sentinel-replay", ContenderProgram::IbidOn(SharedStores::Sentinel), "/orders", KeyTraffic::Replay),
    contender("cluster-miss", ContenderProgram::IbidOn(SharedStores::Cluster), "/orders", KeyTraffic::Miss),
    contender("cluster-replay", ContenderProgram::IbidOn(SharedStores::Cluster), "/orders", KeyTraffic::Replay),
    contender(
        "redis-everysec-miss",
        ContenderProgram::IbidOn(SharedStores::RedisEverySecond),
        "/orders",
        KeyTraffic::Miss,
    ),
    contender("redis-always-miss", ContenderProgram::IbidOn(SharedStores::RedisAlways), "/orders", KeyTraffic::Miss),
    contender("postgres-miss", ContenderProgram::IbidOn(SharedStores::Postgres), "/orders", KeyTraffic::Miss),
    contender("postgres-replay", ContenderProgram::IbidOn(SharedStores::Postgres), "/orders", KeyTraffic::Replay),
    contender("tiered-miss", ContenderProgram::IbidOn(SharedStores::Tiered), "/orders", KeyTraffic::Miss),
    contender("tiered-replay", ContenderProgram::IbidOn(SharedStores::Tiered), "/orders", KeyTraffic::Replay),
    contender("idempotent-proxy-miss", ContenderProgram::IdempotentProxy, IDEMPOTENT_PROXY_PATH, KeyTraffic::Miss),
    contender("idempotent-proxy-replay", ContenderProgram::IdempotentProxy, IDEMPOTENT_PROXY_PATH, KeyTraffic::Replay),
    limit("redis-benchmark claim", StoreLimit::RedisClaims { on: SharedStores::Redis, deep: 1 }),
    limit("redis-benchmark claim -P 16", StoreLimit::RedisClaims { on: SharedStores::Redis, deep: 16 }),
    limit("valkey, redis-benchmark claim -P 16", StoreLimit::RedisClaims { on: SharedStores::Valkey, deep: 16 }),
    limit("replicated, redis-benchmark claim -P 16", StoreLimit::RedisClaims { on: SharedStores::Sentinel, deep: 16 }),
    limit("redis-callers", StoreLimit::InProcess(SharedStores::Redis)),
    limit("pgbench claim", StoreLimit::PostgresClaims { rows: 1 }),
    limit("pgbench claim of 16", StoreLimit::PostgresClaims { rows: 16 }),
    limit("pgbench claim, settle", StoreLimit::PostgresMisses),
    limit("pgbench replay", StoreLimit::PostgresReplays),
    limit("postgres-callers", StoreLimit::InProcess(SharedStores::Postgres)),
];

/// Everything there is to measure; the targets are those of the project's performance page.
pub const BENCHMARKS: &[Benchmark] = &[
    Benchmark {
        name: "gateway-300",
        protocol: LoadProtocol::Http1,
        body_bytes: 300,
        contenders: GATEWAY,
        rows: &[
            row("gateway-proxy-300", "proxy", &[speed("nginx", 0.97)]),
            row(
                "gateway-memory-miss-300",
                "ibid-miss",
                &[speed("nginx", 0.80), cpu_ratio("nginx", 1.4), shown("proxy"), shown("upstream")],
            ),
            row(
                "gateway-memory-replay-300",
                "ibid-replay",
                &[speed("nginx", 1.5), cpu_ratio("nginx", 0.70), shown("proxy")],
            ),
            row("gateway-embedded-miss-300", "embedded-miss", &[speed("nginx", 0.65), shown("proxy")]),
            row("gateway-embedded-replay-300", "embedded-replay", &[shown("nginx"), shown("proxy")]),
            row("peer-haproxy-300", "haproxy", &[shown("nginx")]),
            row("peer-envoy-300", "envoy", &[shown("nginx")]),
            // The exchange API: begin and end on a Unix socket, beside the gateway for the same request.
            row("api-memory-miss-300", "api-miss", &[cpu_ratio("ibid-miss", 1.3), shown("ibid-miss")]),
            row("api-memory-replay-300", "api-replay", &[shown("ibid-replay")]),
            row("ext-proc-miss-300", "envoy-ibid-miss", &[shown("envoy"), shown("ibid-miss")]),
            row("ext-proc-replay-300", "envoy-ibid-replay", &[shown("envoy"), shown("ibid-replay")]),
            // What one line of log per request costs; there is no target for it.
            row("gateway-memory-log-info-300", "ibid-logging-miss", &[shown("ibid-miss"), shown("proxy")]),
        ],
    },
    Benchmark {
        name: "gateway-16k",
        protocol: LoadProtocol::Http1,
        body_bytes: 16 * 1024,
        contenders: GATEWAY,
        rows: &[
            row("gateway-memory-miss-16k", "ibid-miss", &[speed("proxy", 0.80), shown("nginx")]),
            row("gateway-memory-replay-16k", "ibid-replay", &[shown("proxy"), shown("nginx")]),
        ],
    },
    Benchmark {
        name: "layer-300",
        protocol: LoadProtocol::Http1,
        body_bytes: 300,
        contenders: &[
            contender("axum-plain", ContenderProgram::LayerApp, "/plain", KeyTraffic::Miss),
            contender("axum-ibid-miss", ContenderProgram::LayerApp, "/guarded", KeyTraffic::Miss),
            contender("axum-ibid-replay", ContenderProgram::LayerApp, "/guarded", KeyTraffic::Replay),
        ],
        rows: &[
            row("layer-memory-miss-300", "axum-ibid-miss", &[speed("axum-plain", 0.75)]),
            row("layer-memory-replay-300", "axum-ibid-replay", &[speed("axum-plain", 1.0)]),
        ],
    },
    // Shared stores against the bare proxy, and against what their servers do if asked directly in the same round.
    Benchmark {
        name: "shared-300",
        protocol: LoadProtocol::Http1,
        body_bytes: 300,
        contenders: SHARED_STORES,
        rows: &[
            row(
                "gateway-redis-miss-300",
                "redis-miss",
                &[speed("proxy", 0.60), shown("redis-benchmark claim"), shown("redis-benchmark claim -P 16")],
            ),
            row("gateway-redis-replay-300", "redis-replay", &[speed("proxy", 1.5), shown("redis-benchmark claim")]),
            row("gateway-redis-near-replay-300", "redis-near-replay", &[speed("memory-replay", 0.95), shown("proxy")]),
            row("gateway-redis-near-miss-300", "redis-near-miss", &[shown("proxy"), shown("redis-miss")]),
            row(
                "gateway-valkey-miss-300",
                "valkey-miss",
                &[speed("proxy", 0.60), shown("redis-miss"), shown("valkey, redis-benchmark claim -P 16")],
            ),
            row("gateway-valkey-replay-300", "valkey-replay", &[speed("proxy", 1.5), shown("redis-replay")]),
            row(
                "gateway-sentinel-miss-300",
                "sentinel-miss",
                &[speed("proxy", 0.60), shown("redis-miss"), shown("replicated, redis-benchmark claim -P 16")],
            ),
            row("gateway-sentinel-replay-300", "sentinel-replay", &[speed("proxy", 1.5), shown("redis-replay")]),
            row(
                "gateway-cluster-miss-300",
                "cluster-miss",
                &[speed("proxy", 0.60), shown("redis-miss"), shown("redis-benchmark claim -P 16")],
            ),
            row("gateway-cluster-replay-300", "cluster-replay", &[speed("proxy", 1.5), shown("redis-replay")]),
            row_on_demand("idempotent-proxy-miss-300", "idempotent-proxy-miss", &[shown("proxy"), shown("redis-miss")]),
            row_on_demand(
                "idempotent-proxy-replay-300",
                "idempotent-proxy-replay",
                &[shown("proxy"), shown("redis-replay")],
            ),
            row("gateway-redis-everysec-miss-300", "redis-everysec-miss", &[shown("proxy"), shown("redis-miss")]),
            row("gateway-redis-always-miss-300", "redis-always-miss", &[shown("proxy"), shown("redis-miss")]),
            row("gateway-postgres-miss-300", "postgres-miss", &[speed("proxy", 0.30), shown("pgbench claim, settle")]),
            row("gateway-postgres-replay-300", "postgres-replay", &[speed("proxy", 1.0), shown("pgbench replay")]),
            row("gateway-tiered-miss-300", "tiered-miss", &[speed("proxy", 0.25), shown("postgres-miss")]),
            row("gateway-tiered-replay-300", "tiered-replay", &[speed("proxy", 1.4), shown("redis-replay")]),
            row(
                "store-redis-claims",
                "redis-callers",
                &[shown("redis-benchmark claim"), shown("redis-benchmark claim -P 16")],
            ),
            // Claims of many callers go together: that is to be worth three transactions of one row each.
            row(
                "store-postgres-claims",
                "postgres-callers",
                &[speed("pgbench claim", 3.0), shown("pgbench claim of 16")],
            ),
        ],
    },
    // gRPC against the same way without idempotency.
    Benchmark {
        name: "grpc-layer-300",
        protocol: LoadProtocol::Grpc,
        body_bytes: 300,
        contenders: &[
            contender("tonic-plain", ContenderProgram::LayerApp, PLAIN_CALL, KeyTraffic::Miss),
            contender("tonic-ibid-miss", ContenderProgram::LayerApp, GUARDED_CALL, KeyTraffic::Miss),
            contender("tonic-ibid-replay", ContenderProgram::LayerApp, GUARDED_CALL, KeyTraffic::Replay),
        ],
        rows: &[
            row("grpc-layer-miss-300", "tonic-ibid-miss", &[shown("tonic-plain")]),
            row("grpc-layer-replay-300", "tonic-ibid-replay", &[shown("tonic-plain")]),
        ],
    },
    Benchmark {
        name: "grpc-gateway-300",
        protocol: LoadProtocol::Grpc,
        body_bytes: 300,
        contenders: &[
            contender("tonic-plain", ContenderProgram::LayerApp, PLAIN_CALL, KeyTraffic::Miss),
            // The same gateway, which lets this method pass.
            contender("ibid-passing", ContenderProgram::IbidGrpc, PLAIN_CALL, KeyTraffic::Miss),
            contender("ibid-miss", ContenderProgram::IbidGrpc, COVERED_CALL, KeyTraffic::Miss),
            contender("ibid-replay", ContenderProgram::IbidGrpc, COVERED_CALL, KeyTraffic::Replay),
        ],
        rows: &[
            row("grpc-gateway-miss-300", "ibid-miss", &[speed("ibid-passing", 0.80)]),
            row("grpc-gateway-replay-300", "ibid-replay", &[speed("ibid-passing", 1.9), shown("tonic-plain")]),
        ],
    },
    // Two processes of the same server: how far from 1.00 their ratio strays is what other rows' ratios are worth.
    Benchmark {
        name: "noise-300",
        protocol: LoadProtocol::Http1,
        body_bytes: 300,
        contenders: &[
            contender("upstream", ContenderProgram::Upstream, "/orders", KeyTraffic::Miss),
            contender("upstream-again", ContenderProgram::Upstream, "/orders", KeyTraffic::Miss),
        ],
        rows: &[row_on_demand("noise-300", "upstream-again", &[shown("upstream")])],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_names_contenders_of_its_own_scene() {
        for scene in BENCHMARKS {
            for name in scene.rows.iter().flat_map(BenchmarkRow::needs) {
                assert_eq!(scene.contenders.iter().filter(|contender| contender.name == name).count(), 1, "{name}");
            }
        }
    }

    #[test]
    fn all_gateways_of_a_scene_have_the_same_app_behind_them() {
        for scene in BENCHMARKS {
            let mut apps = scene.contenders.iter().filter_map(|contender| contender.program.upstream());
            let first = apps.next();
            assert!(apps.all(|app| Some(app) == first), "{}", scene.name);
        }
    }

    #[test]
    fn rows_are_selected_by_part_of_their_name() {
        let names = |patterns: &[&str]| -> Vec<&str> {
            let patterns: Vec<_> = patterns.iter().map(ToString::to_string).collect();
            select(&patterns).unwrap().into_iter().flat_map(|(_, rows)| rows).map(|row| row.name).collect()
        };
        assert_eq!(names(&["16k"]), ["gateway-memory-miss-16k", "gateway-memory-replay-16k"]);
        assert_eq!(names(&["layer-memory", "noise-300"]).len(), 3);
        assert_eq!(names(&[]).len(), 38);
        assert!(select(&["nothing".into()]).unwrap_err().contains("gateway-memory-miss-300"));
    }
}
