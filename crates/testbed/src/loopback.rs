//! A port on the loopback interface that stays reserved while nobody listens.

use std::{
    io, mem,
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
    state: Mutex<PortState>,
}

#[derive(Debug)]
enum PortState {
    /// This task accepts connections.
    Listening(JoinHandle<()>),
    Refusing(TcpSocket),
    Changing,
}

impl LoopbackPort {
    /// Reserves a free port, which refuses connections.
    pub(crate) fn reserve() -> LoopbackPort {
        let socket = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free port");
        let addr = socket.local_addr().expect("a bound socket has an address");
        LoopbackPort { addr, state: Mutex::new(PortState::Refusing(socket)) }
    }

    /// Accepts connections, unless it does already. `serve` is dropped when they are refused again.
    pub(crate) fn listen(&self, mut serve: impl FnMut(TcpStream) + Send + 'static) {
        let mut state = self.state.lock();
        *state = match mem::replace(&mut *state, PortState::Changing) {
            PortState::Refusing(socket) => {
                let listener = socket.listen(1024).expect("a bound socket can listen");
                PortState::Listening(tokio::spawn(async move {
                    loop {
                        match listener.accept().await {
                            Ok((stream, _)) => serve(stream),
                            // For example no file descriptors: it may pass.
                            Err(_) => sleep(Duration::from_millis(10)).await,
                        }
                    }
                }))
            }
            state => state,
        };
    }

    /// Refuses new connections from now on.
    pub(crate) async fn refuse(&self) {
        let state = mem::replace(&mut *self.state.lock(), PortState::Changing);
        let socket = match state {
            PortState::Listening(task) => {
                task.abort();
                let _ = task.await;
                bind_again(self.addr).await
            }
            PortState::Refusing(socket) => socket,
            PortState::Changing => panic!("two tasks change one port"),
        };
        *self.state.lock() = PortState::Refusing(socket);
    }
}

impl Drop for LoopbackPort {
    fn drop(&mut self) {
        if let PortState::Listening(task) = &*self.state.lock() {
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
