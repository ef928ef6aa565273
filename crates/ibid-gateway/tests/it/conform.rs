//! `ibid conform`: passes ibid itself, and finds what is wrong with servers that are.

use std::{collections::BTreeSet, process::Output, time::Duration};

use ibid::presets::PRESET_NAMES;
use serde_json::Value;
use testbed::{process::GatewayProcess, upstream::TestUpstream};
use tokio::{process::Command, time::timeout};

use self::app::{ConformApp, ServerFaults};
use super::presets::shipped_config;

use crate::support::BIN;

mod app;

/// Where each preset's own configuration has an operation.
fn path(preset: &str) -> &'static str {
    match preset {
        "leads" => "/api/leads",
        "appsportal" => "/api/invoices",
        "bookings" => "/bookings",
        "membership" => "/api/membership/apply",
        "acp" => "/checkout_sessions",
        "ucp" => "/checkout-sessions/chk_1",
        "iceberg" => "/v1/namespaces/ns/tables",
        _ => "/payments",
    }
}

async fn run_conform(args: &[&str]) -> Output {
    let mut command = Command::new(BIN);
    command.arg("conform").args(args).kill_on_drop(true);
    timeout(Duration::from_secs(180), command.output()).await.expect("it ends").expect("it runs")
}

/// What was found, by check.
struct ConformFindings {
    json: Value,
    code: Option<i32>,
}

impl ConformFindings {
    fn verdict(&self, id: &str) -> &str {
        let checks = self.json["checks"].as_array().expect("checks");
        let check = checks.iter().find(|check| check["id"] == id).unwrap_or_else(|| panic!("no {id}: {:#}", self.json));
        check["verdict"].as_str().unwrap()
    }

    /// The ids of all checks that ended so.
    fn all(&self, verdict: &str) -> Vec<&str> {
        let checks = self.json["checks"].as_array().expect("checks").iter();
        checks.filter(|check| check["verdict"] == verdict).map(|check| check["id"].as_str().unwrap()).collect()
    }
}

async fn run_conform_json(args: &[&str]) -> ConformFindings {
    let output = run_conform(&[args, &["--json"]].concat()).await;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let json = serde_json::from_slice(&output.stdout).unwrap_or_else(|why| panic!("{why}: {told}"));
    ConformFindings { json, code: output.status.code() }
}

/// Everything that a run can be told about the app.
fn full_arguments<'a>(url: &'a str, profile: &'a str, count: &'a str) -> Vec<&'a str> {
    let mut args = vec![url, "--profile", profile, "--slow-header", "X-Slow: 1200", "--error-header", "X-Fail: 500"];
    args.extend(["--count-url", count, "--count-pointer", "/ran/times", "--rounds", "2", "--timeout", "20s"]);
    args
}

/// The credentials of two callers, where the profile tells callers apart by them.
const CALLER_ARGUMENTS: [&str; 4] =
    ["--header", "Authorization: Bearer a", "--other-header", "Authorization: Bearer b"];

async fn preset_gateway(preset: &str, app: &ConformApp) -> GatewayProcess {
    let launch = GatewayProcess::launch(BIN).config(shipped_config(preset)).upstream(&app.url(""));
    launch.arg("--store").arg("memory:").start().await
}

async fn preset_passes(preset: &str) {
    let app = ConformApp::start_unprotected().await;
    let gateway = preset_gateway(preset, &app).await;
    let url = format!("http://{}{}", gateway.addr(), path(preset));
    let other = match preset {
        "acp" => "/checkout_sessions/cs_1",
        "ucp" => "/carts",
        _ => "/api/athlete/check-in",
    };
    let (count, other) = (app.url("/count"), format!("http://{}{other}", gateway.addr()));
    let mut args = full_arguments(&url, preset, &count);
    args.extend(["--strict", "--other-url", &other]);
    if ["ietf", "stripe", "acp", "ucp", "iceberg"].contains(&preset) {
        args.extend(CALLER_ARGUMENTS);
    }
    let mut wanted = vec!["mismatch.path"];
    match preset {
        // Its other path must be one of its own.
        "leads" | "appsportal" | "bookings" => {
            let at = args.iter().position(|arg| *arg == "--other-url").unwrap();
            args.drain(at..at + 2);
        }
        _ => wanted.clear(),
    }
    match preset {
        "ietf" | "platform" | "appsportal" => args.extend(["--other-method", "PATCH"]),
        "ucp" => args.extend(["--other-method", "PUT"]),
        "iceberg" => args.extend(["--other-method", "DELETE"]),
        "stripe" => {}
        _ => wanted.push("mismatch.method"),
    }
    let found = run_conform_json(&args).await;
    assert_eq!(found.all("failed"), [""; 0], "{preset}: {:#}", found.json);
    assert_eq!(found.all("advice"), [""; 0], "{preset}: {:#}", found.json);
    assert_eq!(found.all("not performed"), wanted, "{preset}: {:#}", found.json);
    assert_eq!(found.code, Some(0));
    assert!(found.all("passed").len() > 20, "{preset}: {:#}", found.json);
    assert!(app.executions() < 100, "{} runs", app.executions());
}

macro_rules! presets_pass {
    ($($name:ident),+ $(,)?) => {
        $(#[tokio::test]
        async fn $name() {
            preset_passes(stringify!($name)).await;
        })+

        #[test]
        fn every_preset_is_among_them() {
            let mut all = vec![$(stringify!($name)),+];
            let mut names = PRESET_NAMES.to_vec();
            all.sort_unstable();
            names.sort_unstable();
            assert_eq!(all, names);
        }
    };
}

/// ibid does what its presets promise, as seen by its own checks.
mod of_ibid_itself {
    use super::*;

    presets_pass!(leads, appsportal, bookings, platform, membership, ietf, stripe, acp, ucp, iceberg);
}

/// Runs against a server that protects itself.
async fn conform_against(faults: ServerFaults, profile: &str) -> ConformFindings {
    let app = ConformApp::start_protected(faults).await;
    let (url, count) = (app.url("/payments"), app.url("/count"));
    run_conform_json(&[&full_arguments(&url, profile, &count), &CALLER_ARGUMENTS[..]].concat()).await
}

#[tokio::test]
async fn a_server_without_faults_passes() {
    let found = conform_against(ServerFaults::default(), "ietf").await;
    assert_eq!((found.all("failed"), found.code), (vec![], Some(0)), "{:#}", found.json);
    assert_eq!(found.all("advice"), ["get.passes"; 0], "{:#}", found.json);
}

#[tokio::test]
async fn a_server_that_checks_and_then_writes_is_found_out() {
    let found = conform_against(ServerFaults { checks_then_writes: true, ..ServerFaults::default() }, "ietf").await;
    assert_eq!(found.verdict("concurrent.one-run"), "failed", "{:#}", found.json);
    assert_eq!(found.verdict("concurrent.refused"), "failed", "{:#}", found.json);
    // Its retries, one after another, are in order.
    assert_eq!((found.verdict("replay.once"), found.verdict("replay.body")), ("passed", "passed"));
    assert_eq!(found.code, Some(1));
}

/// The same, seen by the answers alone: nobody counts.
#[tokio::test]
async fn it_is_found_out_without_a_counter_too() {
    let app = ConformApp::start_protected(ServerFaults { checks_then_writes: true, ..ServerFaults::default() }).await;
    let found = run_conform_json(&[&app.url("/payments"), "--slow-header", "X-Slow: 1200", "--rounds", "1"]).await;
    assert_eq!(found.verdict("concurrent.one-run"), "failed", "{:#}", found.json);
}

#[tokio::test]
async fn a_server_that_replays_to_others_and_for_another_body_is_found_out() {
    let faults = ServerFaults { shares_callers: true, ignores_body: true, ..ServerFaults::default() };
    let found = conform_against(faults, "ietf").await;
    assert_eq!(found.verdict("caller.isolated"), "failed", "{:#}", found.json);
    assert_eq!(found.verdict("mismatch.body"), "failed", "{:#}", found.json);
    assert_eq!(found.all("failed"), ["mismatch.body", "caller.isolated"], "{:#}", found.json);
    assert_eq!(found.verdict("mismatch.query"), "advice", "{:#}", found.json);
}

#[tokio::test]
async fn a_server_that_remembers_half_of_an_answer_is_found_out() {
    let faults =
        ServerFaults { forgets_head: true, keeps_failures: true, takes_first_key: true, ..ServerFaults::default() };
    let found = conform_against(faults, "ietf").await;
    for id in ["replay.status", "replay.headers", "key.two-headers"] {
        assert_eq!(found.verdict(id), "failed", "{id}: {:#}", found.json);
    }
    // The draft does not forbid it; nobody should do it.
    assert_eq!(found.verdict("error.answer"), "advice", "{:#}", found.json);
    assert_eq!(found.verdict("replay.body"), "passed", "{:#}", found.json);
    assert_eq!(found.code, Some(1));
    // Where the profile forbids it, it fails.
    let found = conform_against(ServerFaults { keeps_failures: true, ..ServerFaults::default() }, "ietf").await;
    assert_eq!((found.all("advice"), found.code), (vec!["error.answer"], Some(0)), "{:#}", found.json);
}

#[tokio::test]
async fn a_server_that_stops_with_its_client_is_found_out() {
    let found = conform_against(ServerFaults { stops_with_client: true, ..ServerFaults::default() }, "ietf").await;
    assert_eq!(found.all("failed"), ["disconnect.answer"], "{:#}", found.json);
}

/// A gateway whose dials break the rules of the protocol fails exactly these checks.
async fn wrong_dials_are_found_out(preset: &str, dials: &str, expected: &[&str]) {
    let app = ConformApp::start_unprotected().await;
    let config = format!("[policy]\npreset = \"{preset}\"\n{dials}\n");
    let launch = GatewayProcess::launch(BIN).config(config).upstream(&app.url(""));
    let gateway = launch.arg("--store").arg("memory:").start().await;
    let (url, other) =
        (format!("http://{}{}", gateway.addr(), path(preset)), format!("http://{}/other", gateway.addr()));
    let count = app.url("/count");
    let args = [&full_arguments(&url, preset, &count), &CALLER_ARGUMENTS[..], &["--other-url", &other]].concat();
    let found = run_conform_json(&args).await;
    assert_eq!((found.all("failed"), found.code), (expected.to_vec(), Some(1)), "{dials}: {:#}", found.json);
}

#[tokio::test]
async fn a_server_that_breaks_rules_of_acp_is_found_out() {
    let dials = "json_numbers = \"as-written\"\nstatus.key_reused = 409\nremember = \"all\"\nkey.required = false\n\
                 scope = \"credential\"\nkey.max_length = 100";
    let expected = ["mismatch.body", "mismatch.numbers", "mismatch.path", "error.answer", "key.missing", "key.longest"];
    wrong_dials_are_found_out("acp", dials, &expected).await;
    let dials = "fingerprint = \"raw\"\nrefusals = \"problem\"\nscope = \"path\"\non_concurrent = \"wait\"";
    let expected = [
        "mismatch.layout",
        "mismatch.numbers",
        "concurrent.refused",
        "caller.isolated",
        "answer.echo",
        "problem.shape",
    ];
    wrong_dials_are_found_out("acp", dials, &expected).await;
}

#[tokio::test]
async fn a_server_that_breaks_rules_of_ucp_is_found_out() {
    let dials = "fingerprint = \"body\"\nstatus.key_reused = 422\nscope = [\"method\", \"path\"]";
    wrong_dials_are_found_out("ucp", dials, &["mismatch.body", "mismatch.layout", "caller.isolated"]).await;
    let dials = "refusals = \"problem\"\non_mismatch = \"new\"";
    wrong_dials_are_found_out("ucp", dials, &["mismatch.body", "mismatch.layout", "problem.shape"]).await;
}

#[tokio::test]
async fn a_server_that_breaks_rules_of_iceberg_is_found_out() {
    // A client would take this conflict for a failed commit.
    let dials = "on_concurrent = \"reject\"\nstatus.in_progress = 409\nremember = \"all\"\nkey.required = true";
    let expected = ["concurrent.waits", "disconnect.answer", "error.answer", "key.missing"];
    wrong_dials_are_found_out("iceberg", dials, &expected).await;
    wrong_dials_are_found_out("iceberg", "refusals = \"problem\"", &["config.lifetime", "problem.shape"]).await;
}

/// Servers that are in order, each in a way that a careless check takes for a fault.
#[tokio::test]
async fn nothing_is_held_against_servers_that_are_in_order() {
    // An operation has one method: another is refused whatever its key.
    let app = ConformApp::start_protected(ServerFaults { takes_post_only: true, ..ServerFaults::default() }).await;
    let (url, count) = (app.url("/payments"), app.url("/count"));
    let args = [&full_arguments(&url, "ietf", &count), &CALLER_ARGUMENTS[..], &["--other-method", "PATCH"]].concat();
    let post_only = run_conform_json(&args).await;
    assert_eq!(post_only.verdict("mismatch.method"), "not performed", "{:#}", post_only.json);
    assert_eq!((post_only.all("failed"), post_only.all("advice")), (vec![], vec![]), "{:#}", post_only.json);
    // JSON that is stored as values and written anew is the same answer.
    let app = ConformApp::start_protected(ServerFaults { reserialises_replays: true, ..ServerFaults::default() }).await;
    let found = self::run_conform_json(&[&app.url("/payments"), "--slow-header", "X-Slow: 300", "--rounds", "1"]).await;
    for id in ["replay.body", "replay.once", "mismatch.keeps-first", "concurrent.one-run", "concurrent.settles"] {
        assert_eq!(found.verdict(id), "passed", "{id}: {:#}", found.json);
    }
    assert_eq!(found.all("failed"), [""; 0], "{:#}", found.json);
}

/// Where a tenant is who says so in a header, another credential of the same tenant is the same caller.
#[tokio::test]
async fn a_second_caller_is_another_tenant() {
    let app = ConformApp::start_protected(ServerFaults { has_tenants: true, ..ServerFaults::default() }).await;
    let url = app.url("/payments");
    let args = [&url, "--profile", "appsportal", "--rounds", "1"];
    let isolated = run_conform_json(&[&args[..], &CALLER_ARGUMENTS[..]].concat()).await;
    assert_ne!(isolated.verdict("caller.isolated"), "failed", "{:#}", isolated.json);
    let named = run_conform_json(&[&args[..], &CALLER_ARGUMENTS[..], &["--header", "X-Tenant-Id: t1"]].concat()).await;
    assert_eq!(named.verdict("caller.isolated"), "not performed", "{:#}", named.json);
    // One that shares answers between tenants is found out all the same.
    let app = ConformApp::start_protected(ServerFaults {
        shares_callers: true,
        has_tenants: true,
        ..ServerFaults::default()
    })
    .await;
    let gateway =
        GatewayProcess::spawn(BIN, "[policy]\npreset = \"appsportal\"\nscope = \"global\"\n", &app.url("")).await;
    let url = format!("http://{}/payments", gateway.addr());
    let shared = run_conform_json(
        &[&[url.as_str(), "--profile", "appsportal", "--rounds", "1"], &CALLER_ARGUMENTS[..]].concat(),
    )
    .await;
    assert_eq!(shared.verdict("caller.isolated"), "failed", "{:#}", shared.json);
}

/// Servers that remember nothing, each in a way that a careless check takes for a replay.
#[tokio::test]
async fn nothing_passes_on_what_is_no_evidence() {
    // It says of every answer that it is a replay, and its runs are alike: nothing is known of it.
    let app = ConformApp::start_protected(ServerFaults {
        always_marks: true,
        hides_replays: true,
        checks_then_writes: true,
        ..ServerFaults::default()
    })
    .await;
    let found = self::run_conform_json(&[&app.url("/payments"), "--rounds", "1"]).await;
    for id in ["first.unmarked", "replay.marker"] {
        assert_eq!(found.verdict(id), "advice", "{id}: {:#}", found.json);
    }
    for id in ["replay.once", "replay.body", "concurrent.one-run", "concurrent.settles"] {
        assert_eq!(found.verdict(id), "not performed", "{id}: {:#}", found.json);
    }
    // It runs nothing at all, with and without the marker.
    for always_marks in [false, true] {
        let app =
            ConformApp::start_protected(ServerFaults { is_static: true, always_marks, ..ServerFaults::default() })
                .await;
        for profile in ["ietf", "stripe", "appsportal", "platform"] {
            let args = [&app.url("/payments"), "--profile", profile, "--rounds", "1", "--slow-header", "X-Slow: 1"];
            let found = self::run_conform_json(&[&args[..], &CALLER_ARGUMENTS[..]].concat()).await;
            assert_eq!(found.code, Some(1), "{profile}: {:#}", found.json);
            let passed = found.all("passed");
            // Nothing that would need a run, or a key that is remembered. Bytes that no header may have are refused below it.
            let shown = ["first.unmarked", "get.passes", "key.control-byte", "key.non-ascii"];
            let unfounded: Vec<_> = passed.into_iter().filter(|id| !shown.contains(id)).collect();
            assert!(unfounded.is_empty(), "{profile} {always_marks}: {unfounded:?}");
        }
    }
}

/// A check without evidence is not performed, and says what it would take.
#[tokio::test]
async fn what_cannot_be_seen_is_not_performed() {
    let app = ConformApp::start_protected(ServerFaults { hides_replays: true, ..ServerFaults::default() }).await;
    let url = app.url("/payments");
    let found = run_conform_json(&[&url]).await;
    for id in [
        "first.independent",
        "replay.once",
        "concurrent.one-run",
        "disconnect.answer",
        "caller.isolated",
        "error.answer",
    ] {
        assert_eq!(found.verdict(id), "not performed", "{id}: {:#}", found.json);
    }
    assert_eq!((found.all("failed"), found.code), (vec![], Some(0)), "{:#}", found.json);
    let output = run_conform(&[&url, "--complete"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("name --count-url\n"), "{text}");
    // With the counter it can be seen.
    let count = app.url("/count");
    let found = self::run_conform_json(&[&url, "--count-url", &count, "--count-pointer", "/ran/times"]).await;
    assert_eq!(found.verdict("replay.once"), "passed", "{:#}", found.json);
    assert_eq!(found.verdict("concurrent.one-run"), "passed", "{:#}", found.json);
}

/// No check is there for show: for each there is a server that fails it.
#[tokio::test]
async fn every_check_can_fail() {
    let right = ServerFaults::default();
    let mut seen = BTreeSet::new();
    let mut look = |found: &ConformFindings| {
        let wrong = found.all("failed").into_iter().chain(found.all("advice"));
        seen.extend(wrong.map(str::to_owned));
    };
    for (faults, id) in [
        (ServerFaults { ignores_keys: true, ..right }, "first.independent"),
        (ServerFaults { always_marks: true, ..right }, "first.unmarked"),
        (ServerFaults { hides_replays: true, ..right }, "replay.marker"),
        (ServerFaults { keeps_cookies: true, ..right }, "replay.cookies"),
        (ServerFaults { forgets_head: true, ..right }, "replay.headers"),
        (ServerFaults { ignores_body: true, ..right }, "mismatch.path"),
        (ServerFaults { forgets_on_mismatch: true, ..right }, "mismatch.keeps-first"),
        (ServerFaults { checks_then_writes: true, ..right }, "concurrent.settles"),
        (ServerFaults { refuses_in_plain_text: true, ..right }, "concurrent.retry-after"),
        (ServerFaults { takes_short_keys: true, ..right }, "key.longest"),
        (ServerFaults { guards_get: true, ..right }, "get.passes"),
    ] {
        let app = ConformApp::start_protected(faults).await;
        let (url, other, count) = (app.url("/payments"), app.url("/refunds"), app.url("/count"));
        let mut args = vec![url.as_str(), "--count-url", &count, "--count-pointer", "/ran/times", "--rounds", "1"];
        args.extend(["--other-url", &other, "--other-method", "PUT", "--slow-header", "X-Slow: 500"]);
        let found = run_conform_json(&[&args, &CALLER_ARGUMENTS[..]].concat()).await;
        assert!(["failed", "advice"].contains(&found.verdict(id)), "{id}: {:#}", found.json);
        look(&found);
    }
    look(
        &conform_against(
            ServerFaults { stops_with_client: true, keeps_failures: true, shares_callers: true, ..right },
            "ietf",
        )
        .await,
    );
    // What protects nothing, and what protects in another way.
    let app = ConformApp::start_unprotected().await;
    let (url, count) = (app.url("/payments"), app.url("/count"));
    for profile in ["platform", "leads", "membership", "ietf", "stripe"] {
        let args =
            [&url, "--profile", profile, "--count-url", &count, "--count-pointer", "/ran/times", "--rounds", "1"];
        look(&run_conform_json(&args).await);
    }
    for (profile, at) in [("acp", "/payments"), ("ucp", "/payments"), ("iceberg", "/v1/payments")] {
        look(&run_conform_json(&[&app.url(at), "--profile", profile, "--rounds", "1"]).await);
    }
    look(&conform_against(right, "membership").await);
    // One that even takes what is no HTTP.
    let upstream = TestUpstream::start().await;
    look(&run_conform_json(&[&format!("{}/payments", upstream.url()), "--rounds", "1"]).await);
    look(&run_conform_json(&[&url, "--header", "X-Fail: 500"]).await);
    let mut all = BTreeSet::new();
    for name in PRESET_NAMES {
        let list = run_conform(&["--list", "--profile", name]).await.stdout;
        let list = String::from_utf8(list).unwrap();
        let ids = list.lines().filter(|line| !line.starts_with(' ')).filter_map(|line| line.split(' ').next());
        all.extend(ids.map(str::to_owned));
    }
    assert!(all.len() > 35, "{all:?}");
    assert_eq!(all.difference(&seen).collect::<Vec<_>>(), [""; 0]);
}

#[tokio::test]
async fn reports_are_for_people_and_for_machines() {
    let app = ConformApp::start_protected(ServerFaults { takes_first_key: true, ..ServerFaults::default() }).await;
    let folder = tempfile::tempdir().unwrap();
    let junit = folder.path().join("report.xml");
    let url = app.url("/payments");
    let secret = "Authorization: Bearer s3cret";
    let output = run_conform(&[&url, "--header", secret, "--junit", junit.to_str().unwrap()]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.starts_with(&format!("{url}, profile ietf\n\npassed         first.processed         A first request")),
        "{text}"
    );
    let failed = "FAILED         key.two-headers         Two key headers are refused\n               sent      POST /payments, Authorization: ****, ";
    assert!(text.contains(failed), "{text}");
    let cited = "               expected  a refusal (4xx), and no run\n               \
                 cites     draft-ietf-httpapi-idempotency-key-header-07 §2.1 (not more than one)\n";
    assert!(text.contains(cited), "{text}");
    assert!(text.contains(" passed, 1 failed, 0 advised, "), "{text}");
    let xml = std::fs::read_to_string(junit).unwrap();
    assert!(!text.contains("s3cret") && !xml.contains("s3cret"));
    let count = |what: &str| xml.matches(what).count();
    assert_eq!((count("<failure "), count("failures=\"1\"")), (1, 1), "{xml}");
    assert_eq!(count("<testcase "), count("</testcase>"), "{xml}");
    let skipped = count("<skipped ");
    assert!(skipped > 0 && xml.contains(&format!("skipped=\"{skipped}\"")), "{xml}");
    assert!(xml.contains(&format!("tests=\"{}\"", count("<testcase "))), "{xml}");
}

#[tokio::test]
async fn ends_say_what_was_wrong() {
    let app = ConformApp::start_unprotected().await;
    let (url, count) = (app.url("/payments"), app.url("/count"));
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = format!("http://{}/payments", closed.local_addr().unwrap());
    drop(closed);
    for (args, code, told) in [
        (&[nobody.as_str()][..], 69, "ibid: no connection to 127.0.0.1:"),
        (&["http://name.invalid/payments"], 69, "ibid: no connection to name.invalid: "),
        (&["ftp://h/x"], 64, "ibid: \"ftp://h/x\" is no URL that can be checked: its scheme is neither http nor https"),
        (&[&url, "--body", "/no/such/file"], 64, "ibid: /no/such/file is neither JSON nor a file that can be read"),
        (&[&url, "--other-url", "http://127.0.0.1:1/x"], 64, "ibid: --other-url must be on the same server"),
        (&[&url, "--count-url", &count], 64, "there is no number at \"\" (see --count-pointer)"),
        (&[&url, "--profile", "nope"], 64, "\"nope\" is no profile; allowed are leads, "),
        (&[], 64, "<URL>"),
    ] {
        let output = run_conform(args).await;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(told), "{args:?}: {said}");
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
    }
    // An operation that does not work shows nothing.
    let found = run_conform_json(&[&url, "--header", "X-Fail: 500"]).await;
    assert_eq!((found.all("failed"), found.code), (vec!["first.processed"], Some(1)));
    assert_eq!(found.all("passed"), [""; 0]);
    // An app that protects nothing does not pass.
    let found = self::run_conform_json(&[&url]).await;
    assert_eq!(found.verdict("replay.once"), "failed", "{:#}", found.json);
    assert_eq!(found.verdict("replay.body"), "failed", "{:#}", found.json);
}

#[tokio::test]
async fn the_list_says_what_each_profile_checks_and_why() {
    for name in PRESET_NAMES {
        let output = run_conform(&["--list", "--profile", name]).await;
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains("replay.once"), "{text}");
    }
    let text = String::from_utf8(run_conform(&["--list", "--profile", "mcp"]).await.stdout).unwrap();
    assert!(text.starts_with("mcp.first") && text.contains("mcp.lost-answer"), "{text}");
}

/// Over TLS: with the right certificate, with any, and not with a wrong one.
#[tokio::test]
async fn certificates_are_checked_unless_told_otherwise() {
    let app = ConformApp::start_unprotected().await;
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (cert, key) = (path("cert.pem", made.cert.pem()), path("key.pem", made.signing_key.serialize_pem()));
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let other = path("other.pem", other.cert.pem());
    let config = format!("tls = {{ cert = \"file:{cert}\", key = \"file:{key}\" }}\n[policy]\npreset = \"ietf\"\n");
    let launch = GatewayProcess::launch(BIN).config(config).upstream(&app.url(""));
    let gateway = launch.arg("--store").arg("memory:").start().await;
    let url = format!("https://localhost:{}/payments", gateway.addr().port());
    for args in [&["--ca", &cert][..], &["--insecure"]] {
        let found = run_conform_json(&[&[url.as_str()], args].concat()).await;
        assert_eq!((found.all("failed"), found.code), (vec![], Some(0)), "{:#}", found.json);
    }
    for args in [&["--ca", other.as_str()][..], &[]] {
        let output = run_conform(&[&[url.as_str()], args].concat()).await;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(69), "{said}");
        assert!(said.contains("certificate"), "{said}");
    }
}
