//! The side-by-side benchmark of `ibid`.
//!
//! Absolute figures on a shared machine move by 20–40 % from run to run, so nothing here judges them. Contenders run
//! *interleaved*: in every round each one is loaded once, in rotated order, and only the **ratio to the baseline of the
//! same round** is compared with a target. The median over rounds is the verdict, min–max shows the noise.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`] | the command line |
//! | [`rows`] | the table of scenes, contenders, rows and targets |
//! | [`runner`] | starts a scene's processes, runs the rounds, collects samples |
//! | [`peers`] | other proxies in front of the same app |
//! | [`server_child`] | a process that is certain to be killed |
//! | [`load`] | the load generator, for HTTP/1.1 and gRPC |
//! | [`wire`] | request bytes and response framing for it |
//! | [`stores`] | the servers of shared stores, for one run |
//! | [`store_limits`] | loads on a store or its server directly: what a gateway on it is compared with |
//! | [`timing`] | whether two kinds of requests can be told apart by their times |
//! | [`round_trips`] | how often a store is asked per operation, counted on the wire |
//! | [`gateway_counts`] | what the gateway does per request, counted under callgrind and strace |
//! | [`half_load`] | latency at half of the throughput that a gateway reaches |
//! | [`histogram`], [`cpu`] | latency buckets; CPU time of a process |
//! | [`verdict`], [`report`] | comparison with the targets; the printed table and the JSON file |
//! | [`server`], [`calls`] | what the benchmark's own servers share; the gRPC method of one of them |
//!
//! Invariant: a figure is reported only if every response of its run had the expected status *and* the app executed
//! exactly as often as the run implies (once per request on a miss, never on a replay). A load on a store counts only if
//! its server made the entries that it implies.

pub mod args;
pub mod calls;
pub mod cpu;
pub mod gateway_counts;
pub mod half_load;
pub mod histogram;
pub mod load;
pub mod peers;
pub mod report;
pub mod round_trips;
pub mod rows;
pub mod runner;
pub mod server;
pub mod server_child;
pub mod store_limits;
pub mod stores;
pub mod timing;
pub mod verdict;
pub mod wire;
