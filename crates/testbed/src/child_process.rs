//! Directories, ports, certificates and processes.

use std::{
    collections::hash_map::RandomState,
    fs,
    hash::BuildHasher,
    io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Sender, channel},
    },
    thread,
};

use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

const FOLDER_PREFIX: &str = "ibid-server-";

static FOLDERS_MADE: AtomicU64 = AtomicU64::new(0);

/// A directory that is removed with its owner. Creating one also removes those of killed processes.
pub(crate) struct ServerFolder(PathBuf);

impl ServerFolder {
    pub(crate) fn new() -> Self {
        static CLEANED: OnceLock<()> = OnceLock::new();
        CLEANED.get_or_init(remove_stale_folders);
        let path = std::env::temp_dir().join(format!(
            "{FOLDER_PREFIX}{}-{}",
            std::process::id(),
            FOLDERS_MADE.fetch_add(1, Relaxed)
        ));
        fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
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

/// Returns an unused port below the system's ephemeral ports.
pub(crate) fn free_port() -> u16 {
    let random = RandomState::new();
    for n in 0..1000_u64 {
        let port = 10_000 + (random.hash_one((n, FOLDERS_MADE.fetch_add(1, Relaxed))) % 22_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port is free");
}

type SpawnResult = io::Result<Child>;
/// A command to start, and where to send the result.
type SpawnRequest = (Command, Sender<SpawnResult>);

/// Starts a process that is killed when this process ends, however it ends.
///
/// The kernel sends that signal when the *thread* that started the child ends, and a test's thread ends with the test.
/// So one thread that never ends starts all of them.
pub(crate) fn spawn(command: Command, package: &str) -> Child {
    static SPAWN_THREAD: OnceLock<Mutex<Sender<SpawnRequest>>> = OnceLock::new();
    let nursery = SPAWN_THREAD.get_or_init(|| {
        let (sender, asked) = channel::<SpawnRequest>();
        thread::spawn(move || {
            for (mut command, answer) in asked {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    let mut guarded = Command::new("setpriv");
    guarded.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
    guarded.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    guarded.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let found = Command::new("which").arg(command.get_program()).output().is_ok_and(|found| found.status.success());
    assert!(found, "{:?} is not installed; install the Debian package {package}", command.get_program());
    let (sender, answer) = channel();
    nursery.lock().send((guarded, sender)).expect("the nursery never ends");
    let spawned = answer.recv().expect("the nursery answers");
    spawned.unwrap_or_else(|error| panic!("setpriv cannot be run ({error}); install the Debian package util-linux"))
}

/// Creates `ca.pem`, and `cert.pem` with `key.pem` for 127.0.0.1 and localhost.
pub(crate) fn write_certificates(folder: &Path) {
    let ca_key = KeyPair::generate().expect("a key");
    let mut ca = CertificateParams::new(Vec::new()).expect("no names");
    // Without distinct names, both would look like one self-signed certificate.
    ca.distinguished_name.push(DnType::CommonName, "ibid test authority");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_certificate = ca.self_signed(&ca_key).expect("a certificate");
    let issuer = Issuer::new(ca, ca_key);
    let key = KeyPair::generate().expect("a key");
    let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
    let mut server = CertificateParams::new(names).expect("names");
    server.distinguished_name.push(DnType::CommonName, "ibid test server");
    let certificate = server.signed_by(&key, &issuer).expect("a certificate");
    for (name, text) in
        [("ca.pem", ca_certificate.pem()), ("cert.pem", certificate.pem()), ("key.pem", key.serialize_pem())]
    {
        fs::write(folder.join(name), text).expect("it is written");
    }
}
