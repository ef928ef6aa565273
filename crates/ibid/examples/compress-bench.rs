//! What `store.compress` costs and saves: JSON answers of three sizes, compressed and decompressed as records are.
//!
//!     scripts/bench --compress
//!
//! Each figure is the fastest of many alternating batches, beside SHA-256 of the same bytes, which every request pays.

use std::{
    fmt::Write as _,
    hint::black_box,
    time::{Duration, Instant},
};

use ibid::compression::{compress, decompress};
use sha2::{Digest, Sha256};

const BATCHES: u32 = 200;
/// How many bytes a batch goes through at least.
const BATCH_BYTES: usize = 256 << 10;

fn main() {
    println!("| JSON answer | stored | compress | decompress | compress, in SHA-256 | decompress, in SHA-256 |");
    println!("|---|---|---|---|---|---|");
    for size in [1 << 10, 4 << 10, 64 << 10] {
        let answer = payments(size);
        let small = compress(&answer).expect("JSON becomes smaller");
        assert_eq!(decompress(&small, size).as_deref(), Some(&answer[..]), "it comes back");
        let [compress, decompress, sha] = fastest(
            size,
            [
                &|| drop(black_box(compress(black_box(&answer)))),
                &|| drop(black_box(decompress(black_box(&small), size))),
                &|| {
                    let _ = black_box(Sha256::digest(black_box(&answer)));
                },
            ],
        );
        let times = |took: Duration| took.as_secs_f64() / sha.as_secs_f64();
        println!(
            "| {} KiB | {:.0} % | {:.1} µs | {:.1} µs | {:.1} × | {:.1} × |",
            size >> 10,
            small.len() as f64 / size as f64 * 100.0,
            compress.as_secs_f64() * 1e6,
            decompress.as_secs_f64() * 1e6,
            times(compress),
            times(decompress),
        );
    }
}

/// The shortest time of one call of each.
fn fastest<const N: usize>(size: usize, work: [&dyn Fn(); N]) -> [Duration; N] {
    let calls = BATCH_BYTES.div_ceil(size) as u32;
    let mut fastest = [Duration::MAX; N];
    for _ in 0..BATCHES {
        for (work, fastest) in work.iter().zip(&mut fastest) {
            let began = Instant::now();
            (0..calls).for_each(|_| work());
            *fastest = (*fastest).min(began.elapsed() / calls);
        }
    }
    fastest
}

/// A list of payments as an API would answer it: names repeat, ids and amounts do not.
fn payments(size: usize) -> Vec<u8> {
    let mut random = 7_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut answer = String::from(r#"{"object":"list","data":["#);
    while answer.len() < size {
        let (id, customer, amount) = (next(), next(), next() % 1_000_000);
        let (created, status) =
            (1_700_000_000 + next() % 30_000_000, ["succeeded", "pending", "failed"][next() as usize % 3]);
        let _ = write!(
            answer,
            r#"{{"id":"pay_{id:016x}","object":"payment","amount":{amount},"currency":"eur","status":"{status}","customer":"cus_{customer:016x}","created":{created},"refunded":false,"description":null,"metadata":{{"order_id":"{}"}}}},"#,
            next() % 10_000_000,
        );
    }
    answer.truncate(size);
    answer.into_bytes()
}
