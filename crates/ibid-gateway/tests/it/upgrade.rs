//! Upgrades and downgrades: gateways that are replaced under load, and stores that a later version has written.

use std::{fs, path::Path, time::Duration};

use ibid_chaos::{
    fault::GatewayReplacement,
    run::{ChaosPlan, run},
};
use testbed::{TestPostgres, TestRedis};

use crate::{
    stores::common::migrated_database,
    support::{BIN, folder_with, run_ibid},
};

/// Two gateways on one store, replaced one after the other as long as the load lasts. The checker of histories judges.
async fn replace_one_by_one(name: &str, store: &str) {
    let config = format!("[log]\nlevel = \"warn\"\n[store]\nurl = \"{store}\"\n[policy]\npreset = \"ietf\"\n");
    let mut plan = ChaosPlan::new(name, BIN, vec![config.clone(), config], 7, Duration::from_secs(8));
    plan.fault_rate.max_concurrent = 1;
    let report = run(&plan, |targets| GatewayReplacement::all(&targets.fleet)).await.expect("the run can be made");
    println!("{report}");
    assert!(report.failures(&[]).is_empty(), "{report}");
    assert_eq!((report.unknown, report.executions), (0, report.keys), "every key ran once, and said how: {report}");
    assert!(report.faults.len() == 2 && report.faults.values().all(|times| *times >= 2), "{report}");
    assert!(report.replays > 0 && report.keys > 50, "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_on_redis_are_replaced_one_by_one_under_load() {
    let server = TestRedis::start();
    replace_one_by_one("replaced on redis", &server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_on_postgres_are_replaced_one_by_one_under_load() {
    let server = TestPostgres::start();
    let (url, database) = migrated_database(&server, server.port()).await;
    // A later schema that lets this version continue, as in the middle of an upgrade.
    server.sql(&database, "INSERT INTO ibid.migrations (version, name, oldest_reader) VALUES (99, 'later', 1)");
    replace_one_by_one("replaced on postgres", &url).await;
}

/// Starts a gateway that must not start, and returns the one line that says why.
async fn start_refused(store: &str, journal: &str) -> String {
    let config = format!(
        "upstream = \"http://127.0.0.1:9\"\nlisten = \"127.0.0.1:0\"\nadmin.listen = \"127.0.0.1:0\"\n\
         journal = \"{journal}\"\n[log]\nlevel = \"error\"\n[store]\nurl = \"{store}\"\n"
    );
    let (_folder, path) = folder_with("ibid.toml", &config);
    let ended = run_ibid(&["serve", "--config", path.to_str().unwrap()], &[]).await;
    assert!(ended.code.is_some_and(|code| code != 0), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    ended.stderr
}

#[track_caller]
fn assert_says(line: &str, found: &str, understood: &str) {
    for part in [found, understood, "use the ibid that"] {
        assert!(line.contains(part), "{part:?} in {line}");
    }
}

#[tokio::test]
async fn a_redis_that_a_later_version_wrote_is_refused_at_start() {
    let server = TestRedis::start();
    server.cli(&["SET", "idempotency:{00}:format", "2"]);
    let line = start_refused(&server.url(), "off").await;
    assert_says(&line, "format version 2", "reads version 1");
    assert_eq!(server.cli(&["KEYS", "*"]).trim(), "idempotency:{00}:format", "nothing was changed");
    server.cli(&["SET", "idempotency:{00}:format", "1"]);
    replace_one_by_one("redis of this version", &server.url()).await;
}

#[tokio::test]
async fn a_schema_that_a_later_version_needs_is_refused_at_start() {
    let server = TestPostgres::start();
    let (url, database) = migrated_database(&server, server.port()).await;
    server.sql(&database, "INSERT INTO ibid.migrations (version, name, oldest_reader) VALUES (99, 'later', 99)");
    assert_says(&start_refused(&url, "off").await, "version 99", "reads up to version 6");
}

/// The files of a folder with their content.
fn contents(folder: &Path) -> Vec<(std::ffi::OsString, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap())
        .filter(|file| !file.file_name().to_string_lossy().ends_with("lock"))
        .map(|file| (file.file_name(), fs::read(file.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[tokio::test]
async fn embedded_files_and_a_journal_of_a_later_version_are_refused_at_start_and_left_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let mut segment = vec![0; 16 << 10];
    segment[..9].copy_from_slice(b"ibid seg\x02");
    fs::write(folder.path().join("00000001.seg"), &segment).unwrap();
    let before = contents(folder.path());
    let line = start_refused(&format!("embedded:{}", folder.path().display()), "off").await;
    assert_says(&line, "00000001.seg is of format version 2", "reads up to version 1");
    assert_eq!(contents(folder.path()), before);

    let folder = tempfile::tempdir().unwrap();
    // Version 2 and its checksum.
    let later = [&[2, 0, 0, 0][..], &[0x46, 0x68, 0x00, 0xf7]].concat();
    let name = format!("{}.answer", "ab".repeat(32));
    fs::write(folder.path().join(&name), &later).unwrap();
    fs::write(folder.path().join("damaged.answer"), b"damaged").unwrap();
    let before = contents(folder.path());
    let line = start_refused("memory:", folder.path().to_str().unwrap()).await;
    assert_says(&line, &format!("{name} is of format version 2"), "reads up to version 1");
    assert_eq!(contents(folder.path()), before);
}
