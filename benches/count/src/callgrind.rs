//! Reads what callgrind writes: how many instructions each function executed itself, and how often it was called.
//!
//! Written with `--compress-strings=no --compress-pos=no`, the format is a list of lines: `ob=` and `fn=` name where the
//! following costs arose; a cost line is a position and a number; `calls=` counts calls of the function that `cfn=` named,
//! and the cost line after it is what the callee cost, which the callee has on its own account.

/// What a process did from its start to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessProfile {
    /// All instructions.
    pub instructions: u64,
    /// Those in functions that compute SHA-256.
    pub sha256: u64,
    /// Those in libc, which differ from one processor and one version of it to the next.
    pub libc: u64,
    /// Calls of `clock_gettime`.
    pub clock_readings: u64,
}

impl ProcessProfile {
    /// Reads a profile.
    ///
    /// # Errors
    /// If it says nothing of instructions.
    pub fn parse(file: &str) -> Result<Self, String> {
        let mut profile = Self::default();
        let (mut in_libc, mut in_sha256, mut reads_clock, mut is_callee) = (false, false, false, false);
        for line in file.lines() {
            if let Some(object) = line.strip_prefix("ob=") {
                in_libc = is_libc(object);
            } else if let Some(function) = line.strip_prefix("fn=") {
                in_sha256 = is_sha256(function);
            } else if let Some(function) = line.strip_prefix("cfn=") {
                reads_clock = function.starts_with("clock_gettime");
            } else if let Some(calls) = line.strip_prefix("calls=") {
                is_callee = true;
                if reads_clock {
                    let count = calls.split(' ').next().and_then(|count| count.parse::<u64>().ok());
                    profile.clock_readings += count.ok_or_else(|| format!("not understood: {line}"))?;
                }
            } else if line.starts_with(|first: char| first.is_ascii_digit()) {
                let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
                let cost = cost.ok_or_else(|| format!("not understood: {line}"))?;
                if !std::mem::take(&mut is_callee) {
                    profile.instructions += cost;
                    profile.sha256 += if in_sha256 { cost } else { 0 };
                    profile.libc += if in_libc { cost } else { 0 };
                }
            }
        }
        if profile.instructions == 0 { Err("callgrind counted nothing".into()) } else { Ok(profile) }
    }
}

fn is_sha256(function: &str) -> bool {
    function.contains("sha2::") || function.contains("sha256")
}

fn is_libc(object: &str) -> bool {
    let name = object.rsplit('/').next().unwrap_or_default();
    ["libc.so", "libc-", "ld-linux", "ld-musl", "libm.so", "vgpreload"].iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callees_are_counted_once_and_by_name() {
        let file = "events: Ir\nob=/usr/lib/libc.so.6\nfn=memcpy\n12 40\n\nob=/target/release/count\nfn=main\n0 100\n\
                    cob=/usr/lib/libc.so.6\ncfn=clock_gettime@@GLIBC_2.17\ncalls=3 38 \n0 30\n0 7\n\
                    cfn=sha2::sha256::soft::unroll::compress\ncalls=1 0\n0 1000\n\n\
                    fn=sha2::sha256::soft::unroll::compress\n0 1000\n\
                    ob=/usr/lib/libc.so.6\nfn=clock_gettime@@GLIBC_2.17\n38 30\n";
        let profile = ProcessProfile { instructions: 1177, sha256: 1000, libc: 70, clock_readings: 3 };
        assert_eq!(ProcessProfile::parse(file), Ok(profile));
        assert!(ProcessProfile::parse("events: Ir\n").is_err());
    }
}
