//! First requests through the layer with the gateway's metrics, to have their cost counted from outside as that of
//! `count`'s operations: `count-metrics service-miss-counted N`.

use std::{alloc::System, process::ExitCode, sync::Arc};

use ibid::{Ibid, observe::NoopObserver, store::Memory};
use ibid_count::operations::first_requests;
use ibid_gateway::metrics::MetricsObserver;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> ExitCode {
    let Some(count) = std::env::args().nth(2).and_then(|count| count.parse().ok()) else {
        eprintln!("count-metrics service-miss-counted N");
        return ExitCode::FAILURE;
    };
    let ibid = Ibid::builder(Arc::new(Memory::default())).observer(MetricsObserver::new(NoopObserver)).build();
    let region = Region::new(ALLOCATOR);
    first_requests(count, &ibid);
    let change = region.change();
    println!("{} {}", change.allocations + change.reallocations, change.bytes_allocated);
    ExitCode::SUCCESS
}
