//! Keys change under load: no request fails, old answers go on answering, and in the end the old key can go.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use serde_json::Value;
use testbed::{
    TestRedis,
    client::TestResponse,
    process::{GatewayProcess, ProcessSignal},
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::time::{sleep, timeout};

use super::{end, ibid, pay, pay_at, table};
use crate::support::{TestGateway, assert_ran, assert_refused, assert_replay, start_gateway};

const RELOADED_LOG_TEXT: &str = "configuration taken up";

/// Clients that pay, and each time also ask again for something that was paid before.
struct RotationLoad {
    stop: Arc<AtomicBool>,
    paid: Arc<AtomicUsize>,
    clients: Vec<tokio::task::JoinHandle<Vec<(String, TestResponse)>>>,
}

impl RotationLoad {
    fn start(gateway: &GatewayProcess) -> RotationLoad {
        let (stop, paid) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let clients = (0..3).map(|client| {
            let (stop, paid) = (stop.clone(), paid.clone());
            let addr = gateway.addr();
            tokio::spawn(async move {
                let mut answers: Vec<(String, TestResponse)> = Vec::new();
                while !stop.load(SeqCst) && answers.len() < 2000 {
                    let key = format!("key-{client}-{}", answers.len());
                    let answer = pay_at(addr, &key).send().await;
                    assert_ran(&answer);
                    answers.push((key, answer));
                    paid.fetch_add(1, SeqCst);
                    let (key, first) = &answers[answers.len() / 2];
                    assert_replay(&pay_at(addr, key).send().await, first);
                }
                answers
            })
        });
        let clients = clients.collect();
        RotationLoad { stop, paid, clients }
    }

    /// Returns once so many more were paid.
    async fn wait_for_more(&self, more: usize) {
        let until = self.paid.load(SeqCst) + more;
        let paid = async {
            while self.paid.load(SeqCst) < until {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(60), paid).await.expect("the clients go on: one has failed");
    }

    async fn stop(self) -> Vec<(String, TestResponse)> {
        self.stop.store(true, SeqCst);
        let mut answers = Vec::new();
        for client in self.clients {
            answers.extend(client.await.expect("no request fails"));
        }
        answers
    }
}

async fn reload_config(gateway: &mut GatewayProcess, config: &str, nth: usize) {
    gateway.rewrite_config(config);
    gateway.signal(ProcessSignal::Hup);
    let taken = async {
        while gateway.logs().iter().filter(|line| line.contains(RELOADED_LOG_TEXT)).count() < nth {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), taken).await.expect("it is taken up");
}

#[tokio::test]
async fn on_a_shared_store_without_a_restart() {
    let (server, upstream) = (TestRedis::start(), TestUpstream::start().await);
    // Nothing near, so that every replay is opened.
    let config = |ids: &[&str]| format!("[store]\nurl = {:?}\nlocal_cache = \"0\"\n{}", server.url(), table(ids));
    let mut gateway = start_gateway(&config(&["old"]), &upstream).await;
    let load = RotationLoad::start(&gateway);
    load.wait_for_more(20).await;
    reload_config(&mut gateway, &config(&["new", "old"]), 1).await;
    load.wait_for_more(20).await;

    let (folder, file) = (tempfile::tempdir().unwrap(), "both.toml");
    let path = folder.path().join(file);
    fs::write(&path, config(&["new", "old"])).unwrap();
    let reseal = ["keys", "reseal", "--config", path.to_str().unwrap(), "--json"];
    let (code, printed, said) = ibid(&reseal).await;
    assert_eq!((code, said.as_str()), (Some(0), ""), "{printed}");
    let counts: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&counts["key"], &counts["unopened"]), (&"new".into(), &0.into()), "{counts}");
    assert!(counts["from"]["old"].as_u64().unwrap() >= 20, "{counts}");
    load.wait_for_more(20).await;
    let (_, printed, _) = ibid(&reseal).await;
    let counts: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(counts["resealed"], 0, "nothing is left to do: {counts}");

    reload_config(&mut gateway, &config(&["new"]), 2).await;
    load.wait_for_more(20).await;
    let answers = load.stop().await;
    assert_eq!(upstream.executions(), answers.len(), "each ran once");
    for (key, first) in &answers {
        assert_replay(&pay(&gateway, key).send().await, first);
    }
    let logs = gateway.logs();
    let trouble: Vec<_> = logs.iter().filter(|line| line.contains("ERROR") || line.contains("WARN")).collect();
    assert!(trouble.is_empty(), "{trouble:#?}");
}

#[tokio::test]
async fn on_an_embedded_store_with_a_stop_in_between() {
    let upstream = TestUpstream::start().await;
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let config = |ids: &[&str]| format!("[store]\nurl = \"embedded:{}\"\n{}", data.display(), table(ids));
    let mut gateway = start_gateway(&config(&["old"]), &upstream).await;
    let load = RotationLoad::start(&gateway);
    load.wait_for_more(10).await;
    reload_config(&mut gateway, &config(&["new", "old"]), 1).await;
    load.wait_for_more(10).await;
    let answers = load.stop().await;
    let path = folder.path().join("ibid.toml");
    fs::write(&path, config(&["new", "old"])).unwrap();
    let reseal = ["keys", "reseal", "--config", path.to_str().unwrap()];
    let (code, _, said) = ibid(&reseal).await;
    assert_eq!(code, Some(69), "{said}");
    assert!(said.contains("in use by process") && said.contains("or stop it"), "{said}");
    end(gateway).await;

    // Bit by bit, as it may be broken off.
    let (mut cursor, mut runs) = (String::new(), 0);
    loop {
        let mut args = vec!["keys", "reseal", "--config", path.to_str().unwrap(), "--json", "--limit", "7"];
        if !cursor.is_empty() {
            args.extend(["--cursor", &cursor]);
        }
        let (code, printed, said) = ibid(&args).await;
        assert_eq!(code, Some(0), "{said}");
        runs += 1;
        let counts: Value = serde_json::from_str(&printed).unwrap();
        let looked = counts["resealed"].as_u64().unwrap() + counts["current"].as_u64().unwrap();
        assert!(looked <= 7, "{counts}");
        match counts["next"].as_str() {
            Some(next) => {
                assert!(said.contains(&format!("--cursor {next}")), "{said}");
                cursor = next.to_owned();
            }
            None => break,
        }
    }
    assert!(runs > 2, "{runs}");
    let (code, printed, _) = ibid(&reseal).await;
    let all = format!("{} records had new already\n", answers.len());
    assert!(code == Some(0) && printed.starts_with(&all), "{printed}");
    assert!(printed.contains("labels have an older key until the entry expires"), "{printed}");

    let gateway = start_gateway(&config(&["new"]), &upstream).await;
    for (key, first) in &answers {
        assert_replay(&pay(&gateway, key).send().await, first);
    }
    assert_eq!(upstream.executions(), answers.len());
}

#[tokio::test]
async fn another_secret_is_refused_by_a_gateway_that_runs() {
    let TestGateway { upstream: _upstream, mut gateway } = TestGateway::start(&table(&["a"])).await;
    let first = pay(&gateway, "k").send().await;
    assert_ran(&first);
    gateway.rewrite_config(&table(&["a"]).replace(&super::key_base64(super::SECRET), &super::key_base64("another")));
    gateway.signal(ProcessSignal::Hup);
    let line = gateway.wait_for_log("would forget what is remembered").await;
    assert!(line.contains("seal.address_secret changed"), "{line}");
    assert_replay(&pay(&gateway, "k").send().await, &first);
}

/// As docs/sealing.md tells it.
#[tokio::test]
async fn sealing_is_switched_on_without_forgetting() {
    let upstream = TestUpstream::start().await;
    let folder = tempfile::tempdir().unwrap();
    let store = format!("[store]\nurl = \"embedded:{}\"\n", folder.path().join("data").display());
    let path = folder.path().join("ibid.toml");
    let start = async |config: String| start_gateway(&config, &upstream).await;
    upstream.on_each(
        "/pay",
        [
            UpstreamReply::usual(),
            UpstreamFault::CloseWithoutReply.into(),
            UpstreamReply::usual(),
            UpstreamReply::usual(),
        ],
    );

    let gateway = start(store.clone()).await;
    let first = pay(&gateway, "in-clear").send().await;
    assert_ran(&first);
    assert_eq!(pay(&gateway, "lost").send().await.status, 502);
    end(gateway).await;

    let switching = format!("{store}{}accept_plain = true\nplain_addresses = true\n", table(&["k"]));
    let gateway = start(switching.clone()).await;
    gateway.wait_for_log("seal.accept_plain: what is not sealed is believed").await;
    assert_replay(&pay(&gateway, "in-clear").send().await, &first);
    assert_refused(&pay(&gateway, "lost").send().await, 409, "outcome-unknown");
    let second = pay(&gateway, "sealed").send().await;
    assert_ran(&second);
    end(gateway).await;
    fs::write(&path, &switching).unwrap();
    let (code, printed, said) = ibid(&["keys", "reseal", "--config", path.to_str().unwrap()]).await;
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert!(printed.starts_with("sealed 1 record with k that was in clear\n1 record had k already\n"), "{printed}");

    let gateway = start(switching.replace("accept_plain = true\n", "")).await;
    assert_replay(&pay(&gateway, "in-clear").send().await, &first);
    assert_replay(&pay(&gateway, "sealed").send().await, &second);
    assert_refused(&pay(&gateway, "lost").send().await, 503, "store-unavailable");
    end(gateway).await;

    // One without the keys refuses what one with them wrote, and runs none of it.
    let ran = upstream.executions();
    let gateway = start(store).await;
    for key in ["in-clear", "sealed"] {
        let refused = pay(&gateway, key).send().await;
        assert!([422, 503].contains(&refused.status), "{refused:?}");
    }
    assert_eq!(upstream.executions(), ran);
}
