//! The app behind the gateways: it counts what it runs.
//!
//! A POST is an execution. It is written to a file and synced before the first byte of its answer, and its answer is like
//! no other: whoever gets it has an answer of that execution. The path says how many milliseconds it takes: `/12`; what
//! is at `/held` takes until it is [released](Upstream::release_held).
//!
//! Invariant: an execution that began is in the log, whatever becomes of the connection that asked for it.

use std::{
    collections::HashMap,
    convert::Infallible,
    fs::File,
    io::{self, Write as _},
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
    task::{JoinHandle, JoinSet},
    time::sleep,
};

use crate::random::SplitMix64;

/// One run of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Execution {
    /// Counted from 1 over all keys.
    pub number: usize,
    /// When, since the upstream's start.
    pub at: Duration,
    /// The body of its answer.
    pub answer: Bytes,
}

/// The upstream. Dropping it closes everything.
pub struct Upstream {
    addr: SocketAddr,
    execution_log: Arc<ExecutionLog>,
    server_task: JoinHandle<()>,
}

struct ExecutionLog {
    started_at: Instant,
    state: Mutex<ExecutionLogState>,
    file: PathBuf,
    lines: mpsc::Sender<(String, oneshot::Sender<()>)>,
    released: watch::Sender<bool>,
}

struct ExecutionLogState {
    executions: HashMap<String, Vec<Execution>>,
    count: usize,
    random: SplitMix64,
}

impl Upstream {
    /// Starts it on a free port of the loopback, with its log in this folder. Times are counted from `began`.
    ///
    /// # Errors
    ///
    /// If the log cannot be made, or there is no free port.
    pub async fn start(folder: &Path, began: Instant, seed: u64) -> io::Result<Upstream> {
        let path = folder.join("executions.log");
        let file = File::create_new(&path)?;
        let (lines, inbox) = mpsc::channel();
        thread::Builder::new().name("executions".into()).spawn(move || write_log(file, &inbox))?;
        let book = ExecutionLogState { executions: HashMap::new(), count: 0, random: SplitMix64::new(seed) };
        let ledger = Arc::new(ExecutionLog {
            started_at: began,
            state: Mutex::new(book),
            file: path,
            lines,
            released: watch::Sender::default(),
        });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let serving = tokio::spawn(serve(listener, Arc::clone(&ledger)));
        Ok(Upstream { addr, execution_log: ledger, server_task: serving })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The executions so far, by key.
    pub fn executions(&self) -> HashMap<String, Vec<Execution>> {
        self.execution_log.state.lock().executions.clone()
    }

    /// How often this key ran so far.
    pub fn execution_count(&self, key: &str) -> usize {
        self.execution_log.state.lock().executions.get(key).map_or(0, Vec::len)
    }

    /// Answers what is held, now and later.
    pub fn release_held(&self) {
        self.execution_log.released.send_replace(true);
    }

    /// Where its log is, for whoever wants to look after a failure.
    pub fn log(&self) -> &Path {
        &self.execution_log.file
    }

    /// How many executions are on the disk.
    ///
    /// # Errors
    ///
    /// If the log cannot be read.
    pub fn executions_on_disk(&self) -> io::Result<usize> {
        Ok(std::fs::read_to_string(self.log())?.lines().count())
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.server_task.abort();
    }
}

impl ExecutionLog {
    /// Counts an execution, and returns its answer once it is on the disk.
    async fn execute(&self, key: &str, path: &str) -> Bytes {
        let (synced, wait) = oneshot::channel();
        let answer = {
            let mut book = self.state.lock();
            book.count += 1;
            let (number, at, nonce) = (book.count, self.started_at.elapsed(), book.random.next_u64());
            let answer = Bytes::from(format!(r#"{{"execution":{number},"key":"{key}","nonce":"{nonce:016x}"}}"#));
            book.executions.entry(key.to_owned()).or_default().push(Execution { number, at, answer: answer.clone() });
            // Under the lock, so that the lines are in the order of their numbers.
            let _ = self.lines.send((format!("{number}\t{}\t{key}\t{path}\t{nonce:016x}\n", at.as_micros()), synced));
            answer
        };
        wait.await.expect("the log's thread runs as long as the ledger");
        answer
    }
}

/// Writes what there is in one go, syncs once, and says so to everybody. Ends with the ledger.
fn write_log(mut file: File, inbox: &mpsc::Receiver<(String, oneshot::Sender<()>)>) {
    while let Ok((mut lines, first)) = inbox.recv() {
        let mut waiting = vec![first];
        while let Ok((line, synced)) = inbox.try_recv() {
            lines += &line;
            waiting.push(synced);
        }
        file.write_all(lines.as_bytes()).and_then(|()| file.sync_data()).expect("the log of executions can be written");
        for synced in waiting {
            let _ = synced.send(());
        }
    }
}

async fn serve(listener: TcpListener, ledger: Arc<ExecutionLog>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        let _ = stream.set_nodelay(true);
        let ledger = Arc::clone(&ledger);
        connections.spawn(async move {
            let service = service_fn(|request| answer(request, Arc::clone(&ledger)));
            let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(request: Request<Incoming>, ledger: Arc<ExecutionLog>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let key = head.headers.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default();
    let key = key.trim_matches('"').to_owned();
    let plain = |status: StatusCode| {
        let mut response = Response::new(Full::default());
        *response.status_mut() = status;
        Ok(response)
    };
    if head.method != Method::POST || key.is_empty() {
        return plain(StatusCode::OK);
    }
    if body.collect().await.is_err() {
        return plain(StatusCode::BAD_REQUEST);
    }
    let path = head.uri.path().to_owned();
    let takes = path.trim_start_matches('/').parse().map_or(Duration::ZERO, Duration::from_millis);
    let mut released = (path == "/held").then(|| ledger.released.subscribe());
    // On its own: a gateway that hangs up does not undo it.
    let executed = tokio::spawn(async move { ledger.execute(&key, &path).await });
    let body = executed.await.expect("an execution never fails");
    sleep(takes).await;
    if let Some(released) = &mut released {
        let _ = released.wait_for(|released| *released).await;
    }
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = StatusCode::CREATED;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    Ok(response)
}
