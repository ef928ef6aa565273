//! `ibid health`: checks the gateway that uses the same settings. For container images without curl.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use ibid_tools::CommandError;
use tokio::time::timeout;

use super::{admin_client::request_to, store};
use crate::{
    config::{AdminTlsArgs, Env, GatewaySettings, ServeArgs},
    outbound::OutboundClient,
    tls,
};

/// Timeout of the answer. Readiness includes a store call, which may take a second.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(6);
const MAX_ANSWER_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Default, Args)]
pub struct HealthArgs {
    /// The gateway's configuration file [env: IBID_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The gateway's admin address [env: IBID_ADMIN] [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    pub admin: Option<String>,
    /// Check whether it is ready (/readyz), not only whether it is alive (/healthz)
    #[arg(long)]
    pub ready: bool,
    /// Certificates for an admin port with TLS
    #[command(flatten)]
    pub tls: AdminTlsArgs,
}

/// Prints the gateway's answer if it is healthy.
pub fn run(args: &HealthArgs, env: &Env<'_>, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let serve = ServeArgs {
        config: args.config.clone(),
        admin: args.admin.clone(),
        // Required, but irrelevant here; the gateway may get it by a flag.
        upstream: Some("http://127.0.0.1".into()),
        ..ServeArgs::default()
    };
    let Some(admin) = GatewaySettings::load(&serve, env)?.admin else {
        return Err(CommandError::Usage("admin.listen is off: there is nobody to ask; give it an address".into()));
    };
    let addr = local_address(admin.listen);
    let tls = match &admin.tls {
        None => None,
        Some(_) => Some(tls::health_client_config("--admin-", &args.tls.load(env)?).map_err(CommandError::Usage)?),
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let url = format!("{scheme}://{addr}{path}");
    let unanswered = |why: &dyn fmt::Display| CommandError::Conflict(format!("no answer from {url}: {why}"));
    let server = OutboundClient::with_tls(&format!("{scheme}://{addr}"), tls, HEALTH_TIMEOUT);
    let server = server.map_err(|why| unanswered(&why))?;
    let request = request_to(path).expect("a path of ours");
    let answer = store::block_on(async {
        match timeout(HEALTH_TIMEOUT, server.send(request, MAX_ANSWER_BYTES)).await {
            Ok(answer) => answer.map_err(|why| unanswered(&why)),
            Err(_) => Err(unanswered(&format!("nothing within {HEALTH_TIMEOUT:?}"))),
        }
    })?;
    let (status, said) = (answer.status(), answer.into_body());
    let said = String::from_utf8_lossy(&said);
    let said = said.trim();
    if !status.is_success() {
        return Err(CommandError::Conflict(format!("{url} says {}: {said}", status.as_u16())));
    }
    Ok(writeln!(out, "{said}")?)
}

/// Replaces an unspecified address by the loopback address.
fn local_address(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_everywhere_is_asked_here() {
        for (listen, asked) in [
            ("0.0.0.0:81", "127.0.0.1:81"),
            ("[::]:81", "[::1]:81"),
            ("127.0.0.1:82", "127.0.0.1:82"),
            ("10.0.0.7:82", "10.0.0.7:82"),
        ] {
            assert_eq!(local_address(listen.parse().unwrap()).to_string(), asked);
        }
    }
}
