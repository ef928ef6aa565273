//! The load generator's threads: one per core, each with a runtime of its own on which its connections stay.

use std::{
    io,
    thread::{self, JoinHandle},
};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// Threads that end when this is dropped.
#[derive(Debug)]
pub(super) struct LoadThreads(Vec<LoadThread>);

#[derive(Debug)]
struct LoadThread {
    runtime: Handle,
    /// Ends the runtime when it is dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LoadThreads {
    /// Starts one thread per core.
    pub(super) fn start() -> io::Result<Self> {
        let cores = thread::available_parallelism()?.get();
        (0..cores).map(|_| LoadThread::start()).collect::<io::Result<_>>().map(Self)
    }

    /// The runtime of the connection with this index.
    pub(super) fn runtime(&self, connection: usize) -> &Handle {
        &self.0[connection % self.0.len()].runtime
    }
}

impl LoadThread {
    fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = thread::Builder::new().name("load".into()).spawn(move || {
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { runtime: handle, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for LoadThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
