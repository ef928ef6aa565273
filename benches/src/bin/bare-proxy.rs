//! The baseline of the gateway rows: the gateway's own listener options, proxy service, upstream connections and
//! buffering, with no idempotency in between. What `ibid serve` costs more than this, idempotency costs.
//!
//! `bare-proxy --upstream http://ADDR [--listen 127.0.0.1:0]`; prints `listening on http://ADDR`.

use std::{
    convert::Infallible,
    error::Error,
    future::poll_fn,
    io::Write,
    net::SocketAddr,
    pin::pin,
    process::ExitCode,
    sync::{Arc, Weak},
};

use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use ibid::{
    http::{App, RequestBody},
    policy::RefusalFormat,
};
use ibid_gateway::{
    config::{Env, GatewaySettings, ServeArgs},
    cores::Cores,
    proxy::{Proxy, ProxyClient, ProxyResponseBody, UpstreamRequestBody},
    server::{
        client_body::{ClientBody, ConnectionPoller},
        connection_builder,
    },
    upstream::{self, UpstreamClient},
};
use tokio::net::{TcpListener, TcpStream};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type ProxyStartError = Box<dyn Error + Send + Sync>;

/// What all connections share.
struct BareProxy {
    settings: GatewaySettings,
    upstream: Arc<UpstreamClient<UpstreamRequestBody>>,
}

fn main() -> ExitCode {
    let run = || -> Result<(), ProxyStartError> {
        let settings = GatewaySettings::load(&parse_flags(std::env::args().skip(1))?, &Env::from_pairs(&[]))?;
        tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(settings))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bare-proxy: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The gateway's defaults hold for everything else.
fn parse_flags(mut args: impl Iterator<Item = String>) -> Result<ServeArgs, String> {
    let mut flags = ServeArgs { listen: Some("127.0.0.1:0".into()), ..ServeArgs::default() };
    while let Some(name) = args.next() {
        let value = Some(args.next().ok_or_else(|| format!("{name} needs a value"))?);
        match name.as_str() {
            "--upstream" => flags.upstream = value,
            "--listen" => flags.listen = value,
            _ => return Err(format!("unknown flag {name}; known: --upstream URL --listen ADDR")),
        }
    }
    Ok(flags)
}

async fn serve(settings: GatewaySettings) -> Result<(), ProxyStartError> {
    let listener = TcpListener::bind(settings.listen).await?;
    let pool =
        upstream::UpstreamSettings { max_connections: settings.max_upstream, ..upstream::UpstreamSettings::default() };
    let upstream = UpstreamClient::new(settings.upstream.parse()?, pool)?;
    writeln!(std::io::stdout(), "listening on http://{}", listener.local_addr()?)?;
    let front = Arc::new(BareProxy { settings, upstream });
    let cores = Cores::start()?;
    loop {
        let (socket, peer) = listener.accept().await?;
        let (socket, front) = (socket.into_std()?, front.clone());
        cores.spawn(async move {
            if let Ok(socket) = TcpStream::from_std(socket) {
                front.serve_connection(socket, peer).await;
            }
        });
    }
}

impl BareProxy {
    async fn serve_connection(self: Arc<Self>, socket: TcpStream, peer: SocketAddr) {
        let _ = socket.set_nodelay(true);
        let GatewaySettings { trusted_proxies, limits, .. } = &self.settings;
        let client = ProxyClient::new(peer.ip(), false, trusted_proxies, limits, Weak::new());
        let (upstream, refusals) = (self.upstream.clone(), RefusalFormat::default());
        let proxy = Proxy { client, upstream, refusals, trace: None };
        let answer = service_fn(move |request| {
            let proxy = proxy.clone();
            async move { Ok::<_, Infallible>(proxy_buffered(proxy, request).await) }
        });
        let builder = connection_builder(&self.settings.limits);
        // A client that hangs up is no concern of a benchmark's server; the client reports it.
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(socket), answer));
        let mut poller = ConnectionPoller::default();
        let _ = poll_fn(|cx| poller.poll(connection.as_mut(), cx)).await;
    }
}

/// Has both bodies whole in memory before it sends them on, as the gateway does with a covered request.
async fn proxy_buffered(mut proxy: Proxy, request: Request<Incoming>) -> Response<ProxyResponseBody> {
    let (parts, body) = request.into_parts();
    let body = ClientBody::new(body, parts.version);
    let Ok(body) = body.collect().await else { return error_response(StatusCode::BAD_REQUEST) };
    let request = Request::from_parts(parts, RequestBody::whole(body.to_bytes(), None));
    let (parts, body) = proxy.pass(request).await.unwrap_or_else(|never| match never {}).into_parts();
    let Ok(body) = body.collect().await else { return error_response(StatusCode::BAD_GATEWAY) };
    Response::from_parts(parts, ProxyResponseBody::whole(body.to_bytes(), None))
}

fn error_response(status: StatusCode) -> Response<ProxyResponseBody> {
    let mut answer = Response::new(ProxyResponseBody::whole("", None));
    *answer.status_mut() = status;
    answer
}
