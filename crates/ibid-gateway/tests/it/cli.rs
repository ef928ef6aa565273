//! The command line as its users see it.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

use testbed::upstream::TestUpstream;

fn ibid(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ibid")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_typo_gets_a_suggestion() {
    for (args, suggestion) in [
        (&["sreve"][..], "'serve'"),
        (&["keys", "relaese"], "'release'"),
        (&["serve", "--upstraem", "http://127.0.0.1:1"], "'--upstream'"),
    ] {
        let output = ibid(args);
        assert_eq!(output.status.code(), Some(64), "{args:?}");
        let told = text(&output.stderr);
        assert!(told.contains("similar") && told.contains(suggestion), "{told}");
    }
}

/// Runs `ibid` in a directory, and types lines.
fn ibid_in(folder: &Path, args: &[&str], typed: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ibid"))
        .args(args)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that asks nothing may have ended.
    let _ = child.stdin.take().unwrap().write_all(typed.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn init_writes_a_file_that_is_valid_and_overwrites_none() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = ["--upstream", "http://127.0.0.1:4567"];
    let output = ibid_in(folder.path(), &[&["init", "--yes"][..], &upstream].concat(), "");
    assert!(output.status.success(), "{output:?}");
    let written = fs::read_to_string(folder.path().join("ibid.toml")).unwrap();
    assert!(written.starts_with("#:schema ./ibid.schema.json\n"), "{written}");
    assert!(written.contains("upstream = \"http://127.0.0.1:4567\""), "{written}");
    let schema = fs::read(folder.path().join("ibid.schema.json")).unwrap();
    assert_eq!(schema, ibid(&["schema"]).stdout);
    let schema: serde_json::Value = serde_json::from_slice(&schema).unwrap();
    assert!(schema["properties"]["upstream"]["description"].is_string());
    assert!(ibid_in(folder.path(), &["check", "ibid.toml"], "").status.success());
    // What is commented out is valid too.
    let all: String = written
        .lines()
        .map(|line| {
            let setting = line.strip_prefix("# ").filter(|rest| rest.starts_with('[') || rest.contains(" = "));
            let is_sentence = setting.is_some_and(|rest| rest.contains(". To try"));
            format!("{}\n", setting.filter(|_| !is_sentence).unwrap_or(line))
        })
        .collect();
    fs::write(folder.path().join("all.toml"), all.replace("env:IBID_ADMIN_TOKEN", "0123456789abcdef")).unwrap();
    let checked = ibid_in(folder.path(), &["check", "all.toml"], "");
    assert!(checked.status.success() && text(&checked.stdout).contains("POST /payments"), "{checked:?}");

    let again = ibid_in(folder.path(), &["init", "--yes"], "");
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("ibid.toml exists"), "{again:?}");
    assert_eq!(fs::read_to_string(folder.path().join("ibid.toml")).unwrap(), written);
}

#[test]
fn init_knows_mcp_servers() {
    let folder = tempfile::tempdir().unwrap();
    let output = ibid_in(folder.path(), &["init", "--yes", "--preset", "mcp"], "");
    assert!(output.status.success(), "{output:?}");
    let written = fs::read_to_string(folder.path().join("ibid.toml")).unwrap();
    let all = written.replace("# tools", "tools").replace("# guard", "guard");
    fs::write(folder.path().join("all.toml"), all).unwrap();
    for file in ["ibid.toml", "all.toml"] {
        let checked = ibid_in(folder.path(), &["check", file], "");
        assert!(checked.status.success() && text(&checked.stdout).contains("POST /mcp"), "{file}: {checked:?}");
    }
}

#[test]
fn init_asks_until_the_answer_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let typed = "localhost:4567\nhttp://localhost:4567\nstrpie\nstripe\n\n";
    let output = ibid_in(folder.path(), &["init", "my.toml"], typed);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("it lacks \"http://\"") && said.contains("did you mean \"stripe\"?"), "{said}");
    let written = fs::read_to_string(folder.path().join("my.toml")).unwrap();
    for line in ["upstream = \"http://localhost:4567\"", "preset = \"stripe\"", "url = \"embedded:ibid-data\""] {
        assert!(written.contains(line), "{line}: {written}");
    }
    // Flags are checked as well, and a wrong one writes nothing.
    let output = ibid_in(folder.path(), &["init", "b.toml", "--yes", "--preset", "strpie"], "");
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(!folder.path().join("b.toml").exists());
}

#[tokio::test]
async fn the_doctor_says_what_a_start_depends_on() {
    let upstream = TestUpstream::start().await;
    let folder = tempfile::tempdir().unwrap();
    let run = async |upstream: String, store: &'static str| {
        let path = folder.path().to_owned();
        tokio::task::spawn_blocking(move || {
            let ports = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
            ibid_in(&path, &[&["doctor", "--upstream", &upstream, "--store", store][..], &ports].concat(), "")
        })
        .await
        .unwrap()
    };
    let output = run(upstream.url(), "embedded:data").await;
    let said = text(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for (verdict, subject, found) in [
        ("ok", "configuration", "no file"),
        ("ok", "store", "data is new; the start creates it"),
        ("ok", "upstream", "answers"),
        ("ok", "keep-alive", "upstream_idle is 4s"),
        ("ok", "open files", "needed"),
        ("ok", "disk", "free"),
        ("ok", "listen", "is free"),
    ] {
        let line = said.lines().find(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(verdict) && line.contains(&format!("  {subject} ")) && line.contains(found)
        });
        assert!(line.is_some(), "{verdict} {subject} {found}: {said}");
    }
    assert!(!folder.path().join("data").exists(), "it creates nothing");
    // Beside a gateway that has the store.
    let data = format!("embedded:{}", folder.path().join("data").display());
    let store = ibid_stores::open(&data).await.expect("it is free");
    let output = run(upstream.url(), "embedded:data").await;
    assert!(output.status.success() && text(&output.stdout).contains("is not checked: it is in use by"), "{output:?}");
    drop(store);
    let redis = testbed::TestRedis::start();
    let output = run(upstream.url(), redis.url().leak()).await;
    assert!(text(&output.stdout).contains("as that of the store, within 5 s"), "{output:?}");
    let output = run("http://127.0.0.1:9".into(), "redis://127.0.0.1:9/0").await;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(said.contains("FAILED") && said.contains("start the app, or correct upstream"), "{said}");
    assert!(said.lines().any(|line| line.starts_with("FAILED") && line.contains("store")), "{said}");
}

#[test]
fn completions_and_manual_pages() {
    for (shell, part) in [("bash", "complete -F"), ("zsh", "#compdef ibid"), ("fish", "complete -c ibid")] {
        let script = text(&ibid(&["completions", shell]).stdout);
        assert!(script.contains(part) && script.contains("doctor") && script.contains("upstream"), "{shell}");
    }
    let script = ibid(&["completions", "bash"]).stdout;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("ibid.bash"), script).unwrap();
    let offered = Command::new("bash")
        .args([
            "-c",
            "source ./ibid.bash; COMP_WORDS=(ibid doc); COMP_CWORD=1; _ibid ibid doc ibid; echo ${COMPREPLY[@]}",
        ])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert_eq!(text(&offered.stdout).trim(), "doctor", "{offered:?}");
    let pages = folder.path().join("man");
    assert!(ibid(&["man", pages.to_str().unwrap()]).status.success());
    for (page, part) in
        [("ibid.1", "idempotency gateway"), ("ibid\\-serve.1", "IBID_UPSTREAM"), ("ibid-keys-list.1", "older")]
    {
        let text = fs::read_to_string(pages.join(page.replace('\\', ""))).unwrap_or_else(|why| panic!("{page}: {why}"));
        assert!(text.contains(".TH") && text.contains(part), "{page}: {text}");
    }
}
