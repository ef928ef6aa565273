//! A store with records of every kind in it, made by a gateway that is gone again, and commands on that store.

use std::{net::SocketAddr, time::Duration};

use ibid_testkit::{
    client::{Request, Response, post},
    process::{Gateway, Signal, run},
    upstream::{Fault, Reply, Upstream},
};
use serde_json::Value;
use tempfile::NamedTempFile;

use super::Place;
use crate::faults::kit::{BIN, caller};

/// Payments that ended well; see [`Scene::filled`].
pub(super) const PAYMENTS: usize = 5;
/// All entries of a filled store.
pub(super) const ALL: usize = PAYMENTS + 3;

pub(super) const TOKEN: &str = "token-of-the-operator";

pub(super) const LOST: &str = "key-of-the-lost-one";
pub(super) const FAILED: &str = "key-of-the-failed-one";
pub(super) const BINARY: &str = "key-of-the-binary-one";
pub(super) const BYTES: &[u8] = b"\x00\x01\xfe\xff";

pub(super) const CLEAR: &str =
    "label = { tenant = \"header:X-Tenant-Id\", user = \"header:X-User-Id\", key = \"clear\" }";

/// The key of a payment.
pub(super) fn key(nth: usize) -> String {
    format!("key-of-payment-{nth}")
}

pub(super) struct Scene<'a> {
    pub(super) place: &'a Place,
    pub(super) upstream: Upstream,
    dials: &'static str,
    /// With nothing but the store in it.
    file: NamedTempFile,
}

/// What a command did.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) code: Option<i32>,
    pub(super) out: Vec<u8>,
    pub(super) said: String,
}

impl Done {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.out.clone()).expect("text")
    }

    #[track_caller]
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }

    /// The value beside a name in what `show` prints.
    #[track_caller]
    pub(super) fn field(&self, name: &str) -> String {
        let text = self.text();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name:<13}  ")));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).to_owned()
    }
}

impl Place {
    pub(crate) fn settings(&self) -> String {
        format!("[store]\nurl = {:?}\n{}\n", self.url, self.table)
    }
}

impl<'a> Scene<'a> {
    /// Five payments by two users of two tenants, one that failed, one whose answer was lost, one that is no text. Keys
    /// are stored in clear.
    pub(super) async fn filled(place: &'a Place) -> Scene<'a> {
        Scene::filled_with(place, CLEAR).await
    }

    pub(super) async fn filled_with(place: &'a Place, dials: &'static str) -> Scene<'a> {
        let file = NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), place.settings()).expect("it is written");
        let scene = Scene { place, upstream: Upstream::start().await, dials, file };
        scene.upstream.on("/pay/failed", Reply::status(404).json(r#"{"error":"no such account"}"#));
        scene.upstream.on_each("/pay/lost", [Fault::CloseWithoutReply.into(), Reply::usual()]);
        let binary = Reply::status(200).header("Content-Type", "application/octet-stream").body(BYTES);
        scene.upstream.on("/pay/binary", binary);
        let gateway = scene.gateway().await;
        for nth in 0..PAYMENTS {
            let reply =
                Reply::status(201).json(&format!(r#"{{"paid":{nth}}}"#)).header("Location", format!("/p/{nth}"));
            scene.upstream.on(&format!("/pay/{nth}"), reply);
            assert_eq!(pay(gateway.addr(), nth).send().await.status, 201);
        }
        for (path, key, status) in [("failed", FAILED, 404), ("lost", LOST, 502), ("binary", BINARY, 200)] {
            let answer = send(gateway.addr(), path, key).send().await;
            assert_eq!(answer.status, status, "{answer:?}");
        }
        scene.end(gateway).await;
        scene
    }

    /// A gateway on the store.
    pub(super) async fn gateway(&self) -> Gateway {
        let config = format!(
            "[admin]\ntoken = {TOKEN:?}\n{}[[route]]\nmatch = \"POST /pay/*\"\n{}\n[[route]]\nmatch = \"POST /short/*\"\nttl = \"100ms\"\nlease = \"100ms\"\n",
            self.place.settings(),
            self.dials
        );
        Gateway::launch(BIN).config(config).upstream(&self.upstream.url()).start().await
    }

    pub(super) async fn end(&self, mut gateway: Gateway) {
        gateway.signal(Signal::Term);
        assert!(gateway.wait_exit(Duration::from_secs(20)).await.success());
    }

    /// What a fresh gateway on the store answers to a request.
    pub(super) async fn ask(&self, path: &str, key: &str) -> Response {
        let gateway = self.gateway().await;
        let answer = send(gateway.addr(), path, key).send().await;
        self.end(gateway).await;
        answer
    }

    pub(super) async fn keys(&self, args: &[&str]) -> Done {
        self.on_store(&[&["keys"], args].concat()).await
    }

    /// A command on the store, which is named by its URL if that is all there is to it.
    pub(super) async fn on_store(&self, args: &[&str]) -> Done {
        if self.place.by_admin {
            let gateway = self.gateway().await;
            let admin = format!("http://{}", gateway.admin_addr());
            let done = ibid_with(&[args, &["--admin", &admin]].concat(), &[("IBID_ADMIN_TOKEN", TOKEN)]).await;
            self.end(gateway).await;
            return done;
        }
        let file = self.file.path().to_str().expect("a plain path");
        let store = if self.place.table.is_empty() { ["--store", &self.place.url] } else { ["--config", file] };
        ibid(&[args, &store].concat()).await
    }

    /// The entries that a list shows.
    pub(super) async fn list(&self, args: &[&str]) -> Vec<Value> {
        let mut all = vec!["list", "--json"];
        all.extend(args);
        let done = self.keys(&all).await;
        assert_eq!((done.code, done.said.as_str()), (Some(0), ""), "{done:?}");
        done.json()["records"].as_array().expect("a list").clone()
    }

    /// The address of the entry with a key.
    pub(super) async fn address(&self, key: &str) -> String {
        let found = self.list(&["--key", key]).await;
        assert_eq!(found.len(), 1, "{found:?}");
        found[0]["address"].as_str().expect("text").to_owned()
    }
}

/// Runs the binary.
pub(super) async fn ibid(args: &[&str]) -> Done {
    ibid_with(args, &[]).await
}

pub(super) async fn ibid_with(args: &[&str], env: &[(&str, &str)]) -> Done {
    let output = run(BIN, args, env).await;
    let said = String::from_utf8(output.stderr).expect("text");
    Done { code: output.status.code(), out: output.stdout, said }
}

pub(super) fn pay(addr: SocketAddr, nth: usize) -> Request {
    let (tenant, user) = (["acme", "globex"][nth % 2], format!("user-{}", nth % 2));
    request(addr, &nth.to_string(), &key(nth), tenant, &user)
}

pub(super) fn send(addr: SocketAddr, path: &str, key: &str) -> Request {
    request(addr, path, key, "acme", "user-9")
}

fn request(addr: SocketAddr, path: &str, key: &str, tenant: &str, user: &str) -> Request {
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/pay/{path}") };
    // The host is part of a key's scope, and the port is another after each restart.
    let request = caller(post(addr, path)).header("Host", "shop.example").key(key).json(r#"{"amount":1}"#);
    request.header("X-Tenant-Id", tenant).header("X-User-Id", user).header("User-Agent", "test/1")
}
