//! Prints the findings as text, JSON and JUnit XML.

use std::{io, time::Duration};

use serde_json::json;

use super::{
    ConformArgs,
    profile::{CheckLevel, ConformProfile},
    session::{CheckFinding, CheckVerdict},
};

pub(super) struct ConformReport<'a> {
    pub(super) args: &'a ConformArgs,
    pub(super) findings: &'a [CheckFinding],
    pub(super) requests: usize,
    pub(super) elapsed: Duration,
}

pub(super) fn print_rules(profile: &ConformProfile, out: &mut dyn io::Write) -> io::Result<()> {
    profile.rules().iter().try_for_each(|rule| {
        let level = rule.level.word();
        writeln!(out, "{:<22}  {level:<8}  {}\n{:<34}{}", rule.id, rule.title, "", rule.citation)
    })
}

impl ConformReport<'_> {
    fn url(&self) -> &str {
        self.args.url.as_deref().unwrap_or_default()
    }

    pub(super) fn print_text(&self, out: &mut dyn io::Write) -> io::Result<()> {
        writeln!(out, "{}, profile {}\n", self.url(), self.args.profile.name)?;
        for CheckFinding { rule, verdict, sent, received, expected } in self.findings {
            writeln!(out, "{:<13}  {:<22}  {}", verdict.word(), rule.id, rule.title)?;
            match verdict {
                CheckVerdict::Passed => {}
                CheckVerdict::NotPerformed => writeln!(out, "{:<39}{expected}", "")?,
                CheckVerdict::Failed | CheckVerdict::Advice => {
                    let lines = [("sent", sent), ("came", received), ("expected", expected), ("cites", &rule.citation)];
                    for (name, text) in lines.iter().filter(|(_, text)| !text.is_empty()) {
                        writeln!(out, "{:<15}{name:<8}  {text}", "")?;
                    }
                }
            }
        }
        writeln!(
            out,
            "\n{} passed, {} failed, {} advised, {} not performed; {} requests in {:.1} s",
            self.count(CheckVerdict::Passed),
            self.count(CheckVerdict::Failed),
            self.count(CheckVerdict::Advice),
            self.count(CheckVerdict::NotPerformed),
            self.requests,
            self.elapsed.as_secs_f64()
        )
    }

    fn count(&self, verdict: CheckVerdict) -> usize {
        self.findings.iter().filter(|finding| finding.verdict == verdict).count()
    }

    pub(super) fn print_json(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let checks = self.findings.iter().map(|finding| {
            json!({
                "id": finding.rule.id,
                "title": finding.rule.title,
                "level": finding.rule.level.word(),
                "verdict": finding.verdict.word().to_lowercase(),
                "sent": finding.sent,
                "came": finding.received,
                "expected": finding.expected,
                "cites": finding.rule.citation,
            })
        });
        let all = json!({
            "url": self.url(),
            "profile": self.args.profile.name,
            "passed": self.count(CheckVerdict::Passed),
            "failed": self.count(CheckVerdict::Failed),
            "advised": self.count(CheckVerdict::Advice),
            "not_performed": self.count(CheckVerdict::NotPerformed),
            "requests": self.requests,
            "checks": checks.collect::<Vec<_>>(),
        });
        writeln!(out, "{all:#}")
    }

    /// Returns one test case per check. Checks that were not performed are `skipped`; advice fails only with `strict`.
    pub(super) fn to_junit(&self) -> String {
        let failures = self.findings.iter().filter(|finding| self.args.fails_run(finding.verdict)).count();
        let skipped = if self.args.complete { 0 } else { self.count(CheckVerdict::NotPerformed) };
        let profile = escape_xml(self.args.profile.name);
        let mut xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"ibid conform {profile}\" tests=\"{}\" \
             failures=\"{failures}\" errors=\"0\" skipped=\"{skipped}\" time=\"{:.3}\">\n",
            self.findings.len(),
            self.elapsed.as_secs_f64()
        );
        for CheckFinding { rule, verdict, sent, received, expected } in self.findings {
            let name = escape_xml(&format!("{}: {}", rule.id, rule.title));
            let told = format!("sent: {sent}\ncame: {received}\nexpected: {expected}\ncites: {}", rule.citation);
            let (expected, told) = (escape_xml(expected), escape_xml(&told));
            let result = match *verdict {
                verdict if self.args.fails_run(verdict) => {
                    format!("<failure message=\"expected {expected}\">{told}</failure>")
                }
                CheckVerdict::NotPerformed => format!("<skipped message=\"not performed: {expected}\"/>"),
                CheckVerdict::Advice => format!("<system-out>advice\n{told}</system-out>"),
                _ => String::new(),
            };
            xml += &format!("<testcase classname=\"conform.{profile}\" name=\"{name}\">{result}</testcase>\n");
        }
        xml + "</testsuite>\n</testsuites>\n"
    }
}

impl CheckVerdict {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Advice => "advice",
            Self::NotPerformed => "not performed",
        }
    }
}

impl CheckLevel {
    fn word(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Advised => "advised",
        }
    }
}

/// Escapes text for XML 1.0, which cannot represent most control characters.
fn escape_xml(text: &str) -> String {
    let text = text.replace('\t', " ").replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let invalid = |found: char| found != '\n' && (found.is_control() || matches!(found, '\u{fffe}' | '\u{ffff}'));
    text.replace('"', "&quot;").replace(invalid, "\u{fffd}").replace('\n', "&#10;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_stays_text_in_xml() {
        assert_eq!(escape_xml("<a href=\"x\">&\u{1b}\n"), "&lt;a href=&quot;x&quot;&gt;&amp;\u{fffd}&#10;");
    }
}
