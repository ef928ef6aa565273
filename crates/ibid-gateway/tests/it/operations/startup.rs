//! Settings that stop the start, and what `check` and `--help` say.

use std::net::TcpListener;

use testbed::certificates::CertificateAuthority;

use crate::support::{TestGateway, folder_with, run_ibid};

const UPSTREAM: &str = "upstream = \"http://127.0.0.1:9\"\nlisten = \"127.0.0.1:0\"\nadmin.listen = \"127.0.0.1:0\"\n";

/// Starts a file that cannot be, and returns the one line about it.
async fn start_error(text: &str) -> String {
    let (_dir, path) = folder_with("mine.toml", &format!("{UPSTREAM}{text}"));
    let path = path.to_str().unwrap();
    let mut lines = Vec::new();
    for args in [vec!["serve", "--config", path], vec!["check", path]] {
        let output = run_ibid(&args, &[]).await;
        let said = &output.stderr;
        assert_eq!(output.code, Some(64), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "exactly one line: {said}");
        assert_eq!(output.text(), "");
        let (start, rest) = said.trim_end().split_once(": ").unwrap();
        assert!(start.starts_with(&format!("{path}:")), "the file is named: {said}");
        lines.push(rest.to_owned());
    }
    assert_eq!(lines[0], lines[1], "serve and check say the same");
    lines.remove(0)
}

#[tokio::test]
async fn a_wrong_setting_stops_the_start_with_one_line() {
    for (text, key, found, allowed) in [
        ("[[route]]\nmatch = \"POST /a\"\nretry = 3", "route[1].retry", "unknown key", "ibid schema"),
        ("[stor]\nurl = \"memory:\"", "stor", "unknown key", "did you mean \"store\"?"),
        ("[policy]\nttl = \"1 day\"", "policy.ttl", "\"1 day\"", "\"24h\""),
        ("[policy]\nmax_request = -1", "policy.max_request", "-1", "64KiB"),
        ("[log]\nlevel = \"loud\"", "log.level", "\"loud\"", "\"error\" \"warn\" \"info\" \"debug\" \"trace\""),
        ("[policy]\nscope = [\"tenant\"]", "policy.scope[1]", "\"tenant\"", "credential"),
        ("[policy]\npreset = \"paypal\"", "policy.preset", "\"paypal\"", "\"leads\" \"appsportal\" \"bookings\""),
        ("admin.token = \"env:IBID_NOPE\"", "admin.token", "\"env:IBID_NOPE\"", "IBID_NOPE is not set"),
        ("admin.token = \"file:not-there\"", "admin.token", "\"file:not-there\"", "cannot read it"),
        ("[[route]]\nttl = \"1h\"", "route[1].match", "", "POST /"),
        ("[tls]\ncert = \"c.pem\"", "tls.key", "missing", "needs a cert and a key"),
        ("[policy]\nscope = [\"global\", \"host\"]", "policy.scope", "global", ""),
        ("[store]\nurl = \"mysql://h/d\"", "store.url", "\"mysql://h/d\"", "memory: embedded:"),
    ] {
        let line = start_error(text).await;
        assert!(line.starts_with(&format!("{key}: ")), "{key}: {line}");
        assert!(line.contains(found) && line.contains(allowed), "{found:?} {allowed:?}: {line}");
    }
    assert!(!start_error("[policy").await.is_empty());
}

#[tokio::test]
async fn contradictions_stop_the_start() {
    let (_dir, path) =
        folder_with("mine.toml", "listen = \"127.0.0.1:9\"\nupstream = \"http://localhost:9\"\nadmin.listen = \"off\"");
    let output = run_ibid(&["serve", "--config", path.to_str().unwrap()], &[]).await;
    assert_eq!((output.code, output.stderr.lines().count()), (Some(64), 1), "{}", output.stderr);
    assert!(output.stderr.contains("upstream: \"http://localhost:9\" is where ibid itself listens"));

    let both = ["serve", "--upstream", "http://127.0.0.1:9", "--listen", "127.0.0.1:7", "--admin", "127.0.0.1:7"];
    let output = run_ibid(&both, &[]).await;
    assert_eq!((output.code, output.stderr.lines().count()), (Some(64), 1), "{}", output.stderr);
    assert!(output.stderr.contains("admin.listen: \"127.0.0.1:7\" is where clients connect already"));
}

#[tokio::test]
async fn a_wrong_flag_or_variable_is_named() {
    let output = run_ibid(&["serve", "--upstream", "localhost:9"], &[]).await;
    assert_eq!((output.code, output.stderr.lines().count()), (Some(64), 1), "{}", output.stderr);
    assert!(output.stderr.starts_with("--upstream: \"localhost:9\" is no upstream"), "{}", output.stderr);
    let output = run_ibid(&["serve", "--upstream", "http://127.0.0.1:9"], &[("IBID_PRESET", "pay")]).await;
    assert_eq!((output.code, output.stderr.lines().count()), (Some(64), 1), "{}", output.stderr);
    assert!(output.stderr.starts_with("IBID_PRESET: \"pay\" is no preset; allowed are \"leads\""));
    let output = run_ibid(&["serve"], &[]).await;
    assert_eq!((output.code, output.stderr.lines().count()), (Some(64), 1), "{}", output.stderr);
    assert!(output.stderr.contains("--upstream or by IBID_UPSTREAM"), "{}", output.stderr);
    let output = run_ibid(&["serve", "--config", "/not/there.toml"], &[]).await;
    assert_eq!((output.code, output.stderr.lines().count()), (Some(64), 1), "{}", output.stderr);
    assert!(output.stderr.starts_with("/not/there.toml: cannot be read"), "{}", output.stderr);
}

#[tokio::test]
async fn a_store_that_is_not_built_in_is_said_plainly() {
    let url = "mysql://u:s3cret@127.0.0.1:6379/0";
    let (_dir, path) = folder_with("mine.toml", &format!("{UPSTREAM}[store]\nurl = \"{url}\""));
    let path = path.to_str().unwrap();
    let upstream = "http://127.0.0.1:9";
    for (args, env, origin) in [
        (&["serve", "--config", path][..], None, format!("{path}:5:1: store.url: ")),
        (&["check", path], None, format!("{path}:5:1: store.url: ")),
        (&["serve", "--upstream", upstream, "--store", url], None, "--store: ".to_owned()),
        (&["serve", "--upstream", upstream], Some(("IBID_STORE", url)), "IBID_STORE: ".to_owned()),
    ] {
        let output = run_ibid(args, env.as_slice()).await;
        let said = &output.stderr;
        assert_eq!((output.code, said.lines().count()), (Some(64), 1), "{said}");
        assert!(said.starts_with(&origin), "{origin}: {said}");
        assert!(said.contains("names no store of this build; built in are memory:"), "{said}");
        assert!(said.contains("127.0.0.1:6379") && !said.contains("s3cret"), "{said}");
    }
}

#[tokio::test]
async fn a_port_in_use_is_no_wrong_setting() {
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = held.local_addr().unwrap().to_string();
    for (listen, admin, key) in [(taken.as_str(), "127.0.0.1:0", "listen"), ("127.0.0.1:0", &taken, "admin.listen")] {
        let args = ["serve", "--upstream", "http://127.0.0.1:9", "--listen", listen, "--admin", admin];
        let output = run_ibid(&[&args[..], &["--log-level", "error"]].concat(), &[]).await;
        let said = &output.stderr;
        assert_eq!((output.code, said.lines().count()), (Some(1), 1), "{said}");
        assert!(said.starts_with(&format!("ibid: {key}: {taken} cannot be bound: ")), "{said}");
        assert!(said.contains("in use"), "{said}");
        assert_eq!(output.text(), "");
    }
}

#[tokio::test]
async fn check_prints_the_dials_of_every_route() {
    let text = "[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /pay/*\"\npreset = \"stripe\"\nttl = \"72h\"\n\
                [[route]]\nmatch = \"PUT /a\"\npreset = \"membership\"\n";
    let (_dir, path) = folder_with("mine.toml", &format!("{UPSTREAM}{text}"));
    let output = run_ibid(&["check", path.to_str().unwrap()], &[]).await;
    let said = output.text();
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{said}");
    for part in ["mine.toml: valid", "route[1]  POST /pay/*", "route[2]  PUT /a", "survives SIGKILL and power loss"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(said.contains("* ttl             72h"), "what differs is marked: {said}");
    for dial in "methods key scope label fingerprint json_ignore json_numbers on_mismatch on_concurrent on_unknown resolve \
                 on_store_down remember refusals unknown_status remember_body max_request max_response digest_status ttl lease \
                 timeout wait_timeout first_headers replay_headers drop_headers status grpc_status envelope guard mode"
        .split_whitespace()
    {
        let shown = said.lines().filter(|line| line.get(2..).unwrap_or("").split_whitespace().next() == Some(dial));
        assert_eq!(shown.count(), 2, "{dial}: {said}");
    }
}

#[tokio::test]
async fn check_against_says_what_is_forgotten() {
    let (_old_dir, old) = folder_with("old.toml", &format!("{UPSTREAM}[[route]]\nmatch = \"POST /pay\"\n"));
    let (_dir, new) =
        folder_with("new.toml", &format!("{UPSTREAM}[[route]]\nmatch = \"POST /pay\"\nscope = \"global\"\n"));
    let (old, new) = (old.to_str().unwrap(), new.to_str().unwrap());
    let output = run_ibid(&["check", new, "--against", old], &[]).await;
    assert_eq!(output.code, Some(1), "{}", output.text());
    assert!(output.text().contains("POST /pay: scope changed from [host, credential] to [global]"));
    let output = run_ibid(&["check", old, "--against", old], &[]).await;
    assert_eq!(output.code, Some(0), "{}", output.text());
    assert!(output.text().contains("nothing that is remembered is forgotten"));
    let output = run_ibid(&["check", new, "--against", "/not/there.toml"], &[]).await;
    assert_eq!(output.code, Some(64), "{}", output.stderr);
}

/// Each pair is put together as a start does, also where it would only be used later.
#[tokio::test]
async fn check_refuses_a_certificate_and_a_key_that_do_not_fit() {
    let authority = CertificateAuthority::new();
    let (one, other) = (authority.vouch("one"), authority.vouch("other"));
    for (top, table, named) in [
        ("", "[tls]\n", "tls"),
        ("", "[admin.tls]\n", "admin.tls"),
        ("upstream_", "", "upstream_cert"),
        ("", "[trace]\notlp = \"https://127.0.0.1:4318\"\n", "trace.cert"),
    ] {
        for (key, code) in [(&other.key, 64), (&one.key, 0)] {
            let pair = format!("{table}{top}cert = {:?}\n{top}key = {key:?}\n", one.cert);
            let (_dir, file) = folder_with("ibid.toml", &format!("upstream = \"https://127.0.0.1:9\"\n{pair}"));
            let output = run_ibid(&["check", file.to_str().unwrap()], &[]).await;
            let said = &output.stderr;
            assert_eq!(output.code, Some(code), "{pair}: {said}");
            let told =
                said.lines().count() == 1 && said.contains("ibid.toml:") && said.contains(&format!(": {named}: "));
            assert!(code == 0 || told, "{pair}: {said}");
        }
    }
}

#[tokio::test]
async fn help_names_the_commands_and_the_variables() {
    let output = run_ibid(&["--help"], &[]).await;
    assert_eq!(output.code, Some(0));
    for command in ["demo", "serve", "check", "keys", "sweep", "migrate", "store"] {
        assert!(output.text().contains(&format!("\n  {command} ")), "{}", output.text());
    }
    let output = run_ibid(&["serve", "--help"], &[]).await;
    assert_eq!(output.code, Some(0));
    for flag in ["config", "listen", "upstream", "store", "preset", "admin", "log-format", "log-level", "journal"] {
        let variable = format!("[env: IBID_{}]", flag.to_uppercase().replace('-', "_"));
        assert!(output.text().contains(&format!("--{flag} ")), "{flag}");
        assert!(output.text().contains(&variable), "{variable}");
    }
}

/// It may start later, so this is no reason not to start.
#[tokio::test]
async fn an_app_that_is_not_there_is_logged_once_it_had_time_to_start() {
    let TestGateway { upstream, gateway } = TestGateway::in_memory("").await;
    upstream.stop().await;
    tokio::time::sleep(std::time::Duration::from_secs(5)).await;
    let line = gateway.wait_for_log("does not answer").await;
    assert!(line.contains("WARN") && line.contains("start the app, or correct upstream"), "{line}");
}
