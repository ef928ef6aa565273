//! The setting `openapi`: the gateway annotates the app's own document as it passes.

use std::{net::SocketAddr, path::Path, process::Stdio};

use serde_json::Value;
use testbed::{
    client::{TestResponse, get, post, request},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use super::{BIN, JSON, YAML, document_path, text, validate_addition};
use crate::{
    console::browser::{ConsoleBrowser, ScriptSetting},
    support::{TestGateway, assert_refused, start_gateway, within},
};

use crate::support::run_ibid;

const INVOICES: &str = "invoices-3.0.json";
const PATH: &str = "/swagger/v1/swagger.json";
const ANNOTATED: &str = "openapi: document annotated";
const UNCHANGED: &str = "openapi: the document passes unchanged";
const TAKEN: &str = "configuration taken up";
const LARGEST: usize = 10 << 20;

/// As docs/presets/appsportal.md has it.
fn config(more: &str) -> String {
    format!(
        "openapi = {PATH:?}\nstore.url = \"memory:\"\n[policy]\npreset = \"off\"\n\
         [[route]]\nmatch = \"POST|PUT|PATCH /api/*\"\npreset = \"appsportal\"\n{more}"
    )
}

/// What the command makes of a document with the gateway's own configuration.
async fn offline(gateway: &GatewayProcess, spec: &Path) -> String {
    let config = gateway.dir().join("ibid.toml");
    let args = ["openapi", spec.to_str().unwrap(), "--config", config.to_str().unwrap()];
    let output = run_ibid(&args, &[("IBID_UPSTREAM", "http://127.0.0.1:1")]).await;
    assert!(output.code == Some(0), "{}", &output.stderr);
    output.text()
}

fn lines(gateway: &GatewayProcess, part: &str) -> Vec<String> {
    gateway.logs().into_iter().filter(|line| line.contains(part)).collect()
}

#[track_caller]
fn etag(answer: &TestResponse) -> String {
    answer.header("etag").unwrap_or_else(|| panic!("no ETag: {answer:?}")).to_owned()
}

#[tokio::test]
async fn the_document_is_annotated_as_the_command_does_it() {
    let upstream = TestUpstream::start().await;
    let own = [
        ("Last-Modified", "Mon, 06 Jul 2026 10:00:00 GMT"),
        ("Content-MD5", "Q2hlY2sgSW50ZWdyaXR5IQ=="),
        ("Digest", "sha-256=X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE="),
        ("Accept-Ranges", "bytes"),
        ("X-Stays", "1"),
    ];
    let with_headers =
        |reply: UpstreamReply| own.iter().fold(reply, |reply, (name, value)| reply.header(*name, *value));
    let reply = |kind: &str, name: &str| {
        with_headers(UpstreamReply::status(200)).header("Content-Type", kind).body(text(document_path(name)))
    };
    upstream.on("/openapi.json", reply("application/vnd.oai.openapi+json; charset=utf-8", JSON));
    // Without a length.
    let yaml = text(document_path(YAML));
    let (start, end) = yaml.split_at(yaml.len() / 2);
    let chunks = UpstreamReply::chunks([start.to_owned(), end.to_owned()]);
    upstream.on("/openapi.yaml", with_headers(chunks).header("Content-Type", "application/yaml"));
    let paths = "openapi = [\"/openapi.json\", \"/openapi.yaml\"]\nstore.url = \"memory:\"\n";
    let gateway =
        GatewayProcess::spawn(BIN, &format!("{paths}{}", text(document_path("config.toml"))), &upstream.url()).await;
    for (path, name) in [("/openapi.json", JSON), ("/openapi.yaml", YAML)] {
        let expected = offline(&gateway, &document_path(name)).await;
        let asked = || {
            let request = get(gateway.addr(), path).header("Accept-Encoding", "gzip, br").header("Range", "bytes=0-9");
            request.header("If-Modified-Since", "Tue, 07 Jul 2026 10:00:00 GMT").header("If-None-Match", "\"other\"")
        };
        let answer = asked().send().await;
        assert_eq!((answer.status, answer.text()), (200, expected.clone()), "{path}");
        let length = expected.len().to_string();
        assert_eq!(answer.header("content-length"), Some(length.as_str()));
        assert_eq!(answer.header("x-stays"), Some("1"));
        for name in ["last-modified", "content-md5", "digest", "accept-ranges"] {
            assert!(!answer.headers.contains(name), "{name}: {answer:?}");
        }
        let seen = upstream.last();
        assert_eq!(seen.header("accept-encoding"), Some("identity"));
        for name in ["range", "if-modified-since", "if-none-match"] {
            assert!(!seen.headers.contains(name), "{name}: {seen:?}");
        }
        // The app has no tags: the same bytes are the same version, and are annotated once.
        let again = asked().send().await;
        assert_eq!((again.text(), etag(&again)), (expected, etag(&answer)));
        let unmodified = get(gateway.addr(), path).header("If-None-Match", etag(&answer)).send().await;
        assert_eq!((unmodified.status, unmodified.body.len(), etag(&unmodified)), (304, 0, etag(&answer)));
        // HEAD says what GET would.
        let head = request("HEAD", gateway.addr(), path).send().await;
        assert_eq!((head.status, etag(&head)), (200, etag(&answer)));
        assert_eq!(
            (head.header("content-length"), head.header("content-type")),
            (Some(&*length), answer.header("content-type"))
        );
        gateway.wait_for_log(&format!("{ANNOTATED} path={path:?}")).await;
        assert_eq!(lines(&gateway, ANNOTATED).iter().filter(|line| line.contains(path)).count(), 1);
    }
    // Only these paths, and only what reads.
    upstream.on("/openapi.json/", reply("application/json", JSON));
    assert_eq!(get(gateway.addr(), "/openapi.json/").send().await.text(), text(document_path(JSON)));
    assert_eq!(post(gateway.addr(), "/openapi.json").json("{}").send().await.text(), text(document_path(JSON)));
}

#[tokio::test]
async fn an_unchanged_document_is_neither_sent_nor_annotated_again() {
    let upstream = TestUpstream::start().await;
    let document = UpstreamReply::status(200).header("ETag", "W/\"v1\"").json(&text(document_path(INVOICES)));
    let unmodified = UpstreamReply::status(304).header("ETag", "W/\"v1\"").header("Cache-Control", "no-cache");
    upstream.on_each(PATH, [document.clone(), unmodified]);
    let gateway = start_gateway(&config(""), &upstream).await;
    let first = get(gateway.addr(), PATH).send().await;
    let tag = etag(&first);
    assert!(first.status == 200 && !tag.contains("v1"), "{first:?}");
    // Whatever the client has, the app is asked about the version that the gateway has.
    for (has, status) in
        [(None, 200), (Some("W/\"v1\""), 200), (Some("\"other\""), 200), (Some(&*tag), 304), (Some("*"), 304)]
    {
        let asked = get(gateway.addr(), PATH);
        let asked = has.into_iter().fold(asked, |asked, has| asked.header("If-None-Match", has));
        let answer = asked.send().await;
        assert_eq!((answer.status, etag(&answer)), (status, tag.clone()), "{has:?}: {answer:?}");
        assert_eq!(answer.header("cache-control"), Some("no-cache"));
        assert_eq!(answer.text(), if status == 200 { first.text() } else { String::new() }, "{has:?}");
        assert_eq!(upstream.last().header("if-none-match"), Some("W/\"v1\""));
        if status == 200 {
            assert_eq!(answer.header("content-type"), Some("application/json"));
        }
    }
    gateway.wait_for_log(ANNOTATED).await;
    assert_eq!(lines(&gateway, ANNOTATED).len(), 1);
    // Another host may have another document under the same tag.
    upstream.on(PATH, document.clone());
    let other = request("GET", gateway.addr(), format!("{PATH}?v=2")).send().await;
    assert_eq!((other.text(), upstream.last().header("if-none-match")), (first.text(), None));
    // Another configuration has another document, and what a client has of the old one is not the app's to judge.
    gateway.rewrite_config(&config("key.required = true\n"));
    gateway.wait_for_log(TAKEN).await;
    let asked = get(gateway.addr(), PATH).header("If-None-Match", &tag).send().await;
    assert_eq!((asked.status, upstream.last().header("if-none-match")), (200, None), "{asked:?}");
    assert!(etag(&asked) != tag && asked.text() != first.text());
    assert_eq!(asked.text(), offline(&gateway, &document_path(INVOICES)).await);
    // And without the setting it is the app's own.
    gateway.rewrite_config(&config("").replacen("openapi = ", "# ", 1));
    let until = async {
        while get(gateway.addr(), PATH).send().await.header("etag") != Some("W/\"v1\"") {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    within("the reload", until).await;
    assert_eq!(get(gateway.addr(), PATH).send().await.text(), text(document_path(INVOICES)));
}

#[tokio::test]
async fn what_cannot_be_annotated_passes_unchanged_and_is_said_once() {
    let TestGateway { upstream, gateway } = TestGateway::start(&config("")).await;
    let mut large = text(document_path(INVOICES)).into_bytes();
    large.resize(LARGEST + 1, b' ');
    let (start, end) = large.split_at(LARGEST / 2);
    let json = |body: &str| UpstreamReply::status(200).json(body);
    let gzip = json(&text(document_path(INVOICES))).header("Content-Encoding", "gzip");
    let cases = [
        ("no JSON", json("{\"openapi\": \"3.0.0\"")),
        ("it has no \\\"openapi\\\"", json("{}")),
        ("Swagger 2.0", json("{\"swagger\": \"2.0\"}")),
        (
            "not UTF-8",
            UpstreamReply::status(200).header("Content-Type", "application/json").body(&b"{\"openapi\": \"\xff\"}"[..]),
        ),
        ("text/html", UpstreamReply::status(200).header("Content-Type", "text/html").body("<p>Sorry</p>")),
        ("content coding is gzip", gzip),
        (
            "larger than 10 MiB",
            UpstreamReply::status(200).header("Content-Type", "application/json").body(large.clone()),
        ),
        (
            "larger than 10 MiB",
            UpstreamReply::chunks([start.to_vec(), end.to_vec()]).header("Content-Type", "application/json"),
        ),
    ];
    let told = cases.len();
    for (nth, (why, reply)) in cases.into_iter().enumerate() {
        let tag = format!("\"{nth}\"");
        upstream.on(PATH, reply.header("ETag", &tag));
        let direct = get(upstream.addr(), PATH).send().await;
        for _ in 0..2 {
            let answer = get(gateway.addr(), PATH).send().await;
            assert_eq!((answer.status, etag(&answer)), (200, tag.clone()), "{why}");
            assert!(answer.body == direct.body, "{why}: {} and {} bytes", answer.body.len(), direct.body.len());
        }
        let told = gateway.wait_for_log(why).await;
        assert!(told.contains("WARN") && told.contains(UNCHANGED), "{told}");
        let head = request("HEAD", gateway.addr(), PATH).send().await;
        assert_eq!((head.status, head.header("content-length")), (200, direct.header("content-length")), "{why}");
        let has = get(gateway.addr(), PATH).header("If-None-Match", &tag).send().await;
        assert_eq!((has.status, has.body.len()), (304, 0), "{why}");
        assert_eq!(upstream.last().header("if-none-match"), Some(&*tag), "{why}");
    }
    for status in [404, 401, 302] {
        upstream.on(PATH, UpstreamReply::status(status).json("{\"error\":\"no\"}"));
        let answer = get(gateway.addr(), PATH).send().await;
        assert_eq!((answer.status, answer.text().as_str()), (status, "{\"error\":\"no\"}"));
    }
    let truncated = UpstreamReply::from(UpstreamFault::Truncated { content_length: 100, sent: 10 });
    upstream.on(PATH, truncated.header("Content-Type", "application/json"));
    assert_refused(&get(gateway.addr(), PATH).send().await, 502, "upstream-lost");
    // The document itself, once it is right.
    upstream.on(PATH, json(&text(document_path(INVOICES))));
    assert!(get(gateway.addr(), PATH).send().await.text().contains("X-Idempotency-Key"));
    gateway.wait_for_log(ANNOTATED).await;
    assert_eq!(lines(&gateway, UNCHANGED).len(), told, "each version once");
}

#[tokio::test]
async fn documents_take_their_memory_from_the_budget() {
    let upstream = TestUpstream::start().await;
    upstream.on(PATH, UpstreamReply::status(200).json(&text(document_path(INVOICES))));
    // Less than is read, and less than annotating it takes.
    for memory in ["100", "\"2KiB\""] {
        let gateway = start_gateway(&format!("buffer_memory = {memory}\n{}", config("")), &upstream).await;
        for _ in 0..2 {
            let answer = get(gateway.addr(), PATH).send().await;
            assert_eq!((answer.status, answer.text()), (200, text(document_path(INVOICES))), "{memory}");
        }
        gateway.wait_for_log("buffer_memory has no room for it").await;
    }
}

#[tokio::test]
async fn the_setting_is_a_path_and_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ibid.toml");
    let check = async |config: &str| {
        std::fs::write(&file, format!("upstream = \"http://127.0.0.1:1\"\n{config}")).unwrap();
        let output = run_ibid(&["check", file.to_str().unwrap()], &[]).await;
        (output.code, output.all())
    };
    for wrong in ["\"swagger.json\"", "\"/swagger.json?v=1\"", "\"/a b\"", "[\"/ok\", \"#x\"]", "\"\""] {
        let (code, told) = check(&format!("openapi = {wrong}\n")).await;
        assert!(code == Some(64) && told.contains("openapi") && told.contains("is no path"), "{wrong}: {told}");
    }
    let (code, told) = check(&config("")).await;
    assert!(code == Some(0) && told.contains("  openapi         /swagger/v1/swagger.json, annotated\n"), "{told}");
    let covered = config("[[route]]\nmatch = \"GET /swagger/*\"\n");
    let (_, told) = check(&covered).await;
    assert!(told.contains("a route covers GET /swagger/v1/swagger.json, so it is not annotated"), "{told}");
}

/// An Express app with Swagger UI, in a process of its own.
async fn swagger_ui() -> (SocketAddr, Child) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let modules = root.join("../../target/apps/node_modules");
    assert!(modules.join("swagger-ui-dist").exists(), "Swagger UI is missing: run scripts/tools, which installs it");
    let mut command = Command::new("node");
    command.arg(root.join("tests/apps/swagger.cjs")).arg(document_path(INVOICES)).env("NODE_PATH", modules);
    let mut process = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("the app starts");
    let mut lines = BufReader::new(process.stdout.take().expect("it is piped")).lines();
    let port = within("the app's port", lines.next_line()).await.unwrap().expect("it prints its port");
    (SocketAddr::from(([127, 0, 0, 1], port.trim().parse().expect("a port"))), process)
}

#[tokio::test(flavor = "multi_thread")]
async fn swagger_ui_documents_the_headers_by_itself() {
    let (app, _process) = swagger_ui().await;
    let gateway = GatewayProcess::spawn(BIN, &config(""), &format!("http://{app}")).await;
    let answer = get(gateway.addr(), PATH).send().await;
    let folder = tempfile::tempdir().unwrap();
    let new = folder.path().join("new.json");
    std::fs::write(&new, answer.text()).unwrap();
    let document = validate_addition(&document_path(INVOICES), new.to_str().unwrap()).await;
    let named = |nth: usize| {
        let to = document["paths"]["/api/invoices"]["post"]["parameters"][nth]["$ref"].as_str().unwrap().to_owned();
        document.pointer(&to[1..]).unwrap()["name"].clone()
    };
    assert_eq!((named(0), named(1)), ("X-Idempotency-Key".into(), "X-Tenant-Id".into()));
    // Express compares tags itself, and sends the document once.
    for _ in 0..2 {
        let again = get(gateway.addr(), PATH).send().await;
        assert_eq!((again.status, again.text()), (200, answer.text()));
    }
    assert_eq!(get(gateway.addr(), PATH).header("If-None-Match", etag(&answer)).send().await.status, 304);
    let sent: Value = get(app, "/sent").send().await.json();
    assert_eq!(sent, serde_json::json!({ "whole": 1, "unmodified": 3 }));

    let browser = ConsoleBrowser::start(ScriptSetting::On).await;
    browser.goto(&format!("http://{}/swagger/index.html", gateway.addr())).await.unwrap();
    let post = "#swagger-ui .opblock-post";
    browser.wait_for_element(&format!("{post} .parameters-container")).await;
    let shown = browser.wait_for_element(post).await.text().await.unwrap();
    for part in ["X-Idempotency-Key", "X-Tenant-Id", "(header)", "Names one operation", "409", "in-progress"] {
        assert!(shown.contains(part), "{part} is not shown:\n{shown}");
    }
    let get = browser.wait_for_element("#swagger-ui .opblock-get").await.text().await.unwrap();
    assert!(!get.contains("X-Idempotency-Key"), "{get}");
}
