//! A server process that cannot outlive its owner: dropping a [`ServerChild`] kills the process and waits for it.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read},
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    net::TcpStream,
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

/// How long a server may take to say that it listens.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// The name of an exchange API's socket in its server's folder.
pub const API_SOCKET: &str = "api.sock";
/// Lines of output kept to explain a failure.
const MAX_KEPT_LINES: usize = 20;

/// A running server.
#[derive(Debug)]
pub struct ServerChild {
    child: Child,
    addr: SocketAddr,
    /// Whether it leads a process group of its own, for it has children that would survive it.
    has_group: bool,
    /// Removed with it.
    folder: Option<tempfile::TempDir>,
    /// The server that it asks about requests, which ends with it.
    asks: Option<Box<Self>>,
}

impl ServerChild {
    /// Keeps its folder for as long as it runs.
    #[must_use]
    pub fn with_folder(mut self, folder: tempfile::TempDir) -> Self {
        self.folder = Some(folder);
        self
    }

    /// Keeps the server that it asks about requests for as long as it runs.
    #[must_use]
    pub fn with_asked(mut self, asked: Self) -> Self {
        self.asks = Some(Box::new(asked));
        self
    }

    /// The server that it asks about requests.
    #[must_use]
    pub fn asked(&self) -> Option<&Self> {
        self.asks.as_deref()
    }

    /// Starts `program` and waits until a line of its output says where it listens.
    ///
    /// # Errors
    /// A sentence for the user: no such program, it ended, or it did not say in time; with its last lines of output.
    pub async fn start(program: &Path, args: &[String]) -> Result<Self, String> {
        let (mut server, output, mut listening) = Self::spawn(program, args, false)?;
        let problem = match timeout(START_TIMEOUT, listening.recv()).await {
            Ok(Some(addr)) => {
                server.addr = addr;
                return Ok(server);
            }
            Ok(None) => "ended before it listened",
            Err(_) => "did not say in time where it listens",
        };
        Err(failure(program, args, problem, &output))
    }

    /// Starts `program`, which was told to listen at `addr` and may have children, and waits until it does.
    ///
    /// # Errors
    /// As [`ServerChild::start`].
    pub async fn start_at(program: &Path, args: &[String], addr: SocketAddr) -> Result<Self, String> {
        let (mut server, output, _) = Self::spawn(program, args, true)?;
        server.addr = addr;
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(addr).await.is_err() {
            if !matches!(server.child.try_wait(), Ok(None)) {
                return Err(failure(program, args, "ended before it listened", &output));
            }
            if Instant::now() > deadline {
                return Err(failure(program, args, "did not listen in time", &output));
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(server)
    }

    /// Starts the process; what it writes is kept, and the addresses that it says are sent.
    fn spawn(program: &Path, args: &[String], has_group: bool) -> Result<SpawnedServer, String> {
        let name = program.display();
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if has_group {
            command.process_group(0);
        }
        let child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                format!("{name}: no such program; build it or name it with its flag")
            }
            _ => format!("{name}: cannot be started: {error}"),
        })?;
        // Owned from here on, so that every early return kills the process.
        let mut server = Self { child, addr: ([127, 0, 0, 1], 0).into(), has_group, folder: None, asks: None };
        let output = KeptOutput::default();
        let (sender, listening) = mpsc::unbounded_channel();
        if let Some(stdout) = server.child.stdout.take() {
            drain(stdout, Arc::clone(&output), sender.clone());
        }
        if let Some(stderr) = server.child.stderr.take() {
            drain(stderr, Arc::clone(&output), sender);
        }
        Ok((server, output, listening))
    }

    /// Asks it to end, and waits until it has.
    ///
    /// # Errors
    /// If it does not within some seconds.
    pub async fn terminate(mut self) -> Result<(), String> {
        send_signal("TERM", &self.pid().to_string());
        let deadline = Instant::now() + START_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                return Err(format!("process {} did not end when it was asked to", self.pid()));
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Where its exchange API listens, if it has one.
    #[must_use]
    pub fn api_socket(&self) -> Option<PathBuf> {
        let socket = self.folder.as_ref()?.path().join(API_SOCKET);
        socket.exists().then_some(socket)
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
        if self.has_group {
            send_signal("KILL", &format!("-{}", self.pid()));
        }
        // Killing fails only if the process has already been waited for; either way it is gone after `wait`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

type KeptOutput = Arc<Mutex<VecDeque<String>>>;
type SpawnedServer = (ServerChild, KeptOutput, mpsc::UnboundedReceiver<SocketAddr>);

fn failure(program: &Path, args: &[String], problem: &str, output: &KeptOutput) -> String {
    let lines = output.lock().make_contiguous().join("\n  ");
    format!("{} {} {problem}\n  {lines}", program.display(), args.join(" "))
}

/// Sends a signal to a process, or to a group if its number is negative. One that is gone needs none.
fn send_signal(signal: &str, process: &str) {
    let _ = Command::new("kill").args(["-s", signal, "--", process]).stderr(Stdio::null()).status();
}

/// Reads a pipe to its end on a thread of its own, so that a talkative server never blocks on it.
fn drain(pipe: impl Read + Send + 'static, kept: KeptOutput, found: mpsc::UnboundedSender<SocketAddr>) {
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
        assert_eq!(port("ibid 0.2.0 listening on http://127.0.0.1:41/, admin on http://127.0.0.1:42"), Some(41));
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
    async fn the_children_of_a_dropped_server_are_gone_with_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let script = "sleep 600 & echo $! >\"$0\"; wait";
        let file = tempfile::NamedTempFile::new().unwrap();
        let args = ["-c".into(), script.into(), file.path().display().to_string()];
        let server = ServerChild::start_at(Path::new("/bin/sh"), &args, listener.local_addr().unwrap()).await.unwrap();
        let child = loop {
            match std::fs::read_to_string(file.path()).unwrap().trim() {
                "" => sleep(Duration::from_millis(10)).await,
                pid => break pid.to_owned(),
            }
        };
        drop(server);
        // Nobody waits for it any more: it may be a zombie for a moment.
        let gone = || std::fs::read_to_string(format!("/proc/{child}/stat")).map_or(true, |stat| stat.contains(") Z "));
        let deadline = Instant::now() + Duration::from_secs(5);
        while !gone() {
            assert!(Instant::now() < deadline, "process {child} lives");
            sleep(Duration::from_millis(10)).await;
        }
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
