//! Reloads one after the other, and compared with the process that runs.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::Command,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use ibid_gateway::{
    config::{Env, GatewaySettings, ServeArgs},
    snapshot::ConfigSnapshot,
    watch::{LiveConfig, ReloadOutcome},
};

const UPSTREAM: &str = "upstream = \"http://127.0.0.1:9\"\n";

fn live(file: &Path) -> Arc<LiveConfig> {
    let args = ServeArgs::for_file(file);
    let settings = GatewaySettings::load(&args, &Env::from_pairs(&[])).expect("a valid file");
    LiveConfig::new(ConfigSnapshot::new(settings, None).expect("a valid file"), args)
}

fn reload(live: &LiveConfig) -> ReloadOutcome {
    live.reload(&Env::from_pairs(&[]))
}

/// The first reload has read its file and still reads a token from a pipe when the file is replaced and read again.
#[tokio::test]
async fn a_reload_that_takes_long_does_not_replace_a_newer_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, pipe) = (folder.path().join("ibid.toml"), folder.path().join("token"));
    assert!(Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()));
    fs::write(&file, UPSTREAM).expect("written");
    let live = live(&file);
    fs::write(&file, format!("{UPSTREAM}max_upstream = 11\n[admin]\ntoken = \"file:token\"\n")).expect("written");
    let older = thread::spawn({
        let live = live.clone();
        move || reload(&live)
    });
    // Opens once the other side reads.
    let mut token = fs::OpenOptions::new().write(true).open(&pipe).expect("the pipe opens");
    fs::write(&file, format!("{UPSTREAM}max_upstream = 22\n")).expect("written");
    let (done, newer_is_done) = mpsc::channel();
    let newer = thread::spawn({
        let live = live.clone();
        move || {
            let reloaded = reload(&live);
            let _ = done.send(());
            reloaded
        }
    });
    // Without an order it is done by now.
    let _ = newer_is_done.recv_timeout(Duration::from_millis(500));
    token.write_all(b"a-token-of-sixteen-characters").expect("it is read");
    drop(token);
    assert!(matches!(older.join().expect("no panic"), ReloadOutcome::Applied(_)));
    assert!(matches!(newer.join().expect("no panic"), ReloadOutcome::Applied(_)));
    assert_eq!(live.now().settings.max_upstream, 22, "the newest file is in force");
}

#[tokio::test]
async fn what_needs_a_restart_is_told_by_what_the_process_started_with() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ibid.toml");
    let write = |running: u32, upstream: u32| {
        fs::write(&file, format!("{UPSTREAM}max_running = {running}\nmax_upstream = {upstream}\n")).expect("written");
    };
    write(100, 10);
    let live = live(&file);
    for (running, upstream, needed) in
        [(200, 10, &["max_running"][..]), (200, 11, &["max_running"]), (100, 11, &[]), (100, 12, &[])]
    {
        write(running, upstream);
        match reload(&live) {
            ReloadOutcome::Applied(named) => {
                assert_eq!(named, needed, "max_running = {running}, max_upstream = {upstream}")
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The store of a running process does not change, whatever files said in between.
#[tokio::test]
async fn going_back_to_the_store_that_is_in_use_forgets_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ibid.toml");
    let write = |top: &str, store: &str| {
        fs::write(&file, format!("{UPSTREAM}{top}[store]\nurl = \"embedded:{store}\"\n")).expect("written");
    };
    write("", "one");
    let live = live(&file);
    write("", "two");
    assert!(matches!(reload(&live), ReloadOutcome::WouldForget(_)));
    write("accept_forgetting = true\n", "two");
    assert!(matches!(reload(&live), ReloadOutcome::Applied(named) if named == ["store"]));
    write("", "one");
    assert!(matches!(reload(&live), ReloadOutcome::Applied(named) if named.is_empty()));
}
