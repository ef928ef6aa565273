//! The documentation runner on pages that are right, and on pages that are wrong.

use std::{
    fs,
    time::{Duration, Instant},
};

use tempfile::NamedTempFile;
use testbed::{
    docs::DocPage,
    upstream::{TestUpstream, UpstreamReply},
};

fn page(text: &str) -> NamedTempFile {
    let file = tempfile::Builder::new().suffix(".md").tempfile().unwrap();
    fs::write(file.path(), text).unwrap();
    file
}

async fn report(text: &str) -> String {
    let file = page(text);
    DocPage::read(file.path()).limit(Duration::from_secs(2)).check().await.unwrap_err()
}

#[tokio::test]
async fn a_page_that_is_right_passes() {
    let upstream = TestUpstream::start().await;
    upstream.on("/where", UpstreamReply::status(200).body(format!("http://{}/pay\n", upstream.addr())));
    let file = page(
        r#"# Pay once

```toml
listen = "127.0.0.1:8080"
```

```console
$ KEY=k-1
$ curl -si http://127.0.0.1:8080/pay \
    -H "Idempotency-Key: $KEY" -d amount=1
HTTP/1.1 201 Created
…
content-length: …

{"id":1,"run":…}
```

Text in between, and ```code``` in a line.

```sh
this is not run
```

```console
$ curl -s http://127.0.0.1:8080/where
http://127.0.0.1:8080/pay
$ echo "still $KEY"; cat ibid.toml; cd /; echo oops >&2
still k-1
listen = "127.0.0.1:8080"
oops
$ pwd; echo "$HOME" | sed 's/page-.*/page/'; false
/
…ibid-page
```
"#,
    );
    let read = DocPage::read(file.path());
    assert_eq!((read.config(), read.commands()), (Some("listen = \"127.0.0.1:8080\"\n"), 5));
    DocPage::read(file.path()).gateway(upstream.addr()).run().await;
    assert_eq!(upstream.executions_with_key("k-1"), 1);
}

#[tokio::test]
async fn a_difference_shows_the_command_and_both_outputs() {
    let report = report("```console\n$ printf 'a\\nb\\n'\na\nc\n$ echo fine\nfine\n$ echo more\n```\n").await;
    assert!(report.contains(".md:2: not as the page says (exit status 0)\n  $ printf 'a\\nb\\n'\n"), "{report}");
    assert!(report.contains("expected:\n  | a\n> | c\ngot:\n  | a\n> | b\n"), "{report}");
    assert!(report.contains("$ echo more\nexpected:\n> (no more lines)\ngot:\n> | more\n"), "{report}");
    assert!(!report.contains("echo fine"), "{report}");
}

#[tokio::test]
async fn a_mistake_in_one_command_does_not_swallow_the_next() {
    let report = report("```console\n$ echo 'open\n$ echo two\ntwo\n```\n").await;
    assert!(report.contains("unexpected EOF") && !report.contains("echo two"), "{report}");
}

#[tokio::test]
async fn a_command_that_hangs_or_exits_is_named() {
    let hangs = report("```console\n$ echo a\na\n$ sleep 100\n$ echo b\nb\n```\n").await;
    assert!(hangs.contains("(did not end in time)\n  $ sleep 100"), "{hangs}");
    assert!(hangs.contains("(never run: a command before it did not end, or ended the shell)\n  $ echo b"), "{hangs}");
    let exits = report("```console\n$ exit 0\n$ echo b\nb\n```\n").await;
    assert!(exits.contains("(it ended the shell)\n  $ exit 0"), "{exits}");
}

#[tokio::test]
async fn a_process_left_running_does_not_hold_up_the_page_and_is_killed() {
    let file = page("```console\n$ sleep 300 &\n$ echo $!\n…\n$ echo $! > \"$PID_FILE\"\n```\n");
    let pid_file = tempfile::NamedTempFile::new().unwrap();
    let start = Instant::now();
    DocPage::read(file.path()).env("PID_FILE", pid_file.path()).run().await;
    assert!(start.elapsed() < Duration::from_secs(30));
    let pid = fs::read_to_string(pid_file.path()).unwrap();
    // A kill is carried out a moment after it is sent, and who inherits the process may never reap it.
    let running = || {
        let status = fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap_or_default();
        !status.is_empty() && !status.contains("State:\tZ")
    };
    while running() {
        assert!(start.elapsed() < Duration::from_secs(30), "{pid} still runs");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
#[should_panic(expected = "the page has no command")]
async fn a_page_without_commands_fails() {
    DocPage::read(page("# nothing\n").path()).gateway("127.0.0.1:1".parse().unwrap()).run().await;
}

#[test]
#[should_panic(expected = ".md:2: output before any command")]
fn output_without_a_command_fails() {
    DocPage::read(page("```console\nhello\n```\n").path());
}
