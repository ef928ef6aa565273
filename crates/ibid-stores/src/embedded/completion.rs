//! Tells the callers of a batch that it is durable, with one wake-up per thread.
//!
//! Waking a task of another thread's runtime costs a system call. So the writer wakes one caller per thread, and the
//! first caller of a thread that is polled wakes the others of that thread, which costs a push to a local queue.
//!
//! Invariant: once the result is known, every waiter is woken: by the caller that the writer woke, when it is polled or
//! dropped, or by [`BatchCompletion::wake_all`] if that caller's task polls something else for long.

use std::{
    cell::Cell,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

use ibid::store::{ErrorKind, StoreError};
use parking_lot::Mutex;

use super::log::store_error;

/// Whether a batch is durable: known once, awaited by all callers that have an entry in it.
#[derive(Debug, Default)]
pub(super) struct BatchCompletion(Mutex<CompletionState>);

#[derive(Debug, Default)]
struct CompletionState {
    result: Option<BatchResult>,
    groups: Vec<WaitGroup>,
}

pub(super) type BatchResult = Result<(), (ErrorKind, Arc<str>)>;

/// The waiters that one thread has polled.
#[derive(Debug)]
struct WaitGroup {
    thread: u64,
    /// `None` for a waiter that is gone.
    waiters: Vec<Option<Waker>>,
}

impl BatchCompletion {
    /// Sets the result and wakes one waiter per thread.
    pub(super) fn finish(&self, result: BatchResult) {
        let mut state = self.0.lock();
        state.result = Some(result);
        let first = |group: &mut WaitGroup| group.waiters.iter_mut().find_map(Option::take);
        let woken: Vec<Waker> = state.groups.iter_mut().filter_map(first).collect();
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Returns `true` once nobody has to be woken any more.
    pub(super) fn is_delivered(&self) -> bool {
        self.0.lock().groups.iter().all(|group| group.waiters.is_empty())
    }

    /// Wakes all waiters that are left.
    pub(super) fn wake_all(&self) {
        let groups = std::mem::take(&mut self.0.lock().groups);
        groups.into_iter().for_each(WaitGroup::wake);
    }
}

impl WaitGroup {
    fn wake(self) {
        self.waiters.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Waits until a batch is durable, then returns the outcome of a call in it.
#[derive(Debug)]
pub(super) struct DurableOutcome<T> {
    outcome: Option<T>,
    completion: Arc<BatchCompletion>,
    /// Number of the group, and of the waiter in it.
    registered: Option<(usize, usize)>,
}

impl<T> DurableOutcome<T> {
    pub(super) fn new(outcome: T, completion: Arc<BatchCompletion>) -> Self {
        Self { outcome: Some(outcome), completion, registered: None }
    }
}

impl<T: Unpin> Future for DurableOutcome<T> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut state = this.completion.0.lock();
        let Some(result) = state.result.clone() else {
            state.register(&mut this.registered, context.waker());
            return Poll::Pending;
        };
        let others = state.take_group(this.registered.take());
        drop(state);
        others.into_iter().for_each(WaitGroup::wake);
        let outcome = this.outcome.take().expect("polled after it was ready");
        Poll::Ready(result.map(|()| outcome).map_err(|(kind, why)| store_error(kind, &*why)))
    }
}

impl<T> Drop for DurableOutcome<T> {
    fn drop(&mut self) {
        let Some((group, waiter)) = self.registered else { return };
        let mut state = self.completion.0.lock();
        if state.result.is_some() {
            // This may be the waiter that was woken for its whole group.
            let others = state.take_group(self.registered);
            drop(state);
            others.into_iter().for_each(WaitGroup::wake);
        } else {
            state.groups[group].waiters[waiter] = None;
        }
    }
}

impl CompletionState {
    fn register(&mut self, registered: &mut Option<(usize, usize)>, waker: &Waker) {
        if let Some((group, waiter)) = *registered {
            let known = &mut self.groups[group].waiters[waiter];
            if !known.as_ref().is_some_and(|known| known.will_wake(waker)) {
                *known = Some(waker.clone());
            }
            return;
        }
        let thread = thread_number();
        let group = self.groups.iter().position(|group| group.thread == thread).unwrap_or_else(|| {
            self.groups.push(WaitGroup { thread, waiters: Vec::new() });
            self.groups.len() - 1
        });
        let waiters = &mut self.groups[group].waiters;
        *registered = Some((group, waiters.len()));
        waiters.push(Some(waker.clone()));
    }

    fn take_group(&mut self, registered: Option<(usize, usize)>) -> Option<WaitGroup> {
        let group = self.groups.get_mut(registered?.0).filter(|group| !group.waiters.is_empty())?;
        Some(WaitGroup { thread: group.thread, waiters: std::mem::take(&mut group.waiters) })
    }
}

/// A number that no other thread of the process has.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    if NUMBER.get() == 0 {
        NUMBER.set(NEXT.fetch_add(1, Relaxed));
    }
    NUMBER.get()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        task::Wake,
        thread,
    };

    use super::*;

    #[derive(Default)]
    struct WakeCounter(AtomicUsize);

    impl Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    struct TestWaiter {
        future: DurableOutcome<u8>,
        wakes: Arc<WakeCounter>,
    }

    impl TestWaiter {
        fn poll(&mut self) -> Poll<Result<u8, StoreError>> {
            let waker = Waker::from(self.wakes.clone());
            Pin::new(&mut self.future).poll(&mut Context::from_waker(&waker))
        }

        fn is_woken(&self) -> bool {
            self.wakes.0.load(SeqCst) == 1
        }
    }

    /// Waiters that this thread has polled once.
    fn waiters(completion: &Arc<BatchCompletion>, number: usize) -> Vec<TestWaiter> {
        let waiter = || TestWaiter { future: DurableOutcome::new(7, completion.clone()), wakes: Arc::default() };
        let mut waiters: Vec<TestWaiter> = (0..number).map(|_| waiter()).collect();
        for waiter in &mut waiters {
            assert!(waiter.poll().is_pending() && waiter.poll().is_pending());
        }
        waiters
    }

    fn woken(waiters: &[TestWaiter]) -> usize {
        waiters.iter().filter(|waiter| waiter.is_woken()).count()
    }

    #[test]
    fn one_waiter_per_thread_is_woken_and_wakes_the_others_when_it_is_polled() {
        let completion = Arc::new(BatchCompletion::default());
        let mut here = waiters(&completion, 5);
        let there = thread::scope(|scope| scope.spawn(|| waiters(&completion, 3)).join().unwrap());
        completion.finish(Ok(()));
        assert_eq!((woken(&here), woken(&there)), (1, 1));
        assert!(!completion.is_delivered());
        assert!(matches!(here[0].poll(), Poll::Ready(Ok(7))));
        assert_eq!((woken(&here), woken(&there)), (5, 1));
        completion.wake_all();
        assert_eq!(woken(&there), 3);
        assert!(completion.is_delivered());
    }

    #[test]
    fn a_dropped_waiter_leaves_no_other_asleep() {
        let completion = Arc::new(BatchCompletion::default());
        let mut waiters = waiters(&completion, 4);
        drop(waiters.remove(0));
        completion.finish(Ok(()));
        assert_eq!(woken(&waiters), 1);
        drop(waiters.remove(0));
        assert_eq!(woken(&waiters), 2);
    }

    #[test]
    fn a_failure_reaches_every_waiter() {
        let completion = Arc::new(BatchCompletion::default());
        let mut waiters = waiters(&completion, 2);
        completion.finish(Err((ErrorKind::Ambiguous, "no power".into())));
        for waiter in &mut waiters {
            let Poll::Ready(Err(error)) = waiter.poll() else { panic!("it failed") };
            assert_eq!(error.kind, ErrorKind::Ambiguous);
        }
    }
}
