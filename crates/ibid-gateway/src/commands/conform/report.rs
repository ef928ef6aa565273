//! What was found, for people, for programs, and for whatever reads JUnit.

use std::{io, time::Duration};

use serde_json::json;

use super::{
    profile::{Level, Profile},
    session::{Finding, Verdict},
};

/// A run that has ended.
pub(super) struct Run<'a> {
    pub(super) url: &'a str,
    pub(super) profile: &'a Profile,
    pub(super) findings: &'a [Finding],
    pub(super) requests: usize,
    pub(super) took: Duration,
}

/// What the profile checks, and why.
pub(super) fn list(profile: &Profile, out: &mut dyn io::Write) -> io::Result<()> {
    for rule in profile.rules() {
        let level = match rule.level {
            Level::Required => "required",
            Level::Advised => "advised",
        };
        writeln!(out, "{:<22}  {level:<8}  {}\n{:<34}{}", rule.id, rule.title, "", rule.cites)?;
    }
    Ok(())
}

impl Run<'_> {
    /// One line per check; more where it failed.
    pub(super) fn text(&self, out: &mut dyn io::Write) -> io::Result<()> {
        writeln!(out, "{}, profile {}\n", self.url, self.profile)?;
        for finding in self.findings {
            let Finding { rule, sent, came, expected, .. } = finding;
            let word = word(finding.verdict);
            match finding.verdict {
                Verdict::NotPerformed => {
                    writeln!(out, "{word:<13}  {:<22}  {}\n{:<39}{expected}", rule.id, rule.title, "")?;
                }
                Verdict::Passed => writeln!(out, "{word:<13}  {:<22}  {}", rule.id, rule.title)?,
                Verdict::Failed | Verdict::Advice => {
                    writeln!(out, "{word:<13}  {:<22}  {}", rule.id, rule.title)?;
                    for (name, text) in [("sent", sent), ("came", came), ("expected", expected), ("cites", &rule.cites)]
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
            count(Verdict::Passed),
            count(Verdict::Failed),
            count(Verdict::Advice),
            count(Verdict::NotPerformed),
            self.requests,
            self.took.as_secs_f64()
        )
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.findings.iter().filter(|finding| finding.verdict == verdict).count()
    }

    /// Everything.
    pub(super) fn json(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let checks = self.findings.iter().map(|finding| {
            json!({
                "id": finding.rule.id,
                "title": finding.rule.title,
                "level": if finding.rule.level == Level::Required { "required" } else { "advised" },
                "verdict": word(finding.verdict).to_lowercase(),
                "sent": finding.sent,
                "came": finding.came,
                "expected": finding.expected,
                "cites": finding.rule.cites,
            })
        });
        let all = json!({
            "url": self.url,
            "profile": self.profile.name,
            "passed": self.count(Verdict::Passed),
            "failed": self.count(Verdict::Failed),
            "advised": self.count(Verdict::Advice),
            "not_performed": self.count(Verdict::NotPerformed),
            "requests": self.requests,
            "checks": checks.collect::<Vec<_>>(),
        });
        writeln!(out, "{all:#}")
    }

    /// One test case per check. What was not performed is `skipped`; advice is a failure only where it is asked for.
    pub(super) fn junit(&self, strict: bool, complete: bool) -> String {
        let failed = |verdict| match verdict {
            Verdict::Passed => false,
            Verdict::Failed => true,
            Verdict::Advice => strict,
            Verdict::NotPerformed => complete,
        };
        let failures = self.findings.iter().filter(|finding| failed(finding.verdict)).count();
        let skipped = if complete { 0 } else { self.count(Verdict::NotPerformed) };
        let mut xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"ibid conform {}\" tests=\"{}\" \
             failures=\"{failures}\" errors=\"0\" skipped=\"{skipped}\" time=\"{:.3}\">\n",
            escaped(self.profile.name),
            self.findings.len(),
            self.took.as_secs_f64()
        );
        for finding in self.findings {
            let Finding { rule, sent, came, expected, .. } = finding;
            let name = escaped(&format!("{}: {}", rule.id, rule.title));
            xml.push_str(&format!("<testcase classname=\"conform.{}\" name=\"{name}\">", escaped(self.profile.name)));
            let (expected, told) = (
                escaped(expected),
                escaped(&format!("sent: {sent}\ncame: {came}\nexpected: {expected}\ncites: {}", rule.cites)),
            );
            match finding.verdict {
                verdict if failed(verdict) => {
                    xml.push_str(&format!("<failure message=\"expected {expected}\">{told}</failure>"));
                }
                Verdict::NotPerformed => xml.push_str(&format!("<skipped message=\"not performed: {expected}\"/>")),
                Verdict::Advice => xml.push_str(&format!("<system-out>advice\n{told}</system-out>")),
                _ => {}
            }
            xml.push_str("</testcase>\n");
        }
        xml.push_str("</testsuite>\n</testsuites>\n");
        xml
    }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed => "FAILED",
        Verdict::Advice => "advice",
        Verdict::NotPerformed => "not performed",
    }
}

/// Text for XML 1.0, which has no room for most control characters, escaped or not.
fn escaped(text: &str) -> String {
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
        assert_eq!(escaped("<a href=\"x\">&\u{1b}\n"), "&lt;a href=&quot;x&quot;&gt;&amp;\u{fffd}&#10;");
    }
}
