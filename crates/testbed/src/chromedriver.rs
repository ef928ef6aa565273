//! Debian's chromedriver, with which tests drive a real Chromium.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

/// Maximum number of starts. chromedriver binds the same port for IPv4 and IPv6; a start fails if the second one is
/// taken.
const MAX_START_ATTEMPTS: u32 = 5;

/// Starts chromedriver and returns its process and port. The caller must kill the process.
pub fn start() -> (Child, u16) {
    for _ in 0..MAX_START_ATTEMPTS {
        let mut command = Command::new("chromedriver");
        command.arg("--port=0").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut driver = command.spawn().unwrap_or_else(|why| {
            panic!("chromedriver cannot be started: {why}; install Debian's packages chromium and chromium-driver")
        });
        let mut lines = BufReader::new(driver.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
        let port = lines.find_map(|line| {
            let (_, port) = line.split_once("started successfully on port ")?;
            port.trim_end_matches('.').parse().ok()
        });
        if let Some(port) = port {
            // Keep reading, or the driver blocks once the pipe is full.
            std::thread::spawn(move || lines.for_each(drop));
            return (driver, port);
        }
        let _ = driver.kill();
        let _ = driver.wait();
    }
    panic!("chromedriver ended {MAX_START_ATTEMPTS} times before it said where it listens");
}
