//! One thread per core, each with a single-threaded runtime, for the connections of clients.
//!
//! A core serves a connection from its first byte to its last. The tasks of its requests and the upstream connections
//! that they open run on the same thread, so that a request wakes no other thread.
//!
//! One acceptor gives each connection to the core with the fewest open ones. `SO_REUSEPORT` would let the kernel
//! distribute them by a hash, which is less even for long-lived connections, and would let a second process share the
//! port unnoticed.

use std::{
    cell::Cell,
    io,
    sync::{Arc, LazyLock},
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;
use tokio::{
    runtime::{Builder, Handle},
    task::AbortHandle,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

/// The cores of this process.
pub struct Cores {
    cores: Vec<Core>,
    tasks: TaskTracker,
    /// The tasks that may still run.
    running: Mutex<Vec<AbortHandle>>,
    /// Ends the threads. Dropping `Cores` also ends them.
    exit: CancellationToken,
}

struct Core {
    runtime: Handle,
    /// Every task of the core holds a clone.
    tasks: Arc<()>,
    thread: JoinHandle<()>,
}

/// How many tasks a core polls before it looks for ready sockets again. With tokio's default of 61, expensive tasks
/// would delay the others' input and output.
const EVENT_INTERVAL: u32 = 13;

thread_local!(static INDEX: Cell<usize> = const { Cell::new(0) });

/// The number of cores. It never changes, even if the system gives the process more or fewer while it runs.
pub fn count() -> usize {
    static COUNT: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));
    *COUNT
}

/// The index of the core that runs this thread, below [`count`]. Other threads have index 0.
pub fn index() -> usize {
    INDEX.get()
}

impl Cores {
    /// Starts the threads.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn start() -> io::Result<Self> {
        let exit = CancellationToken::new();
        let start = |index| Core::start(format!("ibid-core-{index}"), index, exit.clone());
        let cores = (0..count()).map(start).collect::<io::Result<_>>()?;
        Ok(Self { cores, tasks: TaskTracker::new(), running: Mutex::default(), exit })
    }

    /// Runs a task on the core that has the fewest.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let core = self.cores.iter().min_by_key(|core| Arc::strong_count(&core.tasks)).expect("at least one core");
        let counted = core.tasks.clone();
        let task = async move {
            task.await;
            drop(counted);
        };
        let handle = self.tasks.spawn_on(task, &core.runtime).abort_handle();
        let mut running = self.running.lock();
        if running.len() == running.capacity() {
            running.retain(|task| !task.is_finished());
        }
        running.push(handle);
    }

    /// Returns once every task has ended. Spawn none after this call.
    pub async fn wait_idle(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Ends all tasks, and waits until they are dropped.
    pub async fn abort(&self) {
        self.running.lock().iter().for_each(AbortHandle::abort);
        self.wait_idle().await;
    }

    /// Ends the threads, and waits until everything that ran on them is dropped.
    pub async fn stop(mut self) {
        self.exit.cancel();
        let threads: Vec<_> = self.cores.drain(..).map(|core| core.thread).collect();
        let joined = tokio::task::spawn_blocking(|| threads.into_iter().for_each(|thread| drop(thread.join())));
        let _ = joined.await;
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        self.exit.cancel();
    }
}

impl Core {
    fn start(name: String, index: usize, exit: CancellationToken) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().event_interval(EVENT_INTERVAL).build()?;
        let handle = runtime.handle().clone();
        // The core logs to the subscriber of the thread that starts it.
        let log = tracing::dispatcher::get_default(Clone::clone);
        let thread = thread::Builder::new().name(name).spawn(move || {
            INDEX.set(index);
            tracing::dispatcher::with_default(&log, || runtime.block_on(exit.cancelled()));
        })?;
        Ok(Self { runtime: handle, tasks: Arc::default(), thread })
    }
}

/// A thread with a runtime of its own, on which the store is opened. The tasks of the store then run on it. They serve all
/// cores, and wake each other without a system call. The thread ends when this is dropped.
pub struct StoreThread {
    runtime: Handle,
    _exit: DropGuard,
}

impl StoreThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn start() -> io::Result<Self> {
        let exit = CancellationToken::new();
        let runtime = Core::start("ibid-store".into(), 0, exit.clone())?.runtime;
        Ok(Self { runtime, _exit: exit.drop_guard() })
    }

    /// Runs work on the thread, and with it the tasks that it starts.
    pub async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        self.runtime.spawn(work).await.expect("the thread runs, and the work does not panic")
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn tasks_of_the_store_run_on_its_thread() {
        let store = StoreThread::start().unwrap();
        let name = async { thread::current().name().map(str::to_owned) };
        let found = store.run(async { tokio::spawn(name).await.unwrap() }).await;
        assert_eq!(found.as_deref(), Some("ibid-store"));
    }

    #[tokio::test]
    async fn tasks_are_spread_evenly_and_end_with_their_core() {
        let cores = Cores::start().unwrap();
        let (seen, all) = mpsc::channel();
        for _ in 0..2 * count() {
            let seen = seen.clone();
            cores.spawn(async move {
                seen.send(index()).unwrap();
                std::future::pending().await
            });
        }
        let mut indexes: Vec<_> =
            (0..2 * count()).map(|_| all.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
        indexes.sort_unstable();
        assert_eq!(indexes, (0..count()).flat_map(|index| [index; 2]).collect::<Vec<_>>());
        drop(seen);
        cores.abort().await;
        assert_eq!(all.recv(), Err(mpsc::RecvError), "every task is dropped");
        cores.stop().await;
    }
}
