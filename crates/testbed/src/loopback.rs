//! Ports on the loopback interface that stay reserved while nobody listens.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tokio::{
    net::TcpSocket,
    time::{sleep, timeout},
};

use crate::http1::WAIT_TIMEOUT;

/// Reserves a free port.
pub(crate) fn reserve() -> (SocketAddr, TcpSocket) {
    let socket = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free port");
    (socket.local_addr().expect("a bound socket has an address"), socket)
}

/// Reserves the port of a listener that was just closed.
pub(crate) async fn reserve_again(addr: SocketAddr) -> TcpSocket {
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
