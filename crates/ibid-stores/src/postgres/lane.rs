//! Calls of many callers as one statement.
//!
//! While as many batches are under way as there are connections, further calls gather; then they go together. Alone, a
//! call goes at once. Invariants: every job is answered exactly once; a job that waited until its time was nearly up is
//! not sent; a batch that the server rolled back is sent again one by one, so that no job fails for another's reason; a
//! job whose row is in somebody else's hands is sent again while it has time, and holds up nobody meanwhile.

use std::{collections::VecDeque, mem, sync::Arc, time::Duration};

use ibid::store::{End, ErrorKind, Lease, StoreError};
use parking_lot::Mutex;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};

use super::{
    faults::failed,
    pool::{Failed, Pool},
    rows::{self, Answer, Columns, What},
    statements::Statement,
};
use crate::breaker::jittered;

/// At most so many jobs are one statement,
const ROWS: usize = 64;
/// and at most so many bytes of records, except for one alone.
const BYTES: usize = 1 << 20;
/// Between two tries at a row that somebody else holds.
const FIRST_PAUSE: Duration = Duration::from_millis(4);
const LAST_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Lane {
    pool: Arc<Pool>,
    what: Statement,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// Workers that take from it.
    workers: usize,
}

#[derive(Debug)]
struct Job {
    lease: Lease,
    what: What,
    deadline: Instant,
    reply: oneshot::Sender<Result<Answer, StoreError>>,
}

impl Lane {
    pub(super) fn new(pool: Arc<Pool>, what: Statement) -> Arc<Self> {
        Arc::new(Self { pool, what, queue: Mutex::default() })
    }

    /// Sends it with others, and waits for its own answer.
    pub(super) async fn call(self: &Arc<Self>, lease: Lease, what: What) -> Result<Answer, StoreError> {
        let (reply, answered) = oneshot::channel();
        let job = Job { lease, what, deadline: self.pool.deadline(), reply };
        let starts = {
            let mut queue = self.queue.lock();
            queue.waiting.push_back(job);
            let starts = queue.workers < self.pool.place.pool;
            queue.workers += usize::from(starts);
            starts
        };
        if starts {
            tokio::spawn(self.clone().work());
        }
        // The worker answers every job, unless the runtime is shut down around it: then nobody knows.
        let lost = || Err(failed(ErrorKind::Ambiguous, "the store was closed while the call was under way"));
        answered.await.unwrap_or_else(|_| lost())
    }

    async fn work(self: Arc<Self>) {
        loop {
            let batch = {
                let mut queue = self.queue.lock();
                let batch = queue.next(self.pool.timeout / 4);
                if batch.is_empty() {
                    queue.workers -= 1;
                    return;
                }
                batch
            };
            self.send(batch).await;
        }
    }

    async fn send(self: &Arc<Self>, batch: Vec<Job>) {
        match self.try_send(&batch).await {
            Ok(answers) => {
                for (job, answer) in batch.into_iter().zip(answers) {
                    drop(job.reply.send(answer));
                }
            }
            Err(failed) if failed.rolled_back && batch.len() > 1 => {
                for job in batch {
                    match self.alone(&job).await {
                        Err(failed) if failed.in_the_way => drop(tokio::spawn(self.clone().insist(job))),
                        answered => drop(job.reply.send(answered.unwrap_or_else(|failed| Err(failed.error)))),
                    }
                }
            }
            Err(failed) if failed.in_the_way => {
                for job in batch {
                    tokio::spawn(self.clone().insist(job));
                }
            }
            Err(Failed { error, .. }) => {
                let mut batch = batch.into_iter();
                let first = batch.next();
                for job in batch {
                    drop(job.reply.send(Err(failed(error.kind, error.source.to_string()))));
                }
                drop(first.map(|job| job.reply.send(Err(error))));
            }
        }
    }

    /// Rolled back means not applied, so it may be sent as often as there is time.
    async fn insist(self: Arc<Self>, job: Job) {
        let mut pause = FIRST_PAUSE;
        loop {
            sleep(jittered(pause)).await;
            pause = (pause * 2).min(LAST_PAUSE);
            let answered = self.alone(&job).await;
            let has_time = job.deadline > Instant::now() + self.pool.timeout / 4;
            match answered {
                Err(failed) if failed.in_the_way && has_time && !job.reply.is_closed() => {}
                answered => return drop(job.reply.send(answered.unwrap_or_else(|failed| Err(failed.error)))),
            }
        }
    }

    async fn alone(&self, job: &Job) -> Result<Result<Answer, StoreError>, Failed> {
        let mut answers = self.try_send(std::slice::from_ref(job)).await?;
        Ok(answers.pop().expect("one job has one answer"))
    }

    /// The answers in the order of the jobs.
    async fn try_send(&self, batch: &[Job]) -> Result<Vec<Result<Answer, StoreError>>, Failed> {
        let mut columns = Columns::default();
        batch.iter().for_each(|job| columns.push(&job.lease, &job.what));
        let deadline = batch.iter().map(|job| job.deadline).min().expect("no batch is empty");
        let params = &columns.params()[..self.what.types().len()];
        let sent = self.pool.call(self.what, params, deadline).await?;
        let missing = || Err(failed(ErrorKind::Corrupt, "a row of a batch was not answered"));
        let mut answers: Vec<_> = batch.iter().map(|_| missing()).collect();
        for row in &sent {
            let nth: Result<i32, _> = rows::column(row, 0);
            let nth = nth.ok().and_then(|nth| usize::try_from(nth - 1).ok());
            if let Some((job, answer)) = nth.and_then(|nth| Some((batch.get(nth)?, answers.get_mut(nth)?))) {
                *answer = rows::answer(row, Some(&job.lease.ask));
            }
        }
        Ok(answers)
    }
}

impl Queue {
    /// What goes together next. Whose time is nearly up, or who is gone, does not go at all.
    fn next(&mut self, at_least: Duration) -> Vec<Job> {
        let latest = Instant::now() + at_least;
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < ROWS {
            let Some(job) = self.waiting.front() else { break };
            let size = job.bytes();
            let is_due = job.deadline <= latest;
            if !is_due && !batch.is_empty() && bytes + size > BYTES {
                break;
            }
            let Some(job) = self.waiting.pop_front() else { break };
            if is_due {
                let why = "it waited for its turn for too long, behind others";
                drop(job.reply.send(Err(failed(ErrorKind::NotApplied, why))));
            } else if !job.reply.is_closed() {
                bytes += size;
                batch.push(job);
            }
        }
        if self.waiting.is_empty() && self.waiting.capacity() > 4 * ROWS {
            drop(mem::take(&mut self.waiting));
        }
        batch
    }
}

impl Job {
    fn bytes(&self) -> usize {
        match &self.what {
            What::End(End::Complete { record, .. }) => record.len(),
            _ => 0,
        }
    }
}
