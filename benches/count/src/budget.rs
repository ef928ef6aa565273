//! The committed maximum of every figure, and the comparison with it.

use std::{collections::BTreeMap, fmt::Write};

use crate::measure::CountedRow;

/// How far a figure may exceed its budget: what another compiler or another order of functions makes of the same source.
const SLACK: f64 = 1.03;
/// A difference smaller than this is rounding.
const ROUNDING: f64 = 0.05;

const HEAD: &str = "\
# The maximum of each figure per operation; `scripts/bench --only-counts --check` allows 3 % more.
# Written by `scripts/bench --only-counts --write-budgets`. What the figures are: benches/README.md.
";

/// Budgets by row, and in each by figure.
pub type Budgets = BTreeMap<String, BTreeMap<String, f64>>;

/// The figures of a row that have a budget, with their names.
fn budgeted(row: &CountedRow) -> [(&'static str, f64); 5] {
    [
        ("instructions", row.cost.without_sha256() - row.cost.libc),
        ("sha256_blocks", row.sha256_blocks),
        ("allocations", row.cost.allocations),
        ("bytes", row.cost.bytes),
        ("clock_readings", row.cost.clock_readings),
    ]
}

/// Reads a budget file.
///
/// # Errors
/// If it is no TOML of tables with numbers.
pub fn parse(file: &str) -> Result<Budgets, String> {
    let number = |value: &toml::Value| value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64));
    let tables: toml::Table = file.parse().map_err(|why| format!("the budget file: {why}"))?;
    let mut budgets = Budgets::new();
    for (row, figures) in &tables {
        let figures = figures.as_table().ok_or_else(|| format!("the budget file: {row} is no table"))?;
        for (figure, budget) in figures {
            let budget = number(budget).ok_or_else(|| format!("the budget file: {row}.{figure} is no number"))?;
            budgets.entry(row.clone()).or_default().insert(figure.clone(), budget);
        }
    }
    Ok(budgets)
}

/// A budget file that these rows just meet.
#[must_use]
pub fn write(rows: &[CountedRow]) -> String {
    let mut file = HEAD.to_owned();
    for row in rows {
        let _ = writeln!(file, "\n[{}]", row.name);
        for (figure, counted) in budgeted(row) {
            // Figures of a few are averages; those of thousands are not told from their neighbours.
            let digits = usize::from(counted < 100.0);
            let _ = writeln!(file, "{figure} = {:.digits$}", counted.max(0.0));
        }
    }
    file
}

/// One line per figure that exceeds its budget, or that has none.
#[must_use]
pub fn exceeded(rows: &[CountedRow], budgets: &Budgets) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows {
        for (figure, counted) in budgeted(row) {
            let budget = budgets.get(row.name).and_then(|figures| figures.get(figure));
            match budget {
                None => lines.push(format!(
                    "{} has no budget for {figure}: add it with scripts/bench --only-counts --write-budgets",
                    row.name
                )),
                Some(budget) if counted > budget * SLACK + ROUNDING => lines.push(format!(
                    "{} exceeds its budget: {counted:.1} {figure} where {budget} are allowed and 3 % of slack; make it \
                     cheaper, or say in the commit why it must cost more and run scripts/bench --only-counts --write-budgets",
                    row.name
                )),
                Some(_) => {}
            }
        }
    }
    lines
}

/// One line per figure that is so much better than its budget that the budget should be lowered.
#[must_use]
pub fn improved(rows: &[CountedRow], budgets: &Budgets) -> Vec<String> {
    let figures = rows.iter().flat_map(|row| budgeted(row).map(|(figure, counted)| (row.name, figure, counted)));
    figures
        .filter_map(|(row, figure, counted)| {
            let budget = *budgets.get(row)?.get(figure)?;
            (counted * SLACK + ROUNDING < budget).then(|| {
                format!(
                    "{row} needs only {counted:.1} {figure} of {budget}: lower the budget with scripts/bench \
                     --only-counts --write-budgets"
                )
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::OperationCost;

    fn row() -> CountedRow {
        let cost = OperationCost {
            instructions: 30_000.0,
            sha256: 9_000.0,
            libc: 1_000.0,
            allocations: 12.0,
            bytes: 4_096.0,
            clock_readings: 3.0,
        };
        CountedRow { name: "layer-first", cost, sha256_blocks: 4.0 }
    }

    #[test]
    fn what_was_written_is_met_and_three_per_cent_more_is() {
        let budgets = parse(&write(&[row()])).unwrap();
        assert_eq!(budgets["layer-first"]["instructions"], 20_000.0);
        assert_eq!((exceeded(&[row()], &budgets), improved(&[row()], &budgets)), (vec![], vec![]));
        let mut more = row();
        more.cost.instructions += 590.0;
        assert!(exceeded(&[more.clone()], &budgets).is_empty());
        more.cost.instructions += 100.0;
        let lines = exceeded(&[more], &budgets);
        assert!(
            matches!(&lines[..], [line] if line.starts_with("layer-first exceeds its budget: 20690.0 instructions where 20000"))
        );
    }

    #[test]
    fn another_processors_sha256_and_libc_change_nothing() {
        let budgets = parse(&write(&[row()])).unwrap();
        let mut other = row();
        (other.cost.instructions, other.cost.sha256, other.cost.libc) = (24_000.0, 1_000.0, 3_000.0);
        assert!(exceeded(&[other], &budgets).is_empty());
    }

    #[test]
    fn one_more_allocation_of_few_and_a_row_without_budget_fail() {
        let budgets = parse(&write(&[row()])).unwrap();
        let mut more = row();
        more.cost.allocations += 1.0;
        assert_eq!(exceeded(&[more], &budgets).len(), 1);
        assert_eq!(exceeded(&[row()], &Budgets::new()).len(), 5);
        assert!(parse("[layer-first]\nbytes = \"many\"\n").unwrap_err().contains("layer-first.bytes is no number"));
    }

    #[test]
    fn a_better_figure_is_told() {
        let budgets = parse(&write(&[row()])).unwrap();
        let mut better = row();
        better.cost.allocations = 9.0;
        assert!(improved(&[better], &budgets)[0].starts_with("layer-first needs only 9.0 allocations of 12"));
    }
}
