use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

use crate::server_process::{ServerProcess, deref_to_process, free_port};

/// Envoy in front of an app, with ibid as external processor: `deploy/envoy/envoy.yaml` on other ports.
#[derive(Debug)]
pub struct TestEnvoy {
    process: ServerProcess,
    admin: u16,
    ext_proc: u16,
}

deref_to_process!(TestEnvoy);

const CONFIG_FILE: &str = "envoy.yaml";

/// A change of the configuration for an app that speaks HTTP/2, as gRPC servers do.
pub const HTTP2_APP: (&str, &str) = (
    "    - name: app\n      load_assignment:",
    "    - name: app
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: { http2_protocol_options: {} }
      load_assignment:",
);

impl TestEnvoy {
    /// `changes` replaces parts of the configuration.
    pub fn start(app: SocketAddr, changes: &[(&str, &str)]) -> Self {
        Self::start_with(app, (Ipv4Addr::LOCALHOST, free_port()).into(), changes)
    }

    /// As [`start`](Self::start); Envoy expects ibid at `ext_proc`.
    pub fn start_with(app: SocketAddr, ext_proc: SocketAddr, changes: &[(&str, &str)]) -> Self {
        let process = ServerProcess::new("envoy", None);
        let envoy = Self { process, admin: free_port(), ext_proc: ext_proc.port() };
        let mut config = fs::read_to_string(root().join("deploy/envoy/envoy.yaml")).expect("the configuration");
        let ports = [(10000, envoy.port()), (9901, envoy.admin), (3000, app.port()), (8083, envoy.ext_proc)];
        let ports = ports.map(|(from, to)| (format!("port_value: {from} "), format!("port_value: {to} ")));
        let ports = ports.iter().map(|(from, to)| (from.as_str(), to.as_str()));
        for (from, to) in ports.chain(changes.iter().copied()) {
            assert!(config.contains(from), "the configuration has no {from:?}");
            config = config.replace(from, to);
        }
        envoy.write(CONFIG_FILE, &config);
        envoy.restart();
        envoy
    }

    /// Starts it again, with the same configuration.
    pub fn restart(&self) {
        let mut command = Command::new(program());
        command.args(["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning", "--config-path"]);
        command.arg(self.path(CONFIG_FILE));
        self.process.start(&command, || self.answers(b"", b""));
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port()).into()
    }

    pub fn admin_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.admin).into()
    }

    /// Where Envoy expects ibid.
    pub fn ext_proc_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ext_proc).into()
    }
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The program in the Python package that ships it.
fn program() -> PathBuf {
    let pythons = fs::read_dir(root().join("target/envoy/lib")).into_iter().flatten().flatten();
    let mut programs = pythons.map(|python| python.path().join("site-packages/envoy/_bin/envoy"));
    programs.find(|program| program.exists()).expect("there is no Envoy in target/envoy; run scripts/tools")
}
