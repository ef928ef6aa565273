//! Prometheus' text format, version 0.0.4.
//!
//! Written by hand because the metric names are fixed: OpenMetrics libraries append `_total` to counters.

use std::fmt::Write as _;

use super::{MetricFamily, MetricKind, sharded::HistogramSnapshot};

/// Writes the page, family by family.
#[derive(Default)]
pub(super) struct Exposition<'a> {
    text: String,
    family: Option<&'a MetricFamily>,
}

impl<'a> Exposition<'a> {
    /// Starts a family; the samples that follow belong to it.
    pub(super) fn begin_family(&mut self, family: &'a MetricFamily) {
        let MetricFamily { name, kind, help, .. } = family;
        self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        self.family = Some(family);
    }

    /// Writes one sample. `labels` are the values of the family's labels.
    pub(super) fn sample(&mut self, labels: &[&str], value: u64) {
        debug_assert_ne!(self.current_family().kind, MetricKind::Histogram);
        self.write_sample_name("", labels, None);
        self.write(format_args!(" {value}\n"));
    }

    /// Writes one histogram. `labels` are the values of the family's labels.
    pub(super) fn histogram(&mut self, labels: &[&str], spread: &HistogramSnapshot) {
        debug_assert_eq!(self.current_family().kind, MetricKind::Histogram);
        for (bound, count) in spread.cumulative() {
            self.write_sample_name("_bucket", labels, Some(bound));
            self.write(format_args!(" {count}\n"));
        }
        let sum = spread.sum();
        self.write_sample_name("_sum", labels, None);
        self.write(format_args!(" {}.{:09}\n", sum.as_secs(), sum.subsec_nanos()));
        self.write_sample_name("_count", labels, None);
        self.write(format_args!(" {}\n", spread.count()));
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    fn write_sample_name(&mut self, suffix: &str, values: &[&str], le: Option<&str>) {
        let MetricFamily { name, labels, .. } = self.current_family();
        debug_assert_eq!(labels.len(), values.len(), "{name}");
        self.write(format_args!("{name}{suffix}"));
        let pairs = labels.iter().zip(values).map(|(label, value)| (*label, *value)).chain(le.map(|le| ("le", le)));
        let mut before = '{';
        for (label, value) in pairs {
            self.write(format_args!("{before}{label}=\""));
            self.write_escaped(value);
            self.text.push('"');
            before = ',';
        }
        if before == ',' {
            self.text.push('}');
        }
    }

    fn write_escaped(&mut self, value: &str) {
        for c in value.chars() {
            match c {
                '\\' => self.text.push_str("\\\\"),
                '"' => self.text.push_str("\\\""),
                '\n' => self.text.push_str("\\n"),
                c => self.text.push(c),
            }
        }
    }

    fn current_family(&self) -> &'a MetricFamily {
        self.family.expect("samples follow the head of their family")
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
        let mut page = Exposition::default();
        page.begin_family(&family);
        page.sample(&["a\"b\\c\nd", "é"], 7);
        let expected = "# HELP a_total Some.\n# TYPE a_total counter\na_total{x=\"a\\\"b\\\\c\\nd\",y=\"é\"} 7\n";
        assert_eq!(page.into_text(), expected);
    }
}
