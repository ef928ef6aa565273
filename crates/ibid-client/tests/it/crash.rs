//! Clients that are killed in mid-request, and started again.

use std::{
    net::SocketAddr,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use testbed::{FaultProxy, upstream::TestUpstream};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};

use crate::common::{KeyFolder, gateway, only_key, pay};

/// Killed and reaped when dropped.
struct PayProcess(Option<Child>);

impl PayProcess {
    fn start(server: SocketAddr, keys: &KeyFolder) -> PayProcess {
        let mut command = Command::new(pay());
        command.arg(format!("http://{server}/pay")).arg(keys.path()).arg("order-17");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        PayProcess(Some(command.spawn().expect("the example runs")))
    }

    /// SIGKILL.
    fn kill(mut self) {
        let mut child = self.0.take().expect("it runs");
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }

    async fn end(mut self) -> Output {
        let child = self.0.take().expect("it runs");
        let ended = spawn_blocking(move || child.wait_with_output());
        ended.await.expect("no panic").expect("it is ours")
    }
}

impl Drop for PayProcess {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn assert_paid(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.starts_with("201 "), "{text}");
    assert!(text.contains(r#"{"id":1,"run":1}"#), "{text}");
}

#[tokio::test]
async fn a_client_killed_in_mid_request_finishes_when_it_is_started_again() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let gateway = gateway("", &upstream).await;
    let keys = KeyFolder::new();
    let client = PayProcess::start(gateway.addr(), &keys);
    gate.arrived(1).await;
    client.kill();
    assert_eq!(keys.pending_key().await, Some(only_key(&upstream)));
    gate.open();
    let output = PayProcess::start(gateway.addr(), &keys).end().await;
    assert_paid(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("replayed=true"), "{output:?}");
    assert_eq!((upstream.executions(), keys.files()), (1, 0));
}

#[tokio::test]
async fn however_often_and_whenever_it_is_killed_there_is_one_effect() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let gateway = gateway("", &upstream).await;
    let keys = KeyFolder::new();
    // Before the key is kept, while it is, while the request is sent, while it waits for another attempt.
    for round in 0..15 {
        let client = PayProcess::start(gateway.addr(), &keys);
        sleep(Duration::from_millis(round * 4)).await;
        client.kill();
    }
    let client = PayProcess::start(gateway.addr(), &keys);
    gate.arrived(1).await;
    client.kill();
    gate.open();
    assert_paid(&PayProcess::start(gateway.addr(), &keys).end().await);
    assert_eq!((upstream.executions(), keys.pending().await.len()), (1, 0));
    only_key(&upstream);
}

#[tokio::test]
async fn processes_that_begin_at_once_agree_on_one_key() {
    const CLIENTS: usize = 6;
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let gateway = gateway("", &upstream).await;
    let link = FaultProxy::to(gateway.addr());
    let keys = KeyFolder::new();
    let clients: Vec<_> = (0..CLIENTS).map(|_| PayProcess::start(link.addr(), &keys)).collect();
    // All have begun before the first has its answer: that is what they have to agree in.
    let begun = async {
        while link.counts().connections < CLIENTS {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(30), begun).await.expect("all of them connect");
    gate.arrived(1).await;
    gate.open();
    let mut paid = 0;
    for client in clients {
        let output = client.end().await;
        match output.status.code() {
            // Its patience ended before the first had its answer.
            Some(75) => assert!(String::from_utf8_lossy(&output.stderr).contains("still running"), "{output:?}"),
            _ => {
                assert_paid(&output);
                paid += 1;
            }
        }
    }
    assert!(paid >= 1);
    assert_eq!((upstream.executions(), keys.files()), (1, 0));
}
