//! The container's file, as far as it can be judged without building it; and the health check that it runs.

use testbed::{
    process::{self, GatewayProcess},
    upstream::{TestUpstream, UpstreamReply},
};

use super::common::{BIN, text};

#[test]
fn the_image_is_what_it_says() {
    let file = text("deploy/Containerfile");
    let lines: Vec<_> = file.lines().filter(|line| !line.starts_with('#')).collect();
    let rust = text("Cargo.toml");
    let rust = rust.lines().find_map(|line| line.strip_prefix("rust-version = ")).expect("a version").trim_matches('"');
    assert!(lines.contains(&&*format!("FROM docker.io/library/rust:{rust}-bookworm AS build")), "{file}");
    let last = lines.iter().rposition(|line| line.starts_with("FROM ")).expect("stages");
    let user = lines[last..].iter().find_map(|line| line.strip_prefix("USER ")).expect("a user");
    assert!(!["0", "root"].contains(&user.split(':').next().unwrap()), "{user}");
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("HEALTHCHECK ") && line.ends_with("CMD [\"/usr/bin/ibid\", \"health\"]"))
    );
    // A variable would win over the file of whoever mounts one.
    assert!(!lines.iter().any(|line| line.starts_with("ENV ")), "{file}");
    let ignored = text("deploy/Containerfile.dockerignore");
    assert!(ignored.lines().any(|line| line == "target") && !ignored.lines().any(|line| line == "crates"), "{ignored}");
}

#[tokio::test]
async fn health_is_asked_for_by_the_settings_of_the_gateway() {
    let upstream = TestUpstream::start().await;
    let gateway = GatewayProcess::spawn(BIN, "[store]\nurl = \"memory:\"\n", &upstream.url()).await;
    let admin = gateway.admin_addr().to_string();
    let health = async |args: &[&str], env: &[(&str, &str)]| {
        let output = process::run(BIN, &[&["health"], args].concat(), env).await;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    assert_eq!(health(&["--admin", &admin], &[]).await, (Some(0), "ok".into(), String::new()));
    let (code, said, _) = health(&["--ready"], &[("IBID_ADMIN", &admin)]).await;
    assert_eq!(code, Some(0));
    assert!(said.contains("\"ready\":true"), "{said}");

    let (code, _, told) = health(&[], &[("IBID_ADMIN", "off")]).await;
    assert_eq!(code, Some(64), "{told}");
    upstream.on("/readyz", UpstreamReply::status(404));
    let client = gateway.addr().to_string();
    let (code, _, told) = health(&["--admin", &client, "--ready"], &[]).await;
    assert_eq!((code, told.contains("/readyz says 404")), (Some(1), true), "not the admin port: {told}");
    drop(gateway);
    let (code, _, told) = health(&["--admin", &admin], &[]).await;
    assert_eq!(code, Some(1));
    assert!(told.starts_with(&format!("ibid: no answer from http://{admin}/healthz: ")), "{told}");
}
