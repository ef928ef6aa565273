//! A sender that no preset knows: Slack, whose signature has a header for its time.

use testbed::client::{self, TestRequest};

use super::common::{SECRET, hex, mac, now};
use crate::support::{TestGateway, assert_ran, assert_refused, assert_replay};

const CONFIG: &str = r#"
[[route]]
match     = "POST /hooks/slack"
preset    = "webhook:custom"
secrets   = ["env:HOOK_SECRET"]
key.from  = ["json:/event_id"]
tolerance = "1m"

[route.signature]
header    = "X-Slack-Signature"
prefix    = "v0="
encoding  = "hex"
content   = "v0:{X-Slack-Request-Timestamp}:{body}"
timestamp = "X-Slack-Request-Timestamp"
"#;

const BODY: &str = r#"{"event_id":"Ev08MFMKH6","type":"event_callback"}"#;

/// Sent under one time, signed under another.
fn event(bench: &TestGateway, sent: u64, signed: u64, body: &str) -> TestRequest {
    let signature = format!("v0={}", hex(&mac(SECRET.as_bytes(), &format!("v0:{signed}:{BODY}"))));
    let request = client::post(bench.gateway.addr(), "/hooks/slack").json(body);
    request.header("X-Slack-Request-Timestamp", sent.to_string()).header("X-Slack-Signature", signature)
}

#[tokio::test]
async fn a_scheme_of_ones_own_holds_as_the_known_ones_do() {
    let bench = TestGateway::with_hook_secrets(CONFIG).await;
    let at = now();
    for forged in [
        event(&bench, at, at, &BODY.replace("callback", "other")),
        event(&bench, at, at + 1, BODY),
        event(&bench, at - 90, at - 90, BODY),
    ] {
        assert_refused(&forged.send().await, 401, "identity-invalid");
    }
    let without = client::post(bench.gateway.addr(), "/hooks/slack").json(BODY);
    assert_refused(&without.send().await, 401, "identity-invalid");
    assert_eq!(bench.upstream.requests(), 0);
    let first = event(&bench, at, at, BODY).send().await;
    assert_ran(&first);
    assert_replay(&event(&bench, at + 5, at + 5, BODY).send().await, &first);
    let twice = event(&bench, at, at, BODY).header("X-Slack-Request-Timestamp", at.to_string());
    assert_refused(&twice.send().await, 400, "request-ambiguous");
    bench.assert_executed(1);
}

/// Nothing is checked where that was asked for, and the ids are still told apart.
#[tokio::test]
async fn unsigned_deliveries_are_taken_where_that_was_said() {
    let config = "[[route]]\nmatch = \"POST /hooks/plain\"\npreset = \"webhook:custom\"\nunsigned = true\n\
                  key.from = \"header:X-Request-Id\"\n";
    let bench = TestGateway::with_hook_secrets(config).await;
    let send = |id: &str| client::post(bench.gateway.addr(), "/hooks/plain").header("X-Request-Id", id).json("{}");
    let first = send("1").send().await;
    assert_ran(&first);
    assert_replay(&send("1").send().await, &first);
    assert_ran(&send("2").send().await);
    assert_refused(&client::post(bench.gateway.addr(), "/hooks/plain").json("{}").send().await, 400, "key-missing");
    bench.assert_executed(2);
    bench.gateway.wait_for_log("whoever knows the address can send deliveries").await;
}
