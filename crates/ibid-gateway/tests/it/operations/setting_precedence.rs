//! Flags win over variables, variables over the file; and secrets stay secret.

use testbed::{
    client::post,
    process::{GatewayLauncher, GatewayProcess, ProcessSignal},
    upstream::TestUpstream,
};

use crate::support::{BIN, anonymous_pay, folder_with, lines, run_ibid};

/// The presets differ in what a key for another request gets, and in whether one is needed.
async fn active_preset(launch: GatewayLauncher) -> &'static str {
    let gateway = launch.start().await;
    let addr = gateway.addr();
    if post(addr, "/pay").json("{}").send().await.status == 400 {
        return "platform";
    }
    assert_eq!(anonymous_pay(addr, "k-1").send().await.status, 201);
    match post(addr, "/pay").key("k-1").json(r#"{"amount":2}"#).send().await.status {
        422 => "ietf",
        400 => "stripe",
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn flags_win_over_variables_and_variables_over_the_file() {
    let upstream = TestUpstream::start().await;
    let plain = GatewayProcess::launch(BIN).upstream(&upstream.url());
    let file = plain.clone().config("[policy]\npreset = \"stripe\"\n");
    let variable = file.clone().env("IBID_PRESET", "ietf");
    let flag = variable.clone().arg("--preset").arg("platform");
    assert_eq!(active_preset(plain).await, "ietf");
    assert_eq!(active_preset(file.clone()).await, "stripe");
    assert_eq!(active_preset(variable).await, "ietf");
    assert_eq!(active_preset(flag).await, "platform");
    assert_eq!(active_preset(file.env("IBID_PRESET", "")).await, "stripe", "an empty variable says nothing");
}

#[tokio::test]
async fn addresses_and_the_app_come_by_variable_too() {
    let (upstream, other) = (TestUpstream::start().await, TestUpstream::start().await);
    let config = format!("upstream = \"{}\"\n", other.url());
    let variable = GatewayProcess::launch(BIN).config(config).env("IBID_UPSTREAM", upstream.url());
    // The harness passes --listen, which wins over this one.
    let gateway = variable.env("IBID_LISTEN", "127.0.0.1:1").start().await;
    assert_eq!(anonymous_pay(gateway.addr(), "k-1").send().await.status, 201);
    assert_eq!((upstream.executions(), other.executions()), (1, 0));
}

#[tokio::test]
async fn admin_tokens_are_never_printed() {
    const TOKENS: [&str; 4] = ["t0ken-plain-1", "t0ken-env-2", "t0ken-file-3", "t0ken-url-4"];
    let upstream = TestUpstream::start().await;
    let text = "log.level = \"trace\"\n[admin]\ntoken = \"t0ken-plain-1\"\n\
                tokens = [{ role = \"viewer\", token = \"env:PLANTED\" }]\n";
    let env = [("PLANTED", "t0ken-env-2")];
    let mut printed = String::new();

    let launch = GatewayProcess::launch(BIN).config(text).upstream(&upstream.url()).env(env[0].0, env[0].1);
    let mut gateway = launch.start().await;
    assert_eq!(
        anonymous_pay(gateway.addr(), "k-1").header("Authorization", "Bearer t0ken-plain-1").send().await.status,
        201
    );
    for admin in ["/", "/readyz", "/api/records"] {
        let request = testbed::client::get(gateway.admin_addr(), admin);
        printed += &format!("{:?}", request.header("Authorization", "Bearer t0ken-plain-1").send().await);
    }
    gateway.rewrite_config(&format!("{text}tokn = \"t0ken-file-3\"\n"));
    gateway.signal(ProcessSignal::Hup);
    lines(&gateway, "stays", 1).await;
    gateway.rewrite_config(&text.replace("t0ken-plain-1", "t0ken-file-3"));
    gateway.signal(ProcessSignal::Hup);
    lines(&gateway, "configuration taken up", 1).await;
    gateway.signal(ProcessSignal::Term);
    gateway.wait_exit(testbed::http1::WAIT_TIMEOUT).await;
    printed += &gateway.logs().join("\n");

    let url = "store.url = \"redis://u:t0ken-url-4@127.0.0.1:6379/0\"\n";
    for wrong in [
        "",
        url,
        "admin.token = [\"t0ken-plain-1\"]\n",
        "admin.tokens = [\"t0ken-plain-1\"]\n",
        "admin.tokens = \"t0ken-plain-1\"\n",
        "admin = \"t0ken-plain-1\"\n",
        "admin.tokens = [{ role = \"user\", token = \"t0ken-plain-1\" }]\n",
        "admin.token = t0ken-plain-1\n",
        "admin.tokn = \"t0ken-plain-1\"\n",
    ] {
        let (_dir, path) = folder_with("mine.toml", &format!("upstream = \"http://127.0.0.1:9\"\n{wrong}"));
        let output = run_ibid(&["check", path.to_str().unwrap()], &env).await;
        printed += &output.text();
        printed += &output.stderr;
    }
    for token in TOKENS {
        let shown: Vec<_> = printed.lines().filter(|line| line.contains(token)).collect();
        assert!(shown.is_empty(), "{token}: {shown:#?}");
    }
}

#[tokio::test]
async fn a_token_written_as_a_number_is_not_printed_either() {
    let (_dir, path) = folder_with("mine.toml", "upstream = \"http://127.0.0.1:9\"\nadmin.token = 987654321\n");
    let output = run_ibid(&["check", path.to_str().unwrap()], &[]).await;
    let said = output.stderr;
    assert_eq!(output.code, Some(64));
    assert!(said.contains("admin.token: found a number; allowed is text"), "{said}");
    assert!(!said.contains("987654321"), "{said}");
}
