//! What Prometheus' own tool says about the page of metrics.

use std::{io::Write, process::Stdio};

use testbed::{client::get, process::GatewayProcess, upstream::TestUpstream};

use super::common::{BIN, tool};

#[tokio::test]
async fn promtool_has_nothing_to_say_but_about_the_one_name_that_is_given() {
    let upstream = TestUpstream::start().await;
    let gateway =
        GatewayProcess::launch(BIN).config("[store]\nurl = \"memory:\"\n").upstream(&upstream.url()).start().await;
    let page = get(gateway.admin_addr(), "/metrics").send().await;
    let mut promtool = tool("promtool", "prometheus")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(&page.body).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines, ["idempotency_processing_gauge metric name should not include type 'gauge'"]);
}
