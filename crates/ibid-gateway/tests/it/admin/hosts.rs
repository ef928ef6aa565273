//! The API and the console answer to names of this machine, and to configured ones (DNS rebinding).

use testbed::client::{TestRequest, get, request};

use super::common::{ADMIN_CONFIG, ADMIN_TOKEN, assert_problem};
use crate::support::{TestGateway, run_ibid};

const GUARDED_PATHS: [&str; 5] = ["/", "/login", "/api/records", "/api/openapi.json", "/nothing"];

fn request_with_host(office: &TestGateway, path: &str, host: &str) -> TestRequest {
    let request = get(office.gateway.admin_addr(), path).header("Host", host);
    request.header("Authorization", format!("Bearer {ADMIN_TOKEN}"))
}

#[tokio::test]
async fn another_name_is_refused_with_any_token() {
    let office = TestGateway::with_operators().await;
    let own = office.gateway.admin_addr().to_string();
    for path in GUARDED_PATHS {
        for host in ["evil.example", "evil.example:8081", "localhost.evil.example", "127.0.0.1.nip.example", "10.1.2.3"]
        {
            let answer = request_with_host(&office, path, host).send().await;
            assert_problem(&answer, 421, "admin.hosts");
        }
        for host in [own.as_str(), "localhost", "localhost:1", "[::1]:8081", "127.0.0.9"] {
            assert_ne!(request_with_host(&office, path, host).send().await.status, 421, "{path} at {host}");
        }
    }
    let answer = request_with_host(&office, "/api/records", "localhost").send().await;
    assert_eq!(answer.status, 200, "{answer:?}");
    // The target's own authority is what counts where there is one, and none may differ.
    let target = request("GET", office.gateway.admin_addr(), "http://evil.example/api/records").header("Host", &own);
    assert_eq!(target.header("Authorization", format!("Bearer {ADMIN_TOKEN}")).send().await.status, 421);
    let login = request("POST", office.gateway.admin_addr(), "/login").header("Host", "evil.example");
    assert_eq!(login.body(format!("token={ADMIN_TOKEN}")).send().await.status, 421, "nobody logs in there either");
}

#[tokio::test]
async fn health_and_metrics_answer_to_every_name() {
    let office = TestGateway::with_operators().await;
    for path in ["/healthz", "/readyz", "/metrics"] {
        for host in ["10.1.2.3:8081", "ibid-admin.ops.svc.cluster.local"] {
            let answer = get(office.gateway.admin_addr(), path).header("Host", host).send().await;
            assert_eq!(answer.status, 200, "{path} at {host}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn configured_names_are_answered_and_taken_up_without_a_restart() {
    let office = TestGateway::embedded(&format!("{ADMIN_CONFIG}hosts = [\"ibid.example.com\"]\n")).await;
    for (host, status) in [("Ibid.Example.Com:443", 200), ("other.example.com", 421)] {
        assert_eq!(request_with_host(&office, "/api/records", host).send().await.status, status, "{host}");
    }
    office
        .gateway
        .rewrite_config(&format!("[store]\nurl = \"embedded:data\"\n{ADMIN_CONFIG}hosts = [\"other.example.com\"]\n"));
    let line = office.gateway.wait_for_log("configuration taken up").await;
    assert!(!line.contains("needs_restart"), "{line}");
    for (host, status) in [("ibid.example.com", 421), ("other.example.com", 200)] {
        assert_eq!(request_with_host(&office, "/api/records", host).send().await.status, status, "{host}");
    }
}

#[tokio::test]
async fn what_is_no_name_is_refused_by_check() {
    for host in ["https://ibid.example.com", "ibid.example.com:443", "*.example.com", ""] {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("ibid.toml");
        let config = format!("upstream = \"http://127.0.0.1:9\"\n[admin]\nhosts = [\"ibid\", {host:?}]\n");
        std::fs::write(&file, config).expect("written");
        let output = run_ibid(&["check", file.to_str().expect("a plain path")], &[]).await;
        let said = output.stderr;
        assert_eq!(output.code, Some(64), "{said}");
        assert!(said.contains("admin.hosts[2]") && said.contains("ibid.example.com"), "{said}");
    }
}
