//! Commands on a sealed store, with its keys and without.

use std::fs;

use serde_json::Value;
use testbed::{
    client::request,
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};

use super::{end, ibid, key_base64, pay, table};
use crate::support::start_gateway;

const TENANT_POLICY: &str = "[policy]\nlabel = { tenant = \"header:X-Tenant-Id\", key = \"clear\" }\n";

/// A sealed store with an answer and an unknown outcome in it, and the file of its gateway.
struct SealedGateway {
    folder: tempfile::TempDir,
    upstream: TestUpstream,
}

impl SealedGateway {
    async fn start_filled() -> SealedGateway {
        let scene = SealedGateway { folder: tempfile::tempdir().unwrap(), upstream: TestUpstream::start().await };
        scene.upstream.on_each(
            "/pay",
            [UpstreamReply::status(201).json(r#"{"paid":true}"#), UpstreamFault::CloseWithoutReply.into()],
        );
        fs::write(scene.file(), scene.config()).unwrap();
        let gateway = scene.gateway().await;
        assert_eq!(pay(&gateway, "the-first").header("X-Tenant-Id", "acme").send().await.status, 201);
        assert_eq!(pay(&gateway, "the-lost").header("X-Tenant-Id", "acme").send().await.status, 502);
        end(gateway).await;
        scene
    }

    fn config(&self) -> String {
        format!("{TENANT_POLICY}[store]\nurl = {:?}\n{}", self.url(), table(&["k"]))
    }

    fn url(&self) -> String {
        format!("embedded:{}", self.folder.path().join("data").display())
    }

    fn file(&self) -> String {
        self.folder.path().join("ibid.toml").to_str().unwrap().to_owned()
    }

    async fn gateway(&self) -> GatewayProcess {
        start_gateway(&self.config(), &self.upstream).await
    }

    /// With the keys.
    async fn run_keys(&self, args: &[&str]) -> (Option<i32>, String, String) {
        ibid(&[&["keys"], args, &["--config", &self.file()]].concat()).await
    }

    /// With nothing but the store.
    async fn run_keys_without_seal(&self, args: &[&str]) -> (Option<i32>, String, String) {
        ibid(&[&["keys"], args, &["--store", &self.url()]].concat()).await
    }

    async fn address(&self, key: &str) -> String {
        let (_, printed, said) = self.run_keys(&["list", "--key", key, "--json"]).await;
        let found: Value = serde_json::from_str(&printed).unwrap_or_else(|why| panic!("{why}: {said}"));
        found["records"][0]["address"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn who_has_the_keys_sees_what_was_asked_and_answered() {
    let scene = SealedGateway::start_filled().await;
    let (code, printed, said) = scene.run_keys(&["list", "--tenant", "acme"]).await;
    assert_eq!((code, said.as_str()), (Some(0), ""));
    for part in ["the-first", "the-lost", "acme", "done", "unknown"] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let (_, printed, _) = scene.run_keys(&["show", "--key", "the-first"]).await;
    for part in ["POST /pay", "127.0.0.1", r#"{"paid":true}"#] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    assert!(!printed.contains("sealed"), "{printed}");
}

#[tokio::test]
async fn who_has_no_keys_sees_that_it_is_sealed() {
    let scene = SealedGateway::start_filled().await;
    let (code, printed, said) = scene.run_keys_without_seal(&["list"]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.starts_with("ibid: 2 entries are shown sealed, with hashes for key, tenant, user and endpoint: name the gateway's --config"), "{said}");
    assert!(printed.contains("unknown") && printed.contains("done"), "{printed}");
    let address = scene.address("the-first").await;
    let (code, shown, said) = scene.run_keys_without_seal(&["show", &address]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(shown.contains("\nsealed with    k\n"), "{shown}");
    assert!(shown.contains("the answer cannot be read: it is sealed with the key \"k\""), "{shown}");
    let (_, json, _) = scene.run_keys_without_seal(&["show", &address, "--json"]).await;
    let entry: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&entry["sealed_with"], &entry["response"]["sealed_with"]), (&"k".into(), &"k".into()), "{json}");
    let (code, _, said) = scene.run_keys_without_seal(&["show", &address, "--body"]).await;
    assert_eq!(code, Some(1), "{said}");
    for text in ["the-first", "acme", "/pay", "paid"] {
        assert!(![&printed, &shown, &json].iter().any(|printed| printed.contains(text)), "{text}");
    }
    // A file whose keys cannot be had says why.
    let path = scene.folder.path().join("keyless.toml");
    let config = scene.config().replace(&key_base64("k"), "env:NOT_HERE");
    fs::write(&path, config).unwrap();
    let (code, _, said) = ibid(&["keys", "list", "--config", path.to_str().unwrap()]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("the keys cannot be read: ") && said.contains("NOT_HERE is not set"), "{said}");
    let (code, _, said) = ibid(&["keys", "reseal", "--config", path.to_str().unwrap()]).await;
    assert!(code == Some(64) && said.contains("NOT_HERE is not set"), "{said}");
    let (code, _, said) = scene.run_keys_without_seal(&["reseal"]).await;
    assert!(code == Some(64) && said.contains("there are no keys to seal with"), "{said}");
}

#[tokio::test]
async fn an_outcome_is_resolved_with_the_keys_only() {
    let scene = SealedGateway::start_filled().await;
    let address = scene.address("the-lost").await;
    let resolve = ["resolve", &address, "--as", "done", "--status", "202", "--reason", "ticket 7"];
    let (code, _, said) = scene.run_keys_without_seal(&resolve).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("nothing was changed: it is sealed, and its gateway does not give an answer that is not"),
        "{said}"
    );
    let (code, _, said) = scene.run_keys(&resolve).await;
    assert_eq!(code, Some(0), "{said}");
    let gateway = scene.gateway().await;
    let told = pay(&gateway, "the-lost").header("X-Tenant-Id", "acme").send().await;
    assert_eq!((told.status, told.header("idempotent-replayed")), (202, Some("true")), "{told:?}");
    end(gateway).await;
    // Releasing and forgetting need none.
    let address = scene.address("the-first").await;
    let (code, _, said) = scene.run_keys_without_seal(&["forget", &address, "--reason", "ticket 8"]).await;
    assert_eq!(code, Some(0), "{said}");
}

#[tokio::test]
async fn what_does_not_open_is_said_and_can_be_forgotten() {
    let scene = SealedGateway::start_filled().await;
    let address = scene.address("the-first").await;
    let path = scene.folder.path().join("other.toml");
    // The same name, another key: as if the record had been altered.
    fs::write(&path, scene.config().replace(&key_base64("k"), &key_base64("another"))).unwrap();
    let other = path.to_str().unwrap();
    let (code, shown, said) = ibid(&["keys", "show", &address, "--config", other]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("their keys are not in [seal], or they were altered"), "{said}");
    assert!(shown.contains("the answer cannot be read"), "{shown}");
    let (code, _, said) = ibid(&["keys", "reseal", "--config", other]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&format!("ibid: {address}: what is at ")) && said.contains("was altered"), "{said}");
    assert!(said.contains("1 record did not open; nothing was changed there"), "{said}");
    let (code, _, said) = ibid(&["keys", "forget", &address, "--reason", "altered", "--config", other]).await;
    assert_eq!(code, Some(0), "{said}");
}

/// The route masks keys. Whoever asks for one is written down.
#[tokio::test]
async fn a_masked_key_is_revealed_to_an_admin_who_says_why() {
    const WHO: &str = "[admin]\naudit = \"store\"\ntoken = \"token-of-the-admin\"\n\
                       tokens = [{ role = \"viewer\", token = \"token-of-the-viewer\" }]\n";
    let scene = SealedGateway { folder: tempfile::tempdir().unwrap(), upstream: TestUpstream::start().await };
    let config = scene.config().replace(", key = \"clear\"", "");
    fs::write(scene.file(), &config).unwrap();
    let gateway = start_gateway(&format!("{WHO}{config}"), &scene.upstream).await;
    assert_eq!(pay(&gateway, "key-of-the-payment").send().await.status, 201);
    let send = async |method: &str, token: &str, path: &str, body: &str| {
        let asked = request(method, gateway.admin_addr(), path).header("Authorization", format!("Bearer {token}"));
        if method == "GET" { asked.send().await } else { asked.json(body).send().await }
    };
    let list = send("GET", "token-of-the-viewer", "/api/records", "").await;
    assert!(!list.text().contains("key-of-the-payment"), "{}", list.text());
    let record = &list.json()["records"][0];
    assert_eq!((&record["key"], &record["revealable"]), (&"key-****ment".into(), &true.into()), "{record}");
    let path = format!("/api/records/{}/reveal", record["address"].as_str().unwrap());
    assert_eq!(send("POST", "token-of-the-viewer", &path, r#"{"reason":"curious"}"#).await.status, 403);
    assert_eq!(send("POST", "token-of-the-admin", &path, r#"{"reason":" "}"#).await.status, 400);
    let revealed = send("POST", "token-of-the-admin", &path, r#"{"reason":"ticket 7"}"#).await;
    assert_eq!((revealed.status, &revealed.json()["key"]), (200, &"key-of-the-payment".into()), "{revealed:?}");
    end(gateway).await;

    let (code, printed, said) =
        scene.run_keys(&["reveal", "--key", "key-of-the-payment", "--reason", "ticket 8"]).await;
    assert_eq!((code, printed.as_str()), (Some(0), "key-of-the-payment\n"), "{said}");
    // Both are in the one trail, and the key is not.
    let (_, trail, _) = scene.run_keys(&["audit", "--json"]).await;
    let entries = serde_json::from_str::<Value>(&trail).unwrap()["entries"].clone();
    let told: Vec<_> = entries.as_array().unwrap().iter().map(|entry| [&entry["action"], &entry["reason"]]).collect();
    assert_eq!(told, [["reveal", "ticket 8"], ["reveal", "ticket 7"]], "{trail}");
    assert!(!trail.contains("key-of-the-payment") && trail.contains("(ibid keys)"), "{trail}");
    // Without the keys of the store nothing is revealed.
    let address = entries[0]["address"].as_str().unwrap();
    let (code, printed, said) = scene.run_keys_without_seal(&["reveal", address, "--reason", "r"]).await;
    assert!(code == Some(1) && printed.is_empty() && said.contains("does not open"), "{said}");
}
