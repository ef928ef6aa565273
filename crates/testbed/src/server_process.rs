//! What the private servers have in common: a directory, a process, its log.
//!
//! Invariants: a server listens only on 127.0.0.1, on free ports, with its files in its own directory. It ends with its
//! owner, however that ends. A missing program fails the test and names its package.

use std::{
    collections::{VecDeque, hash_map::RandomState},
    fs,
    hash::BuildHasher,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Sender, channel},
    },
    thread::{self, sleep},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

const FOLDER_PREFIX: &str = "ibid-server-";
/// Timeout of any wait: servers start slowly if many tests run on few cores.
const SERVER_TIMEOUT: Duration = Duration::from_secs(180);
const MAX_SHOWN_LOG_LINES: usize = 60;

static FOLDERS_MADE: AtomicU64 = AtomicU64::new(0);

/// A directory that is removed with its owner. Creating one also removes those of killed processes.
#[derive(Debug)]
pub(crate) struct ServerFolder(PathBuf);

impl ServerFolder {
    /// If this process is root, the directory belongs to `user`.
    pub(crate) fn new(user: Option<&str>) -> Self {
        static CLEANED: OnceLock<()> = OnceLock::new();
        CLEANED.get_or_init(remove_stale_folders);
        let name = format!("{FOLDER_PREFIX}{}-{}", std::process::id(), FOLDERS_MADE.fetch_add(1, Relaxed));
        let folder = Self(std::env::temp_dir().join(name));
        fs::create_dir_all(&folder.0).expect("a folder");
        if let Some(user) = user.filter(|_| is_root()) {
            let given = Command::new("chown").arg(format!("{user}:{user}")).arg(&folder.0).status();
            assert!(given.is_ok_and(|status| status.success()), "there is no user {user}: install its Debian package");
        }
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for ServerFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn remove_stale_folders() {
    let Ok(folders) = fs::read_dir(std::env::temp_dir()) else { return };
    for folder in folders.flatten() {
        let name = folder.file_name();
        let owner =
            name.to_str().and_then(|name| name.strip_prefix(FOLDER_PREFIX)?.split_once('-')?.0.parse::<u32>().ok());
        if owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
            let _ = fs::remove_dir_all(folder.path());
        }
    }
}

/// Ports that were handed out last and may not be bound yet.
const PORTS_HELD: usize = 64;

/// Returns an unused port below the system's ephemeral ports.
pub fn free_port() -> u16 {
    /// A UDP socket on a port keeps other callers away from it, in other processes too, until its server listens.
    static HELD: Mutex<VecDeque<UdpSocket>> = Mutex::new(VecDeque::new());
    let random = RandomState::new();
    for n in 0..1000_u64 {
        let port = 10_000 + (random.hash_one((n, FOLDERS_MADE.fetch_add(1, Relaxed))) % 22_000) as u16;
        let Ok(hold) = UdpSocket::bind(("127.0.0.1", port)) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            let mut held = HELD.lock();
            held.push_back(hold);
            while held.len() > PORTS_HELD {
                held.pop_front();
            }
            return port;
        }
    }
    panic!("no port is free");
}

/// A server's directory, port and process. Dropping it kills the process and removes the directory. A failing test
/// shows the end of its log.
#[derive(Debug)]
pub struct ServerProcess {
    /// The Debian package of its program.
    package: &'static str,
    user: Option<&'static str>,
    folder: ServerFolder,
    port: u16,
    child: Mutex<Option<Child>>,
}

impl ServerProcess {
    /// If this process is root, the server runs as `user`, if any.
    pub(crate) fn new(package: &'static str, user: Option<&'static str>) -> Self {
        Self { package, user, folder: ServerFolder::new(user), port: free_port(), child: Mutex::default() }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// A file in its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path(name)
    }

    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).expect("a file in our folder");
        path
    }

    /// Starts the server, again if it runs, and waits until it is ready.
    pub(crate) fn start(&self, command: &Command, is_ready: impl Fn() -> bool) {
        self.kill();
        let program = command.get_program();
        let found = Command::new("which").arg(program).output().is_ok_and(|found| found.status.success());
        assert!(found, "{program:?} is not installed; install the Debian package {}", self.package);
        let mut guarded = command_as(self.user, &["--pdeathsig", "KILL"]);
        guarded.arg(program).args(command.get_args());
        guarded.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let log = fs::File::options().create(true).append(true).open(self.path("log")).expect("a log");
        guarded.stdin(Stdio::null()).stdout(log.try_clone().expect("another handle")).stderr(log);
        *self.child.lock() =
            Some(spawn(guarded).unwrap_or_else(|error| {
                panic!("setpriv cannot be run ({error}); install the Debian package util-linux")
            }));
        self.until("it is ready", is_ready);
    }

    /// Whether it answers `greeting` with `reply`.
    pub(crate) fn answers(&self, greeting: &[u8], reply: &[u8]) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let mut first = vec![0; reply.len()];
        stream.set_read_timeout(Some(Duration::from_secs(5))).is_ok()
            && stream.write_all(greeting).is_ok()
            && stream.read_exact(&mut first).is_ok()
            && first == reply
    }

    pub fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            let ended = self.child.lock().as_mut().and_then(|child| child.try_wait().ok().flatten());
            let package = self.package;
            assert!(ended.is_none(), "{package} ended ({ended:?}) before {what}:\n{}", self.log_tail());
            assert!(began.elapsed() < SERVER_TIMEOUT, "{package}: waited in vain until {what}:\n{}", self.log_tail());
            sleep(Duration::from_millis(20));
        }
    }

    /// Kills it and its children, as a crash of the machine would; but data that the system has not written yet is not
    /// lost.
    pub fn kill(&self) {
        self.stop_with("-KILL");
    }

    /// Sends a signal and waits until it has exited.
    pub(crate) fn stop_with(&self, signal: &str) {
        let pids = self.signal(signal, signal == "-KILL");
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.wait();
        }
        // Killed children of PostgreSQL hold its shared memory until they have exited.
        let began = Instant::now();
        while pids.iter().any(|pid| is_running(pid)) && began.elapsed() < SERVER_TIMEOUT {
            sleep(Duration::from_millis(5));
        }
    }

    /// Pauses it: connections stay and are accepted, nothing is answered.
    pub fn pause(&self) {
        drop(self.signal("-STOP", true));
    }

    pub fn resume(&self) {
        drop(self.signal("-CONT", true));
    }

    /// Sends a signal to the process, if it runs, and to its children. Returns their ids.
    fn signal(&self, signal: &str, also_children: bool) -> Vec<String> {
        let Some(pid) = self.child.lock().as_ref().map(Child::id) else { return Vec::new() };
        let mut pids = vec![pid.to_string()];
        if also_children {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
            pids.extend(children.split_whitespace().map(str::to_owned));
        }
        let sent = Command::new("kill").arg(signal).args(&pids).stderr(Stdio::null()).status();
        assert!(sent.is_ok(), "kill {signal}: {sent:?}");
        pids
    }

    fn log_tail(&self) -> String {
        log_tail(&self.path("log"))
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("--- the log of {} ---\n{}\n---", self.package, self.log_tail());
        }
    }
}

/// Whether a process exists and is not a zombie.
fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

/// The last lines of a log, for a failing test to show.
pub(crate) fn log_tail(path: &Path) -> String {
    let log = fs::read(path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(MAX_SHOWN_LOG_LINES)..].join("\n")
}

/// Makes what all servers can do available on these types, which have a field `process`.
macro_rules! deref_to_process {
    ($($server:ty),*) => { $(
        impl std::ops::Deref for $server {
            type Target = $crate::ServerProcess;

            fn deref(&self) -> &Self::Target {
                &self.process
            }
        }
    )* };
}
pub(crate) use deref_to_process;

/// The start of a command that runs as `user` if this process is root.
pub(crate) fn command_as(user: Option<&str>, setpriv_args: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    if let Some(user) = user.filter(|_| is_root()) {
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]).current_dir("/");
    }
    command.args(setpriv_args).arg("--");
    command
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|this| this.uid() == 0)
}

/// Starts a process with `setpriv --pdeathsig`: it is killed when this process ends.
///
/// The kernel sends that signal when the *thread* that started the child ends, and a test's thread ends with the test.
/// So one thread that never ends starts all of them.
fn spawn(command: Command) -> io::Result<Child> {
    type SpawnRequest = (Command, Sender<io::Result<Child>>);
    static SPAWN_THREAD: OnceLock<Mutex<Sender<SpawnRequest>>> = OnceLock::new();
    let requests = SPAWN_THREAD.get_or_init(|| {
        let (sender, requests) = channel::<SpawnRequest>();
        thread::spawn(move || {
            for (mut command, answer) in requests {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    let (sender, answer) = channel();
    requests.lock().send((command, sender)).expect("the thread never ends");
    answer.recv().expect("the thread answers")
}
