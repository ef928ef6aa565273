//! Who may call, and where.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    process::Stdio,
};

use tokio::process::Command;

use super::common::{ApiGateway, ApiPlace, TOKEN, created, payment, request_bytes};
use crate::support::{folder_with, run_ibid};

#[tokio::test]
async fn on_an_address_every_call_needs_the_token() {
    let gateway = ApiGateway::tcp("").await;
    let body = payment("key-1").to_string();
    for token in [None, Some(""), Some("token"), Some("token-of-the-appp")] {
        let denied = gateway.send(&request_bytes("/v1/exchanges", token, &body)).await;
        denied.assert_problem(401, "api.token");
        assert!(denied.head.contains("www-authenticate: Bearer"), "{denied:?}");
    }
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let end = format!("/v1/exchanges/{exchange}/end");
    let denied = gateway.send(&request_bytes(&end, None, &created("forged").to_string())).await;
    denied.assert_problem(401, "Bearer TOKEN");
    let ended = gateway.send(&request_bytes(&end, Some(TOKEN), &created("paid").to_string())).await;
    assert_eq!(ended.answer().body, "paid");
}

#[tokio::test]
async fn the_socket_is_for_this_user_only() {
    let mut gateway = ApiGateway::ietf("").await;
    let ApiPlace::Unix(path) = gateway.place.clone() else { unreachable!() };
    let metadata = fs::metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    // Another user who got hold of the path is refused even if the permissions allow it.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let folder = path.parent().unwrap();
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let call = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\ntry:\n \
                s.sendall(b'GET /v1/openapi.json HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n')\n \
                print(len(s.recv(100)))\nexcept ConnectionError: print(0)\n";
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", call]).arg(&path);
    let output = command.stdin(Stdio::null()).output().await.expect("setpriv runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "0", "{output:?}");
    gateway.process.wait_for_log("a connection of another user was closed").await;
    assert_eq!(gateway.begin(&payment("key-1")).await.status, 201, "the same user");
    // A socket that a killed process left is replaced.
    gateway.process.kill().await;
    assert!(path.exists());
    gateway.process.restart().await;
    assert_eq!(gateway.begin(&payment("key-2")).await.status, 201);
}

#[tokio::test]
async fn two_processes_do_not_share_a_socket() {
    let gateway = ApiGateway::ietf("").await;
    let ApiPlace::Unix(path) = &gateway.place else { unreachable!() };
    let listen = path.display();
    let config = format!(
        "listen = \"127.0.0.1:0\"\nupstream = \"http://127.0.0.1:9\"\n[admin]\nlisten = \"off\"\n[api]\nlisten = \"unix:{listen}\"\n"
    );
    let (_folder, file) = folder_with("ibid.toml", &config);
    let output = run_ibid(&["serve", "--store", "memory:", "--config", file.to_str().unwrap()], &[]).await;
    assert!(output.all().contains("another process listens there"), "{output:?}");
    assert_eq!(gateway.begin(&payment("key-1")).await.status, 201, "the first one still has it");
}

#[tokio::test]
async fn settings_that_cannot_be_are_explained() {
    for (api, expected) in [
        ("listen = \"0.0.0.0:8082\"", "is no loopback address"),
        ("listen = \"127.0.0.1:8082\"", "api.token: missing"),
        ("listen = \"unix:\"", "is no place to listen"),
        ("token = \"secret\"", "api.listen, which is missing"),
        ("listen = \"127.0.0.1:8080\"\ntoken = \"t\"", "is where clients connect already"),
    ] {
        let config = format!("upstream = \"http://127.0.0.1:9\"\n[api]\n{api}\n");
        let (_folder, file) = folder_with("ibid.toml", &config);
        let output = run_ibid(&["check", file.to_str().unwrap()], &[]).await;
        assert_eq!(output.code, Some(64), "{output:?}");
        assert!(output.all().contains(expected), "{api}: {output:?}");
    }
}
