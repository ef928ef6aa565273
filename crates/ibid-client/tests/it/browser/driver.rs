//! A real Chromium, driven by WebDriver over plain HTTP.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::ServerProcess;
use tokio::{task::spawn_blocking, time::timeout};

use crate::common::client;

const SCRIPT_TIMEOUT: Duration = Duration::from_secs(60);

/// One browser with a profile of its own. Killed when dropped.
pub(super) struct WebDriverBrowser {
    driver: ServerProcess,
    /// The browser's own process; the driver does not take it along when it is killed.
    chromium: Option<u64>,
    session: String,
    http: Client,
    _profile: TempDir,
}

impl WebDriverBrowser {
    pub(super) async fn start() -> WebDriverBrowser {
        let profile = tempfile::Builder::new().prefix("ibid-chromium-").tempdir().expect("a folder");
        let starting = timeout(SCRIPT_TIMEOUT, spawn_blocking(testbed::chromedriver::start)).await;
        let driver = starting.expect("the driver starts").expect("no panic");
        let session = format!("http://127.0.0.1:{}/session", driver.port());
        let mut browser = WebDriverBrowser { driver, chromium: None, session, http: client(), _profile: profile };
        let options = json!({ "binary": "/usr/bin/chromium", "args": [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--disable-background-timer-throttling", "--disable-renderer-backgrounding",
            format!("--user-data-dir={}", browser._profile.path().display()),
        ] });
        let asked = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options,
            "timeouts": { "script": 60_000, "pageLoad": 60_000 },
        } } });
        let made = browser.command(Method::POST, "", Some(asked)).await;
        browser.chromium = made["capabilities"]["goog:processID"].as_u64();
        browser.session += &format!("/{}", made["sessionId"].as_str().expect("a session"));
        browser
    }

    pub(super) async fn open(&self, url: &str) {
        self.command(Method::POST, "/url", Some(json!({ "url": url }))).await;
    }

    pub(super) async fn reload(&self) {
        self.command(Method::POST, "/refresh", Some(json!({}))).await;
    }

    /// The value of an expression, once it is there; what it throws, as `{ "thrown": … }`.
    pub(super) async fn value(&self, expression: &str) -> Value {
        let script = format!(
            "const done = arguments[arguments.length - 1]; (async () => ({expression}))()\
             .then(done, error => done({{ thrown: String(error), reason: error.reason ?? null }}))"
        );
        self.command(Method::POST, "/execute/async", Some(json!({ "script": script, "args": [] }))).await
    }

    /// Does something without waiting for its end.
    pub(super) async fn start_script(&self, script: &str) {
        self.command(Method::POST, "/execute/sync", Some(json!({ "script": script, "args": [] }))).await;
    }

    /// A new tab, in front.
    pub(super) async fn tab(&self) -> String {
        let made = self.command(Method::POST, "/window/new", Some(json!({ "type": "tab" }))).await;
        let handle = made["handle"].as_str().expect("a handle").to_owned();
        self.switch(&handle).await;
        handle
    }

    pub(super) async fn current(&self) -> String {
        self.command(Method::GET, "/window", None).await.as_str().expect("a handle").to_owned()
    }

    pub(super) async fn switch(&self, handle: &str) {
        self.command(Method::POST, "/window", Some(json!({ "handle": handle }))).await;
    }

    /// A double click with the mouse, in the middle of what the selector finds.
    pub(super) async fn double_click(&self, selector: &str) {
        let found = json!({ "using": "css selector", "value": selector });
        let element = self.command(Method::POST, "/element", Some(found)).await;
        let press = json!({ "type": "pointerDown", "button": 0 });
        let let_go = json!({ "type": "pointerUp", "button": 0 });
        let mouse = json!({ "type": "pointer", "id": "mouse", "parameters": { "pointerType": "mouse" }, "actions": [
            { "type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": element }, press, let_go, press, let_go,
        ] });
        self.command(Method::POST, "/actions", Some(json!({ "actions": [mouse] }))).await;
    }

    async fn command(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let mut request = self.http.request(method, format!("{}{path}", self.session));
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let answer = timeout(SCRIPT_TIMEOUT * 2, async { request.send().await?.text().await }).await;
        let text = answer.unwrap_or_else(|_| panic!("the browser does not answer {path}"));
        let text = text.unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}: {text}"));
        let value = answer["value"].take();
        assert!(
            value.get("error").is_none_or(Value::is_null) || value.get("stacktrace").is_none(),
            "{path}: {value:#}"
        );
        value
    }
}

impl Drop for WebDriverBrowser {
    fn drop(&mut self) {
        if let Some(id) = self.chromium {
            let _ = Command::new("kill").args(["-KILL", &id.to_string()]).stderr(Stdio::null()).status();
        }
        self.driver.kill();
    }
}
