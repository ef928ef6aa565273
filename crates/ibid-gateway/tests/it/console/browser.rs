//! A browser of its own: Debian's chromium, driven by its chromedriver. Both end with the test, also when it panics.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    ops::Deref,
    time::Duration,
};

use fantoccini::{
    Client, ClientBuilder, Locator,
    elements::Element,
    error::CmdError,
    wd::{Capabilities, WebDriverCompatibleCommand},
};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::ServerProcess;
use tokio::time::{Instant, sleep};
use url::{ParseError, Url};

/// How long anything may take to appear.
const ELEMENT_TIMEOUT: Duration = Duration::from_secs(20);

/// A browser with one tab.
pub(crate) struct ConsoleBrowser {
    client: Client,
    driver: ConsoleDriver,
    _profile: TempDir,
}

struct ConsoleDriver {
    process: ServerProcess,
    address: SocketAddr,
    session: Option<String>,
}

/// What a browser is told besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScriptSetting {
    On,
    Off,
}

impl ConsoleBrowser {
    pub(crate) async fn start(scripts: ScriptSetting) -> ConsoleBrowser {
        let mut driver = ConsoleDriver::start();
        let profile = tempfile::tempdir().expect("a folder for its profile");
        let mut args: Vec<String> = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--window-size=1360,900",
        ]
        .map(String::from)
        .into();
        args.push(format!("--user-data-dir={}", profile.path().display()));
        if scripts == ScriptSetting::Off {
            args.push("--blink-settings=scriptEnabled=false".into());
        }
        let mut capabilities = Capabilities::new();
        // What a page asks for in vain, or throws, is in the browser's log.
        capabilities.insert("goog:chromeOptions".into(), json!({ "args": args }));
        capabilities.insert("goog:loggingPrefs".into(), json!({ "browser": "ALL", "performance": "ALL" }));
        let mut builder = ClientBuilder::new(HttpConnector::new());
        let client = builder.capabilities(capabilities).connect(&format!("http://{}", driver.address)).await;
        let client = client.unwrap_or_else(|why| panic!("chromium does not start: {why}"));
        driver.session = client.session_id().await.expect("a session");
        ConsoleBrowser { client, driver, _profile: profile }
    }

    /// Waits for an element.
    pub(crate) async fn wait_for_element(&self, css: &str) -> Element {
        let found = self.client.wait().at_most(ELEMENT_TIMEOUT).for_element(Locator::Css(css)).await;
        match found {
            Ok(element) => element,
            Err(why) => panic!("no {css}: {why}\n{}", self.text().await),
        }
    }

    /// Waits until the page says so.
    pub(crate) async fn wait_for_text(&self, text: &str) {
        let until = Instant::now() + ELEMENT_TIMEOUT;
        while !self.text().await.contains(text) {
            assert!(Instant::now() < until, "the page does not say {text:?}:\n{}", self.text().await);
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// What a person reads on the page.
    pub(crate) async fn text(&self) -> String {
        match self.client.find(Locator::Css("body")).await {
            Ok(body) => body.text().await.unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    pub(crate) async fn click(&self, css: &str) {
        self.wait_for_element(css).await.click().await.unwrap_or_else(|why| panic!("{css} cannot be clicked: {why}"));
    }

    /// Clicks what has this text.
    pub(crate) async fn click_text(&self, text: &str) {
        let path = format!("//*[self::a or self::button or self::summary][normalize-space()={text:?}]");
        let found = self.client.wait().at_most(ELEMENT_TIMEOUT).for_element(Locator::XPath(&path)).await;
        let found = match found {
            Ok(found) => found,
            Err(why) => panic!("nothing to press that says {text:?}: {why}\n{}", self.text().await),
        };
        found.click().await.unwrap_or_else(|why| panic!("{text:?} cannot be pressed: {why}"));
    }

    pub(crate) async fn type_into(&self, css: &str, text: &str) {
        let field = self.wait_for_element(css).await;
        field.clear().await.expect("it can be emptied");
        field.send_keys(text).await.unwrap_or_else(|why| panic!("{css} takes no text: {why}"));
    }

    /// A command of the browser's own protocol.
    pub(crate) async fn devtools_command(&self, command: &'static str, params: Value) -> Value {
        let told: Result<Value, CmdError> = self.client.issue_cmd(DevToolsCommand { command, params }).await;
        told.unwrap_or_else(|why| panic!("{command}: {why}"))
    }

    /// What scripts complained about, and what the policy of the page stopped.
    pub(crate) async fn console_errors(&self) -> Vec<String> {
        let lines: Value = self.client.issue_cmd(BrowserLogCommand("browser")).await.expect("the browser's log");
        let lines = lines.as_array().cloned().unwrap_or_default();
        let bad = lines.iter().filter(|line| line["level"] == "SEVERE" || line["level"] == "WARNING");
        bad.map(|line| line["message"].to_string()).collect()
    }

    /// Every address that pages asked for since the last look. The browser's own pages are not counted.
    pub(crate) async fn requested_urls(&self) -> Vec<String> {
        let lines: Value = self.client.issue_cmd(BrowserLogCommand("performance")).await.expect("the browser's log");
        let lines = lines.as_array().cloned().unwrap_or_default();
        let events = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line["message"].as_str()?).ok());
        let sent = events.filter(|event| event["message"]["method"] == "Network.requestWillBeSent");
        let urls = sent.filter_map(|event| Some(event["message"]["params"]["request"]["url"].as_str()?.to_owned()));
        urls.filter(|url| !url.starts_with("chrome")).collect()
    }

    /// As wide and as high as a screen.
    pub(crate) async fn set_screen_size(&self, width: u32, height: u32, phone: bool) {
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone });
        self.devtools_command("Emulation.setDeviceMetricsOverride", params).await;
    }

    pub(crate) async fn set_color_scheme(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools_command("Emulation.setEmulatedMedia", json!({ "features": features })).await;
    }
}

impl Deref for ConsoleBrowser {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl ConsoleDriver {
    fn start() -> ConsoleDriver {
        let process = testbed::chromedriver::start();
        let address = SocketAddr::from(([127, 0, 0, 1], process.port()));
        ConsoleDriver { process, address, session: None }
    }

    /// Ends the browser: a driver that is killed leaves it behind.
    fn quit(&self) -> std::io::Result<()> {
        let Some(session) = &self.session else { return Ok(()) };
        let mut socket = TcpStream::connect_timeout(&self.address, Duration::from_secs(1))?;
        socket.set_read_timeout(Some(Duration::from_secs(10)))?;
        let host = self.address;
        write!(socket, "DELETE /session/{session} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
        socket.read(&mut [0; 64]).map(drop)
    }
}

impl Drop for ConsoleDriver {
    fn drop(&mut self) {
        let _ = self.quit();
        self.process.kill();
    }
}

impl Drop for ConsoleBrowser {
    fn drop(&mut self) {
        // Before its profile is removed.
        let _ = self.driver.quit();
    }
}

#[derive(Debug)]
struct DevToolsCommand {
    command: &'static str,
    params: Value,
}

impl WebDriverCompatibleCommand for DevToolsCommand {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, ParseError> {
        base.join(&format!("session/{}/goog/cdp/execute", session.unwrap_or_default()))
    }

    fn method_and_body(&self, _: &Url) -> (http::Method, Option<String>) {
        (http::Method::POST, Some(json!({ "cmd": self.command, "params": self.params }).to_string()))
    }
}

/// What the browser wrote down, by kind.
#[derive(Debug)]
struct BrowserLogCommand(&'static str);

impl WebDriverCompatibleCommand for BrowserLogCommand {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, ParseError> {
        base.join(&format!("session/{}/se/log", session.unwrap_or_default()))
    }

    fn method_and_body(&self, _: &Url) -> (http::Method, Option<String>) {
        (http::Method::POST, Some(json!({ "type": self.0 }).to_string()))
    }
}
