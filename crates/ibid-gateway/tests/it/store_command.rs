//! One store, one process; and `ibid store check|dump|compact` on a good store, a busy one and a damaged one.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use testbed::{
    client::{TestRequest, TestResponse, post},
    process::{GatewayProcess, ProcessSignal},
    upstream::{TestUpstream, UpstreamReply},
};

use crate::support::{BIN, assert_replay, caller, find, policy, run_ibid};

const KEY_COUNT: usize = 5;

fn pay(addr: SocketAddr, key: usize) -> TestRequest {
    // The host is part of a key's scope, and the port is another after each restart.
    let request = caller(post(addr, format!("/pay/{key}"))).header("Host", "shop.example");
    request.key(format!("key-{key}")).json(r#"{"amount":1}"#)
}

/// A gateway on `embedded:data`, with some keys that have run.
struct EmbeddedGateway {
    upstream: TestUpstream,
    gateway: GatewayProcess,
    first: Vec<TestResponse>,
}

impl EmbeddedGateway {
    async fn start() -> EmbeddedGateway {
        let upstream = TestUpstream::start().await;
        let launch = GatewayProcess::launch(BIN).config(policy("")).upstream(&upstream.url());
        let gateway = launch.arg("--store").arg("embedded:data").start().await;
        let mut first = Vec::new();
        for key in 0..KEY_COUNT {
            upstream
                .on(&format!("/pay/{key}"), UpstreamReply::status(201).json(&format!(r#"{{"paid":"answer-{key}"}}"#)));
            first.push(pay(gateway.addr(), key).send().await);
            assert_eq!(first[key].status, 201, "{:?}", first[key]);
        }
        EmbeddedGateway { upstream, gateway, first }
    }

    async fn stop(&mut self) {
        self.gateway.signal(ProcessSignal::Term);
        assert!(self.gateway.wait_exit(Duration::from_secs(10)).await.success());
    }

    fn data(&self) -> PathBuf {
        self.gateway.dir().join("data")
    }

    async fn store(&self, what: &str) -> (Option<i32>, String, String) {
        printed(&["store", what, self.data().to_str().expect("a plain path")]).await
    }

    async fn assert_replays(&self, keys: impl IntoIterator<Item = usize>) {
        for key in keys {
            assert_replay(&pay(self.gateway.addr(), key).send().await, &self.first[key]);
        }
        assert_eq!(self.upstream.executions(), KEY_COUNT, "nothing ran again");
    }
}

async fn printed(args: &[&str]) -> (Option<i32>, String, String) {
    let done = run_ibid(args, &[]).await;
    (done.code, done.text(), done.stderr)
}

/// Flips a bit of the only place in the store where this stands; the file's name, and the place.
fn flip_bit(data: &Path, needle: &str) -> (String, usize) {
    for file in fs::read_dir(data).expect("the store's folder") {
        let path = file.expect("a file").path();
        let mut bytes = fs::read(&path).expect("it reads");
        if let Some(at) = find(&bytes, needle.as_bytes()) {
            bytes[at] ^= 1;
            fs::write(&path, bytes).expect("it is written");
            return (path.file_name().expect("a name").to_string_lossy().into_owned(), at);
        }
    }
    panic!("{needle} stands nowhere in {}", data.display())
}

#[tokio::test]
async fn a_second_gateway_on_the_same_store_is_refused_and_told_who_has_it() {
    let scene = EmbeddedGateway::start().await;
    let (store, url) = (format!("embedded:{}", scene.data().display()), scene.upstream.url());
    let serve = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", &url, "--store", &store];
    let (code, _, said) = printed(&serve).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&format!("in use by process {} on ", scene.gateway.id())), "{said}");
    assert!(said.contains(&store), "{said}");
    scene.assert_replays(0..KEY_COUNT).await;
}

#[tokio::test]
async fn a_store_that_a_gateway_has_open_is_left_alone() {
    let scene = EmbeddedGateway::start().await;
    for what in ["check", "dump", "compact"] {
        let (code, out, said) = scene.store(what).await;
        assert_eq!((code, out.as_str()), (Some(1), ""), "{what}: {said}");
        assert!(said.contains(&format!("in use by process {}", scene.gateway.id())), "{what}: {said}");
    }
    scene.assert_replays(0..KEY_COUNT).await;
}

#[tokio::test]
async fn a_good_store_is_checked_dumped_and_compacted() {
    let mut scene = EmbeddedGateway::start().await;
    scene.stop().await;
    let (code, out, said) = scene.store("check").await;
    assert_eq!((code, said.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains(&format!("of which {KEY_COUNT} count")), "{out}");
    let (code, dumped, said) = scene.store("dump").await;
    assert_eq!((code, said.as_str(), dumped.lines().count()), (Some(0), "", KEY_COUNT), "{dumped}");
    assert!(dumped.lines().all(|line| line.contains(r#""kind":"done""#)), "{dumped}");
    let (code, out, said) = scene.store("compact").await;
    assert_eq!((code, said.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains("bytes before"), "{out}");
    assert_eq!(scene.store("dump").await.1, dumped, "compacting changes nothing that counts");
    scene.gateway.restart().await;
    scene.assert_replays(0..KEY_COUNT).await;
}

#[tokio::test]
async fn what_is_damaged_is_reported_with_file_and_offset_and_never_served() {
    let mut scene = EmbeddedGateway::start().await;
    scene.stop().await;
    let (file, at) = flip_bit(&scene.data(), "answer-2");
    let (code, out, said) = scene.store("check").await;
    assert_eq!(code, Some(1), "{out}{said}");
    let line = out.lines().find(|line| line.starts_with(&format!("{file}, offset "))).expect("the place is named");
    let offset = line.split(['t', ':']).nth(1).and_then(|text| text.trim().parse::<usize>().ok());
    assert!(offset.is_some_and(|offset| offset <= at && at - offset < 4096), "{line}, damaged at {at}");
    assert!(line.ends_with("the checksum does not fit"), "{line}");
    let (code, dumped, said) = scene.store("dump").await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(line), "{said}");
    assert_eq!(dumped.matches(r#""kind":"done""#).count(), KEY_COUNT - 1, "{dumped}");

    scene.gateway.restart().await;
    let warned = scene.gateway.wait_for_log(&format!("not readable, and not served: {line}")).await;
    assert!(warned.contains("WARN"), "{warned}");
    scene.assert_replays((0..KEY_COUNT).filter(|key| *key != 2)).await;
    let answer = pay(scene.gateway.addr(), 2).send().await;
    assert!(answer.status == 409 || answer.status == 503, "that it began is known: {answer:?}");
    assert!(!answer.text().contains("answer-"), "{answer:?}");
    assert_eq!(scene.upstream.executions(), KEY_COUNT, "and it did not run again");
}
