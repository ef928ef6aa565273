//! `ibid demo`, as its newcomer meets it.

use std::process::Command;

use crate::support::{IbidProcess, until};

/// The first command that the demo says to try, as one would copy it: with its continuation lines.
fn printed_curl(printed: &str) -> String {
    let mut command = String::new();
    for line in printed.lines().skip_while(|line| !line.trim_start().starts_with("curl -i ")) {
        command += line.trim();
        command.push('\n');
        if !line.ends_with('\\') {
            return command;
        }
    }
    panic!("no curl in:\n{printed}");
}

async fn bash(script: String) -> String {
    let output = tokio::task::spawn_blocking(move || Command::new("bash").arg("-c").arg(script).output());
    let output = output.await.unwrap().expect("bash runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn what_it_says_to_try_works_as_it_says() {
    let mut demo = IbidProcess::start(&["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], &[]);
    let printed = demo.wait_for("ibid: listening on http://").await;
    let curl = printed_curl(&printed);
    let first = bash(curl.clone()).await;
    assert!(first.starts_with("HTTP/1.1 201 "), "{first}");
    assert!(!first.to_lowercase().contains("idempotent-replayed"), "{first}");
    let second = bash(curl).await;
    assert!(second.starts_with("HTTP/1.1 201 "), "{second}");
    assert!(second.to_lowercase().contains("idempotent-replayed: true"), "{second}");
    let body = |answer: &str| answer.split_once("\r\n\r\n").unwrap().1.to_owned();
    assert_eq!(body(&first), body(&second));
    assert!(body(&first).contains("\"amount\":1200") && body(&first).contains("pay_0001"), "{first}");

    let count = printed.lines().find_map(|line| line.strip_prefix("Charged in all:")).expect("it says how to count");
    assert_eq!(bash(format!("{} -s", count.trim())).await.trim(), r#"{"charged":1}"#);
    until("both are shown", || demo.printed().matches("charged so far: 1").count() == 2).await;
    let shown = demo.printed();
    let (executed, replayed) = (shown.find("EXECUTED").unwrap(), shown.find("REPLAYED").unwrap());
    assert!(executed < replayed, "{shown}");
    assert!(!shown.contains('\x1b'), "no colours in a file");

    let records =
        printed.lines().find_map(|line| line.strip_prefix("What is remembered:")).expect("it says how to look");
    let records = bash(format!("{} -s", records.trim())).await;
    let records: serde_json::Value = serde_json::from_str(&records).expect("JSON");
    assert_eq!((&records["records"][0]["state"], &records["records"][0]["status"]), (&"done".into(), &201.into()));
    let told = |what: &str| {
        let value = printed.lines().find_map(|line| line.strip_prefix(what)).map(str::trim);
        value.unwrap_or_else(|| panic!("no {what} in:\n{printed}")).to_owned()
    };
    let (console, token) = (told("The console, in a browser:"), told("Its token, for the next time:"));
    let login = console.split('?').next().expect("a link");
    let logged_in = bash(format!("curl -si {login} --data-urlencode token={token}")).await;
    assert!(logged_in.starts_with("HTTP/1.1 303 ") && logged_in.contains("ibid_session="), "{logged_in}");
    // The link logs in once.
    let logged_in = bash(format!("curl -si '{console}'")).await;
    assert!(logged_in.starts_with("HTTP/1.1 303 ") && logged_in.contains("ibid_session="), "{logged_in}");
    let again = bash(format!("curl -si '{console}'")).await;
    assert!(again.starts_with("HTTP/1.1 401 ") && again.contains("it works once"), "{again}");
    let table =
        printed.lines().find_map(|line| line.strip_prefix("The same as a table:")).expect("it says how to list");
    let table = bash(table.trim().replace(" ibid ", &format!(" {} ", crate::support::BIN))).await;
    assert!(table.starts_with("STATE ") && table.lines().count() == 2, "{table}");

    demo.interrupt();
    assert_eq!(demo.exit_code().await, Some(0));
    assert!(demo.printed().contains("1 payments were charged"), "{}", demo.printed());
}

#[tokio::test]
async fn ten_retries_at_once_are_charged_once() {
    let demo = IbidProcess::start(&["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], &[]);
    let printed = demo.wait_for("ibid: listening on http://").await;
    let lines: Vec<_> = printed.lines().skip_while(|line| !line.contains("seq 10 | xargs")).take(2).collect();
    let codes = bash(lines.join("\n")).await;
    let mut codes: Vec<_> = codes.lines().collect();
    codes.sort_unstable();
    assert_eq!(codes.len(), 10, "{codes:?}");
    assert!(codes.contains(&"201") && codes.iter().all(|code| ["201", "409"].contains(code)), "{codes:?}");
    let count = printed.lines().find_map(|line| line.strip_prefix("Charged in all:")).unwrap();
    assert_eq!(bash(format!("{} -s", count.trim())).await.trim(), r#"{"charged":1}"#);
}

#[tokio::test]
async fn a_port_in_use_is_said_in_one_line() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = held.local_addr().unwrap().to_string();
    let mut demo = IbidProcess::start(&["demo", "--listen", &taken, "--admin", "127.0.0.1:0"], &[]);
    assert_eq!(demo.exit_code().await, Some(1));
    let said = demo.printed();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains(&format!("listen: {taken} cannot be bound: ")), "{said}");
}

#[tokio::test]
async fn the_demo_works_on_another_store() {
    let redis = testbed::TestRedis::start();
    let url = redis.url();
    let demo = IbidProcess::start(&["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", &url], &[]);
    let printed = demo.wait_for("ibid: listening on http://").await;
    let address = printed.lines().find_map(|line| line.strip_prefix("ibid: listening on ")).unwrap().trim().to_owned();
    let pay = format!("curl -si {address}/payments -H 'Idempotency-Key: order-7' -d '{{\"amount\":1}}'");
    assert!(bash(pay.clone()).await.starts_with("HTTP/1.1 201 "));
    assert!(bash(pay).await.contains("idempotent-replayed: true"));
    let mut wrong = IbidProcess::start(&["demo", "--store", "rediss//x"], &[]);
    assert_eq!(wrong.exit_code().await, Some(64));
}
