//! The guide for clients says what is so, and what it shows runs.

use std::{fs, os::unix::fs::symlink, path::Path, process::Output, time::Duration};

use ibid::RefusalReason;
use ibid_client::Schedule;
use testbed::{
    FaultProxy,
    docs::DocPage,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::{process::Command, time::timeout};

use crate::common::{gateway, root};

fn guide() -> String {
    fs::read_to_string(root().join("docs/clients.md")).expect("the guide")
}

fn block(language: &str) -> String {
    let text = guide();
    let blocks: Vec<_> = text.split(&format!("```{language}\n")).skip(1).collect();
    assert_eq!(blocks.len(), 1, "one block of {language}");
    blocks[0].split("```").next().expect("it ends").to_owned()
}

async fn run(program: &str, folder: &Path, args: &[&str]) -> (Output, String) {
    let output = Command::new(program).args(args).current_dir(folder).kill_on_drop(true).output();
    let output = timeout(Duration::from_secs(60), output).await.unwrap_or_else(|_| panic!("{program} does not end"));
    let output = output.unwrap_or_else(|error| panic!("{program} (Debian packages python3, nodejs, php-cli): {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output, said)
}

#[test]
fn every_refusal_is_in_the_table_with_its_status() {
    let text = guide();
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with("| ")).collect();
    for reason in RefusalReason::all() {
        let row = rows.iter().find(|row| row.contains(&format!("`{reason}`")));
        let row = row.unwrap_or_else(|| panic!("{reason} is not in the table"));
        assert!(row.starts_with(&format!("| {} |", reason.status().as_u16())), "{reason}: {row}");
    }
}

#[test]
fn the_schedules_are_as_the_code_has_them() {
    let text = guide();
    for (name, schedule) in [("exponential", Schedule::exponential()), ("linear", Schedule::linear())] {
        let waits: Vec<_> = (1..).map_while(|made| schedule.wait(made)).map(|wait| wait.as_millis()).collect();
        let (unit, by) = if name == "linear" { ("s", 1000) } else { ("ms", 1) };
        let waits: Vec<_> = waits.iter().map(|wait| (wait / by).to_string()).collect();
        let cells = format!(" | {} {unit} | {} |", waits.join(", "), schedule.max_attempts());
        let row = text.lines().find(|line| line.starts_with(&format!("| `{name}`"))).expect("a row");
        assert!(row.ends_with(&cells), "{row}: {cells}");
    }
}

#[tokio::test]
async fn the_commands_of_curl_do_what_the_guide_shows() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream).await;
    DocPage::read(root().join("docs/clients.md")).gateway(gateway.addr()).run().await;
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn the_code_in_python_retries_replays_and_stops() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("pay.py"), block("python")).unwrap();
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream).await;
    let link = FaultProxy::to(gateway.addr());
    let url = |path: &str| format!("http://{}{path}", link.addr());
    let pay = async |path: &str, key: &str| run("python3", folder.path(), &["pay.py", &url(path), key]).await;

    // The answer is lost twice.
    link.break_answers(2);
    let (_, said) = pay("/pay", "k-1").await;
    assert_eq!(said, "201 b'{\"id\":1,\"run\":1}' True\n");
    let (_, said) = pay("/pay", "k-2").await;
    assert_eq!(said, "201 b'{\"id\":2,\"run\":2}' False\n");
    // A final 4xx is an answer.
    upstream.on("/none", UpstreamReply::status(404));
    assert_eq!(pay("/none", "k-3").await.1, "404 b'' False\n");
    assert_eq!(upstream.executions_at("/none"), 1);
    // An unknown outcome is not retried.
    upstream.on("/lost", UpstreamFault::ResetAfterRequest);
    let (output, said) = pay("/lost", "k-4").await;
    assert!(!output.status.success() && said.contains("IdempotencyError: outcome-unknown: "), "{said}");
    assert_eq!(upstream.executions_at("/lost"), 1);
    // Nor is what a server wants much later, or what never ends.
    upstream.on("/later", UpstreamReply::status(503).header("retry-after", "3600"));
    assert!(pay("/later", "k-5").await.1.contains("asks to wait for 3600 seconds"));
    let gate = upstream.gate("/slow");
    let (first, second) = tokio::join!(
        async {
            let ended = pay("/slow", "k-6").await;
            ended.1
        },
        async {
            gate.arrived(1).await;
            let said = pay("/slow", "k-6").await.1;
            gate.open();
            said
        }
    );
    assert!(second.contains("still in-progress after 5 attempts"), "{second}");
    assert!(first.starts_with("201 ") && first.ends_with("False\n"), "{first}");
}

#[tokio::test]
async fn the_code_in_php_retries_replays_and_stops() {
    let folder = tempfile::tempdir().unwrap();
    let code = block("php").replace("'https://api.example.com/pay'", "$argv[1]");
    let code = code.replace("bin2hex(random_bytes(16))", "$argv[2]");
    let print = "echo $status, ' ', $text, ' ', var_export($replayed, true), \"\\n\";";
    fs::write(folder.path().join("pay.php"), format!("<?php\n{code}\n{print}\n")).unwrap();
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream).await;
    let link = FaultProxy::to(gateway.addr());
    let url = |path: &str| format!("http://{}{path}", link.addr());
    let pay = async |path: &str, key: &str| run("php", folder.path(), &["pay.php", &url(path), key]).await;

    link.break_answers(2);
    assert_eq!(pay("/pay", "k-1").await.1, "201 {\"id\":1,\"run\":1} true\n");
    assert_eq!(pay("/pay", "k-2").await.1, "201 {\"id\":2,\"run\":2} false\n");
    upstream.on("/none", UpstreamReply::status(404));
    assert_eq!(pay("/none", "k-3").await.1, "404  false\n");
    assert_eq!(upstream.executions_at("/none"), 1);
    upstream.on("/lost", UpstreamFault::ResetAfterRequest);
    let (output, said) = pay("/lost", "k-4").await;
    assert!(!output.status.success() && said.contains("outcome-unknown: "), "{said}");
    assert_eq!(upstream.executions_at("/lost"), 1);
    upstream.on("/later", UpstreamReply::status(503).header("retry-after", "3600"));
    assert!(pay("/later", "k-5").await.1.contains("still 503; keep the key"));
}

#[tokio::test]
async fn the_code_in_javascript_pays_once() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream).await;
    let link = FaultProxy::to(gateway.addr());
    link.break_answers(1);
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("node_modules")).unwrap();
    symlink(root().join("clients/js"), folder.path().join("node_modules/ibid-client")).unwrap();
    let code = block("js").replace("127.0.0.1:8080", &link.addr().to_string());
    let code = code + "console.log(JSON.stringify(await pay({ id: 17, amount: 1 })))\n";
    fs::write(folder.path().join("pay.mjs"), code).unwrap();
    let (_, said) = run("node", folder.path(), &["pay.mjs"]).await;
    assert_eq!(said, "{\"paid\":true,\"before\":true}\n");
    assert_eq!(upstream.executions(), 1);
}
