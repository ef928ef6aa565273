//! Debian's chromedriver, with which tests drive a real Chromium.

use std::process::Command;

use crate::ServerProcess;

pub fn start() -> ServerProcess {
    let driver = ServerProcess::new("chromium-driver", None);
    let mut command = Command::new("chromedriver");
    command.arg(format!("--port={}", driver.port()));
    driver.start(&command, || driver.answers(b"", b""));
    driver
}
