//! A server process that cannot outlive its owner: dropping a [`ServerChild`] kills the process and waits for it.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::mpsc, time::timeout};

/// How long a server may take to say that it listens.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Lines of output kept to explain a failure.
const MAX_KEPT_LINES: usize = 20;

/// A running server.
#[derive(Debug)]
pub struct ServerChild {
    child: Child,
    addr: SocketAddr,
    /// Removed with it.
    folder: Option<tempfile::TempDir>,
}

impl ServerChild {
    /// Keeps its folder for as long as it runs.
    #[must_use]
    pub fn with_folder(mut self, folder: tempfile::TempDir) -> Self {
        self.folder = Some(folder);
        self
    }

    /// Starts `program` and waits until a line of its output says where it listens.
    ///
    /// # Errors
    /// A sentence for the user: no such program, it ended, or it did not say in time; with its last lines of output.
    pub async fn start(program: &Path, args: &[String]) -> Result<Self, String> {
        let name = program.display();
        let child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    format!("{name}: no such program; build it or name it with its flag")
                }
                _ => format!("{name}: cannot be started: {error}"),
            })?;
        // Owned from here on, so that every early return kills the process.
        let mut server = Self { child, addr: ([127, 0, 0, 1], 0).into(), folder: None };
        let output = Arc::new(Mutex::new(VecDeque::new()));
        let (sender, mut listening) = mpsc::unbounded_channel();
        if let Some(stdout) = server.child.stdout.take() {
            drain(stdout, Arc::clone(&output), sender.clone());
        }
        if let Some(stderr) = server.child.stderr.take() {
            drain(stderr, Arc::clone(&output), sender);
        }
        let problem = match timeout(START_TIMEOUT, listening.recv()).await {
            Ok(Some(addr)) => {
                server.addr = addr;
                return Ok(server);
            }
            Ok(None) => "ended before it listened",
            Err(_) => "did not say in time where it listens",
        };
        let lines = output.lock().make_contiguous().join("\n  ");
        Err(format!("{name} {} {problem}\n  {lines}", args.join(" ")))
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for ServerChild {
    fn drop(&mut self) {
        // Killing fails only if the process has already been waited for; either way it is gone after `wait`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a pipe to its end on a thread of its own, so that a talkative server never blocks on it.
fn drain(
    pipe: impl Read + Send + 'static, kept: Arc<Mutex<VecDeque<String>>>, found: mpsc::UnboundedSender<SocketAddr>,
) {
    thread::spawn(move || {
        let mut found = Some(found);
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            if let Some(addr) = listening_addr(&line)
                && let Some(found) = found.take()
            {
                let _ = found.send(addr);
            }
            let mut kept = kept.lock();
            if kept.len() == MAX_KEPT_LINES {
                kept.pop_front();
            }
            kept.push_back(line.into_owned());
        }
    });
}

/// The first `127.0.0.1:PORT` on a line that says `listening`, unless it is the admin listener that says so.
fn listening_addr(line: &str) -> Option<SocketAddr> {
    const HOST: &str = "127.0.0.1:";
    let (before, after) = line.split_once("listening")?;
    if before.to_ascii_lowercase().contains("admin") {
        return None;
    }
    let rest = &after[after.find(HOST)? + HOST.len()..];
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let port = rest[..digits].parse().ok()?;
    Some(([127, 0, 0, 1], port).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_found_on_any_line_that_says_listening() {
        let port = |line| listening_addr(line).map(|addr| addr.port());
        assert_eq!(port("listening 127.0.0.1:8080"), Some(8080));
        assert_eq!(port("ibid 0.1.0 listening on http://127.0.0.1:41/, admin on http://127.0.0.1:42"), Some(41));
        assert_eq!(port("\u{1b}[32mINFO\u{1b}[0m listening on \u{1b}[1mhttp://127.0.0.1:8080\u{1b}[0m"), Some(8080));
        assert_eq!(port("admin listening on http://127.0.0.1:8081"), None);
        assert_eq!(port("upstream is 127.0.0.1:8081"), None);
        assert_eq!(port("listening on 127.0.0.1:99999"), None);
    }

    #[tokio::test]
    async fn a_missing_program_and_one_that_ends_are_told_apart() {
        let missing = ServerChild::start(Path::new("/nowhere/ibid"), &[]).await.unwrap_err();
        assert!(missing.contains("/nowhere/ibid: no such program"), "{missing}");
        let ended =
            ServerChild::start(Path::new("/bin/sh"), &["-c".into(), "echo no store >&2".into()]).await.unwrap_err();
        assert!(ended.contains("ended before it listened") && ended.contains("no store"), "{ended}");
    }

    #[tokio::test]
    async fn a_dropped_server_is_gone() {
        let script = "echo listening 127.0.0.1:1; exec sleep 600";
        let server = ServerChild::start(Path::new("/bin/sh"), &["-c".into(), script.into()]).await.unwrap();
        let proc = format!("/proc/{}", server.pid());
        assert!(Path::new(&proc).exists());
        drop(server);
        assert!(!Path::new(&proc).exists());
    }
}
