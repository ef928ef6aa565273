//! Captures the output of a process, line by line.

use std::{
    io::{BufRead as _, BufReader, Read},
    net::SocketAddr,
    process::Child,
    sync::Arc,
    thread,
};

use tokio::sync::watch;

/// The lines so far. Two threads write it, one per stream, so that a process never blocks on a full pipe while the
/// test is busy.
pub(super) type OutputCapture = watch::Sender<CapturedLines>;

#[derive(Debug, Default)]
pub(super) struct CapturedLines {
    pub(super) all: Vec<String>,
    earlier_lines: usize,
    /// The number of streams that have ended; two at the end.
    ended_streams: usize,
}

/// Captures the output of a process, after the lines of its earlier runs.
pub(super) fn start(child: &mut Child, earlier: Vec<String>) -> Arc<OutputCapture> {
    let lines = CapturedLines { earlier_lines: earlier.len(), all: earlier, ended_streams: 0 };
    let capture = Arc::new(watch::Sender::new(lines));
    read_stream(&capture, child.stdout.take().expect("stdout is piped"));
    read_stream(&capture, child.stderr.take().expect("stderr is piped"));
    capture
}

fn read_stream(capture: &Arc<OutputCapture>, stream: impl Read + Send + 'static) {
    let capture = Arc::clone(capture);
    thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while let Ok(1..) = stream.read_until(b'\n', &mut line) {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned();
            capture.send_modify(|lines| lines.all.push(text));
            line.clear();
        }
        capture.send_modify(|lines| lines.ended_streams += 1);
    });
}

pub(super) async fn wait_for_end(capture: &OutputCapture) {
    wait_for(capture, |_| None::<()>).await;
}

/// Waits for a line that contains `part`. `None` if the streams ended without one.
pub(super) async fn wait_for_line(capture: &OutputCapture, part: &str) -> Option<String> {
    wait_for(capture, |lines| lines.all.iter().find(|line| line.contains(part)).cloned()).await
}

/// Waits for the address in a line of this run that starts with `start`. `None` if the streams ended without one.
pub(super) async fn wait_for_address(capture: &OutputCapture, start: &str) -> Option<SocketAddr> {
    let address = |line: &String| {
        let url = line.strip_prefix(start)?.split_whitespace().next()?;
        let (_, address) = url.split_once("://")?;
        address.trim_end_matches('/').parse().ok()
    };
    wait_for(capture, |lines| lines.all.iter().skip(lines.earlier_lines).find_map(address)).await
}

async fn wait_for<T>(capture: &OutputCapture, look: impl Fn(&CapturedLines) -> Option<T>) -> Option<T> {
    let mut receiver = capture.subscribe();
    // The caller holds the sender, so this cannot fail.
    let lines = receiver.wait_for(|lines| lines.ended_streams == 2 || look(lines).is_some()).await.ok()?;
    look(&lines)
}
