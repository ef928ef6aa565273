//! A store with records of every kind in it, made by a gateway that is gone again, and commands on that store.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tempfile::NamedTempFile;
use testbed::{
    client::{TestRequest, TestResponse, post},
    process::{GatewayProcess, ProcessSignal},
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};

use super::TestStore;
use crate::support::{BIN, CommandResult, caller, run_ibid};

/// Payments that ended well; see [`Scene::filled`].
pub(super) const PAYMENT_COUNT: usize = 5;
/// All entries of a filled store.
pub(super) const ENTRY_COUNT: usize = PAYMENT_COUNT + 3;

pub(super) const OPERATOR_TOKEN: &str = "token-of-the-operator";

pub(super) const UNKNOWN_KEY: &str = "key-of-the-lost-one";
pub(super) const FAILED_KEY: &str = "key-of-the-failed-one";
pub(super) const BINARY_KEY: &str = "key-of-the-binary-one";
pub(super) const BINARY_BODY: &[u8] = b"\x00\x01\xfe\xff";

pub(super) const CLEAR_LABELS: &str =
    "label = { tenant = \"header:X-Tenant-Id\", user = \"header:X-User-Id\", key = \"clear\" }";

/// The key of a payment.
pub(super) fn key(nth: usize) -> String {
    format!("key-of-payment-{nth}")
}

pub(super) struct KeysFixture<'a> {
    pub(super) store: &'a TestStore,
    pub(super) upstream: TestUpstream,
    dials: &'static str,
    /// With nothing but the store in it.
    config_file: NamedTempFile,
}

impl TestStore {
    pub(crate) fn settings(&self) -> String {
        format!("[store]\nurl = {:?}\n{}\n", self.url, self.table)
    }
}

impl<'a> KeysFixture<'a> {
    /// Five payments by two users of two tenants, one that failed, one whose answer was lost, one that is no text. Keys
    /// are stored in clear.
    pub(super) async fn start_filled(place: &'a TestStore) -> KeysFixture<'a> {
        KeysFixture::start_filled_with(place, CLEAR_LABELS).await
    }

    pub(super) async fn start_filled_with(place: &'a TestStore, dials: &'static str) -> KeysFixture<'a> {
        let file = NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), place.settings()).expect("it is written");
        let scene = KeysFixture { store: place, upstream: TestUpstream::start().await, dials, config_file: file };
        scene.upstream.on("/pay/failed", UpstreamReply::status(404).json(r#"{"error":"no such account"}"#));
        scene.upstream.on_each("/pay/lost", [UpstreamFault::CloseWithoutReply.into(), UpstreamReply::usual()]);
        let binary = UpstreamReply::status(200).header("Content-Type", "application/octet-stream").body(BINARY_BODY);
        scene.upstream.on("/pay/binary", binary);
        let gateway = scene.start_gateway().await;
        for nth in 0..PAYMENT_COUNT {
            let reply = UpstreamReply::status(201)
                .json(&format!(r#"{{"paid":{nth}}}"#))
                .header("Location", format!("/p/{nth}"));
            scene.upstream.on(&format!("/pay/{nth}"), reply);
            assert_eq!(pay(gateway.addr(), nth).send().await.status, 201);
        }
        for (path, key, status) in
            [("failed", FAILED_KEY, 404), ("lost", UNKNOWN_KEY, 502), ("binary", BINARY_KEY, 200)]
        {
            let answer = send(gateway.addr(), path, key).send().await;
            assert_eq!(answer.status, status, "{answer:?}");
        }
        scene.stop_gateway(gateway).await;
        scene
    }

    /// A gateway on the store.
    pub(super) async fn start_gateway(&self) -> GatewayProcess {
        let config = format!(
            "[admin]\naudit = \"store\"\ntoken = {OPERATOR_TOKEN:?}\n{}[[route]]\nmatch = \"POST /pay/*\"\n{}\n[[route]]\nmatch = \"POST /short/*\"\nttl = \"100ms\"\nlease = \"100ms\"\n",
            self.store.settings(),
            self.dials
        );
        GatewayProcess::launch(BIN).config(config).upstream(&self.upstream.url()).start().await
    }

    pub(super) async fn stop_gateway(&self, mut gateway: GatewayProcess) {
        gateway.signal(ProcessSignal::Term);
        assert!(gateway.wait_exit(Duration::from_secs(20)).await.success());
    }

    /// What a fresh gateway on the store answers to a request.
    pub(super) async fn send_to_fresh_gateway(&self, path: &str, key: &str) -> TestResponse {
        let gateway = self.start_gateway().await;
        let answer = send(gateway.addr(), path, key).send().await;
        self.stop_gateway(gateway).await;
        answer
    }

    /// Releases an entry through a running gateway.
    pub(super) async fn release_over(&self, admin: &str, address: &str) -> CommandResult {
        let args = ["keys", "release", address, "--reason", "ticket 7", "--admin", admin];
        run_ibid(&args, &[("IBID_ADMIN_TOKEN", OPERATOR_TOKEN)]).await
    }

    pub(super) async fn run_keys(&self, args: &[&str]) -> CommandResult {
        self.run_on_store(&[&["keys"], args].concat()).await
    }

    /// A command on the store, which is named by its URL if that is all there is to it.
    pub(super) async fn run_on_store(&self, args: &[&str]) -> CommandResult {
        if self.store.via_admin {
            let gateway = self.start_gateway().await;
            let admin = format!("http://{}", gateway.admin_addr());
            let done = run_ibid(&[args, &["--admin", &admin]].concat(), &[("IBID_ADMIN_TOKEN", OPERATOR_TOKEN)]).await;
            self.stop_gateway(gateway).await;
            return done;
        }
        let file = self.config_file.path().to_str().expect("a plain path");
        let store = if self.store.table.is_empty() { ["--store", &self.store.url] } else { ["--config", file] };
        run_ibid(&[args, &store].concat(), &[]).await
    }

    /// The entries that a list shows.
    pub(super) async fn list(&self, args: &[&str]) -> Vec<Value> {
        let mut all = vec!["list", "--json"];
        all.extend(args);
        let done = self.run_keys(&all).await;
        assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{done:?}");
        done.json()["records"].as_array().expect("a list").clone()
    }

    /// The address of the entry with a key.
    pub(super) async fn address(&self, key: &str) -> String {
        let found = self.list(&["--key", key]).await;
        assert_eq!(found.len(), 1, "{found:?}");
        found[0]["address"].as_str().expect("text").to_owned()
    }
}

pub(super) fn pay(addr: SocketAddr, nth: usize) -> TestRequest {
    let (tenant, user) = (["acme", "globex"][nth % 2], format!("user-{}", nth % 2));
    request(addr, &nth.to_string(), &key(nth), tenant, &user)
}

pub(super) fn send(addr: SocketAddr, path: &str, key: &str) -> TestRequest {
    request(addr, path, key, "acme", "user-9")
}

fn request(addr: SocketAddr, path: &str, key: &str, tenant: &str, user: &str) -> TestRequest {
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/pay/{path}") };
    // The host is part of a key's scope, and the port is another after each restart.
    let request = caller(post(addr, path)).header("Host", "shop.example").key(key).json(r#"{"amount":1}"#);
    request.header("X-Tenant-Id", tenant).header("X-User-Id", user).header("User-Agent", "test/1")
}
