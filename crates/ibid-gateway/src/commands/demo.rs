//! `ibid demo`: the gateway in front of a built-in payments API. Prints what to try, and shows each request.

use std::{
    fmt::Display,
    io::{IsTerminal, Write},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use clap::Args;
use http::{StatusCode, header};
use ibid::{Observer, RequestOutcome, RequestReport, generate_key, observe::EngineEvent, time::rfc3339};
use ibid_tools::CommandError;
use serde_json::Value;
use tokio::net::TcpListener;

use super::serve::{self, RunningGateway, stop_signals};
use crate::{
    admin::auth::random_secret,
    config::{Env, GatewaySettings, ServeArgs},
    format::now_ms,
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
    /// Where records are stored, such as redis://127.0.0.1:6379/0; without it, in a temporary folder
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
}

/// A token from a variable, because it is not for the command line. A prefix of its own, because the demo's records must
/// not mix with others in a Redis.
const DEMO_CONFIG: &str = "[admin]\ntoken = \"env:IBID_ADMIN_TOKEN\"\n[store]\nprefix = \"ibid-demo\"\n";

pub fn run(args: &DemoArgs) -> Result<(), CommandError> {
    serve::block_on(async {
        let failed = |what: &str, why: &dyn Display| CommandError::Failed(format!("{what}{why}"));
        let app = DemoPaymentsApi::start().await.map_err(|why| failed("the payments API cannot be started: ", &why))?;
        let folder = tempfile::tempdir().map_err(|why| failed("no folder for the store: ", &why))?;
        let serve = ServeArgs {
            listen: Some(args.listen.to_string()),
            admin: Some(args.admin.to_string()),
            upstream: Some(format!("http://{}", app.address)),
            store: args.store.clone().or_else(|| Some(format!("embedded:{}", folder.path().display()))),
            journal: Some("off".into()),
            ..ServeArgs::default()
        };
        // A new token for each demo, so that sessions of an earlier demo end.
        let token = random_secret();
        let env = [("IBID_ADMIN_TOKEN", token.as_str())];
        let settings = GatewaySettings::from_text(DEMO_CONFIG, None, &serve, &Env::from_pairs(&env))?;
        let colour = std::io::stdout().is_terminal();
        let show = MetricsObserver::new(TerminalObserver { app: app.clone(), colour });
        let url = &settings.store.url;
        let store = settings.store.store_config().open(show.clone()).await;
        let store = store.map_err(|why| failed(&format!("the store {url} cannot be opened: "), &why))?;
        let gateway = RunningGateway::start(settings, serve, store, show).await;
        let gateway = gateway.map_err(CommandError::Failed)?;
        let stopped = stop_signals()?;
        print_instructions(&gateway, gateway.admin.unwrap_or(args.admin), &token, &app, colour);
        stopped.await;
        gateway.stop().await;
        println!("\n{} payments were charged. Bye.", app.charged.load(SeqCst));
        Ok(())
    })
}

fn print_instructions(gateway: &RunningGateway, admin: SocketAddr, token: &str, app: &DemoPaymentsApi, colour: bool) {
    let (address, login) = (gateway.address, gateway.login_path.as_deref().unwrap_or("/"));
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
         The console, in a browser:       http://{admin}{login}\n\
         Its token, for the next time:    {token}\n\
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
        let router = Router::new()
            .route("/payments", post(charge).get(count_charges))
            .fallback(async || answer(StatusCode::NOT_FOUND, r#"{"error":"there is only /payments here"}"#))
            .with_state(app.clone());
        tokio::spawn(axum::serve(listener, router).into_future());
        Ok(app)
    }
}

async fn charge(State(app): State<Arc<DemoPaymentsApi>>, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    // Simulates the call of a bank.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let number = app.charged.fetch_add(1, SeqCst) + 1;
    let (amount, at) = (body.get("amount").unwrap_or(&Value::Null), rfc3339(now_ms()));
    let payment = format!(r#"{{"id":"pay_{number:04}","amount":{amount},"status":"charged","at":"{at}"}}"#);
    answer(StatusCode::CREATED, &payment)
}

async fn count_charges(State(app): State<Arc<DemoPaymentsApi>>) -> Response {
    answer(StatusCode::OK, &format!(r#"{{"charged":{}}}"#, app.charged.load(SeqCst)))
}

fn answer(status: StatusCode, body: &str) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], format!("{body}\n")).into_response()
}
