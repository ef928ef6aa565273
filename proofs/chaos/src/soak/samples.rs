//! What is measured during a soak, whether it grows, and the curves.

use std::{fmt::Write as _, fs, io, path::Path, time::Duration};

use testbed::process::GatewayProcess;

/// The first samples are a warm-up, in percent: caches fill, and the first records expire.
const WARM_UP_PERCENT: usize = 30;
const CURVE_WIDTH: f64 = 640.0;
const CURVE_HEIGHT: f64 = 90.0;

/// What is measured, in columns: name, unit, growth that is none (in percent, and in the unit), and the value.
type SoakMeasure = (&'static str, &'static str, f64, f64, fn(&SoakSample) -> f64);

const MEASURES: [SoakMeasure; 4] = [
    ("memory", "MiB", 10.0, 2.0, |sample| sample.memory_bytes as f64 / 1048576.0),
    ("file descriptors", "open", 10.0, 5.0, |sample| sample.open_files as f64),
    ("store", "MiB", 10.0, 1.0, |sample| sample.store_bytes as f64 / 1048576.0),
    // Noise of the machine is in it.
    ("p99", "ms", 50.0, 5.0, |sample| sample.p99.as_secs_f64() * 1000.0),
];

/// What is measured at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoakSample {
    /// Since the start.
    pub at: Duration,
    /// Resident memory of the gateway.
    pub memory_bytes: u64,
    /// Its open files.
    pub open_files: usize,
    /// The store's size.
    pub store_bytes: u64,
    /// Requests since the last sample.
    pub requests: usize,
    /// The time that 99 of 100 of them took at most.
    pub p99: Duration,
}

impl SoakSample {
    pub(super) fn take(
        at: Duration, gateway: &GatewayProcess, store_bytes: u64, mut latencies: Vec<Duration>,
    ) -> SoakSample {
        let process = format!("/proc/{}", gateway.id());
        let status = fs::read_to_string(format!("{process}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = resident.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
        latencies.sort_unstable();
        SoakSample {
            at,
            memory_bytes: kilobytes.expect("a running process has memory") * 1024,
            open_files: fs::read_dir(format!("{process}/fd")).map_or(0, Iterator::count),
            store_bytes,
            requests: latencies.len(),
            p99: latencies.get(latencies.len() * 99 / 100).copied().unwrap_or_default(),
        }
    }
}

/// What grew from the first third after the warm-up to the last.
pub fn find_growth(samples: &[SoakSample]) -> Vec<String> {
    let Some(thirds) = split_thirds(samples) else { return vec!["too few samples to compare".to_owned()] };
    let mut grown = Vec::new();
    for (name, unit, percent, least, value) in MEASURES {
        let [first, last] = thirds.map(|third| median(third, value));
        if last > first * (1.0 + percent / 100.0) + least {
            grown.push(format!("{name} grew from {first:.1} to {last:.1} {unit}"));
        }
    }
    grown
}

pub(super) fn compare_thirds(samples: &[SoakSample]) -> Vec<String> {
    let Some(thirds) = split_thirds(samples) else { return Vec::new() };
    let compare = |(name, unit, _, _, value): SoakMeasure| {
        let [first, last] = thirds.map(|third| median(third, value));
        format!("{name:<30}{first:>9.1} then {last:>9.1} {unit}")
    };
    MEASURES.map(compare).into()
}

/// The first third and the last, after the warm-up.
fn split_thirds(samples: &[SoakSample]) -> Option<[&[SoakSample]; 2]> {
    let warm = &samples[samples.len() * WARM_UP_PERCENT / 100..];
    let third = warm.len() / 3;
    (third > 0).then(|| [&warm[..third], &warm[warm.len() - third..]])
}

fn median(samples: &[SoakSample], value: fn(&SoakSample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(value).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Writes `NAME.csv` and `NAME.svg`.
pub(super) fn write_curves(folder: &Path, name: &str, samples: &[SoakSample]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut csv = "seconds,memory_bytes,open_files,store_bytes,requests,p99_ms\n".to_owned();
    for SoakSample { at, memory_bytes, open_files, store_bytes, requests, p99 } in samples {
        let (seconds, p99) = (at.as_secs(), p99.as_secs_f64() * 1000.0);
        let _ = writeln!(csv, "{seconds},{memory_bytes},{open_files},{store_bytes},{requests},{p99:.2}");
    }
    fs::write(folder.join(format!("{name}.csv")), csv)?;
    fs::write(folder.join(format!("{name}.svg")), draw_curves(name, samples))
}

/// One curve below the other, each from 0 to its highest value.
fn draw_curves(name: &str, samples: &[SoakSample]) -> String {
    let seconds = samples.last().map_or(1.0, |last| last.at.as_secs_f64());
    let (width, height) = (CURVE_WIDTH + 20.0, (CURVE_HEIGHT + 40.0) * MEASURES.len() as f64 + 30.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<text x=\"10\" y=\"20\">{name}, {seconds:.0} seconds</text>\n"
    );
    for (nth, (title, unit, _, _, value)) in MEASURES.into_iter().enumerate() {
        let top = 50.0 + (CURVE_HEIGHT + 40.0) * nth as f64;
        let highest = samples.iter().map(value).fold(0.0, f64::max);
        let point = |sample: &SoakSample| {
            let x = 10.0 + CURVE_WIDTH * sample.at.as_secs_f64() / seconds;
            let y = top + CURVE_HEIGHT * (1.0 - value(sample) / highest.max(1e-9));
            format!("{x:.1},{y:.1}")
        };
        let points: Vec<String> = samples.iter().map(point).collect();
        let (bottom, right) = (top + CURVE_HEIGHT, 10.0 + CURVE_WIDTH);
        let _ = write!(
            svg,
            "<text x=\"10\" y=\"{:.1}\">{title}: at most {highest:.1} {unit}</text>\n<path d=\"M10 {top}V{bottom}H{right}\" fill=\"none\" stroke=\"#999\"/>\n<polyline points=\"{}\" fill=\"none\" stroke=\"#06c\" stroke-width=\"1.5\"/>\n",
            top - 6.0,
            points.join(" ")
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(memory_mib: impl Fn(u64) -> u64) -> Vec<SoakSample> {
        let sample = |nth| SoakSample {
            at: Duration::from_secs(nth * 10),
            memory_bytes: memory_mib(nth) << 20,
            open_files: 40,
            store_bytes: 9 << 20,
            requests: 2000,
            p99: Duration::from_millis(7 + nth % 3),
        };
        (1..=60).map(sample).collect()
    }

    #[test]
    fn what_stays_is_flat_also_after_a_warm_up() {
        assert_eq!(find_growth(&samples(|_| 50)), [""; 0]);
        assert_eq!(find_growth(&samples(|nth| if nth < 15 { 20 + nth } else { 50 })), [""; 0]);
    }

    #[test]
    fn a_leak_is_found_and_named() {
        assert_eq!(find_growth(&samples(|nth| 50 + nth)), ["memory grew from 76.0 to 104.0 MiB"]);
        let mut leaking = samples(|_| 50);
        leaking.iter_mut().for_each(|sample| sample.open_files += sample.at.as_secs() as usize / 10);
        assert_eq!(find_growth(&leaking), ["file descriptors grew from 66.0 to 94.0 open"]);
    }

    #[test]
    fn too_few_samples_show_nothing() {
        assert_eq!(find_growth(&samples(|_| 50)[..2]), ["too few samples to compare"]);
    }

    #[test]
    fn curves_and_table_are_written() {
        let folder = tempfile::tempdir().expect("a folder");
        write_curves(folder.path(), "soak-x", &samples(|nth| nth)).expect("they can be written");
        let csv = fs::read_to_string(folder.path().join("soak-x.csv")).expect("the table");
        assert_eq!((csv.lines().count(), csv.lines().nth(1)), (61, Some("10,1048576,40,9437184,2000,8.00")));
        let svg = fs::read_to_string(folder.path().join("soak-x.svg")).expect("the curves");
        assert_eq!(svg.matches("<polyline").count(), 4);
        assert!(svg.contains("memory: at most 60.0 MiB"), "{svg}");
    }
}
