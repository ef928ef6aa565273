//! Sealing at rest, as who runs a gateway sees it: settings, rotation, commands, and what a thief finds.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use testbed::{
    client::{TestRequest, post},
    process::{GatewayProcess, ProcessSignal},
};

use crate::support::{caller, run_ibid};

mod commands;
mod forged_records;
mod reseal_over_admin;
mod rotation;
mod secret_leaks;
mod settings;

/// 32 bytes that are all about this name.
pub(crate) fn key_bytes(name: &str) -> [u8; 32] {
    let mut name = name.bytes().chain([b'|']).cycle();
    std::array::from_fn(|_| name.next().expect("it never ends"))
}

/// The same in base64.
pub(crate) fn key_base64(name: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = key_bytes(name).into_iter().chain([0]).collect();
    let groups = bytes.chunks(3).flat_map(|group| {
        let bits = u32::from_be_bytes([0, group[0], group[1], group[2]]);
        [18, 12, 6, 0].map(|shift| DIGITS[(bits >> shift & 63) as usize] as char)
    });
    let mut text: String = groups.collect();
    text.replace_range(43.., "=");
    text
}

/// The secret of every gateway here.
pub(crate) const SECRET: &str = "the-address-secret";

/// A `[seal]` table with these keys, the first of which seals.
pub(crate) fn table(ids: &[&str]) -> String {
    let keys: Vec<String> = ids.iter().map(|id| format!("{{ id = {id:?}, key = {:?} }}", key_base64(id))).collect();
    format!("[seal]\nkeys = [{}]\naddress_secret = {:?}\n", keys.join(", "), key_base64(SECRET))
}

/// The same caller's payment, whichever port it is sent to.
fn pay(gateway: &GatewayProcess, key: &str) -> TestRequest {
    pay_at(gateway.addr(), key)
}

fn pay_at(addr: SocketAddr, key: &str) -> TestRequest {
    caller(post(addr, "/pay")).header("Host", "shop.example").key(key).json(r#"{"amount":1}"#)
}

async fn end(mut gateway: GatewayProcess) {
    gateway.signal(ProcessSignal::Term);
    assert!(gateway.wait_exit(Duration::from_secs(20)).await.success());
}

/// What a command printed, and said aside.
async fn ibid(args: &[&str]) -> (Option<i32>, String, String) {
    let done = run_ibid(args, &[]).await;
    (done.code, done.text(), done.stderr)
}

/// Everything in the files of a folder but zeroes, of which there are millions.
fn files(folder: &Path) -> Vec<u8> {
    let files = fs::read_dir(folder).expect("a folder").map(|file| file.expect("a file").path());
    let mut all = files
        .filter(|path| path.is_file())
        .map(|path| fs::read(path).expect("it is read"))
        .collect::<Vec<_>>()
        .concat();
    all.retain(|byte| *byte != 0);
    all
}

fn contains_text(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|part| part == text.as_bytes())
}

#[test]
fn the_keys_of_these_tests_are_keys() {
    assert_eq!(key_base64("2026-11"), "MjAyNi0xMXwyMDI2LTExfDIwMjYtMTF8MjAyNi0xMXw=");
}
