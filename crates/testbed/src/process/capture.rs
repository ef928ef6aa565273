//! Captures the output of a process, line by line.

use std::{
    io::{BufRead as _, BufReader, Read},
    net::SocketAddr,
    process::Child,
    sync::Arc,
    thread,
};

use parking_lot::Mutex;
use tokio::sync::watch;

/// The lines so far. Two threads write it, one per stream, so that a process never blocks on a full pipe while the
/// test is busy.
#[derive(Debug, Default)]
pub(super) struct OutputCapture {
    lines: Mutex<CapturedLines>,
    /// Incremented after every change of `lines`.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct CapturedLines {
    all: Vec<String>,
    earlier_lines: usize,
    /// The number of streams that have ended; two at the end.
    ended_streams: usize,
}

impl OutputCapture {
    pub(super) fn start(child: &mut Child) -> Arc<OutputCapture> {
        let capture = Arc::new(OutputCapture::default());
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        OutputCapture::read_stream(&capture, stdout);
        OutputCapture::read_stream(&capture, stderr);
        capture
    }

    fn read_stream(capture: &Arc<OutputCapture>, stream: impl Read + Send + 'static) {
        let capture = Arc::clone(capture);
        thread::spawn(move || {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            while let Ok(1..) = stream.read_until(b'\n', &mut line) {
                let text = String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned();
                capture.update(|lines| lines.all.push(text));
                line.clear();
            }
            capture.update(|lines| lines.ended_streams += 1);
        });
    }

    fn update(&self, change: impl FnOnce(&mut CapturedLines)) {
        change(&mut self.lines.lock());
        self.changed.send_modify(|count| *count += 1);
    }

    /// Prepends the lines of an earlier run.
    pub(super) fn prepend(&self, earlier: Vec<String>) {
        self.update(|lines| {
            lines.earlier_lines = earlier.len();
            lines.all.splice(0..0, earlier);
        });
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.lines.lock().all.clone()
    }

    pub(super) async fn wait_for_end(&self) {
        self.wait_for(|lines| (lines.ended_streams == 2).then_some(())).await;
    }

    /// Waits for a line that contains `part`. `None` if the streams ended without one.
    pub(super) async fn wait_for_line(&self, part: &str) -> Option<String> {
        self.wait_for(|lines| found_or_ended(lines, lines.all.iter().find(|line| line.contains(part)).cloned())).await
    }

    /// Waits for the address in a line of this run that starts with `start`. `None` if the streams ended without one.
    pub(super) async fn wait_for_address(&self, start: &str) -> Option<SocketAddr> {
        let address = |line: &String| {
            let url = line.strip_prefix(start)?.split_whitespace().next()?;
            let (_, address) = url.split_once("://")?;
            address.trim_end_matches('/').parse().ok()
        };
        self.wait_for(|lines| found_or_ended(lines, lines.all.iter().skip(lines.earlier_lines).find_map(address))).await
    }

    async fn wait_for<T>(&self, check: impl Fn(&CapturedLines) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            if let Some(found) = check(&self.lines.lock()) {
                return found;
            }
            // `self` owns the sender, so this cannot fail.
            let _ = changed.changed().await;
        }
    }
}

fn found_or_ended<T>(lines: &CapturedLines, found: Option<T>) -> Option<Option<T>> {
    match found {
        Some(found) => Some(Some(found)),
        None => (lines.ended_streams == 2).then_some(None),
    }
}
