//! What the operating system says about this process. Absent where there is no `/proc`.

use std::{fs, time::SystemTime};

use rustix::process::{Resource, getrlimit};

/// Clock ticks per second in `/proc`, on every architecture that this runs on.
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Debug, Default)]
pub(super) struct ProcessStats {
    pub(super) cpu_seconds: Option<f64>,
    pub(super) resident_bytes: Option<f64>,
    pub(super) virtual_bytes: Option<f64>,
    pub(super) open_files: Option<f64>,
    pub(super) max_open_files: Option<f64>,
}

impl ProcessStats {
    pub(super) fn read() -> Self {
        let file = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
        let (stat, status) = (file("stat"), file("status"));
        let memory = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            Some(line.split_whitespace().nth(1)?.parse::<f64>().ok()? * 1024.0)
        };
        // The name of the process, in brackets, may contain spaces.
        let ticks = |at: usize| stat.rsplit(')').next()?.split_whitespace().nth(at)?.parse::<f64>().ok();
        Self {
            cpu_seconds: ticks(11).zip(ticks(12)).map(|(user, system)| (user + system) / TICKS_PER_SECOND),
            resident_bytes: memory("VmRSS:"),
            virtual_bytes: memory("VmSize:"),
            open_files: fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as f64),
            max_open_files: getrlimit(Resource::Nofile).current.map(|most| most as f64),
        }
    }
}

/// Seconds since 1970.
pub(super) fn unix_seconds(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| (since.as_secs_f64() * 1000.0).round() / 1000.0)
}
