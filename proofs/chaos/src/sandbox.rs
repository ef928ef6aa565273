//! What gateways stand on, and what fails beneath them: packets, names, disks, clocks and file descriptors.
//!
//! All of it is private to the run, which has network and mount namespaces of its own ([`sandbox_command`]): packets are
//! dropped by their port on its loopback interface, names are in its own `/etc/hosts`, each gateway's folder is a disk of
//! its own, and its clock is libfaketime's. The namespaces end with the run.

use std::{
    env,
    ffi::OsStr,
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::Mutex;
use tempfile::TempDir;
use testbed::process::GatewayLauncher;

use crate::{
    fault::{ChaosFault, CustomFault},
    fleet::GatewayFleet,
};

/// Set inside.
const INSIDE_VARIABLE: &str = "CHAOS_SANDBOX";
/// By which gateways know the servers of their store, and their upstream.
const STORE_NAME: &str = "store.test";
const UPSTREAM_NAME: &str = "app.test";
/// The size of a gateway's disk. It takes only what is written.
const DISK_BYTES: &str = "1G";
/// A slow disk does nothing for so long, then works for a while.
const DISK_STALL: Duration = Duration::from_millis(120);
const DISK_WORKS: Duration = Duration::from_millis(30);

const PACKET_RULES: &str = "table ip chaos
delete table ip chaos
table ip chaos {
    set to_server { type inet_service; }
    set to_client { type inet_service; }
    set lossy { type inet_service; }
    chain input {
        type filter hook input priority 0;
        tcp dport @to_server drop
        tcp sport @to_client drop
        tcp dport @lossy numgen random mod 10 < 3 drop
        tcp sport @lossy numgen random mod 10 < 3 drop
    }
}
";

/// Whether this process is inside.
pub fn is_inside() -> bool {
    env::var_os(INSIDE_VARIABLE).is_some()
}

/// Runs this program inside.
///
/// # Errors
///
/// If namespaces cannot be made.
pub fn sandbox_command(program: &Path) -> io::Result<Command> {
    let made = Command::new("unshare").args(["--net", "--mount", "true"]).output()?;
    if !made.status.success() {
        let why = String::from_utf8_lossy(&made.stderr).trim().to_owned();
        return Err(io::Error::other(format!("network and mount namespaces cannot be made, which needs root: {why}")));
    }
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--propagation", "private", "--", "sh", "-c"]);
    command.args(["ip link set lo up && exec \"$0\" \"$@\""]).arg(program).env(INSIDE_VARIABLE, "1");
    Ok(command)
}

/// The machine of a run's gateways.
#[derive(Debug)]
pub struct Sandbox {
    folder: TempDir,
    faketime: PathBuf,
}

impl Sandbox {
    /// Makes it, inside.
    ///
    /// # Errors
    ///
    /// If files cannot be written, or libfaketime is not installed.
    ///
    /// # Panics
    ///
    /// If this process is not inside.
    pub fn new() -> io::Result<Sandbox> {
        assert!(is_inside(), "only a process of its own namespaces may change what is beneath it");
        let faketime = find_faketime()
            .ok_or_else(|| io::Error::other("libfaketime is missing; install the Debian package libfaketime"))?;
        let sandbox = Sandbox { folder: tempfile::Builder::new().prefix("ibid-sandbox-").tempdir()?, faketime };
        let rules = sandbox.folder.path().join("packets.nft");
        fs::write(&rules, PACKET_RULES)?;
        run_command("nft", &["-f".as_ref(), rules.as_os_str()]);
        sandbox.write_names(true);
        run_command("mount", &["--bind".as_ref(), sandbox.names().as_os_str(), "/etc/hosts".as_ref()]);
        Ok(sandbox)
    }

    /// A store's configuration with names instead of addresses.
    pub fn with_names(&self, store: &str) -> String {
        store.replace("127.0.0.1", STORE_NAME)
    }

    /// The upstream's URL.
    pub fn upstream_url(&self, port: u16) -> String {
        format!("http://{UPSTREAM_NAME}:{port}")
    }

    /// Gives the nth gateway a disk and a clock.
    ///
    /// # Errors
    ///
    /// If they cannot be made.
    pub fn launch(&self, launcher: GatewayLauncher, nth: usize) -> io::Result<GatewayLauncher> {
        let (disk, image) = (self.disk(nth), self.folder.path().join(format!("disk-{nth}.img")));
        fs::create_dir(&disk)?;
        run_command("truncate", &["--size".as_ref(), DISK_BYTES.as_ref(), image.as_os_str()]);
        run_command("mkfs.ext4", &["-q".as_ref(), "-N".as_ref(), "4096".as_ref(), image.as_os_str()]);
        run_command("mount", &["-o".as_ref(), "loop".as_ref(), image.as_os_str(), disk.as_os_str()]);
        set_clock(&self.clock(nth), "+0");
        // What gateways measure times with stays as it is: it does not jump on a real machine either.
        let variables = [("FAKETIME_DONT_FAKE_MONOTONIC", "1"), ("FAKETIME_CACHE_DURATION", "1")];
        let launcher = variables.into_iter().fold(launcher, |launcher, (name, value)| launcher.env(name, value));
        let launcher = launcher.env("LD_PRELOAD", &self.faketime).env("FAKETIME_TIMESTAMP_FILE", self.clock(nth));
        Ok(launcher.folder_in(&disk))
    }

    /// Everything that can fail beneath these gateways, besides packets.
    pub fn faults(self: &Arc<Self>, fleet: &Arc<GatewayFleet>) -> Vec<Box<dyn ChaosFault>> {
        let (gone, back) = (Arc::clone(self), Arc::clone(self));
        let mut faults = vec![blocking_fault(
            "names",
            "gone",
            milliseconds(100..2500),
            move || gone.write_names(false),
            move || back.write_names(true),
        )];
        for nth in 0..fleet.len() {
            let gateway = format!("gateway {nth}");
            for (step, description) in [("+1h", "an hour ahead"), ("-1h", "an hour behind")] {
                let (clock, again) = (self.clock(nth), self.clock(nth));
                faults.push(blocking_fault(
                    &format!("{gateway} clock"),
                    description,
                    milliseconds(1500..4000),
                    move || set_clock(&clock, step),
                    move || set_clock(&again, "+0"),
                ));
            }
            let (full, freed) = (self.disk(nth), self.disk(nth));
            let (inject, heal) = (move || fill_disk(&full), move || free_disk(&freed));
            faults.push(blocking_fault(&gateway, "disk full", milliseconds(300..2500), inject, heal));
            faults.push(slow_disk_fault(&gateway, self.disk(nth)));
            faults.push(file_limit_fault(&gateway, nth, fleet));
        }
        faults
    }

    fn write_names(&self, known: bool) {
        let names = if known { format!("127.0.0.1 {STORE_NAME} {UPSTREAM_NAME}\n") } else { String::new() };
        fs::write(self.names(), format!("127.0.0.1 localhost\n{names}")).expect("the names can be written");
    }

    fn names(&self) -> PathBuf {
        self.folder.path().join("hosts")
    }

    /// Where the nth gateway's disk is.
    pub fn disk(&self, nth: usize) -> PathBuf {
        self.folder.path().join(format!("disk-{nth}"))
    }

    fn clock(&self, nth: usize) -> PathBuf {
        self.folder.path().join(format!("clock-{nth}"))
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let disks = (0..).map(|nth| self.disk(nth)).take_while(|disk| disk.exists());
        for mounted in disks.chain([PathBuf::from("/etc/hosts")]) {
            let _ = Command::new("umount").arg("--lazy").arg(mounted).output();
        }
    }
}

/// Drops packets by their port: see `PACKET_RULES`.
pub(crate) fn drop_packets(set: &str, port: u16, dropped: bool) {
    let action = if dropped { "add" } else { "delete" };
    run_command("nft", &[action, "element", "ip", "chaos", set, &format!("{{ {port} }}")].map(OsStr::new));
}

fn find_faketime() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").ok()?.flatten();
    folders.map(|folder| folder.path().join("faketime/libfaketime.so.1")).find(|library| library.exists())
}

fn set_clock(clock: &Path, step: &str) {
    // Replaced as a whole: half a line is no time.
    let next = clock.with_extension("next");
    fs::write(&next, step).and_then(|()| fs::rename(&next, clock)).expect("the clock can be set");
}

fn fill_disk(disk: &Path) {
    // All at once, then what is left by writing.
    let fill = "fallocate -l $(df -B1 --output=avail . | tail -1) filler; cat /dev/zero >filler-2; exit 0";
    let filled = Command::new("sh").args(["-c", fill]).current_dir(disk).output();
    assert!(filled.is_ok_and(|filled| filled.status.success()), "the disk cannot be filled");
}

fn free_disk(disk: &Path) {
    for filler in ["filler", "filler-2"] {
        fs::remove_file(disk.join(filler)).expect("the disk was filled");
    }
}

/// The disk stalls again and again.
fn slow_disk_fault(gateway: &str, disk: PathBuf) -> Box<dyn ChaosFault> {
    type Stalling = (Arc<AtomicBool>, JoinHandle<()>);
    let stalling: Arc<Mutex<Option<Stalling>>> = Arc::default();
    let healing = Arc::clone(&stalling);
    let inject = move || {
        let (over, disk) = (Arc::new(AtomicBool::new(false)), disk.clone());
        let seen = Arc::clone(&over);
        let work = move || {
            while !seen.load(SeqCst) {
                run_command("fsfreeze", &["--freeze".as_ref(), disk.as_os_str()]);
                thread::sleep(DISK_STALL);
                run_command("fsfreeze", &["--unfreeze".as_ref(), disk.as_os_str()]);
                thread::sleep(DISK_WORKS);
            }
        };
        *stalling.lock() = Some((over, thread::spawn(work)));
    };
    let heal = move || {
        if let Some((over, work)) = healing.lock().take() {
            over.store(true, SeqCst);
            work.join().expect("the disk can be frozen");
        }
    };
    blocking_fault(gateway, "disk slow", milliseconds(300..2500), inject, heal)
}

/// The process may open no more files than it has open.
fn file_limit_fault(gateway: &str, nth: usize, fleet: &Arc<GatewayFleet>) -> Box<dyn ChaosFault> {
    let limit = move |fleet: &Arc<GatewayFleet>, exhausted: bool| {
        let fleet = Arc::clone(fleet);
        async move {
            let process = PathBuf::from(format!("/proc/{}", fleet.process_id(nth).await));
            let open = fs::read_dir(process.join("fd")).map_or(0, Iterator::count);
            let limits = fs::read_to_string(process.join("limits")).unwrap_or_default();
            let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
            let hard = line.and_then(|line| line.split_whitespace().nth(1)).expect("a process has limits").to_owned();
            let soft = if exhausted { open.to_string() } else { hard.clone() };
            let pid = process.file_name().expect("the process has a number").to_owned();
            run_command("prlimit", &["--pid".as_ref(), &pid, format!("--nofile={soft}:{hard}").as_ref()]);
        }
    };
    let (exhausted, again) = (Arc::clone(fleet), Arc::clone(fleet));
    let (inject, heal) = (move || limit(&exhausted, true), move || limit(&again, false));
    CustomFault::from(gateway, "file descriptors exhausted", milliseconds(200..2500), inject, heal)
}

fn blocking_fault(
    target: &str, description: &str, durations: Range<Duration>, inject: impl Fn() + Send + Sync + 'static,
    heal: impl Fn() + Send + Sync + 'static,
) -> Box<dyn ChaosFault> {
    fn wrap(act: impl Fn() + Send + Sync + 'static) -> impl Fn() -> std::future::Ready<()> + Send + Sync + 'static {
        move || {
            tokio::task::block_in_place(&act);
            std::future::ready(())
        }
    }
    CustomFault::from(target, description, durations, wrap(inject), wrap(heal))
}

fn milliseconds(range: Range<u64>) -> Range<Duration> {
    Duration::from_millis(range.start)..Duration::from_millis(range.end)
}

fn run_command(program: &str, args: &[&OsStr]) {
    let done = Command::new(program).args(args).output();
    let done = done.unwrap_or_else(|error| panic!("{program} cannot be run: {error}"));
    assert!(done.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&done.stderr));
}
