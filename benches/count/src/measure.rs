//! One row of exact figures per operation.
//!
//! Every mode of [`MODES`](crate::operations::MODES) runs twice, the second time with as many operations more as the first
//! had, so that what is done before and after them cancels out. Both runs happen once under callgrind and once with
//! nothing but the counting allocator of the `count` program.

use std::{fmt::Write, path::Path, process::Command};

use crate::callgrind::ProcessProfile;

/// Blocks of 64 bytes that SHA-256 of 1,024 bytes takes: the last one holds the length.
const BLOCKS_OF_1024_BYTES: f64 = 17.0;
/// The mode that SHA-256 blocks are told by.
const SHA256_OF_1024_BYTES: &str = "sha256-1024";
/// The mode that is no work of the layer: making a request, and the app.
const INNER: &str = "inner";

/// The row of `count-metrics`, which has no budget.
const METRICS_ROW: &(&str, &str, bool) = &("layer-first, with the gateway's metrics", "service-miss-counted", true);

/// The rows of the table: name, mode, and whether the mode runs the app, whose share is taken off.
pub const COUNTED_ROWS: &[(&str, &str, bool)] = &[
    ("layer-first", "service-miss", true),
    ("layer-replay", "service-replay", true),
    ("engine-first", "engine-miss", false),
    ("engine-replay", "engine-replay", false),
    ("fingerprint-300", "fingerprint-300", false),
    ("fingerprint-1024", "fingerprint-1024", false),
    ("fingerprint-16384", "fingerprint-16384", false),
    ("fingerprint-sorted-300", "fingerprint-sorted-300", false),
    ("fingerprint-sorted-1024", "fingerprint-sorted-1024", false),
    ("fingerprint-sorted-16384", "fingerprint-sorted-16384", false),
];

/// What one operation costs on average.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OperationCost {
    /// All instructions.
    pub instructions: f64,
    /// Those that compute SHA-256.
    pub sha256: f64,
    /// Those in libc.
    pub libc: f64,
    /// Calls of the allocator that hand out or enlarge memory.
    pub allocations: f64,
    /// Bytes that it handed out.
    pub bytes: f64,
    /// Readings of the clock.
    pub clock_readings: f64,
}

impl OperationCost {
    /// Instructions besides SHA-256.
    #[must_use]
    pub fn without_sha256(&self) -> f64 {
        self.instructions - self.sha256
    }

    fn minus(&self, other: &Self) -> Self {
        Self {
            instructions: self.instructions - other.instructions,
            sha256: self.sha256 - other.sha256,
            libc: self.libc - other.libc,
            allocations: self.allocations - other.allocations,
            bytes: self.bytes - other.bytes,
            clock_readings: self.clock_readings - other.clock_readings,
        }
    }

    fn divided_by(&self, operations: u64) -> Self {
        let each = |total: f64| total / operations as f64;
        Self {
            instructions: each(self.instructions),
            sha256: each(self.sha256),
            libc: each(self.libc),
            allocations: each(self.allocations),
            bytes: each(self.bytes),
            clock_readings: each(self.clock_readings),
        }
    }
}

/// A row with its figures.
#[derive(Clone, Debug, PartialEq)]
pub struct CountedRow {
    /// One of [`COUNTED_ROWS`].
    pub name: &'static str,
    /// Its figures.
    pub cost: OperationCost,
    /// SHA-256 blocks in them.
    pub sha256_blocks: f64,
}

/// Counts the rows whose name contains `only` with the `count` program at `program`, and one more with `count-metrics` if its
/// path is given.
///
/// # Errors
/// If valgrind is missing or something cannot be run.
pub fn count_rows(
    program: &Path, metrics: Option<&Path>, only: &str, operations: u64,
) -> Result<Vec<CountedRow>, String> {
    let inner = count_operation(program, INNER, operations)?;
    let per_block = count_operation(program, SHA256_OF_1024_BYTES, operations)?.sha256 / BLOCKS_OF_1024_BYTES;
    let rows = COUNTED_ROWS.iter().filter(|row| row.0.contains(only)).map(|row| (program, row));
    let mut counted = Vec::new();
    for (program, (name, mode, has_app)) in rows.chain(metrics.map(|program| (program, METRICS_ROW))) {
        let operations = if name.ends_with("-16384") { operations.div_ceil(4) } else { operations };
        let mut cost = count_operation(program, mode, operations)?;
        if *has_app {
            cost = cost.minus(&inner);
        }
        counted.push(CountedRow { name, cost, sha256_blocks: (cost.sha256 / per_block.max(1.0)).round() });
    }
    Ok(counted)
}

/// Counts one mode of a program that is called as `count` is.
///
/// # Errors
/// As [`count_rows`].
pub fn count_operation(program: &Path, mode: &str, operations: u64) -> Result<OperationCost, String> {
    let [once, twice] = [operations, 2 * operations].map(|count| run_counted(program, mode, count));
    Ok(twice?.minus(&once?).divided_by(operations))
}

fn run_counted(program: &Path, mode: &str, count: u64) -> Result<OperationCost, String> {
    let count = count.to_string();
    let folder = tempfile::tempdir().map_err(|why| format!("no folder for a profile: {why}"))?;
    let file = folder.path().join("profile");
    output(
        Command::new("valgrind")
            .args(["--tool=callgrind", "--compress-strings=no", "--compress-pos=no"])
            .arg(format!("--callgrind-out-file={}", file.display()))
            .arg(program)
            .args([mode, &count]),
    )?;
    let profile = std::fs::read_to_string(&file).map_err(|why| format!("{}: {why}", file.display()))?;
    let profile = ProcessProfile::parse(&profile)?;
    // Without valgrind, which has an allocator of its own to ask for memory.
    let printed = output(Command::new(program).args([mode, &count]))?;
    let mut figures = printed.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
    let (Some(allocations), Some(bytes)) = (figures.next(), figures.next()) else {
        return Err(format!("{} {mode} {count} printed {printed:?}", program.display()));
    };
    Ok(OperationCost {
        instructions: profile.instructions as f64,
        sha256: profile.sha256 as f64,
        libc: profile.libc as f64,
        allocations,
        bytes,
        clock_readings: profile.clock_readings as f64,
    })
}

fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|why| match why.kind() {
        std::io::ErrorKind::NotFound => format!("{name} is not installed; install the Debian package of that name"),
        _ => format!("{name}: {why}"),
    })?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The rows for people.
#[must_use]
pub fn table(rows: &[CountedRow]) -> String {
    let mut table = String::from(
        "| operation | instructions | of it SHA-256 (blocks) | without SHA-256 | of that in libc | allocations | \
         bytes allocated | clock readings |\n|---|---|---|---|---|---|---|---|\n",
    );
    for CountedRow { name, cost, sha256_blocks } in rows {
        let OperationCost { instructions, sha256, libc, allocations, bytes, clock_readings } = cost;
        let rest = cost.without_sha256();
        let _ = writeln!(
            table,
            "| {name} | {instructions:.0} | {sha256:.0} ({sha256_blocks:.0}) | {rest:.0} | {libc:.0} | \
             {allocations:.1} | {bytes:.0} | {clock_readings:.1} |"
        );
    }
    table
}
