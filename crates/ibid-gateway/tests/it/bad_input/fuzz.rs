//! Random damage to a good request: the gateway survives, and no key runs twice.

use std::{collections::HashMap, sync::Arc, time::Duration};

use testbed::client::RawClient;
use tokio::{sync::Semaphore, task::JoinSet, time::timeout};

use super::TestGateway;

const MUTATIONS: u64 = 2000;
const CONCURRENT_CLIENTS: usize = 32;
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Few enough that every key is sent many times.
const KEY_COUNT: u64 = 40;

/// One scope for all, so that a key alone says what may run once; and nothing runs without one.
const CONFIG: &str = r#"
[limits]
header_timeout = "500ms"
body_timeout = "500ms"
[policy]
scope = ["global"]
key.required = true
"#;

struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// What tends to hurt.
const DAMAGING_BYTES: [&[u8]; 24] = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n\r\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b",",
    b";",
    b"\"",
    b"\\",
    b"\xff",
    b"Content-Length: 5\r\n",
    b"Content-Length: 500\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Idempotency-Key: other\r\n",
    b"Connection: Idempotency-Key\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
    b"0\r\n\r\n",
    b"POST /smuggled HTTP/1.1\r\nHost: a\r\nIdempotency-Key: smuggled\r\nContent-Length: 0\r\n\r\n",
    b"/../",
];

fn mutate_request(random: &mut Xorshift) -> Vec<u8> {
    let key = format!("fuzz-{}", random.next() % KEY_COUNT);
    let (framing, body) = if random.next().is_multiple_of(2) {
        ("Content-Length: 12", "{\"amount\":1}".to_owned())
    } else {
        ("Transfer-Encoding: chunked", "c\r\n{\"amount\":1}\r\n0\r\n\r\n".to_owned())
    };
    let mut bytes = format!(
        "POST /pay HTTP/1.1\r\nHost: shop.test\r\nIdempotency-Key: {key}\r\nAuthorization: Bearer a\r\n\
         Content-Type: application/json\r\n{framing}\r\n\r\n{body}"
    )
    .into_bytes();
    for _ in 0..random.below(4) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => drop(bytes.remove(at)),
            2 => drop(bytes.splice(at..at, DAMAGING_BYTES[random.below(DAMAGING_BYTES.len())].iter().copied())),
            3 => bytes.truncate(at.max(1)),
            4 => {
                let end = (at + random.below(40)).min(bytes.len());
                let twice = bytes[at..end].to_vec();
                drop(bytes.splice(at..at, twice));
            }
            _ => {
                // Before a header line, where a whole line does the most.
                let line = bytes.windows(2).enumerate().filter(|(_, two)| *two == b"\r\n").map(|(at, _)| at + 2);
                let lines: Vec<_> = line.collect();
                if let Some(at) = lines.get(random.below(lines.len().max(1))).copied() {
                    drop(bytes.splice(at..at, DAMAGING_BYTES[random.below(DAMAGING_BYTES.len())].iter().copied()));
                }
            }
        }
        if bytes.is_empty() {
            bytes.push(b'P');
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_requests_neither_kill_it_nor_run_twice() {
    let seed = std::env::var("IBID_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x1b1d_5eed);
    println!("seed {seed}; set IBID_FUZZ_SEED to repeat it");
    let mut world = TestGateway::in_memory(CONFIG).await;
    let mut random = Xorshift(seed.max(1));
    let (addr, room) = (world.gateway.addr(), Arc::new(Semaphore::new(CONCURRENT_CLIENTS)));
    let mut clients = JoinSet::new();
    for _ in 0..MUTATIONS {
        let (bytes, hangs_up) = (mutate_request(&mut random), !random.next().is_multiple_of(4));
        let permit = room.clone().acquire_owned().await.expect("never closed");
        clients.spawn(async move {
            let mut raw = RawClient::try_connect(addr).await.expect("the gateway still accepts connections");
            let talk = async {
                let _ = raw.try_send(&bytes).await;
                if hangs_up {
                    raw.half_close().await;
                }
                // Whatever it says, or does not say.
                raw.try_read_response().await.is_ok()
            };
            let answered = timeout(RESPONSE_TIMEOUT, talk).await.unwrap_or(false);
            drop(permit);
            answered
        });
    }
    let answered = clients.join_all().await.into_iter().filter(|answered| *answered).count();
    assert!(!world.gateway.has_exited(), "seed {seed}: the gateway died");

    let covered = ["POST", "PUT", "PATCH", "DELETE"];
    let mut runs: HashMap<String, Vec<String>> = HashMap::new();
    for seen in world.upstream.log() {
        if seen.execution.is_some() && covered.contains(&seen.method.as_str()) {
            let key = seen.key().unwrap_or_else(|| panic!("seed {seed}: ran without a key: {seen:?}"));
            runs.entry(key.to_owned()).or_default().push(format!("{seen:?}"));
        }
    }
    for (key, runs) in &runs {
        assert_eq!(runs.len(), 1, "seed {seed}: {key:?} ran {} times: {runs:#?}", runs.len());
    }
    println!("{answered} of {MUTATIONS} answered, {} keys ran", runs.len());
    assert!(answered > MUTATIONS as usize / 4, "seed {seed}: only {answered} were answered, so little was tested");
    assert!(runs.len() >= KEY_COUNT as usize / 2, "seed {seed}: only {} keys ran, so little was tested", runs.len());
    world.assert_runs_once("afterwards", "a-good-one-at-the-end").await;
}
