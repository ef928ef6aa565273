//! A gateway in the test's own process with records of every kind in its store, and a way into its console.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use ibid::store::Memory;
use ibid_gateway::commands::serve;
use ibid_testkit::wrappers::FailingStore;
use tempfile::TempDir;
use testbed::{
    client::{TestRequest, TestResponse, get, post},
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};

use crate::support::{failing_store, start_in_process};

pub(super) const ADMIN: &str = "token-of-the-admin-0123456789";
pub(super) const VIEWER: &str = "token-of-the-viewer-0123456789";
pub(super) const USER: &str = "token-of-user-1-0123456789";

/// The key of the operation that was lost.
pub(super) const UNKNOWN_KEY: &str = "order-1841-refund";
/// A key that would run in a careless page. Keys of visible ASCII may look like this.
pub(super) const MARKUP_KEY: &str = "<script>alert(1)</script><img/src=x/onerror=alert(2)>";

const CONFIG: &str = r#"
[[route]]
match = "POST /payments/*"
label = { tenant = "header:X-Tenant-Id", user = "header:X-User-Id", key = "clear" }
[[route]]
match = "POST /quotes"
mode = "shadow"
"#;

/// A gateway with something in it.
pub(super) struct ConsoleGateway {
    pub(super) gateway: serve::RunningGateway,
    pub(super) store: Arc<FailingStore<Memory>>,
    pub(super) upstream: TestUpstream,
    _folder: TempDir,
}

impl ConsoleGateway {
    /// Without records.
    pub(super) async fn start_empty() -> ConsoleGateway {
        let (upstream, folder) = (TestUpstream::start().await, tempfile::tempdir().expect("a folder"));
        let store = failing_store();
        let audit = folder.path().join("audit.jsonl");
        let config = format!(
            "{CONFIG}[admin]\naudit = {audit:?}\ntoken = {ADMIN:?}\n\
             tokens = [{{ role = \"viewer\", token = {VIEWER:?} }}, {{ role = \"user\", user = \"user-1\", token = {USER:?} }}]\n"
        );
        let gateway = start_in_process(&config, &upstream, store.clone(), Arc::new(ibid::observe::NoopObserver)).await;
        ConsoleGateway { gateway, store, upstream, _folder: folder }
    }

    /// With payments of two users that went well, one that failed, one that was lost, and one with a strange key.
    pub(super) async fn start_filled() -> ConsoleGateway {
        let scene = ConsoleGateway::start_empty().await;
        scene.upstream.on("/payments/failed", UpstreamReply::status(404).json(r#"{"error":"no such account"}"#));
        scene.upstream.on("/payments/lost", UpstreamFault::CloseWithoutReply);
        for nth in 0..4 {
            let body = format!(r#"{{"id":"pay_{nth}","status":"charged"}}"#);
            scene.upstream.on(&format!("/payments/{nth}"), UpstreamReply::status(201).json(&body));
            assert_eq!(scene.pay(&nth.to_string(), &format!("order-{nth}-pay"), nth % 2 + 1).send().await.status, 201);
        }
        assert_eq!(scene.pay("failed", "order-77-pay", 1).send().await.status, 404);
        assert_eq!(scene.pay("lost", UNKNOWN_KEY, 1).send().await.status, 502);
        scene
            .upstream
            .on("/payments/markup", UpstreamReply::status(201).json(r#"{"note":"<b onclick=alert(3)>bold</b>"}"#));
        assert_eq!(scene.pay("markup", MARKUP_KEY, 2).send().await.status, 201);
        scene
    }

    pub(super) fn pay(&self, path: &str, key: &str, user: usize) -> TestRequest {
        self.pay_amount(1, path, key, user)
    }

    pub(super) fn pay_amount(&self, amount: u32, path: &str, key: &str, user: usize) -> TestRequest {
        let request = post(self.gateway.address, format!("/payments/{path}")).key(key);
        let request = request.json(&format!(r#"{{"amount":{amount}}}"#));
        let request = request.header("Authorization", "Bearer app").header("X-Tenant-Id", "acme");
        request.header("X-User-Id", format!("user-{user}")).header("User-Agent", "shop/1.4")
    }

    pub(super) fn admin(&self) -> SocketAddr {
        self.gateway.admin.expect("it has an admin port")
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin())
    }

    /// A reader without a browser, who has logged in.
    pub(super) async fn log_in(&self, token: &str) -> PageClient {
        let mut reader = PageClient { addr: self.admin(), cookie: None };
        let answer = reader.post_form("/login", &[("token", token)]).await;
        assert_eq!(answer.status, 303, "{answer:?}");
        reader
    }

    /// The address of the record with a key, as its list links to it.
    pub(super) async fn address(&self, key: &str) -> String {
        let reader = self.log_in(ADMIN).await;
        let query: String = form_urlencoded::byte_serialize(key.as_bytes()).collect();
        let page = reader.get(&format!("/records?key={query}")).await.text();
        let (_, rest) = page.split_once("href=\"/records/").unwrap_or_else(|| panic!("no record {key}:\n{page}"));
        rest[..64].to_owned()
    }
}

/// Somebody who reads pages with a plain HTTP client, and keeps a cookie.
pub(super) struct PageClient {
    addr: SocketAddr,
    cookie: Option<String>,
}

impl PageClient {
    pub(super) fn anonymous(addr: SocketAddr) -> PageClient {
        PageClient { addr, cookie: None }
    }

    fn with_cookie(&self, request: TestRequest) -> TestRequest {
        match &self.cookie {
            Some(cookie) => request.header("Cookie", cookie),
            None => request,
        }
    }

    pub(super) async fn get(&self, path: &str) -> TestResponse {
        self.with_cookie(get(self.addr, path)).send().await
    }

    /// Opens a page that must be there.
    pub(super) async fn get_page(&self, path: &str) -> String {
        let answer = self.get(path).await;
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.text()
    }

    /// Sends a form as a browser would.
    pub(super) async fn post_form(&mut self, path: &str, fields: &[(&str, &str)]) -> TestResponse {
        let request = self.form(path, fields).header("Origin", format!("http://{}", self.addr));
        let answer = request.header("Sec-Fetch-Site", "same-origin").send().await;
        if let Some(cookie) = answer.header("set-cookie") {
            self.cookie = Some(cookie.split(';').next().unwrap_or_default().to_owned());
        }
        answer
    }

    /// The same without any word on where it comes from.
    pub(super) fn form(&self, path: &str, fields: &[(&str, &str)]) -> TestRequest {
        let mut body = form_urlencoded::Serializer::new(String::new());
        body.extend_pairs(fields);
        let request = post(self.addr, path).header("Content-Type", "application/x-www-form-urlencoded");
        self.with_cookie(request.body(body.finish()))
    }

    /// Fills in the form of a page, over what it holds already, and sends it.
    pub(super) async fn submit_form(&mut self, page: &str, fields: &[(&str, &str)]) -> TestResponse {
        let form = page.split("<main").nth(1).expect("a page has a main part");
        let action = text_between(form, "method=\"post\" action=\"", "\"").expect("a form that is sent").to_owned();
        let mut all: HashMap<&str, String> = HashMap::new();
        for input in form.split("<input type=\"hidden\" ").skip(1) {
            let (name, value) = (text_between(input, "name=\"", "\""), text_between(input, "value=\"", "\""));
            all.insert(name.expect("a name"), value.expect("a value").to_owned());
        }
        for area in form.split("<textarea name=\"").skip(1) {
            let (name, rest) = area.split_once('"').expect("a name");
            let value = text_between(rest, ">\n", "</textarea>").unwrap_or_default();
            all.insert(name, unescape(value));
        }
        all.extend(fields.iter().map(|(name, value)| (*name, (*value).to_owned())));
        let all: Vec<(&str, &str)> = all.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.post_form(&action, &all).await
    }
}

/// Where a page's link of this kind (`next`, `prev`) leads to.
pub(super) fn link(page: &str, rel: &str) -> Option<String> {
    text_between(page, &format!("rel=\"{rel}\" href=\""), "\"").map(unescape)
}

fn text_between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(from)?;
    Some(rest.split_once(to)?.0)
}

fn unescape(text: &str) -> String {
    let text = text.replace("&#60;", "<").replace("&#62;", ">").replace("&#34;", "\"").replace("&#39;", "'");
    text.replace("&#38;", "&")
}
