//! Prints the findings as text, JSON and JUnit XML.

use std::{io, time::Duration};

use serde_json::json;

use super::{
    profile::{CheckLevel, ConformProfile},
    session::{CheckFinding, CheckVerdict},
};

pub(super) struct ConformReport<'a> {
    pub(super) url: &'a str,
    pub(super) profile: &'a ConformProfile,
    pub(super) findings: &'a [CheckFinding],
    pub(super) requests: usize,
    pub(super) elapsed: Duration,
}

/// Prints the profile's checks with their reasons.
pub(super) fn print_rules(profile: &ConformProfile, out: &mut dyn io::Write) -> io::Result<()> {
    for rule in profile.rules() {
        let level = match rule.level {
            CheckLevel::Required => "required",
            CheckLevel::Advised => "advised",
        };
        writeln!(out, "{:<22}  {level:<8}  {}\n{:<34}{}", rule.id, rule.title, "", rule.citation)?;
    }
    Ok(())
}

impl ConformReport<'_> {
    /// Prints one line per check, and more for failures.
    pub(super) fn print_text(&self, out: &mut dyn io::Write) -> io::Result<()> {
        writeln!(out, "{}, profile {}\n", self.url, self.profile)?;
        for finding in self.findings {
            let CheckFinding { rule, sent, received: came, expected, .. } = finding;
            let word = verdict_word(finding.verdict);
            match finding.verdict {
                CheckVerdict::NotPerformed => {
                    writeln!(out, "{word:<13}  {:<22}  {}\n{:<39}{expected}", rule.id, rule.title, "")?;
                }
                CheckVerdict::Passed => writeln!(out, "{word:<13}  {:<22}  {}", rule.id, rule.title)?,
                CheckVerdict::Failed | CheckVerdict::Advice => {
                    writeln!(out, "{word:<13}  {:<22}  {}", rule.id, rule.title)?;
                    for (name, text) in
                        [("sent", sent), ("came", came), ("expected", expected), ("cites", &rule.citation)]
                    {
                        if !text.is_empty() {
                            writeln!(out, "{:<15}{name:<8}  {text}", "")?;
                        }
                    }
                }
            }
        }
        let count = |verdict| self.count(verdict);
        writeln!(
            out,
            "\n{} passed, {} failed, {} advised, {} not performed; {} requests in {:.1} s",
            count(CheckVerdict::Passed),
            count(CheckVerdict::Failed),
            count(CheckVerdict::Advice),
            count(CheckVerdict::NotPerformed),
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
                "level": if finding.rule.level == CheckLevel::Required { "required" } else { "advised" },
                "verdict": verdict_word(finding.verdict).to_lowercase(),
                "sent": finding.sent,
                "came": finding.received,
                "expected": finding.expected,
                "cites": finding.rule.citation,
            })
        });
        let all = json!({
            "url": self.url,
            "profile": self.profile.name,
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
    pub(super) fn to_junit(&self, strict: bool, complete: bool) -> String {
        let failed = |verdict| match verdict {
            CheckVerdict::Passed => false,
            CheckVerdict::Failed => true,
            CheckVerdict::Advice => strict,
            CheckVerdict::NotPerformed => complete,
        };
        let failures = self.findings.iter().filter(|finding| failed(finding.verdict)).count();
        let skipped = if complete { 0 } else { self.count(CheckVerdict::NotPerformed) };
        let mut xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"ibid conform {}\" tests=\"{}\" \
             failures=\"{failures}\" errors=\"0\" skipped=\"{skipped}\" time=\"{:.3}\">\n",
            escape_xml(self.profile.name),
            self.findings.len(),
            self.elapsed.as_secs_f64()
        );
        for finding in self.findings {
            let CheckFinding { rule, sent, received: came, expected, .. } = finding;
            let name = escape_xml(&format!("{}: {}", rule.id, rule.title));
            xml.push_str(&format!(
                "<testcase classname=\"conform.{}\" name=\"{name}\">",
                escape_xml(self.profile.name)
            ));
            let (expected, told) = (
                escape_xml(expected),
                escape_xml(&format!("sent: {sent}\ncame: {came}\nexpected: {expected}\ncites: {}", rule.citation)),
            );
            match finding.verdict {
                verdict if failed(verdict) => {
                    xml.push_str(&format!("<failure message=\"expected {expected}\">{told}</failure>"));
                }
                CheckVerdict::NotPerformed => {
                    xml.push_str(&format!("<skipped message=\"not performed: {expected}\"/>"))
                }
                CheckVerdict::Advice => xml.push_str(&format!("<system-out>advice\n{told}</system-out>")),
                _ => {}
            }
            xml.push_str("</testcase>\n");
        }
        xml.push_str("</testsuite>\n</testsuites>\n");
        xml
    }
}

fn verdict_word(verdict: CheckVerdict) -> &'static str {
    match verdict {
        CheckVerdict::Passed => "passed",
        CheckVerdict::Failed => "FAILED",
        CheckVerdict::Advice => "advice",
        CheckVerdict::NotPerformed => "not performed",
    }
}

/// Escapes text for XML 1.0, which cannot represent most control characters.
fn escape_xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' => out.push_str("&#10;"),
            '\t' => out.push(' '),
            control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_stays_text_in_xml() {
        assert_eq!(escape_xml("<a href=\"x\">&\u{1b}\n"), "&lt;a href=&quot;x&quot;&gt;&amp;\u{fffd}&#10;");
    }
}
