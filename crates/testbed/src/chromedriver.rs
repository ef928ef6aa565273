//! Debian's chromedriver, with which tests drive a real Chromium.

use std::{net::TcpStream, process::Command};

use crate::ServerProcess;

pub fn start() -> ServerProcess {
    let driver = ServerProcess::new("chromium-driver", None);
    let mut command = Command::new("chromedriver");
    command.arg(format!("--port={}", driver.port()));
    driver.start(&command, || TcpStream::connect(("127.0.0.1", driver.port())).is_ok());
    driver
}
