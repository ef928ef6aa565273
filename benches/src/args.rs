//! The command line, and the defaults behind it.

use std::{path::PathBuf, time::Duration};

/// What `--help` prints.
pub const HELP: &str = "\
ibid-bench: side-by-side benchmark; only ratios within a round count

  --rows NAME,...        rows whose name contains one of these (default: all but noise-300)
  --list                 print the rows and end
  --gateway-counts       instructions, clock readings and system calls of the gateway per request, and end
  --half-load            latency at half of the throughput reached, beside the bare proxy, and end; the throughput
                         is measured for at most 3 s a round
  --rounds N             interleaved rounds (5); with fewer than 5, targets are shown but not judged
  --seconds S            measured time per contender and round (3)
  --settle S             unmeasured time before it, on the same connections (0.3)
  --connections N        connections, one request in flight on each (64)
  --replay-keys N        distinct keys of replay rows (256)
  --answer BYTES         size of the app's JSON answer (300)
  --app-threads N        threads of bare-upstream and layer-app: 0 is a current-thread runtime (0)
  --redo-above PERCENT   play a round again if strangers used more of the machine in one of its runs; at most
                         as many times as there are rounds, and the report says how often (off)
  --quick                2 rounds of 0.4 s and 64 replay keys: a smoke test that judges no speed
  --strict               exit 2 if a target was missed
  --json FILE            also write every sample and verdict there
  --proxy-bin PATH       the bare proxy (IBID_BENCH_PROXY; else bare-proxy beside this program)
  --ibid-bin PATH        the gateway (IBID_BENCH_IBID; else ibid beside this program)
  --envoy-bin PATH       Envoy (IBID_BENCH_ENVOY; else ../envoy/bin/envoy from this program, where scripts/bench puts it)

Exit: 0 all rows valid, 1 a row was invalid or the run failed, 2 missed a target with --strict.
";

/// A parsed command line.
#[derive(Clone, Debug)]
pub struct BenchArgs {
    /// Patterns of row names; empty means the defaults.
    pub rows: Vec<String>,
    /// Only print the rows.
    pub list: bool,
    /// Only count what the gateway does per request.
    pub gateway_counts: bool,
    /// Only measure latency at half load.
    pub half_load: bool,
    /// Only print [`HELP`].
    pub help: bool,
    /// Interleaved rounds.
    pub rounds: usize,
    /// Measured time per contender and round.
    pub measure: Duration,
    /// Unmeasured time before it.
    pub warm_up: Duration,
    /// Connections of the load generator.
    pub connections: usize,
    /// Distinct keys of replay rows.
    pub replay_keys: u64,
    /// Size of the app's answer.
    pub response_bytes: usize,
    /// Threads of the benchmark's own servers.
    pub app_threads: usize,
    /// Share of the machine (0–1) used by strangers above which a round is played again.
    pub max_foreign_load: f64,
    /// Whether a missed target makes the exit code 2.
    pub strict: bool,
    /// Where to write the machine-readable result.
    pub json: Option<PathBuf>,
    /// The bare proxy.
    pub proxy_bin: PathBuf,
    /// The gateway.
    pub ibid_bin: PathBuf,
    /// Envoy.
    pub envoy_bin: PathBuf,
    /// Where this package's own binaries are.
    pub bin_folder: PathBuf,
}

impl BenchArgs {
    /// Reads the command line; `env` looks up environment variables, `own_bins` is the folder of this program.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn parse(
        args: impl IntoIterator<Item = String>, env: impl Fn(&str) -> Option<PathBuf>, own_bins: PathBuf,
    ) -> Result<Self, String> {
        let mut parsed = Self {
            rows: Vec::new(),
            list: false,
            gateway_counts: false,
            half_load: false,
            help: false,
            rounds: 5,
            measure: Duration::from_secs(3),
            warm_up: Duration::from_millis(300),
            connections: 64,
            replay_keys: 256,
            response_bytes: 300,
            app_threads: 0,
            max_foreign_load: f64::INFINITY,
            strict: false,
            json: None,
            proxy_bin: env("IBID_BENCH_PROXY").unwrap_or_else(|| own_bins.join("bare-proxy")),
            ibid_bin: env("IBID_BENCH_IBID").unwrap_or_else(|| own_bins.join("ibid")),
            envoy_bin: env("IBID_BENCH_ENVOY").unwrap_or_else(|| own_bins.join("../envoy/bin/envoy")),
            bin_folder: own_bins,
        };
        let mut args = args.into_iter();
        while let Some(name) = args.next() {
            if parsed.set_flag(&name) {
                continue;
            }
            let value = args.next().ok_or_else(|| format!("{name}: unknown, or it needs a value; see --help"))?;
            parsed.set_value(&name, &value)?;
        }
        match () {
            () if parsed.rounds == 0 => Err("--rounds must be at least 1".into()),
            () if parsed.connections == 0 => Err("--connections must be at least 1".into()),
            () if parsed.replay_keys == 0 => Err("--replay-keys must be at least 1".into()),
            () if parsed.measure.is_zero() => Err("--seconds must be more than 0".into()),
            () => Ok(parsed),
        }
    }

    /// Applies a flag without value; false if it is none.
    fn set_flag(&mut self, name: &str) -> bool {
        match name {
            "--quick" => {
                (self.rounds, self.measure, self.warm_up) = (2, Duration::from_millis(400), Duration::from_millis(100));
                self.replay_keys = 64;
            }
            "--strict" => self.strict = true,
            "--gateway-counts" => self.gateway_counts = true,
            "--half-load" => self.half_load = true,
            "--list" => self.list = true,
            "--help" | "-h" => self.help = true,
            _ => return false,
        }
        true
    }

    fn set_value(&mut self, name: &str, value: &str) -> Result<(), String> {
        let bad = || format!("{name} {value}: not understood; see --help");
        let seconds = || value.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok()).ok_or_else(bad);
        match name {
            "--rows" => self.rows = value.split(',').filter(|row| !row.is_empty()).map(str::to_owned).collect(),
            "--rounds" => self.rounds = value.parse().map_err(|_| bad())?,
            "--seconds" => self.measure = seconds()?,
            "--settle" => self.warm_up = seconds()?,
            "--connections" => self.connections = value.parse().map_err(|_| bad())?,
            "--replay-keys" => self.replay_keys = value.parse().map_err(|_| bad())?,
            "--answer" => self.response_bytes = value.parse().map_err(|_| bad())?,
            "--app-threads" => self.app_threads = value.parse().map_err(|_| bad())?,
            "--redo-above" => self.max_foreign_load = value.parse::<f64>().map_err(|_| bad())? / 100.0,
            "--json" => self.json = Some(value.into()),
            "--proxy-bin" => self.proxy_bin = value.into(),
            "--ibid-bin" => self.ibid_bin = value.into(),
            "--envoy-bin" => self.envoy_bin = value.into(),
            _ => return Err(bad()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<BenchArgs, String> {
        let env = |name: &str| (name == "IBID_BENCH_PROXY").then(|| PathBuf::from("/env/proxy"));
        BenchArgs::parse(line.split_whitespace().map(str::to_owned), env, "/bins".into())
    }

    #[test]
    fn flags_win_over_variables_and_variables_over_the_folder() {
        let args = parse("--rows a,b --seconds 0.5").unwrap();
        assert_eq!((args.rows.len(), args.measure), (2, Duration::from_millis(500)));
        assert_eq!((args.proxy_bin, args.ibid_bin), ("/env/proxy".into(), "/bins/ibid".into()));
        assert_eq!(parse("--proxy-bin /flag").unwrap().proxy_bin, PathBuf::from("/flag"));
    }

    #[test]
    fn nonsense_is_refused() {
        for line in ["--rounds", "--rounds x", "--seconds -1", "--seconds 0", "--connections 0", "--what 1", "--what"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
