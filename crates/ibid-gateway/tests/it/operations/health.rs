//! Health on the admin port, and the published contract on the public one.

use ibid::RefusalReason;
use testbed::{
    client::{RawClient, get, post, request},
    upstream::{TestUpstream, UpstreamReply},
};

use crate::support::{TestGateway, start_gateway};

const CONTRACT: &str = "/.well-known/idempotency";

#[tokio::test]
async fn health_is_on_the_admin_port_only() {
    let TestGateway { upstream, gateway } = TestGateway::start("").await;
    let admin = gateway.admin_addr();
    let alive = get(admin, "/healthz").send().await;
    assert_eq!((alive.status, alive.text().trim()), (200, "ok"));
    let ready = get(admin, "/readyz").send().await;
    assert_eq!((ready.status, ready.header("content-type")), (200, Some("application/json")), "{ready:?}");
    let ready = ready.json();
    assert_eq!((&ready["ready"], &ready["stopping"], &ready["running"]), (&true.into(), &false.into(), &0.into()));
    assert_eq!((&ready["store"]["name"], &ready["store"]["durable"]), (&"embedded".into(), &true.into()), "{ready}");
    for path in ["/healthz", "/readyz"] {
        let head = request("HEAD", admin, path).send().await;
        assert_eq!((head.status, head.body.len()), (200, 0), "{head:?}");
        assert_eq!(get(admin, path).send().await.header("cache-control"), Some("no-store"));
        assert_eq!(post(admin, path).send().await.status, 405, "{path}");
    }
    assert_eq!(get(admin, "/nothing").send().await.status, 404);
    assert_eq!(upstream.requests(), 0, "the admin port never reaches the app");

    for path in ["/healthz", "/readyz", "/metrics", "/api/records"] {
        upstream.on(path, UpstreamReply::status(418).body("the app's own"));
        let answer = get(gateway.addr(), path).send().await;
        assert_eq!((answer.status, answer.text().as_str()), (418, "the app's own"), "{path}");
    }
}

#[tokio::test]
async fn the_contract_is_json_unless_a_browser_asks() {
    let upstream = TestUpstream::start().await;
    let config = "[[route]]\nmatch = \"POST /pay/*\"\npreset = \"stripe\"\n[[route]]\nmatch = \"PUT /<i>&\"\n";
    let gateway = start_gateway(config, &upstream).await;
    let addr = gateway.addr();
    for accept in [None, Some("*/*"), Some("application/json"), Some("application/json, text/html")] {
        let request = get(addr, CONTRACT);
        let request = accept.iter().fold(request, |request, accept| request.header("Accept", *accept));
        let answer = request.send().await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")), "{accept:?}");
        let page = answer.json();
        let routes: Vec<_> = page["routes"].as_array().unwrap().iter().map(|route| route["match"].clone()).collect();
        assert_eq!(routes, ["POST /pay/*", "PUT /<i>&", "*"]);
        let refusals = page["refusals"].as_array().unwrap();
        for reason in RefusalReason::all() {
            let anchor = format!("{CONTRACT}#{}", reason.name());
            assert!(refusals.iter().any(|refusal| refusal["type"] == anchor.as_str()), "{anchor}");
        }
        assert!(answer.header("vary").is_some_and(|vary| vary.to_lowercase().contains("accept")), "{answer:?}");
    }
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let answer = get(addr, CONTRACT).header("Accept", browser).send().await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/html; charset=utf-8")), "{answer:?}");
    assert!(answer.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));
    let page = answer.text();
    for reason in RefusalReason::all() {
        assert_eq!(page.matches(&format!(" id=\"{}\"", reason.name())).count(), 1, "{reason}");
    }
    assert!(page.contains("/pay/*") && page.contains("/&lt;i&gt;&amp;") && !page.contains("<i>&"), "{page}");
    for own in [upstream.addr().to_string(), gateway.admin_addr().to_string()] {
        assert!(!page.contains(&own), "{own} is nobody's business");
    }
    assert_eq!(upstream.requests(), 0);
}

#[tokio::test]
async fn a_head_of_the_contract_has_its_length_and_no_body() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start("").await;
    let whole = get(gateway.addr(), CONTRACT).send().await;
    let mut raw = RawClient::connect(gateway.addr()).await;
    let head = request("HEAD", gateway.addr(), CONTRACT).send_on(&mut raw).await;
    assert_eq!((head.status, head.header("content-type")), (200, Some("application/json")));
    assert_eq!(head.header("content-length"), Some(whole.body.len().to_string().as_str()), "{head:?}");
    // Nothing of a body is left over on the connection.
    assert_eq!(get(gateway.addr(), "/next").send_on(&mut raw).await.status, 200);
}

#[tokio::test]
async fn every_refusal_leads_to_its_place() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start("[policy]\nkey.required = true\n").await;
    let refused = post(gateway.addr(), "/pay").send().await;
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    assert!(refused.header("link").is_some_and(|link| link.contains(CONTRACT) && link.contains("describedby")));
    let kind = refused.json()["type"].as_str().unwrap().to_owned();
    let (page, anchor) = kind.split_once('#').unwrap();
    let page = get(gateway.addr(), page).header("Accept", "text/html").send().await.text();
    assert!(page.contains(&format!("id=\"{anchor}\"")), "{anchor}");
}

#[tokio::test]
async fn only_that_path_shadows_the_app() {
    let TestGateway { upstream, gateway } = TestGateway::start("").await;
    upstream.reply_by_default(UpstreamReply::status(418).body("the app's own"));
    let addr = gateway.addr();
    for path in ["/.well-known", "/.well-known/", "/.well-known/idempotency/", "/.well-known/idempotency2", "/"] {
        assert_eq!(get(addr, path).send().await.status, 418, "{path}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        assert_eq!(request(method, addr, CONTRACT).send().await.status, 418, "{method}");
    }
    assert_eq!(get(addr, format!("{CONTRACT}?lang=en")).send().await.status, 200, "a query changes nothing");
}
