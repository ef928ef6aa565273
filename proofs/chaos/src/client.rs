//! A client: retries each operation through whichever gateway until it has a final answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use ibid_histories::event::RequestResult;
use testbed::client::{RawClient, TestResponse, post};
use tokio::time::{sleep, timeout};

use crate::{
    answer_history::{AnswerHistory, ChaosOperation, FinalAnswer, ObservedAnswer},
    fleet::GatewayFleet,
    random::SplitMix64,
};

/// How long one try may take. Longer than a lease, so that a paused gateway can still be seen to answer late.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a client goes on asking about one key, counted from the end of the faults.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two tries: doubled each time, with jitter.
const INITIAL_BACKOFF: Duration = Duration::from_millis(2);
const MAX_BACKOFF: Duration = Duration::from_millis(200);

/// One client, with a connection to each gateway.
pub(crate) struct ChaosClient {
    fleet: Arc<GatewayFleet>,
    history: Arc<AnswerHistory>,
    random: SplitMix64,
    connections: Vec<Option<RawClient>>,
}

/// What one try brought.
enum ChaosAttempt {
    Final(ObservedAnswer),
    /// To be tried again; what was seen.
    Retry(String),
}

impl ChaosClient {
    pub(crate) fn new(fleet: &Arc<GatewayFleet>, board: &Arc<AnswerHistory>, seed: u64) -> ChaosClient {
        let connections = (0..fleet.len()).map(|_| None).collect();
        ChaosClient { fleet: Arc::clone(fleet), history: Arc::clone(board), random: SplitMix64::new(seed), connections }
    }

    /// One operation after the other until it is over. The last one is brought to its end.
    pub(crate) async fn run(mut self, over: Arc<AtomicBool>, slowest: Duration, longest_pause: Duration) {
        while !over.load(SeqCst) {
            let operation = self.history.next(&mut self.random, slowest);
            self.run_to_final_answer(&operation, &over).await;
            let pause = self.random.within(&(Duration::ZERO..longest_pause));
            sleep(pause).await;
        }
    }

    async fn run_to_final_answer(&mut self, operation: &ChaosOperation, over: &AtomicBool) {
        let mut end = Instant::now() + OPERATION_TIMEOUT;
        let mut seen = String::new();
        for nth in 0u32.. {
            if !over.load(SeqCst) {
                end = Instant::now() + OPERATION_TIMEOUT;
            } else if Instant::now() >= end {
                break;
            }
            let gateway = self.random.next_below(self.fleet.len());
            match self.attempt(operation, gateway, nth > 0, false).await {
                ChaosAttempt::Final(heard) => return self.history.record_answer(&operation.key, heard),
                ChaosAttempt::Retry(what) => seen = what,
            }
            self.back_off(nth).await;
        }
        self.history
            .record_abandoned(format!("{} after {OPERATION_TIMEOUT:?}; the last try saw: {seen}", operation.key));
    }

    /// Asks this gateway until it gives a final answer; nothing if it does not before `end`.
    pub(crate) async fn final_answer_from(
        &mut self, operation: &ChaosOperation, gateway: usize, end: Instant,
    ) -> Option<ObservedAnswer> {
        for nth in 0u32.. {
            match self.attempt(operation, gateway, nth > 0, true).await {
                ChaosAttempt::Final(heard) => return Some(ObservedAnswer { during_verification: true, ..heard }),
                ChaosAttempt::Retry(_) if Instant::now() >= end => return None,
                ChaosAttempt::Retry(_) => self.back_off(nth).await,
            }
        }
        None
    }

    async fn back_off(&mut self, nth: u32) {
        let longest = (INITIAL_BACKOFF * 2u32.pow(nth.min(10))).min(MAX_BACKOFF);
        let pause = self.random.within(&(longest / 2..longest));
        sleep(pause).await;
    }

    async fn attempt(
        &mut self, operation: &ChaosOperation, gateway: usize, retry: bool, at_rest: bool,
    ) -> ChaosAttempt {
        let begun = self.history.now();
        let request = self.history.record_invoke(&operation.key, retry, at_rest);
        // A request without an answer has no end: it may have an effect later.
        let answer = match timeout(ATTEMPT_TIMEOUT, self.send(operation, gateway)).await {
            Err(_) => return ChaosAttempt::Retry(format!("gateway {gateway}: no answer within {ATTEMPT_TIMEOUT:?}")),
            Ok(Err(broken)) => return ChaosAttempt::Retry(format!("gateway {gateway}: {broken}")),
            Ok(Ok(answer)) => answer,
        };
        let pending = answer.header("idempotency-stored") == Some("pending");
        let (result, told) = match answer.status {
            201 => {
                let told = FinalAnswer::Completed { status: 201, body: answer.body.clone() };
                (RequestResult::Answer { answer: answer.text(), pending }, Some(told))
            }
            409 if answer.text().contains("#outcome-unknown") => {
                (RequestResult::OutcomeUnknown, Some(FinalAnswer::OutcomeUnknown))
            }
            409 if answer.text().contains("#in-progress") => (RequestResult::InProgress, None),
            502..=504 => (RequestResult::Lost, None),
            _ => {
                let ChaosOperation { key, path } = operation;
                self.history.record_unexpected(format!("{key} at {path} from gateway {gateway}: {answer:?}"));
                (RequestResult::Lost, None)
            }
        };
        self.history.record_return(request, result);
        let Some(told) = told else { return ChaosAttempt::Retry(format!("{answer:?}")) };
        ChaosAttempt::Final(ObservedAnswer {
            told,
            gateway,
            sent_at: begun,
            at: self.history.now(),
            replayed: answer.headers.contains("idempotent-replayed"),
            pending,
            degraded: answer.header("idempotency-guarantee") == Some("degraded"),
            during_verification: false,
        })
    }

    async fn send(&mut self, operation: &ChaosOperation, gateway: usize) -> Result<TestResponse, String> {
        let addr = self.fleet.addr(gateway);
        let mut raw = match self.connections[gateway].take() {
            Some(raw) => raw,
            None => RawClient::try_connect(addr).await.map_err(|error| format!("cannot connect: {error}"))?,
        };
        // The host and the credential are part of a key's scope.
        let request = post(addr, operation.path.as_str()).header("Host", "shop.example").key(operation.key.as_str());
        let request = request.header("Authorization", "Bearer chaos").json(r#"{"amount":1}"#);
        let answer = request.try_send_on(&mut raw).await.map_err(|broken| broken.to_string())?;
        if answer.header("connection") != Some("close") {
            self.connections[gateway] = Some(raw);
        }
        Ok(answer)
    }
}
