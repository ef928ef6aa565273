//! `ibid health`: checks the gateway that uses the same settings. For container images without curl.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};

use super::open_store::CommandError;
use crate::{
    config::{AdminTls, AdminTlsArgs, Env, GatewaySettings, ServeArgs},
    tls,
};

/// Timeout of each step. Readiness includes a store call, which may take a second.
const HEALTH_STEP_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum size of a response in bytes.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;

/// `ibid health`.
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
///
/// # Errors
/// Returns an error if it is unhealthy or unreachable.
pub fn run(args: &HealthArgs, env: &Env<'_>, out: &mut dyn Write) -> Result<(), CommandError> {
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
        Some(_) => {
            let AdminTls { ca, shown } = args.tls.load(env)?;
            Some(tls::health_client_config("--admin-", ca.as_ref(), shown.as_ref()).map_err(CommandError::Usage)?)
        }
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let (status, said) = fetch(addr, path, tls)
        .map_err(|why| CommandError::Conflict(format!("no answer from {scheme}://{addr}{path}: {why}")))?;
    let said = said.trim();
    if status != 200 {
        return Err(CommandError::Conflict(format!("{scheme}://{addr}{path} says {status}: {said}")));
    }
    writeln!(out, "{said}")?;
    Ok(())
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

/// Returns status and body.
fn fetch(addr: SocketAddr, path: &str, tls: Option<Arc<ClientConfig>>) -> io::Result<(u16, String)> {
    let socket = TcpStream::connect_timeout(&addr, HEALTH_STEP_TIMEOUT)?;
    socket.set_read_timeout(Some(HEALTH_STEP_TIMEOUT))?;
    socket.set_write_timeout(Some(HEALTH_STEP_TIMEOUT))?;
    let answer = match tls {
        None => exchange(socket, addr, path)?,
        Some(tls) => {
            let name = ServerName::IpAddress(addr.ip().into());
            let session = ClientConnection::new(tls, name).map_err(io::Error::other)?;
            exchange(StreamOwned::new(session, socket), addr, path)?
        }
    };
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    status.zip(body).ok_or_else(|| io::Error::other("what listens there does not speak HTTP"))
}

fn exchange(mut socket: impl Read + Write, addr: SocketAddr, path: &str) -> io::Result<Vec<u8>> {
    write!(socket, "GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n")?;
    socket.flush()?;
    let mut answer = Vec::new();
    socket.take(MAX_RESPONSE_BYTES).read_to_end(&mut answer)?;
    Ok(answer)
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
