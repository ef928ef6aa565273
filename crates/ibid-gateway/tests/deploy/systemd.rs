//! The unit, judged by systemd's own tool: it is one, and what it leaves open is little.

use std::{fs, path::PathBuf, time::Duration};

use ibid_gateway::config::{Env, GatewaySettings, ServeArgs};

use super::common::{BIN, run, text, tool};

const UNIT: &str = "deploy/systemd/ibid.service";

/// The unit in a folder of its own, for the binary that was built.
fn unit(change: impl Fn(String) -> String) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ibid.service");
    let here = text(UNIT).replace("/usr/bin/ibid", BIN);
    fs::write(&file, change(here)).unwrap();
    (folder, file)
}

#[test]
fn the_unit_is_one() {
    let verify = |file: &PathBuf| run(tool("systemd-analyze", "systemd").args(["verify", "--man=no"]).arg(file));
    let (_folder, file) = unit(|text| text);
    let (fine, told) = verify(&file);
    assert!(fine && !told.contains("ibid.service"), "{told}");
    let (_folder, file) = unit(|text| text.replace("ProtectSystem=strict", "ProtectSistem=strict"));
    let (_, told) = verify(&file);
    assert!(told.contains("ProtectSistem"), "the tool finds what is wrong: {told}");
}

#[test]
fn it_leaves_little_open() {
    let exposed = |file: &PathBuf| {
        let mut analyze = tool("systemd-analyze", "systemd");
        run(analyze.args(["security", "--offline=true", "--no-pager", "--threshold=20"]).arg(file))
    };
    let (_folder, file) = unit(|text| text);
    let (fine, told) = exposed(&file);
    assert!(fine, "{told}");
    let (_folder, file) = unit(|text| text.replace("SystemCallFilter=", "#").replace("CapabilityBoundingSet=", "#"));
    assert!(!exposed(&file).0, "the tool finds what is open");
}

#[test]
fn it_waits_for_the_shutdown_and_has_files_enough() {
    let unit = text(UNIT);
    let value = |name: &str| -> u64 {
        let line = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).expect(name);
        line.parse().expect("a number")
    };
    let settings = GatewaySettings::from_text(
        "upstream = \"http://127.0.0.1:3000\"",
        None,
        &ServeArgs::default(),
        &Env::from_pairs(&[]),
    )
    .unwrap();
    assert!(Duration::from_secs(value("TimeoutStopSec")) > settings.limits.shutdown + Duration::from_secs(5));
    let sockets = settings.limits.max_connections + settings.max_upstream;
    assert!(value("LimitNOFILE") > sockets as u64);
    assert_eq!(value("RestartPreventExitStatus"), 64, "the code for wrong settings");
}
