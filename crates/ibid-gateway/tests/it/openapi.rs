//! `ibid openapi`, as its user sees it, on documents as people write them; judged by parsers and a validator of others.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;

use crate::support::{BIN, run_ibid};

mod served;

const YAML: &str = "payments-3.0.yaml";
const JSON: &str = "orders-3.1.json";

fn document_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openapi").join(name)
}

fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap()
}

/// Runs it with the shared configuration: what it wrote, what it said, how it ended.
async fn openapi(args: &[&str]) -> (String, String, Option<i32>) {
    let config = document_path("config.toml");
    let all = [&["openapi", "--config", config.to_str().unwrap()], args].concat();
    let output = run_ibid(&all, &[]).await;
    (output.text(), output.stderr, output.code)
}

/// A copy that may be written over.
fn copy(folder: &TempDir, name: &str) -> String {
    let path = folder.path().join(name);
    fs::copy(document_path(name), &path).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Asks the validator: is it valid, and is it the old one with nothing but additions?
async fn validate_addition(old: &Path, new: &str) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("../../target/openapi-validator/bin/python");
    assert!(
        python.exists(),
        "{} is missing: `scripts/test` installs the validator (tests/openapi/requirements.txt) there",
        python.display()
    );
    let output =
        Command::new(python).arg(root.join("tests/openapi/validate.py")).arg(old).arg(new).output().await.unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {told}", old.display());
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn documents_stay_valid_and_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for (name, said) in [(YAML, "4 of 6 operations covered; annotated"), (JSON, "3 of 4 operations covered; annotated")]
    {
        let spec = copy(&folder, name);
        let (_, told, code) = openapi(&[&spec, "--in-place"]).await;
        assert!(code == Some(0) && told.contains(said), "{told}");
        validate_addition(&document_path(name), &spec).await;
        // Once more: nothing changes, not even the file's time.
        let before = fs::metadata(&spec).unwrap().modified().unwrap();
        let (_, told, code) = openapi(&[&spec, "--in-place"]).await;
        assert!(code == Some(0) && told.contains("operations covered; nothing was missing"), "{told}");
        assert_eq!(fs::metadata(&spec).unwrap().modified().unwrap(), before);
    }
}

/// Of every line of a YAML document, whatever is written there stays: lines are only added to, never changed.
#[tokio::test]
async fn lines_are_kept_as_they_are() {
    let (new, _, _) = openapi(&[document_path(YAML).to_str().unwrap()]).await;
    let mut rest = new.lines();
    for line in text(document_path(YAML)).lines() {
        // But for the two that have their response between braces.
        let start = line.trim_end_matches(['}', ' ']);
        assert!(rest.any(|found| found == line || line.contains("description") && found.starts_with(start)), "{line}");
    }
    for kept in
        ["x-rate: 1.50", "hex: 0x1F, exponent: 1e3, yes: no, \"null\": ~", "# Added by hand", "# Nothing follows."]
    {
        assert!(new.contains(kept), "{kept}");
    }
    let (new, _, _) = openapi(&[document_path(JSON).to_str().unwrap()]).await;
    for kept in ["12345678901234567890.12345678901234567890", "1E+2", r"Orders \ud83d\udce6", r"Tabs\tand \u00e9scapes"]
    {
        assert!(new.contains(kept), "{kept}");
    }
}

#[tokio::test]
async fn operations_say_what_their_routes_promise() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new.yaml");
    let out = out.to_str().unwrap();
    let (printed, ..) = openapi(&[document_path(YAML).to_str().unwrap()]).await;
    let (nothing, ..) = openapi(&[document_path(YAML).to_str().unwrap(), "--output", out]).await;
    assert_eq!((nothing, text(out)), (String::new(), printed));
    let document = validate_addition(&document_path(YAML), out).await;
    let component = |reference: &Value| {
        let to = reference["$ref"].as_str().unwrap_or_else(|| panic!("no reference: {reference}"));
        document.pointer(&to[1..]).unwrap_or_else(|| panic!("{to} leads nowhere")).clone()
    };
    let post = &document["paths"]["/payments"]["post"];
    let key = component(&post["parameters"][0]);
    assert_eq!((&key["name"], &key["required"]), (&"Idempotency-Key".into(), &true.into()));
    assert_eq!(key["schema"]["maxLength"], 255);
    assert!(key["description"].as_str().unwrap().contains("for 72 hours"), "{key}");
    let busy = component(&post["responses"]["409"]);
    assert!(busy["description"].as_str().unwrap().starts_with("in-progress: "), "{busy}");
    assert_eq!(busy["headers"]["Retry-After"]["schema"]["type"], "integer");
    let problem = component(&busy["content"]["application/problem+json"]["schema"]);
    assert_eq!(problem["required"], serde_json::json!(["type", "title", "status", "detail"]));
    let replayed = component(&post["responses"]["201"]["headers"]["Idempotent-Replayed"]);
    assert_eq!(replayed["schema"]["enum"], serde_json::json!(["true"]));
    // Only where a reuse is refused with 422; and what was there is there.
    let refund = &document["paths"]["/payments/{id}/refunds"]["post"];
    assert_eq!(refund["responses"]["422"], Value::Null);
    assert_eq!(refund["responses"]["409"]["description"], "Somebody else is refunding it");
    let added = ["#/components/parameters/StripeAccountParameter", "#/components/parameters/StripeContextParameter"];
    let parameters = refund["parameters"].as_array().unwrap();
    assert_eq!(parameters.len(), 4);
    assert_eq!(added.map(|to| parameters.iter().filter(|found| found["$ref"] == to).count()), [1, 1]);
    // Reading is not covered, and hooks are where their own server says.
    assert_eq!(document["paths"]["/payments"]["get"]["responses"]["409"], Value::Null);
    assert_eq!(component(&document["paths"]["/hooks"]["post"]["parameters"][0])["required"], true);
}

#[tokio::test]
async fn a_check_fails_until_the_document_says_all() {
    let folder = tempfile::tempdir().unwrap();
    let spec = copy(&folder, JSON);
    let (_, told, code) = openapi(&[&spec, "--check"]).await;
    assert!(code == Some(1) && told.contains("does not say all that"), "{told}");
    assert_eq!(text(&spec), text(document_path(JSON)));
    openapi(&[&spec, "--in-place"]).await;
    let (_, told, code) = openapi(&[&spec, "--check"]).await;
    assert_eq!(code, Some(0), "{told}");
}

#[tokio::test]
async fn a_link_to_a_document_stays_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (spec, link) = (copy(&folder, YAML), folder.path().join("link.yaml"));
    std::os::unix::fs::symlink(&spec, &link).unwrap();
    let (_, told, code) = openapi(&[link.to_str().unwrap(), "--in-place"]).await;
    assert_eq!(code, Some(0), "{told}");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(text(&spec).contains("#/components/responses/Idempotency409"));
}

#[tokio::test]
async fn what_is_wrong_is_named_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let yaml = file("broken.yaml", "openapi: 3.0.0\npaths:\n  /v1/payments: [\n");
    let json = file("broken.json", "{\n  \"openapi\": \"3.0.0\",\n  \"paths\": {,}\n}\n");
    let old = file("old.yaml", "# old\nswagger: '2.0'\n");
    for (spec, line) in
        [(&yaml, "broken.yaml: line "), (&json, "broken.json: line 3: no JSON: "), (&old, "old.yaml: line 2: ")]
    {
        let (out, told, code) = openapi(&[spec, "--in-place"]).await;
        assert!(code == Some(1) && told.contains(line), "{told}");
        assert_eq!(out, "");
    }
    let (_, told, code) = openapi(&["/no/such/file"]).await;
    assert!(code == Some(1) && told.contains("/no/such/file cannot be read"), "{told}");
    let (_, told, code) = openapi(&[&yaml, "--base-path", "v1"]).await;
    assert!(code == Some(64) && told.contains("is no path; write /v1"), "{told}");
    let none =
        file("none.yaml", "openapi: 3.0.0\ninfo: {title: a, version: '1'}\npaths:\n  /x:\n    post: {responses: {}}\n");
    let (out, told, code) = openapi(&[&none]).await;
    assert!(code == Some(0) && told.contains("none of 1 operations is covered"), "{told}");
    assert_eq!(out, text(&none));
}
