//! Parses the fenced blocks of a Markdown page, and the commands in them.

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FencedBlock {
    /// The first word after the opening fence.
    pub(super) language: String,
    /// The number of its first line in the page, from 1.
    pub(super) first_line: usize,
    pub(super) lines: Vec<String>,
}

impl FencedBlock {
    pub(super) fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{line}\n")).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DocCommand {
    /// Its line in the page, from 1.
    pub(super) line: usize,
    pub(super) command: String,
    pub(super) expected: Vec<String>,
}

/// Returns all fenced blocks, in order. An unclosed block ends with the page.
pub(super) fn parse_blocks(page: &str) -> Vec<FencedBlock> {
    let mut blocks = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let Some(fence) = FenceMarker::opening(line) else { continue };
        let language = fence.rest.split_whitespace().next().unwrap_or_default().to_owned();
        let inside = lines.by_ref().map(|(_, line)| line).take_while(|line| !fence.is_closed_by(line));
        let lines = inside.map(|line| fence.unindented(line).to_owned()).collect();
        blocks.push(FencedBlock { language, first_line: index + 2, lines });
    }
    blocks
}

/// Returns the commands of a console block, or the line of the first error with its reason.
pub(super) fn parse_commands(block: &FencedBlock) -> Result<Vec<DocCommand>, (usize, String)> {
    let mut steps: Vec<DocCommand> = Vec::new();
    let mut continued = false;
    for (index, line) in block.lines.iter().enumerate() {
        let number = block.first_line + index;
        let step = match (steps.last_mut(), line.strip_prefix("$ ")) {
            (Some(step), _) if continued => {
                step.command.push('\n');
                step.command.push_str(line);
                step
            }
            (_, Some(command)) => {
                steps.push(DocCommand { line: number, command: command.to_owned(), expected: Vec::new() });
                steps.last_mut().expect("just pushed")
            }
            (Some(step), None) => {
                step.expected.push(line.trim_end().to_owned());
                continue;
            }
            (None, None) if line.trim().is_empty() => continue,
            (None, None) => return Err((number, format!("output before any command: {line:?}"))),
        };
        continued = step.command.ends_with('\\');
    }
    if continued {
        return Err((block.first_line + block.lines.len(), "the block ends in the middle of a command".to_owned()));
    }
    for step in &mut steps {
        while step.expected.last().is_some_and(String::is_empty) {
            step.expected.pop();
        }
    }
    Ok(steps)
}

struct FenceMarker<'a> {
    indent: usize,
    mark: char,
    length: usize,
    rest: &'a str,
}

impl FenceMarker<'_> {
    fn opening(line: &str) -> Option<FenceMarker<'_>> {
        let inner = line.trim_start_matches(' ');
        let mark = inner.chars().next().filter(|mark| matches!(mark, '`' | '~'))?;
        let rest = inner.trim_start_matches(mark);
        let length = inner.len() - rest.len();
        // Three backticks around words within one line are code, not a fence.
        let fence = length >= 3 && !(mark == '`' && rest.contains('`'));
        fence.then_some(FenceMarker { indent: line.len() - inner.len(), mark, length, rest })
    }

    fn is_closed_by(&self, line: &str) -> bool {
        let line = line.trim();
        line.len() >= self.length && line.chars().all(|c| c == self.mark)
    }

    /// Removes at most the fence's indentation from a line.
    fn unindented<'l>(&self, line: &'l str) -> &'l str {
        let spaces = line.len() - line.trim_start_matches(' ').len();
        &line[spaces.min(self.indent)..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_language_line_and_unindented_text() {
        let page = "# T\n\n```toml title=x\na = 1\n```\n\n1. item\n   ```console\n   $ ls\n     two\n   ```\n````md\n```\nx\n````\n";
        let blocks = parse_blocks(page);
        let brief: Vec<_> = blocks.iter().map(|b| (b.language.as_str(), b.first_line, b.lines.join("|"))).collect();
        let expected =
            [("toml", 4, "a = 1".to_owned()), ("console", 9, "$ ls|  two".to_owned()), ("md", 13, "```|x".to_owned())];
        assert_eq!(brief, expected);
    }

    #[test]
    fn a_command_goes_on_after_a_backslash() {
        let block = parse_blocks("```console\n$ echo a \\\n  b\na b\n\n$ true\n```").remove(0);
        let steps = parse_commands(&block).unwrap();
        assert_eq!(steps.len(), 2);
        assert_eq!((steps[0].line, steps[0].command.as_str()), (2, "echo a \\\n  b"));
        assert_eq!(steps[0].expected, ["a b"]);
        assert_eq!((steps[1].line, steps[1].expected.len()), (6, 0));
    }

    #[test]
    fn a_block_that_makes_no_sense_is_refused() {
        let refused = |page: &str| parse_commands(&parse_blocks(page)[0]).unwrap_err();
        assert_eq!(refused("```console\nhello\n```").0, 2);
        assert!(refused("```console\n$ echo \\\n```").1.contains("middle of a command"));
    }
}
