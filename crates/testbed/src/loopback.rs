//! A port on the loopback interface that stays reserved while nobody listens.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    net::{TcpSocket, TcpStream},
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::http1::WAIT_TIMEOUT;

#[derive(Debug)]
pub(crate) struct LoopbackPort {
    pub(crate) addr: SocketAddr,
    /// Reserves the port while connections are refused.
    reserved: Mutex<Option<TcpSocket>>,
    /// Accepts connections meanwhile.
    task: Mutex<Option<JoinHandle<()>>>,
}

impl LoopbackPort {
    /// Reserves a free port, which refuses connections.
    pub(crate) fn reserve() -> LoopbackPort {
        let socket = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free port");
        let addr = socket.local_addr().expect("a bound socket has an address");
        LoopbackPort { addr, reserved: Mutex::new(Some(socket)), task: Mutex::default() }
    }

    /// Accepts connections, unless it does already. `serve` is dropped when they are refused again.
    pub(crate) fn listen(&self, mut serve: impl FnMut(TcpStream) + Send + 'static) {
        let Some(socket) = self.reserved.lock().take() else { return };
        let listener = socket.listen(1024).expect("a bound socket can listen");
        *self.task.lock() = Some(tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => serve(stream),
                    // For example no file descriptors: it may pass.
                    Err(_) => sleep(Duration::from_millis(10)).await,
                }
            }
        }));
    }

    /// Refuses new connections from now on.
    pub(crate) async fn refuse(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await;
            let socket = bind_again(self.addr).await;
            *self.reserved.lock() = Some(socket);
        }
    }
}

impl Drop for LoopbackPort {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut() {
            task.abort();
        }
    }
}

/// Binds the port of a listener that was just closed.
async fn bind_again(addr: SocketAddr) -> TcpSocket {
    let bound = async {
        loop {
            match bind(addr) {
                Ok(socket) => return socket,
                Err(_) => sleep(Duration::from_millis(1)).await,
            }
        }
    };
    timeout(WAIT_TIMEOUT, bound).await.unwrap_or_else(|_| panic!("{addr} was taken by another process"))
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Connections from before linger in the kernel and would block the port.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}
