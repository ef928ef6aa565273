//! The JavaScript client in a real Chromium, on a page of one origin, against the gateway on another.

mod driver;

use std::{fs, time::Duration};

use serde_json::{Value, json};
use testbed::{
    FaultProxy,
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::time::{sleep, timeout};

use self::driver::WebDriverBrowser;
use crate::common::{gateway, only_key, root};

/// What the page offers to the tests. `pay` says what became of it, `sent` what the guarded button and form did.
const PAGE: &str = r#"<!doctype html><title>shop</title>
<button id="button">Pay</button>
<form id="form"><input name="amount" value="1"><button id="submit" name="way" value="card">Pay</button></form>
<script type="module">
import { IdempotencyError, guard, idempotentFetch } from '/ibid.min.js'
const told = async answer => ({ status: answer.status, body: await answer.text(), ...answer.idempotency })
window.ibid = { IdempotencyError, guard, idempotentFetch }
window.pay = async (url, options) => told(await idempotentFetch(url, {
  method: 'POST', body: '{"amount":1}', headers: { 'content-type': 'application/json' } }, options))
window.ready = true
</script>"#;

/// The shop's page, the app, the gateway before it, and a link between browser and gateway.
struct BrowserShop {
    page: TestUpstream,
    app: TestUpstream,
    proxy: FaultProxy,
    gateway: GatewayProcess,
    browser: WebDriverBrowser,
}

impl BrowserShop {
    async fn open() -> BrowserShop {
        let (page, app) = (TestUpstream::start().await, TestUpstream::start().await);
        page.on("/", UpstreamReply::status(200).header("content-type", "text/html").body(PAGE));
        let script = fs::read_to_string(root().join("clients/js/ibid.min.js")).expect("the shipped file");
        page.on("/ibid.min.js", UpstreamReply::status(200).header("content-type", "text/javascript").body(script));
        // The app knows nothing of preflights.
        app.on("OPTIONS *", UpstreamReply::status(404));
        let gateway = gateway(&format!("cors = {{ origins = [\"{}\"] }}\n", page.url()), &app).await;
        let link = FaultProxy::to(gateway.addr());
        let shop = BrowserShop { page, app, proxy: link, gateway, browser: WebDriverBrowser::start().await };
        shop.open_page().await;
        shop
    }

    async fn open_page(&self) {
        self.browser.open(&self.page.url()).await;
        self.until_ready().await;
    }

    async fn until_ready(&self) {
        self.browser
            .value(
                "new Promise(done => { const look = () => window.ready ? done(true) : setTimeout(look, 5); look() })",
            )
            .await;
    }

    fn pay(&self, options: &Value) -> String {
        format!("pay('http://{}/pay', {options})", self.proxy.addr())
    }

    /// How many keys are kept of operations that have not ended.
    async fn pending_keys(&self) -> Value {
        self.browser.value("Object.values(localStorage).filter(it => !('until' in JSON.parse(it))).length").await
    }

    /// How often the app was asked to do something; preflights do nothing.
    fn runs(&self) -> usize {
        self.app.executions_at("/pay")
    }
}

/// One key on everything that ran, and the answer of the one run.
#[track_caller]
fn assert_one_effect(shop: &BrowserShop, answer: &Value) {
    assert_eq!((&answer["status"], &answer["body"]), (&json!(201), &json!(r#"{"id":1,"run":1}"#)), "{answer}");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn answers_replays_and_refusals_are_told_apart_across_origins() {
    let shop = BrowserShop::open().await;
    for replayed in [false, true] {
        let answer = shop.browser.value(&shop.pay(&json!({ "key": "k-1" }))).await;
        assert_one_effect(&shop, &answer);
        assert_eq!(answer["replayed"], replayed, "{answer}");
    }
    shop.app.on("/pay", UpstreamFault::ResetAfterRequest);
    let lost = shop.browser.value(&shop.pay(&json!({ "operation": "order-17" }))).await;
    assert_eq!(lost["reason"], "outcome-unknown", "{lost}");
    assert!(lost["thrown"].as_str().unwrap().contains("nobody knows whether it happened"), "{lost}");
    assert_eq!((shop.runs(), shop.pending_keys().await), (2, json!(1)));
    shop.app.on("/pay", UpstreamReply::status(503).header("retry-after", "3600"));
    let later = shop.browser.value(&shop.pay(&json!({}))).await;
    assert_eq!(later["reason"], "retry-after", "the header can be read across origins: {later}");
}

/// With cookies a browser hides every answer that does not allow credentials, also that of an operation that ran.
#[tokio::test]
async fn a_page_that_sends_cookies_reads_answers_replays_and_refusals() {
    let shop = BrowserShop::open().await;
    let url = format!("http://{}/pay", shop.proxy.addr());
    let pay = |body: &str| {
        format!(
            "fetch('{url}', {{ method: 'POST', credentials: 'include', body: '{body}', headers: {{ 'Idempotency-Key': 'k-1', \
             'Content-Type': 'application/json' }} }}).then(async it => [it.status, it.headers.get('Idempotent-Replayed'), await it.text()])"
        )
    };
    let said = r#"{"id":1,"run":1}"#;
    assert_eq!(shop.browser.value(&pay("{}")).await, json!([201, null, said]));
    assert_eq!(shop.browser.value(&pay("{}")).await, json!([201, "true", said]));
    let refused = shop.browser.value(&pay("[]")).await;
    assert_eq!(refused[0], 422, "{refused}");
    assert_eq!(shop.runs(), 1);
}

#[tokio::test]
async fn the_network_cut_in_mid_request_leaves_one_effect() {
    let shop = BrowserShop::open().await;
    let gate = ReplyGate::new();
    shop.app.on("/pay", UpstreamReply::usual().gated(&gate));
    let pay = shop.pay(&json!({ "operation": "order-17", "schedule": [200, 400, 800, 1600] }));
    shop.browser.start_script(&format!("window.paid = {pay}")).await;
    gate.arrived(1).await;
    assert_eq!(shop.pending_keys().await, 1);
    let before = shop.proxy.counts().connections;
    shop.proxy.cut_and_refuse();
    shop.proxy.reset();
    gate.open();
    sleep(Duration::from_millis(300)).await;
    shop.proxy.heal();
    let answer = shop.browser.value("window.paid").await;
    assert_one_effect(&shop, &answer);
    assert_eq!((&answer["replayed"], &answer["key"]), (&json!(true), &json!(only_key(&shop.app))), "{answer}");
    assert!(answer["attempts"].as_u64().unwrap() > 1, "{answer}");
    assert!(shop.proxy.counts().connections > before);
    assert_eq!(shop.pending_keys().await, 0);
}

#[tokio::test]
async fn an_operation_that_is_run_twice_to_success_pays_once() {
    let shop = BrowserShop::open().await;
    let pay = shop.pay(&json!({ "operation": "order-17" }));
    for replayed in [false, true] {
        let answer = shop.browser.value(&pay).await;
        assert_one_effect(&shop, &answer);
        assert_eq!(answer["replayed"], replayed, "{answer}");
        // The page that shows the answer is another one.
        shop.open_page().await;
    }
    assert_eq!(shop.browser.value("localStorage.length").await, 1);
    // What is over is removed when something else ends.
    let over = "localStorage.setItem('ibid:old', JSON.stringify({ key: 'k', since: 0, until: 1 }))";
    shop.browser.value(over).await;
    shop.browser.value(&shop.pay(&json!({ "operation": "order-18" }))).await;
    let gone = "new Promise(done => { const look = () => localStorage['ibid:old'] ? setTimeout(look, 5) : done(localStorage.length); look() })";
    assert_eq!((shop.browser.value(gone).await, shop.runs()), (json!(2), 2));
}

#[tokio::test]
async fn a_page_that_is_reloaded_in_mid_request_goes_on_with_its_key() {
    let shop = BrowserShop::open().await;
    let gate = ReplyGate::new();
    shop.app.on("/pay", UpstreamReply::usual().gated(&gate));
    let pay = shop.pay(&json!({ "operation": "order-17" }));
    shop.browser.start_script(&format!("{pay}.catch(() => {{}})")).await;
    gate.arrived(1).await;
    shop.browser.reload().await;
    shop.until_ready().await;
    assert_eq!(shop.pending_keys().await, 1);
    gate.open();
    let answer = shop.browser.value(&pay).await;
    assert_one_effect(&shop, &answer);
    assert_eq!((&answer["replayed"], shop.pending_keys().await), (&json!(true), json!(0)), "{answer}");
}

#[tokio::test]
async fn two_tabs_agree_on_one_key() {
    let shop = BrowserShop::open().await;
    let first = shop.browser.current().await;
    let second = shop.browser.tab().await;
    shop.open_page().await;
    for (round, locks) in [true, false, true, false, true, false].into_iter().enumerate() {
        let path = format!("/pay-{round}");
        let gate = ReplyGate::new();
        shop.app.on(&path, UpstreamReply::usual().gated(&gate));
        let options = json!({ "operation": path, "schedule": vec![100; 100] });
        let pay = format!("pay('http://{}{path}', {options})", shop.proxy.addr());
        let take_locks = if locks { "" } else { "Object.defineProperty(navigator, 'locks', { value: undefined });" };
        // Both at one moment, by the clock that they share.
        let at = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() + 600;
        for tab in [&first, &second] {
            shop.browser.switch(tab).await;
            let wait = format!("new Promise(done => setTimeout(done, {at} - Date.now()))");
            shop.browser.start_script(&format!("{take_locks} window.paid = {wait}.then(() => {pay})")).await;
        }
        // Both have begun before the first has its answer: that is what they have to agree in.
        let both = async {
            let refused = |line: &String| line.contains(&format!("path=\"{path}\"")) && line.contains("in-progress");
            while gate.count() < 2 && !shop.gateway.logs().iter().any(refused) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(30), both).await.expect("both tabs send");
        gate.open();
        let mut answers = Vec::new();
        for tab in [&first, &second] {
            shop.browser.switch(tab).await;
            answers.push(shop.browser.value("window.paid").await);
            // The next round may have its locks.
            shop.open_page().await;
        }
        assert_eq!(shop.app.executions_at(&path), 1, "round {round}: {answers:?}");
        assert_eq!(answers[0]["key"], answers[1]["key"], "round {round}: {answers:?}");
        assert_eq!(answers[0]["body"], answers[1]["body"], "round {round}: {answers:?}");
        assert_eq!(shop.pending_keys().await, 0, "round {round}");
    }
}

#[tokio::test]
async fn a_double_click_is_one_payment() {
    let shop = BrowserShop::open().await;
    // No operation and no name: only the guard stands between the second click and a second payment.
    let guard = |id: &str, more: &str| {
        let pay = shop.pay(&json!({}));
        format!(
            "window.sent = 0; window.off = ibid.guard({id}, async event => {{ sent++; {more}; window.paid = {pay}; await paid }})"
        )
    };
    let way = "window.way = new FormData(event.target, event.submitter).get('way')";
    for (id, press, more) in [("button", "#button", ""), ("form", "#submit", way)] {
        let gate = ReplyGate::new();
        shop.app.on("/pay", UpstreamReply::usual().gated(&gate));
        let before = shop.runs();
        shop.browser.start_script(&guard(id, more)).await;
        shop.browser.double_click(press).await;
        gate.arrived(1).await;
        let button = format!("document.querySelector('{press}').disabled");
        assert_eq!(shop.browser.value(&button).await, true, "{id}");
        shop.browser.double_click(press).await;
        gate.open();
        let answer = shop.browser.value("window.paid").await;
        assert_eq!(answer["status"], 201, "{answer}");
        assert_eq!((shop.browser.value("sent").await, shop.runs()), (json!(1), before + 1), "{id}");
        // It is free again, and a new click is a new payment; after its end it is an ordinary button.
        shop.browser.value(&format!("new Promise(done => setTimeout(done, 20)).then(() => {button})")).await;
        assert_eq!(shop.browser.value(&button).await, false, "{id}");
        shop.browser.start_script(&format!("document.querySelector('{press}').click()")).await;
        shop.browser.value("window.paid").await;
        assert_eq!((shop.browser.value("sent").await, shop.runs()), (json!(2), before + 2), "{id}");
        shop.browser.start_script("off(); document.querySelector('#form').onsubmit = () => false").await;
        shop.browser.start_script(&format!("document.querySelector('{press}').click()")).await;
        assert_eq!(shop.browser.value("sent").await, 2, "{id}");
    }
    assert_eq!(shop.browser.value("way").await, "card", "the pressed button is part of the form's data");
}
