//! Brokers that are started privately: they come back after a crash, and are gone with their owner.

use std::net::TcpStream;

use testbed::{TestNats, TestRabbitmq};

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

#[test]
fn nats_restarts_and_goes_with_its_owner() {
    let server = TestNats::start();
    let port = server.port();
    assert!(listens(port) && server.url().ends_with(&port.to_string()));
    server.kill();
    assert!(!listens(port));
    server.restart();
    assert!(listens(port));
    drop(server);
    assert!(!listens(port));
}

#[test]
fn rabbitmq_restarts_and_goes_with_its_owner_and_so_does_its_port_mapper() {
    let server = TestRabbitmq::start();
    let ports = server.ports();
    assert!(ports.into_iter().all(listens), "{ports:?}");
    server.restart();
    assert!(ports.into_iter().all(listens), "{ports:?}");
    let folder = server.folder();
    assert!(folder.exists());
    drop(server);
    assert!(!ports.into_iter().any(listens), "{ports:?}");
    assert!(!folder.exists());
}
