//! A client: retries each operation through whichever gateway until it has a final answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use ibid_testkit::client::{Raw, Response, post};
use tokio::time::{sleep, timeout};

use crate::{
    board::{Board, Heard, Operation, Told},
    dice::Dice,
    fleet::Fleet,
};

/// How long one try may take. Longer than a lease, so that a paused gateway can still be seen to answer late.
const ONE_TRY: Duration = Duration::from_secs(3);
/// How long a client goes on asking about one key.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two tries: doubled each time, with jitter.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// One client, with a connection to each gateway.
pub(crate) struct Client {
    fleet: Arc<Fleet>,
    board: Arc<Board>,
    dice: Dice,
    open: Vec<Option<Raw>>,
}

/// What one try brought.
enum Try {
    Final(Heard),
    /// To be tried again; what was seen.
    Again(String),
}

impl Client {
    pub(crate) fn new(fleet: &Arc<Fleet>, board: &Arc<Board>, seed: u64) -> Client {
        let open = (0..fleet.len()).map(|_| None).collect();
        Client { fleet: Arc::clone(fleet), board: Arc::clone(board), dice: Dice::new(seed), open }
    }

    /// One operation after the other until it is over. The last one is brought to its end.
    pub(crate) async fn run(mut self, over: Arc<AtomicBool>, slowest: Duration) {
        while !over.load(SeqCst) {
            let operation = self.board.next(&mut self.dice, slowest);
            self.until_told(&operation).await;
            sleep(Duration::from_millis(self.dice.below(8) as u64)).await;
        }
    }

    async fn until_told(&mut self, operation: &Operation) {
        let end = Instant::now() + PATIENCE;
        let mut seen = String::new();
        for nth in 0u32.. {
            if Instant::now() >= end {
                break;
            }
            let gateway = self.dice.below(self.fleet.len());
            match self.ask(operation, gateway, nth > 0).await {
                Try::Final(heard) => return self.board.hear(&operation.key, heard),
                Try::Again(what) => seen = what,
            }
            self.pause(nth).await;
        }
        self.board.give_up(format!("{} after {PATIENCE:?}; the last try saw: {seen}", operation.key));
    }

    /// Asks this gateway until it gives a final answer; nothing if it does not before `end`.
    pub(crate) async fn until_told_by(&mut self, operation: &Operation, gateway: usize, end: Instant) -> Option<Heard> {
        for nth in 0u32.. {
            match self.ask(operation, gateway, nth > 0).await {
                Try::Final(heard) => return Some(Heard { verifying: true, ..heard }),
                Try::Again(_) if Instant::now() >= end => return None,
                Try::Again(_) => self.pause(nth).await,
            }
        }
        None
    }

    async fn pause(&mut self, nth: u32) {
        let longest = (FIRST_PAUSE * 2u32.pow(nth.min(10))).min(LONGEST_PAUSE);
        let pause = self.dice.within(&(longest / 2..longest));
        sleep(pause).await;
    }

    async fn ask(&mut self, operation: &Operation, gateway: usize, retry: bool) -> Try {
        let Operation { key, path } = operation;
        self.board.count(retry);
        let begun = self.board.now();
        let answer = match timeout(ONE_TRY, self.send(operation, gateway)).await {
            Err(_) => return Try::Again(format!("gateway {gateway}: no answer within {ONE_TRY:?}")),
            Ok(Err(broken)) => return Try::Again(format!("gateway {gateway}: {broken}")),
            Ok(Ok(answer)) => answer,
        };
        let told = match answer.status {
            201 => Told::Done { status: 201, body: answer.body.clone() },
            409 if answer.text().contains("#outcome-unknown") => Told::Unknown,
            409 if answer.text().contains("#in-progress") => return Try::Again(format!("{answer:?}")),
            502..=504 => return Try::Again(format!("{answer:?}")),
            _ => {
                self.board.surprise(format!("{key} at {path} from gateway {gateway}: {answer:?}"));
                return Try::Again(format!("{answer:?}"));
            }
        };
        Try::Final(Heard {
            told,
            gateway,
            begun,
            at: self.board.now(),
            replayed: answer.headers.contains("idempotent-replayed"),
            pending: answer.header("idempotency-stored") == Some("pending"),
            degraded: answer.header("idempotency-guarantee") == Some("degraded"),
            verifying: false,
        })
    }

    async fn send(&mut self, operation: &Operation, gateway: usize) -> Result<Response, String> {
        let addr = self.fleet.addr(gateway);
        let mut raw = match self.open[gateway].take() {
            Some(raw) => raw,
            None => Raw::try_connect(addr).await.map_err(|error| format!("cannot connect: {error}"))?,
        };
        // The host and the credential are part of a key's scope.
        let request = post(addr, operation.path.as_str()).header("Host", "shop.example").key(operation.key.as_str());
        let request = request.header("Authorization", "Bearer chaos").json(r#"{"amount":1}"#);
        let answer = request.try_send_on(&mut raw).await.map_err(|broken| broken.to_string())?;
        if answer.header("connection") != Some("close") {
            self.open[gateway] = Some(raw);
        }
        Ok(answer)
    }
}
