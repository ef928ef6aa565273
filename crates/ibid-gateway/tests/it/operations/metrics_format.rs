//! Prometheus' text format, read strictly: what this refuses, a scraper may refuse.

use std::collections::{BTreeMap, HashSet};

/// What a page holds.
#[derive(Debug, Default)]
pub(super) struct MetricsPage(Vec<ParsedFamily>);

#[derive(Debug)]
pub(super) struct ParsedFamily {
    pub(super) name: String,
    pub(super) kind: String,
    pub(super) help: String,
    pub(super) samples: Vec<ParsedSample>,
}

#[derive(Debug)]
pub(super) struct ParsedSample {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) value: f64,
}

impl MetricsPage {
    #[track_caller]
    pub(super) fn parse(text: &str) -> Self {
        try_parse(text).unwrap_or_else(|why| panic!("{why}\n{text}"))
    }

    pub(super) fn families(&self) -> &[ParsedFamily] {
        &self.0
    }

    /// The value of a sample; labels that are not named do not matter.
    #[track_caller]
    pub(super) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let samples: Vec<_> = self.0.iter().flat_map(|family| &family.samples).collect();
        let fits = |sample: &&&ParsedSample| {
            sample.name == name
                && labels.iter().all(|(label, value)| sample.labels.get(*label).is_some_and(|found| found == value))
        };
        let fitting: Vec<_> = samples.iter().filter(fits).collect();
        assert!(!fitting.is_empty(), "no {name} with {labels:?}");
        fitting.iter().map(|sample| sample.value).sum()
    }

    /// The value of a sample without labels.
    #[track_caller]
    pub(super) fn value(&self, name: &str) -> f64 {
        self.sum(name, &[])
    }

    /// How many requests of all routes got this.
    #[track_caller]
    pub(super) fn outcome(&self, outcome: &str) -> f64 {
        self.sum("idempotency_requests_total", &[("outcome", outcome)])
    }

    /// How often the store was asked so.
    #[track_caller]
    pub(super) fn store_calls(&self, op: &str) -> f64 {
        self.sum("idempotency_store_seconds_count", &[("op", op)])
    }
}

fn try_parse(text: &str) -> Result<MetricsPage, String> {
    let mut page = MetricsPage::default();
    let body = text.strip_suffix('\n').ok_or("the last line has no end")?;
    let mut lines = body.split('\n').peekable();
    let mut seen = HashSet::new();
    while let Some(line) = lines.next() {
        let (name, help) = line
            .strip_prefix("# HELP ")
            .and_then(|rest| rest.split_once(' '))
            .ok_or_else(|| format!("HELP was expected: {line:?}"))?;
        is_name(name)?;
        let kind = lines.next().and_then(|line| line.strip_prefix(&format!("# TYPE {name} "))).unwrap_or_default();
        if !["counter", "gauge", "histogram"].contains(&kind) || help.is_empty() || help.contains('\\') {
            return Err(format!("{name}: HELP or TYPE is wrong"));
        }
        if !seen.insert(name.to_owned()) {
            return Err(format!("{name} is there twice"));
        }
        let mut family = ParsedFamily { name: name.into(), kind: kind.into(), help: help.into(), samples: Vec::new() };
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            family.samples.push(sample(line).map_err(|why| format!("{why}: {line:?}"))?);
        }
        family.check()?;
        page.0.push(family);
    }
    Ok(page)
}

impl ParsedFamily {
    fn check(&self) -> Result<(), String> {
        let mut seen = HashSet::new();
        for sample in &self.samples {
            let suffix = sample.name.strip_prefix(&self.name).unwrap_or("?");
            let fits = match self.kind.as_str() {
                "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
                _ => suffix.is_empty(),
            };
            if !fits || (suffix == "_bucket") != sample.labels.contains_key("le") {
                return Err(format!("{sample:?} is no sample of {}", self.name));
            }
            if !seen.insert((&sample.name, &sample.labels)) {
                return Err(format!("{sample:?} is there twice"));
            }
            let whole = sample.value >= 0.0 && sample.value.fract() == 0.0;
            // Of the process, some are times.
            let is_count = suffix != "_sum" && !self.name.starts_with("process_");
            if is_count && !whole || sample.value < 0.0 {
                return Err(format!("{sample:?} is no count"));
            }
        }
        if self.kind == "histogram" { self.check_histograms() } else { Ok(()) }
    }

    fn check_histograms(&self) -> Result<(), String> {
        let mut series: BTreeMap<_, Vec<&ParsedSample>> = BTreeMap::new();
        for sample in &self.samples {
            let mut labels = sample.labels.clone();
            labels.remove("le");
            series.entry(labels).or_default().push(sample);
        }
        for (labels, samples) in series {
            let wrong = |what: &str| Err(format!("{} {labels:?}: {what}", self.name));
            let [buckets @ .., sum, count] = &samples[..] else { return wrong("too few samples") };
            if !sum.name.ends_with("_sum") || !count.name.ends_with("_count") {
                return wrong("its sum and its count are not at the end");
            }
            let mut before = (f64::NEG_INFINITY, 0.0);
            for bucket in buckets {
                let Ok(bound) = bucket.labels["le"].parse::<f64>() else { return wrong("le is no number") };
                if bound <= before.0 || bucket.value < before.1 {
                    return wrong("its buckets do not grow");
                }
                before = (bound, bucket.value);
            }
            if before != (f64::INFINITY, count.value) || buckets.last().is_some_and(|last| last.labels["le"] != "+Inf")
            {
                return wrong("the bucket +Inf is not its count");
            }
            if count.value == 0.0 && sum.value != 0.0 {
                return wrong("a sum of nothing");
            }
        }
        Ok(())
    }
}

fn sample(line: &str) -> Result<ParsedSample, String> {
    let name_end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(name_end);
    is_name(name)?;
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").ok_or("a label without a value")?;
            is_name(label)?;
            let (value, after) = unescape(after)?;
            if label.contains(':') || labels.insert(label.to_owned(), value).is_some() {
                return Err(format!("the label {label}"));
            }
            rest = after;
            match rest.split_at_checked(1) {
                Some((",", after)) => rest = after,
                Some(("}", after)) => {
                    rest = after;
                    break;
                }
                _ => return Err("labels do not end".into()),
            }
        }
    }
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    if !value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return Err("the value is no plain number".into());
    }
    Ok(ParsedSample { name: name.into(), labels, value: value.parse().map_err(|_| "the value is no number")? })
}

/// A label's value up to its closing quote, and what follows.
fn unescape(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => value.push(match chars.next() {
                Some((_, '\\')) => '\\',
                Some((_, '"')) => '"',
                Some((_, 'n')) => '\n',
                other => return Err(format!("an escape of {other:?}")),
            }),
            c => value.push(c),
        }
    }
    Err("a quote is not closed".into())
}

fn is_name(name: &str) -> Result<(), String> {
    let fits = |at: usize, byte: u8| {
        byte.is_ascii_alphabetic() || matches!(byte, b'_' | b':') || at > 0 && byte.is_ascii_digit()
    };
    let is = !name.is_empty() && name.bytes().enumerate().all(|(at, byte)| fits(at, byte));
    if is { Ok(()) } else { Err(format!("{name:?} is no name")) }
}

/// A parser that takes everything proves nothing.
#[test]
fn what_is_not_the_text_format_is_refused() {
    let head = "# HELP a_total Some.\n# TYPE a_total counter\n";
    let histogram = "# HELP h Some.\n# TYPE h histogram\n";
    let good = [
        format!("{head}a_total 1\n"),
        format!("{head}a_total{{x=\"a\\\\\\\"\\n,}}\",y=\"\"}} 1\n"),
        format!("{histogram}h_bucket{{le=\"0.1\"}} 1\nh_bucket{{le=\"+Inf\"}} 2\nh_sum 0.3\nh_count 2\n"),
    ];
    for text in good {
        assert!(try_parse(&text).is_ok(), "{text}: {:?}", try_parse(&text));
    }
    let bad = [
        "a_total 1\n".to_owned(),
        format!("{head}a_total 1"),
        format!("{head}\na_total 1\n"),
        format!("{head}a_total 1\na_total 2\n"),
        format!("{head}a_total 1\n{head}a_total{{x=\"\"}} 1\n"),
        format!("{head}a 1\n"),
        format!("{head}a_total -1\n"),
        format!("{head}a_total 1.5\n"),
        format!("{head}a_total NaN\n"),
        format!("{head}a_total  1\n"),
        format!("{head}a_total{{}} 1\n"),
        format!("{head}a_total{{x=\"1\"\n"),
        format!("{head}a_total{{x=\"\\t\"}} 1\n"),
        format!("{head}a_total{{x=\"1\",x=\"2\"}} 1\n"),
        format!("{head}a_total{{1x=\"1\"}} 1\n"),
        "# HELP a-b Some.\n# TYPE a-b counter\na-b 1\n".to_owned(),
        "# TYPE a_total counter\na_total 1\n".to_owned(),
        "# HELP a_total Some.\n# TYPE b_total counter\na_total 1\n".to_owned(),
        format!("{histogram}h_bucket{{le=\"0.1\"}} 1\nh_sum 0.3\nh_count 1\n"),
        format!("{histogram}h_bucket{{le=\"+Inf\"}} 2\nh_sum 0.3\nh_count 1\n"),
        format!("{histogram}h_bucket{{le=\"0.1\"}} 3\nh_bucket{{le=\"+Inf\"}} 2\nh_sum 0.3\nh_count 2\n"),
        format!(
            "{histogram}h_bucket{{le=\"0.2\"}} 1\nh_bucket{{le=\"0.1\"}} 1\nh_bucket{{le=\"+Inf\"}} 2\nh_sum 0.3\nh_count 2\n"
        ),
        format!("{histogram}h_bucket{{le=\"+Inf\"}} 2\nh_count 2\n"),
        format!("{histogram}h 2\n"),
    ];
    for text in bad {
        assert!(try_parse(&text).is_err(), "{text}");
    }
}
