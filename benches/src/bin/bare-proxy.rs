//! The baseline of the gateway rows: the gateway's own listener options, proxy service, upstream connections and
//! buffering, with no idempotency in between. What `ibid serve` costs more than this, idempotency costs.
//!
//! `bare-proxy --upstream http://ADDR [--listen 127.0.0.1:0]`; prints `listening on http://ADDR`.

use std::{
    convert::Infallible,
    error::Error,
    io::Write,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Weak},
};

use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use ibid::http::RequestBody;
use ibid_gateway::{
    config::{Env, ServeArgs, Settings},
    live::Chosen,
    proxy::{Body, Client, Proxy, Reply},
    server::protocol,
    upstream::{self, Upstream},
};
use tokio::net::{TcpListener, TcpStream};
use tower_service::Service;

type Failure = Box<dyn Error + Send + Sync>;

/// What all connections share.
struct Front {
    settings: Settings,
    upstream: Arc<Upstream<Body>>,
}

fn main() -> ExitCode {
    let run = || -> Result<(), Failure> {
        let settings = Settings::load(&flags(std::env::args().skip(1))?, &Env::of(&[]))?;
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
fn flags(mut args: impl Iterator<Item = String>) -> Result<ServeArgs, String> {
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

async fn serve(settings: Settings) -> Result<(), Failure> {
    let listener = TcpListener::bind(settings.listen).await?;
    let pool = upstream::Settings { max_connections: settings.max_upstream, ..upstream::Settings::default() };
    let upstream = Upstream::new(settings.upstream.parse()?, pool)?;
    writeln!(std::io::stdout(), "listening on http://{}", listener.local_addr()?)?;
    let front = Arc::new(Front { settings, upstream });
    loop {
        let (socket, peer) = listener.accept().await?;
        tokio::spawn(front.clone().connection(socket, peer));
    }
}

impl Front {
    async fn connection(self: Arc<Self>, socket: TcpStream, peer: SocketAddr) {
        let _ = socket.set_nodelay(true);
        let Settings { trusted_proxies, limits, .. } = &self.settings;
        let proxy = Proxy::new(Client::new(peer.ip(), false, trusted_proxies, limits, Weak::new()));
        let upstream = self.upstream.clone();
        let answer = service_fn(move |request| {
            let (proxy, chosen) = (proxy.clone(), Chosen::only(upstream.clone()));
            async move { Ok::<_, Infallible>(buffered(proxy, chosen, request).await) }
        });
        let builder = protocol(&self.settings.limits);
        // A client that hangs up is no concern of a benchmark's server; the client reports it.
        let _ = builder.serve_connection_with_upgrades(TokioIo::new(socket), answer).await;
    }
}

/// Has both bodies whole in memory before it sends them on, as the gateway does with a covered request.
async fn buffered(mut proxy: Proxy, chosen: Chosen, request: Request<Incoming>) -> Response<Reply> {
    let (mut parts, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return broken(StatusCode::BAD_REQUEST) };
    parts.extensions.insert(chosen);
    let request = Request::from_parts(parts, RequestBody::whole(body.to_bytes(), None));
    let (parts, body) = proxy.call(request).await.unwrap_or_else(|never| match never {}).into_parts();
    let Ok(body) = body.collect().await else { return broken(StatusCode::BAD_GATEWAY) };
    Response::from_parts(parts, Reply::whole(body.to_bytes(), None))
}

fn broken(status: StatusCode) -> Response<Reply> {
    let mut answer = Response::new(Reply::whole("", None));
    *answer.status_mut() = status;
    answer
}
