//! Prometheus' text format, version 0.0.4.
//!
//! Written by hand because the metric names are fixed: OpenMetrics libraries append `_total` to counters.

use std::fmt::Write as _;

use super::{MetricFamily, MetricKind, counters::HistogramSnapshot};

pub(super) struct FamilyWriter<'a> {
    text: &'a mut String,
    family: &'a MetricFamily,
}

impl<'a> FamilyWriter<'a> {
    /// Writes the head of a family.
    pub(super) fn begin(text: &'a mut String, family: &'a MetricFamily) -> Self {
        let MetricFamily { name, kind, help, .. } = family;
        let mut this = Self { text, family };
        this.write(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        this
    }

    /// Writes one sample. `labels` are the values of the family's labels.
    pub(super) fn sample(&mut self, labels: &[&str], value: u64) {
        debug_assert_ne!(self.family.kind, MetricKind::Histogram);
        self.write_line("", labels, None, format_args!("{value}"));
    }

    /// Writes one sample without labels, if there is a value.
    pub(super) fn number(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.write_line("", &[], None, format_args!("{value}"));
        }
    }

    /// Writes one histogram. `labels` are the values of the family's labels.
    pub(super) fn histogram(&mut self, labels: &[&str], spread: &HistogramSnapshot) {
        debug_assert_eq!(self.family.kind, MetricKind::Histogram);
        for (bound, count) in spread.cumulative() {
            self.write_line("_bucket", labels, Some(bound), format_args!("{count}"));
        }
        let sum = spread.sum();
        self.write_line("_sum", labels, None, format_args!("{}.{:09}", sum.as_secs(), sum.subsec_nanos()));
        self.write_line("_count", labels, None, format_args!("{}", spread.count()));
    }

    fn write_line(&mut self, suffix: &str, values: &[&str], le: Option<&str>, value: std::fmt::Arguments<'_>) {
        let MetricFamily { name, labels, .. } = self.family;
        debug_assert_eq!(labels.len(), values.len(), "{name}");
        self.write(format_args!("{name}{suffix}"));
        let pairs = labels.iter().zip(values).map(|(label, value)| (*label, *value)).chain(le.map(|le| ("le", le)));
        let mut before = '{';
        for (label, value) in pairs {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            self.write(format_args!("{before}{label}=\"{escaped}\""));
            before = ',';
        }
        self.write(format_args!("{} {value}\n", if before == ',' { "}" } else { "" }));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("a string takes everything");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let family = MetricFamily {
            name: "a_total",
            labels: &["x", "y"],
            kind: MetricKind::Counter,
            help: "Some.",
            read: |_, _| {},
        };
        let mut page = String::new();
        FamilyWriter::begin(&mut page, &family).sample(&["a\"b\\c\nd", "é"], 7);
        let expected = "# HELP a_total Some.\n# TYPE a_total counter\na_total{x=\"a\\\"b\\\\c\\nd\",y=\"é\"} 7\n";
        assert_eq!(page, expected);
    }
}
