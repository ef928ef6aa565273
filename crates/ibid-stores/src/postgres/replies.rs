//! Replies to the callers of a batch, with one wake-up per runtime.
//!
//! Waking a task of another thread's runtime is a system call. So the replies to callers of another runtime are sent by a task
//! there: it wakes them by a push to a local queue.

use tokio::{runtime::Handle, sync::oneshot};

use super::batcher::JobOutcome;

/// Where a caller waits for its outcome. If it is dropped, the caller learns that nobody will reply.
#[derive(Debug)]
pub(super) struct JobReply {
    caller: Handle,
    to: oneshot::Sender<JobOutcome>,
}

impl JobReply {
    /// Makes a reply to this task, and what the task awaits.
    pub(super) fn new() -> (Self, oneshot::Receiver<JobOutcome>) {
        let (to, answered) = oneshot::channel();
        (Self { caller: Handle::current(), to }, answered)
    }

    pub(super) fn send(self, outcome: JobOutcome) {
        drop(self.to.send(outcome));
    }

    /// Whether the caller is gone.
    pub(super) fn is_closed(&self) -> bool {
        self.to.is_closed()
    }
}

/// Replies that are sent together: those of each runtime.
#[derive(Debug, Default)]
pub(super) struct BatchReplies(Vec<(Handle, Vec<PendingReply>)>);

type PendingReply = (oneshot::Sender<JobOutcome>, JobOutcome);

impl BatchReplies {
    pub(super) fn add(&mut self, reply: JobReply, outcome: JobOutcome) {
        let id = reply.caller.id();
        let nth = self.0.iter().position(|(caller, _)| caller.id() == id).unwrap_or_else(|| {
            self.0.push((reply.caller, Vec::new()));
            self.0.len() - 1
        });
        self.0[nth].1.push((reply.to, outcome));
    }

    /// Sends them. Those to a runtime that has ended are dropped, like its callers.
    pub(super) fn send(self) {
        let here = Handle::current().id();
        for (caller, replies) in self.0 {
            let is_direct = caller.id() == here || replies.len() == 1;
            let send = || replies.into_iter().for_each(|(to, outcome)| drop(to.send(outcome)));
            if is_direct {
                send();
            } else {
                drop(caller.spawn(async move { send() }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::{Builder, Runtime};

    use super::{super::RowOutcome, *};

    fn runtime() -> Runtime {
        Builder::new_current_thread().build().unwrap()
    }

    /// So many replies to callers on `runtime`, and what those await.
    fn callers(runtime: &Runtime, count: usize, replies: &mut BatchReplies) -> Vec<oneshot::Receiver<JobOutcome>> {
        let _entered = runtime.enter();
        let mut make = || {
            let (reply, answered) = JobReply::new();
            replies.add(reply, Ok(RowOutcome { settle_code: 0, outcome: None }));
            answered
        };
        (0..count).map(|_| make()).collect()
    }

    fn answered(callers: &mut [oneshot::Receiver<JobOutcome>]) -> usize {
        callers.iter_mut().filter_map(|caller| caller.try_recv().ok()).count()
    }

    #[test]
    fn callers_of_another_runtime_are_answered_by_one_task_there() {
        let (here, there) = (runtime(), runtime());
        let mut replies = BatchReplies::default();
        let (mut near, mut far) = (callers(&here, 3, &mut replies), callers(&there, 3, &mut replies));
        here.block_on(async { replies.send() });
        assert_eq!((answered(&mut near), answered(&mut far)), (3, 0));
        assert_eq!(there.metrics().num_alive_tasks(), 1);
        there.block_on(tokio::task::yield_now());
        assert_eq!(answered(&mut far), 3);
    }

    #[test]
    fn callers_of_a_runtime_that_has_ended_learn_that_nobody_replies() {
        let (here, there) = (runtime(), runtime());
        let mut replies = BatchReplies::default();
        let callers = callers(&there, 2, &mut replies);
        drop(there);
        here.block_on(async { replies.send() });
        for mut caller in callers {
            assert_eq!(caller.try_recv().err(), Some(oneshot::error::TryRecvError::Closed));
        }
    }
}
