//! `ibid demo`: the gateway in front of a built-in payments API. Prints what to try, and shows each request.

use std::{
    convert::Infallible,
    fmt::Display,
    io::{IsTerminal, Write},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use clap::Args;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use ibid::{Observer, RequestOutcome, RequestReport, generate_key, observe::EngineEvent, time::rfc3339};
use ibid_stores::OpenedStore;
use ibid_tools::CommandError;
use serde_json::Value;
use tokio::net::TcpListener;

use super::serve::{self, RunningGateway, stop_signals};
use crate::{
    admin::auth::random_secret,
    config::{Env, GatewaySettings, ServeArgs},
    metrics::MetricsObserver,
};

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Where clients connect
    #[arg(long, default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Where operators connect
    #[arg(long, default_value = "127.0.0.1:8081")]
    pub admin: SocketAddr,
}

pub fn run(args: &DemoArgs) -> Result<(), CommandError> {
    serve::block_on(async {
        let failed = |what: &str, why: &dyn Display| CommandError::Failed(format!("{what}{why}"));
        let app = DemoPaymentsApi::start().await.map_err(|why| failed("the payments API cannot be started: ", &why))?;
        let folder = tempfile::tempdir().map_err(|why| failed("no folder for the store: ", &why))?;
        let serve = ServeArgs {
            listen: Some(args.listen.to_string()),
            admin: Some(args.admin.to_string()),
            upstream: Some(format!("http://{}", app.address)),
            store: Some(format!("embedded:{}", folder.path().display())),
            journal: Some("off".into()),
            ..ServeArgs::default()
        };
        // A new token for each demo, so that sessions of an earlier demo end.
        let token = random_secret();
        let config = "[admin]\ntoken = \"env:IBID_ADMIN_TOKEN\"";
        let env = [("IBID_ADMIN_TOKEN", token.as_str())];
        let settings =
            GatewaySettings::from_text(config, None, &serve, &Env::from_pairs(&env)).map_err(|why| failed("", &why))?;
        let store = ibid_stores::open(settings.store.url.expose()).await.map_err(|why| failed("", &why))?;
        let colour = std::io::stdout().is_terminal();
        let show = MetricsObserver::new(TerminalObserver { app: app.clone(), colour });
        let gateway = RunningGateway::start(settings, serve, OpenedStore::plain(store), show).await;
        let gateway = gateway.map_err(CommandError::Failed)?;
        let stopped = stop_signals()?;
        print_instructions(gateway.address, gateway.admin.unwrap_or(args.admin), &token, &app, colour);
        stopped.await;
        gateway.stop().await;
        println!("\n{} payments were charged. Bye.", app.charged.load(SeqCst));
        Ok(())
    })
}

fn print_instructions(address: SocketAddr, admin: SocketAddr, token: &str, app: &DemoPaymentsApi, colour: bool) {
    let bold = |text: &str| if colour { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() };
    let key = generate_key();
    println!(
        "{}\n\nibid listens on http://{address}, in front of a payments API on http://{}.\nTry this twice, in another terminal:\n\n    \
         curl -i http://{address}/payments -H 'Idempotency-Key: {key}' \\\n         -H 'Content-Type: application/json' -d '{{\"amount\": 1200, \"currency\": \"EUR\"}}'\n\n\
         The second answer is the first one again, with Idempotent-Replayed: true. Retry ten times at once:\n\n    \
         seq 10 | xargs -P 10 -I{{}} curl -s -o /dev/null -w '%{{http_code}}\\n' http://{address}/payments \\\n         \
         -H 'Idempotency-Key: {}' -d '{{\"amount\": 700}}'\n\n\
         Charged in all:                  curl http://{address}/payments\n\
         The published contract:          http://{address}/.well-known/idempotency\n\n\
         The console, in a browser:       http://{admin}/\n\
         Its token:                       {token}\n\
         What is remembered:              curl -H 'Authorization: Bearer {token}' http://{admin}/api/records\n\
         The same as a table:             IBID_ADMIN_TOKEN={token} ibid keys list --admin http://{admin}\n\n{}",
        bold("A payment that is retried, and charged once."),
        app.address,
        generate_key(),
        bold("What happens (Ctrl-C ends it):"),
    );
    println!("ibid: admin on http://{admin}\nibid: listening on http://{address}");
    let _ = std::io::stdout().flush();
}

struct TerminalObserver {
    app: Arc<DemoPaymentsApi>,
    colour: bool,
}

impl Observer for TerminalObserver {
    fn on_request(&self, request: &RequestReport<'_>) {
        let (word, colour) = match request.outcome {
            RequestOutcome::Executed => ("EXECUTED", 32),
            RequestOutcome::Replayed => ("REPLAYED", 36),
            RequestOutcome::Refused(_) => ("REFUSED", 33),
            RequestOutcome::Keyless => ("NO KEY", 90),
            _ => ("RAN", 35),
        };
        let word = if self.colour { format!("\x1b[{colour}m{word:<9}\x1b[0m") } else { format!("{word:<9}") };
        let why = match request.outcome {
            RequestOutcome::Refused(reason) => format!(" {}", reason.name()),
            RequestOutcome::Keyless => " passed through without protection".into(),
            _ => String::new(),
        };
        let status = if request.status == 100 { String::new() } else { request.status.to_string() };
        let charged = self.app.charged.load(SeqCst);
        println!(
            "  {word} {} {} {status:<3} key {:<12} {:>6.1} ms   charged so far: {charged}{why}",
            request.method,
            request.path,
            if request.key.is_empty() { "-" } else { request.key },
            request.took.as_secs_f64() * 1000.0,
        );
    }

    fn on_event(&self, notice: &EngineEvent<'_>) {
        println!("  {notice}");
    }
}

/// The app behind the gateway. It has no idempotency and charges for every request.
struct DemoPaymentsApi {
    address: SocketAddr,
    charged: AtomicU64,
}

impl DemoPaymentsApi {
    async fn start() -> std::io::Result<Arc<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let app = Arc::new(Self { address: listener.local_addr()?, charged: AtomicU64::new(0) });
        let serving = app.clone();
        tokio::spawn(async move {
            loop {
                let Ok((socket, _)) = listener.accept().await else { continue };
                let app = serving.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| {
                        let app = app.clone();
                        async move { Ok::<_, Infallible>(app.answer(request).await) }
                    });
                    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Ok(app)
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        match (request.method().clone(), request.uri().path()) {
            (Method::POST, "/payments") => {
                let body = Limited::new(request.into_body(), 1 << 20).collect().await;
                let body: Value =
                    body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok()).unwrap_or_default();
                // Simulates the call of a bank.
                tokio::time::sleep(Duration::from_millis(300)).await;
                let number = self.charged.fetch_add(1, SeqCst) + 1;
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                let (amount, at) = (body.get("amount").unwrap_or(&Value::Null), rfc3339(now.as_millis() as u64));
                let payment = format!(r#"{{"id":"pay_{number:04}","amount":{amount},"status":"charged","at":"{at}"}}"#);
                answer(StatusCode::CREATED, &payment)
            }
            (Method::GET, "/payments") => {
                answer(StatusCode::OK, &format!(r#"{{"charged":{}}}"#, self.charged.load(SeqCst)))
            }
            _ => answer(StatusCode::NOT_FOUND, r#"{"error":"there is only /payments here"}"#),
        }
    }
}

fn answer(status: StatusCode, body: &str) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(format!("{body}\n").into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}
