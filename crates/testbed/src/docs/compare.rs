//! Compares an output with a page, in which `…` matches anything.

const WILDCARD: &str = "…";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OutputDifference {
    /// The first expected line that does not match.
    pub(super) expected: usize,
    /// The first line of the output that does not match.
    pub(super) got: usize,
}

/// Returns the lines of an output without ignored characters.
pub(super) fn output_lines(output: &str) -> Vec<String> {
    let mut lines: Vec<_> = output.lines().map(|line| line.replace('\r', "").trim_end().to_owned()).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

pub(super) fn compare(expected: &[String], output: &str) -> Result<(), OutputDifference> {
    let got = output_lines(output);
    // `reach[j]`: the expected lines so far match exactly the first j lines of the output.
    let mut reach = vec![false; got.len() + 1];
    reach[0] = true;
    for (index, line) in expected.iter().enumerate() {
        let mut next = vec![false; got.len() + 1];
        if line.trim() == WILDCARD {
            if let Some(first) = reach.iter().position(|reached| *reached) {
                next[first..].fill(true);
            }
        } else {
            for (j, reached) in reach.iter().take(got.len()).enumerate() {
                next[j + 1] = *reached && line_matches(line, &got[j]);
            }
        }
        if !next.contains(&true) {
            // After an open `…` any line might have been meant; the first possible one is the most helpful.
            let got = reach.iter().position(|reached| *reached).unwrap_or_default();
            return Err(OutputDifference { expected: index, got });
        }
        reach = next;
    }
    match reach.iter().rposition(|reached| *reached) {
        Some(end) if end == got.len() => Ok(()),
        end => Err(OutputDifference { expected: expected.len(), got: end.unwrap_or_default() }),
    }
}

fn line_matches(expected: &str, got: &str) -> bool {
    let Some((start, rest)) = expected.split_once(WILDCARD) else { return expected == got };
    let Some(mut got) = got.strip_prefix(start) else { return false };
    let (middles, end) = rest.rsplit_once(WILDCARD).unwrap_or(("", rest));
    // Matching each middle as early as possible leaves the most text for the others.
    for middle in middles.split(WILDCARD) {
        match got.find(middle) {
            Some(at) => got = &got[at + middle.len()..],
            None => return false,
        }
    }
    got.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(expected: &str, got: &str) -> Result<(), OutputDifference> {
        compare(&expected.lines().map(str::to_owned).collect::<Vec<_>>(), got)
    }

    #[test]
    fn the_same_text_matches_whatever_its_line_ends() {
        assert_eq!(check("a\n\nb", "a \r\n\r\nb\n\n"), Ok(()));
        assert_eq!(check("", ""), Ok(()));
    }

    #[test]
    fn an_ellipsis_in_a_line_is_anything_in_that_line() {
        assert!(line_matches("date: …", "date: now"));
        assert!(line_matches("…", ""));
        assert!(line_matches(r#"{"id":…,"run":…}"#, r#"{"id":1,"run":22}"#));
        assert!(line_matches("a…b…a", "aba"));
        assert!(!line_matches("a…a", "a"));
        assert!(!line_matches("a…b", "a\u{62}c"));
        assert!(!line_matches("x…", "yx"));
    }

    #[test]
    fn an_ellipsis_on_its_own_is_any_number_of_lines() {
        assert_eq!(check("a\n…\nd", "a\nd"), Ok(()));
        assert_eq!(check("a\n…\nd", "a\nb\nd\nc\nd"), Ok(()));
        assert_eq!(check("…", ""), Ok(()));
        assert_eq!(check("…\nb\n…", "a\nb\nc"), Ok(()));
        assert_eq!(check("a\n…\nd", "a\nb"), Err(OutputDifference { expected: 2, got: 1 }));
    }

    #[test]
    fn a_difference_says_where() {
        assert_eq!(check("a\nb\nc", "a\nx\nc"), Err(OutputDifference { expected: 1, got: 1 }));
        assert_eq!(check("a\nb", "a"), Err(OutputDifference { expected: 1, got: 1 }));
        assert_eq!(check("a", "a\nb"), Err(OutputDifference { expected: 1, got: 1 }));
        assert_eq!(check("", "oops"), Err(OutputDifference { expected: 0, got: 0 }));
    }
}
