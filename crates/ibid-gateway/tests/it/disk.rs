//! The disk under the default store is full, or read-only, in the middle of load: new keys are refused before anything
//! runs, old ones replay, and with the room the service comes back.
//!
//! These tests mount file systems of their own, as root, and fail where that is not possible. Linux refuses
//! `remount,ro` while a file is open for writing, as a running store's are; so a read-only disk is shown in the three
//! ways in which it does happen: at a start, a folder in which nothing may be made any more (and then may again), and
//! an ext4 that goes read-only by itself, as after an error of its device.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tempfile::TempDir;
use testbed::{
    client::{TestRequest, TestResponse, post},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::{task::JoinHandle, time::sleep};

use crate::support::{BIN, assert_refused, assert_replay, caller, policy, run_ibid, until};

const CLIENT_COUNT: usize = 8;
/// Of an answer: a segment of 2 MiB, as `max_size=16MiB` makes them, is full after a hundred.
const ANSWER_BYTES: usize = 16 << 10;

/// A file system of its own, gone with the test.
pub(crate) struct TestMount {
    folder: TempDir,
    image: Option<PathBuf>,
}

impl TestMount {
    pub(crate) fn tmpfs(size: &str) -> TestMount {
        let mount = TestMount { folder: tempfile::tempdir().expect("a folder"), image: None };
        run_on_path("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"], mount.path());
        mount
    }

    /// An ext4 in a file of this many bytes.
    fn ext4(size: u64, images: &Path) -> TestMount {
        let image = images.join("image");
        File::create(&image).and_then(|file| file.set_len(size)).expect("room for an image");
        run_on_path("mkfs.ext4", &["-q", "-F"], &image);
        let mount = TestMount { folder: tempfile::tempdir().expect("a folder"), image: Some(image) };
        mount.mount_again();
        mount
    }

    fn mount_again(&self) {
        let image = self.image.as_ref().expect("it is in a file").to_str().expect("a plain path");
        run_on_path("mount", &["-o", "loop", image], self.path());
    }

    fn remount(&self, how: &str) {
        run_on_path("mount", &["-o", &format!("remount,{how}")], self.path());
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The store in it. Its segments are of 2 MiB.
    fn url(&self) -> String {
        format!("embedded:{}?max_size=16MiB", self.path().join("data").display())
    }

    /// Takes up whatever room there is left.
    pub(crate) fn fill(&self) -> PathBuf {
        let path = self.path().join("ballast");
        let mut file = File::create(&path).expect("a file");
        for piece in [vec![1; 64 << 10], vec![1; 512]] {
            while file.write_all(&piece).is_ok() {}
        }
        path
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).output();
    }
}

fn run_on_path(name: &str, args: &[&str], path: &Path) {
    let output = Command::new(name).args(args).arg(path).output();
    let done = output.as_ref().is_ok_and(|output| output.status.success());
    assert!(done, "{name} {args:?} {}: these tests run as root: {output:?}", path.display());
}

fn pay(addr: SocketAddr, key: &str) -> TestRequest {
    // The host is part of a key's scope, and the port is another after each restart.
    caller(post(addr, "/pay")).header("Host", "shop.example").key(key).json(r#"{"amount":1}"#)
}

async fn upstream() -> TestUpstream {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamReply::status(201).large(ANSWER_BYTES).delay(Duration::from_millis(2)));
    upstream
}

async fn gateway(upstream: &TestUpstream, store: &str) -> GatewayProcess {
    let launch = GatewayProcess::launch(BIN).config(policy("lease = \"5s\"")).upstream(&upstream.url());
    launch.arg("--store").arg(store).start().await
}

/// Clients that take one fresh key after the other, and what each key was answered first.
struct ClientLoad {
    answers: Arc<Mutex<Vec<(String, TestResponse)>>>,
    stopped: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl ClientLoad {
    fn start(addr: SocketAddr) -> ClientLoad {
        let answers = Arc::<Mutex<Vec<(String, TestResponse)>>>::default();
        let (stopped, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let client = |_| {
            let (answers, over, next) = (answers.clone(), stopped.clone(), next.clone());
            tokio::spawn(async move {
                while !over.load(SeqCst) {
                    let key = format!("k-{}", next.fetch_add(1, SeqCst));
                    let answer = pay(addr, &key).send().await;
                    let refused = answer.status != 201;
                    answers.lock().push((key, answer));
                    sleep(Duration::from_millis(if refused { 20 } else { 1 })).await;
                }
            })
        };
        let tasks = (0..CLIENT_COUNT).map(client).collect();
        ClientLoad { answers, stopped, tasks }
    }

    fn count(&self, status: u16) -> usize {
        self.answers.lock().iter().filter(|(_, answer)| answer.status == status).count()
    }

    /// Returns once that many more were answered like this.
    async fn wait_for_more(&self, status: u16, n: usize) {
        let before = self.count(status);
        let end = Instant::now() + Duration::from_secs(20);
        while self.count(status) < before + n {
            assert!(Instant::now() < end, "{} of {n} more {status} came", self.count(status) - before);
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn first_finished(&self) -> (String, TestResponse) {
        self.answers.lock().iter().find(|(_, answer)| answer.status == 201).expect("some ran").clone()
    }

    async fn end(self) -> Vec<(String, TestResponse)> {
        self.stopped.store(true, SeqCst);
        for task in self.tasks {
            task.await.expect("every key got an answer");
        }
        std::mem::take(&mut *self.answers.lock())
    }
}

/// Nothing ran that is not remembered, or at least known to have begun: what was answered replays, what was refused
/// never ran. Refused keys are free: asked again, they run.
async fn assert_all_protected(addr: SocketAddr, upstream: &TestUpstream, answers: &[(String, TestResponse)]) {
    let mut runs: HashMap<String, usize> = HashMap::new();
    for seen in upstream.log().iter().filter(|seen| seen.execution.is_some()) {
        *runs.entry(seen.key().expect("every request has a key").to_owned()).or_default() += 1;
    }
    let (mut replayed, mut unknown, mut refused) = (0, 0, 0);
    for (key, first) in answers {
        let ran = runs.get(key).copied().unwrap_or(0);
        if first.status != 201 {
            assert_refused(first, 503, "store-unavailable");
            assert_eq!(ran, 0, "{key} was refused, and ran");
            refused += 1;
            continue;
        }
        assert_eq!(ran, 1, "{key} was answered once");
        let again = pay(addr, key).send().await;
        if again.status == 409 && first.headers.contains("idempotency-stored") {
            unknown += 1;
        } else {
            assert_replay(&again, first);
            replayed += 1;
        }
    }
    assert_eq!(upstream.executions(), runs.len(), "asking again ran nothing");
    println!(
        "{} keys: {} executions, {replayed} replayed, {unknown} unknown, {refused} refused",
        answers.len(),
        runs.len()
    );
    if let Some((key, _)) = answers.iter().find(|(_, first)| first.status == 503) {
        assert_eq!(pay(addr, key).send().await.status, 201, "{key} was refused, and is free");
    }
}

#[tokio::test]
async fn a_full_disk_refuses_new_keys_replays_old_ones_and_serves_again_with_room() {
    let (mount, upstream) = (TestMount::tmpfs("24m"), upstream().await);
    let gateway = gateway(&upstream, &mount.url()).await;
    let load = ClientLoad::start(gateway.addr());
    load.wait_for_more(201, 50).await;
    for _ in 0..2 {
        let ballast = mount.fill();
        load.wait_for_more(503, 40).await;
        let (key, first) = load.first_finished();
        assert_replay(&pay(gateway.addr(), &key).send().await, &first);
        fs::remove_file(ballast).expect("the ballast goes");
        load.wait_for_more(201, 40).await;
    }
    let answers = load.end().await;
    assert_all_protected(gateway.addr(), &upstream, &answers).await;
}

#[tokio::test]
async fn a_folder_that_goes_read_only_refuses_new_keys_and_serves_again_once_it_is_writable() {
    let (mount, upstream) = (TestMount::tmpfs("24m"), upstream().await);
    let gateway = gateway(&upstream, &mount.url()).await;
    let load = ClientLoad::start(gateway.addr());
    load.wait_for_more(201, 20).await;
    let data = mount.path().join("data");
    run_on_path("chattr", &["+i"], &data);
    load.wait_for_more(503, 40).await;
    let (key, first) = load.first_finished();
    assert_replay(&pay(gateway.addr(), &key).send().await, &first);
    run_on_path("chattr", &["-i"], &data);
    load.wait_for_more(201, 40).await;
    let answers = load.end().await;
    assert_all_protected(gateway.addr(), &upstream, &answers).await;
}

#[tokio::test]
async fn a_disk_that_goes_read_only_by_itself_runs_nothing_unprotected() {
    let images = tempfile::tempdir().expect("a folder");
    let (mount, upstream) = (TestMount::ext4(64 << 20, images.path()), upstream().await);
    let mut gateway = gateway(&upstream, &mount.url()).await;
    let load = ClientLoad::start(gateway.addr());
    load.wait_for_more(201, 50).await;
    mount.remount("abort");
    load.wait_for_more(503, 40).await;
    let (key, first) = load.first_finished();
    assert_replay(&pay(gateway.addr(), &key).send().await, &first);
    let answers = load.end().await;
    // An aborted file system is writable again only after it was mounted anew, for which nobody may have it open.
    gateway.kill().await;
    run_on_path("umount", &[], mount.path());
    mount.mount_again();
    gateway.restart().await;
    assert_all_protected(gateway.addr(), &upstream, &answers).await;
}

#[tokio::test]
async fn a_start_on_a_read_only_disk_says_so_and_loses_nothing() {
    let (mount, upstream) = (TestMount::tmpfs("24m"), upstream().await);
    let mut gateway = gateway(&upstream, &mount.url()).await;
    let first = pay(gateway.addr(), "k").send().await;
    gateway.kill().await;
    mount.remount("ro");
    let (store, url) = (mount.url(), upstream.url());
    let serve = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", &url, "--store", &store];
    let output = run_ibid(&serve, &[]).await;
    let said = output.stderr;
    assert_eq!(output.code, Some(1), "{said}");
    assert!(said.contains("embedded:") && said.contains("Read-only file system"), "{said}");
    mount.remount("rw");
    gateway.restart().await;
    assert_replay(&pay(gateway.addr(), "k").send().await, &first);
}

#[tokio::test]
async fn a_store_at_its_max_size_refuses_new_keys_and_evicts_nothing() {
    let upstream = upstream().await;
    upstream.on("/pay", UpstreamReply::status(201).large(4 * ANSWER_BYTES));
    let mut gateway = gateway(&upstream, "embedded:data?max_size=16MiB").await;
    let load = ClientLoad::start(gateway.addr());
    load.wait_for_more(503, 20).await;
    let answers = load.end().await;
    for again in 0..2 {
        let ran = upstream.executions();
        assert!(ran > 100, "only {ran} fit into 16 MiB");
        for (key, first) in answers.iter().filter(|(_, first)| first.status == 201) {
            assert_replay(&pay(gateway.addr(), key).send().await, first);
        }
        for (_, refused) in answers.iter().filter(|(_, first)| first.status != 201) {
            assert_refused(refused, 503, "store-unavailable");
        }
        assert_refused(&pay(gateway.addr(), &format!("new-{again}")).send().await, 503, "store-unavailable");
        assert_eq!(upstream.executions(), ran, "neither a replay nor a refusal runs");
        let taken: u64 = segments(&gateway.dir().join("data")).map(|(_, size)| size).sum();
        assert!(taken <= 16 << 20, "it takes up {taken} bytes");
        gateway.restart().await;
    }
    until("the gateway to say why", || gateway.logs().iter().any(|line| line.contains("max_size"))).await;
}

fn segments(folder: &Path) -> impl Iterator<Item = (PathBuf, u64)> {
    let files = fs::read_dir(folder).expect("the store's folder").map(|file| file.expect("a file"));
    let files = files.filter(|file| file.path().extension().is_some_and(|extension| extension == "seg"));
    files.map(|file| (file.path(), file.metadata().expect("it is there").len()))
}
