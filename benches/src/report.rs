//! The two ways to show results: a table for people, JSON for programs.

use std::fmt::Write;

use crate::{
    args::BenchArgs,
    round_trips::{self, RoundTrips},
    rows::{BenchmarkRow, TargetMeasure},
    runner::{BenchmarkResult, ContenderResult, RoundSample},
    verdict::{RoundSpread, TargetResult, TargetVerdict, judge_target},
};

/// With fewer rounds the noise of this kind of machine decides, so nothing is judged.
const ROUNDS_TO_JUDGE: usize = 5;

/// If others use more of the machine than this during a run, the report says so.
const NOISY_PERCENT: f64 = 10.0;

/// One line, or one per target, of the table.
#[derive(Debug)]
struct ReportEntry {
    /// The row's name, or the baseline's within its scene.
    name: String,
    contender: &'static str,
    samples: Vec<RoundSample>,
    problem: Option<String>,
    /// Empty for a baseline.
    judgements: Vec<TargetResult>,
}

/// The contender that all others of its scene are shown beside, where it takes part.
const COMPARED_WITH: &str = "nginx";

/// A contender beside [`COMPARED_WITH`]: medians over the rounds.
#[derive(Debug)]
struct ContenderLine {
    name: &'static str,
    per_second: f64,
    speed_ratio: f64,
    cpu_us: f64,
    cpu_ratio: f64,
    p50_us: f64,
    p99_us: f64,
}

/// All results of one invocation.
#[derive(Debug)]
pub struct BenchReport {
    settings: String,
    rounds: usize,
    /// Rounds of all scenes that were played again because of noise.
    repeated_rounds: usize,
    entries: Vec<ReportEntry>,
    /// The scenes with [`COMPARED_WITH`] in them.
    comparisons: Vec<(&'static str, Vec<ContenderLine>)>,
    /// If shared stores were played.
    round_trips: Vec<RoundTrips>,
}

impl BenchReport {
    /// Judges everything that was played.
    #[must_use]
    pub fn new(args: &BenchArgs, played: &[BenchmarkResult], round_trips: Vec<RoundTrips>) -> Self {
        let settings = format!(
            "{} rounds of {} s, {} connections, answer {} B, {} replay keys, app threads {}, {} cores",
            args.rounds,
            args.measure.as_secs_f64(),
            args.connections,
            args.response_bytes,
            args.replay_keys,
            args.app_threads,
            std::thread::available_parallelism().map_or(0, usize::from),
        );
        let judging = args.rounds >= ROUNDS_TO_JUDGE;
        let entries = played.iter().flat_map(|played| entries(played, judging)).collect();
        let repeated_rounds = played.iter().map(|played| played.repeated_rounds).sum();
        let comparisons = played.iter().filter_map(contender_lines).collect();
        Self { settings, rounds: args.rounds, repeated_rounds, entries, comparisons, round_trips }
    }

    /// Whether some row's figures mean nothing, or a store was asked more or less often than it should have been.
    #[must_use]
    pub fn any_invalid(&self) -> bool {
        self.has(TargetVerdict::Invalid) || self.round_trips.iter().any(|trips| !trips.are_as_expected())
    }

    /// Whether some target was missed.
    #[must_use]
    pub fn any_missed(&self) -> bool {
        self.has(TargetVerdict::Missed)
    }

    fn has(&self, verdict: TargetVerdict) -> bool {
        self.entries.iter().flat_map(|entry| &entry.judgements).any(|judged| judged.verdict == verdict)
    }

    /// The table.
    #[must_use]
    pub fn table(&self) -> String {
        const HEAD: [&str; 9] =
            ["row", "req/s", "ratio (min–max)", "p50 µs", "p99 µs", "CPU µs/req", "store's", "target", "verdict"];
        let mut lines = vec![HEAD.map(str::to_owned)];
        lines.extend(self.entries.iter().flat_map(table_lines));
        let mut table = format!(
            "\n{}\nEach figure is a median over rounds; ratios are taken within each round.\n\n",
            self.settings
        );
        for (scene, contenders) in &self.comparisons {
            let _ = writeln!(table, "{scene}: CPU is user and system time of all processes of a contender\n");
            let _ = writeln!(table, "{}", aligned(&comparison_lines(contenders)));
        }
        table += &aligned(&lines);
        if !self.round_trips.is_empty() {
            let _ = write!(table, "\n{}", round_trips::table(&self.round_trips));
        }
        let samples = || self.entries.iter().flat_map(|entry| &entry.samples);
        if let Some(others) = RoundSpread::of(samples().map(|sample| sample.foreign_load * 100.0)) {
            let _ = writeln!(
                table,
                "\nOther processes used {:.0} % of the machine (worst run {:.0} %).",
                others.median, others.max
            );
            if self.repeated_rounds > 0 {
                let _ = writeln!(table, "{} noisy rounds were played again (--redo-above).", self.repeated_rounds);
            }
            if others.max > NOISY_PERCENT {
                let _ = writeln!(table, "That is a noisy machine: repeat before believing a narrow verdict.");
            }
        }
        for entry in &self.entries {
            if let Some(problem) = &entry.problem {
                let _ = writeln!(table, "\nINVALID {} ({}): {problem}", entry.name, entry.contender);
            }
        }
        table
    }

    /// Every sample and verdict.
    #[must_use]
    pub fn json(&self) -> String {
        let entries: Vec<_> = self.entries.iter().map(entry_json).collect();
        let lines = self.comparisons.iter().flat_map(|(scene, lines)| lines.iter().map(move |line| (scene, line)));
        let comparisons: Vec<_> = lines.map(|(scene, line)| contender_json(scene, line)).collect();
        let trips: Vec<_> = self.round_trips.iter().map(trips_json).collect();
        format!(
            "{{\"settings\":{},\"rounds\":{},\"redone\":{},\"comparisons\":[{}],\"entries\":[\n{}\n],\
             \"round_trips\":[{}]}}\n",
            quoted(&self.settings),
            self.rounds,
            self.repeated_rounds,
            comparisons.join(","),
            entries.join(",\n"),
            trips.join(",")
        )
    }
}

/// Lines of cells as a table, the first of them as its head.
fn aligned<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut table = String::new();
    for (index, line) in lines.iter().enumerate() {
        let cells: Vec<_> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(table, "| {} |", cells.join(" | "));
        if index == 0 {
            let _ = writeln!(table, "|{}|", widths.map(|width| "-".repeat(width + 2)).join("|"));
        }
    }
    table
}

/// The contenders of a scene beside [`COMPARED_WITH`], if that took part and none of them had a problem all along.
fn contender_lines(played: &BenchmarkResult) -> Option<(&'static str, Vec<ContenderLine>)> {
    let base = played.measured.iter().find(|measured| measured.name == COMPARED_WITH && measured.problem.is_none())?;
    let line = |measured: &ContenderResult| {
        let median = |pick: &dyn Fn(&RoundSample) -> Option<f64>| {
            RoundSpread::of(measured.samples.iter().filter_map(pick)).map(|spread| spread.median)
        };
        let ratio = |pick: fn(&RoundSample) -> f64| {
            let rounds = measured.samples.iter().zip(&base.samples);
            RoundSpread::of(rounds.map(|(own, base)| pick(own) / pick(base))).map(|spread| spread.median)
        };
        Some(ContenderLine {
            name: measured.name,
            per_second: median(&|sample| Some(sample.per_second))?,
            speed_ratio: ratio(|sample| sample.per_second)?,
            cpu_us: median(&|sample| Some(sample.cpu_us))?,
            cpu_ratio: ratio(|sample| sample.cpu_us)?,
            p50_us: median(&|sample| sample.p50_us)?,
            p99_us: median(&|sample| sample.p99_us)?,
        })
    };
    let valid = played.measured.iter().filter(|measured| measured.problem.is_none());
    Some((played.benchmark.name, valid.filter_map(line).collect()))
}

fn comparison_lines(contenders: &[ContenderLine]) -> Vec<[String; 8]> {
    let head = [
        "contender",
        "requests/s",
        "× nginx",
        "CPU µs per request",
        "CPU × nginx",
        "p50 µs",
        "p99 µs",
        "vCPU per 1,000 requests/s",
    ];
    let line = |line: &ContenderLine| {
        [
            line.name.to_owned(),
            format!("{:.0}", line.per_second),
            format!("{:.2}", line.speed_ratio),
            format!("{:.1}", line.cpu_us),
            format!("{:.2}", line.cpu_ratio),
            format!("{:.0}", line.p50_us),
            format!("{:.0}", line.p99_us),
            // A thousand times so many microseconds in a second.
            format!("{:.4}", line.cpu_us / 1_000.0),
        ]
    };
    std::iter::once(head.map(str::to_owned)).chain(contenders.iter().map(line)).collect()
}

fn contender_json(scene: &str, line: &ContenderLine) -> String {
    let ContenderLine { name, per_second, speed_ratio, cpu_us, cpu_ratio, p50_us, p99_us } = line;
    format!(
        "\n{{\"scene\":{},\"contender\":{},\"per_second\":{per_second:.1},\"speed_ratio\":{speed_ratio:.4},\
         \"cpu_us\":{cpu_us:.2},\"cpu_ratio\":{cpu_ratio:.4},\"p50_us\":{p50_us:.1},\"p99_us\":{p99_us:.1}}}",
        quoted(scene),
        quoted(name)
    )
}

/// First the scene's baselines, then its rows.
fn entries(played: &BenchmarkResult, judging: bool) -> Vec<ReportEntry> {
    let is_row = |measured: &&ContenderResult| played.rows.iter().any(|row| row.contender == measured.name);
    let baselines = played.measured.iter().filter(|measured| !is_row(measured)).map(|measured| ReportEntry {
        name: format!("{}: {}", played.benchmark.name, measured.name),
        contender: measured.name,
        samples: measured.samples.clone(),
        problem: measured.problem.clone(),
        judgements: Vec::new(),
    });
    let rows = played.rows.iter().filter_map(|row| row_entry(row, &played.measured, judging));
    baselines.chain(rows).collect()
}

fn row_entry(row: &'static BenchmarkRow, measured: &[ContenderResult], judging: bool) -> Option<ReportEntry> {
    let find = |name| measured.iter().find(|measured| measured.name == name);
    let own = find(row.contender)?;
    let judged = row
        .targets
        .iter()
        .filter_map(|target| Some(judge_target(target, own, find(target.baseline)?, judging)))
        .collect();
    Some(ReportEntry {
        name: row.name.to_owned(),
        contender: row.contender,
        samples: own.samples.clone(),
        problem: own.problem.clone(),
        judgements: judged,
    })
}

/// Figures on the first line; a further line for every further target.
fn table_lines(entry: &ReportEntry) -> Vec<[String; 9]> {
    let figure = |pick: fn(&RoundSample) -> Option<f64>, digits: usize| match (
        &entry.problem,
        RoundSpread::of(entry.samples.iter().filter_map(pick)),
    ) {
        (None, Some(spread)) => format!("{:.digits$}", spread.median),
        _ => "–".to_owned(),
    };
    let figures = [
        figure(|sample| Some(sample.per_second), 0),
        figure(|sample| sample.p50_us, 0),
        figure(|sample| sample.p99_us, 0),
        figure(|sample| Some(sample.cpu_us), 1),
        figure(|sample| sample.store_cpu_us, 1),
    ];
    if entry.judgements.is_empty() {
        let [speed, p50, p99, cpu, store] = figures;
        let verdict = if entry.problem.is_some() { TargetVerdict::Invalid.name() } else { "baseline" };
        return vec![[entry.name.clone(), speed, "–".into(), p50, p99, cpu, store, "–".into(), verdict.into()]];
    }
    let mut lines = Vec::new();
    for (index, judged) in entry.judgements.iter().enumerate() {
        let [speed, p50, p99, cpu, store] = if index == 0 { figures.clone() } else { Default::default() };
        let name = if index == 0 { entry.name.clone() } else { String::new() };
        let (ratio, target) = comparison(judged);
        lines.push([name, speed, ratio, p50, p99, cpu, store, target, judged.verdict.name().into()]);
    }
    lines
}

fn comparison(judged: &TargetResult) -> (String, String) {
    let base = judged.target.baseline;
    let target = match judged.target.measure {
        TargetMeasure::Speed(at_least) => format!("≥ {at_least:.2} × {base}"),
        TargetMeasure::CpuRatio(at_most) => format!("CPU ≤ {at_most:.2} × {base}"),
        TargetMeasure::SpeedNotJudged => format!("(× {base}, shown only)"),
    };
    let shown = match judged.spread {
        None => "–".to_owned(),
        Some(RoundSpread { median, min, max }) => format!("{median:.2} ({min:.2}–{max:.2})"),
    };
    (shown, target)
}

fn entry_json(entry: &ReportEntry) -> String {
    let samples: Vec<_> = entry
        .samples
        .iter()
        .map(
            |RoundSample {
                 per_second,
                 p50_us,
                 p99_us,
                 cpu_us,
                 store_cpu_us,
                 load_cpu_us,
                 idle,
                 foreign_load: others,
             }| {
                let time = |us: &Option<f64>| us.map_or("null".to_owned(), |us| format!("{us:.1}"));
                let (p50, p99, store) = (time(p50_us), time(p99_us), time(store_cpu_us));
                format!(
                    "{{\"per_second\":{per_second:.1},\"p50_us\":{p50},\"p99_us\":{p99},\"cpu_us\":{cpu_us:.2},\
                 \"store_cpu_us\":{store},\"load_cpu_us\":{load_cpu_us:.2},\"idle\":{idle:.3},\"others\":{others:.3}}}"
                )
            },
        )
        .collect();
    let targets: Vec<_> = entry.judgements.iter().map(judged_json).collect();
    format!(
        "{{\"name\":{},\"contender\":{},\"problem\":{},\"samples\":[{}],\"targets\":[{}]}}",
        quoted(&entry.name),
        quoted(entry.contender),
        entry.problem.as_deref().map_or("null".to_owned(), quoted),
        samples.join(","),
        targets.join(",")
    )
}

fn judged_json(judged: &TargetResult) -> String {
    let (measure, bound) = match judged.target.measure {
        TargetMeasure::Speed(at_least) => ("speed-at-least", at_least.to_string()),
        TargetMeasure::CpuRatio(at_most) => ("cpu-ratio-at-most", at_most.to_string()),
        TargetMeasure::SpeedNotJudged => ("speed-shown", "null".to_owned()),
    };
    let spread = judged.spread.map_or("null".to_owned(), |RoundSpread { median, min, max }| {
        format!("{{\"median\":{median:.4},\"min\":{min:.4},\"max\":{max:.4}}}")
    });
    let (base, verdict) = (quoted(judged.target.baseline), quoted(judged.verdict.name()));
    format!(
        "{{\"baseline\":{base},\"measure\":\"{measure}\",\"bound\":{bound},\"result\":{spread},\"verdict\":{verdict}}}"
    )
}

fn trips_json(trips: &RoundTrips) -> String {
    let RoundTrips { subject: on, operation, counted: [redis, postgres], expected: [redis_due, postgres_due] } = trips;
    let name = quoted(&format!("{on}: {operation}"));
    format!(
        "{{\"name\":{name},\"redis\":{redis},\"redis_due\":{redis_due},\"postgres\":{postgres},\
         \"postgres_due\":{postgres_due}}}"
    )
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_text_is_escaped() {
        assert_eq!(quoted("a\"b\\c\n"), r#""a\"b\\c\u000a""#);
    }
}
