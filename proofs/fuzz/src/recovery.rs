//! The embedded store on a directory that anything may have happened to.
//!
//! An image with records, claims, segments of several kinds and a snapshot is made once. The input says what is done to
//! its files: bytes changed, pieces cut, moved, doubled, zeroed, files gone. With an even first byte the checksums stay
//! as they are: whatever opens must then answer with what was written, or not at all. With an odd one they are made to
//! fit again, as no disk does, so that the damage gets past them: then it must still open or be refused, and end.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, EntryFilter, Fingerprint, ListCursor, RecordSummary, Settlement,
    Store, Tags,
};
use ibid_stores::embedded::{Embedded, EmbeddedOptions, TimeSource};
use tokio::runtime::{Builder, Runtime};

use self::disk::{Files, MemDisk};

mod disk;
mod repair;

const KEYS: usize = 60;
const HOUR: Duration = Duration::from_secs(3600);
const NOW: Duration = Duration::from_secs(1_800_000_000);

static IMAGE: OnceLock<Files> = OnceLock::new();

/// See the module.
pub fn check(input: &[u8]) {
    let mut files = IMAGE.get_or_init(image).clone();
    let Some((mode, orders)) = input.split_first() else { return };
    for order in orders.chunks_exact(8) {
        damage(&mut files, order.try_into().expect("eight"));
    }
    let repaired = mode % 2 == 1;
    if repaired {
        files.iter_mut().for_each(|(name, bytes)| repair::file(name, bytes));
    }
    let Ok(store) = Embedded::open_on(Arc::new(MemDisk::new(files)), options()) else { return };
    runtime().block_on(async {
        for nth in 0..KEYS {
            match store.get(&address(nth)).await {
                Ok(Some(ClaimOutcome::Completed(found))) if !repaired => {
                    assert_eq!(found.record, record(nth), "key {nth}")
                }
                Ok(Some(ClaimOutcome::Granted(_))) => panic!("nobody may run what was there: key {nth}"),
                _ => {}
            }
        }
        let _ = store.admin().list(&EntryFilter::default(), ListCursor::default(), 1000).await;
        let _ = store.sweep(1000).await;
        for nth in [0, KEYS] {
            if let Ok(ClaimOutcome::Granted(lease)) = store.claim(&ask(nth)).await {
                let _ = store.settle(&lease, &end(nth)).await;
            }
        }
    });
}

fn image() -> Files {
    let disk = MemDisk::new(Files::new());
    for round in 0..2 {
        let store = Embedded::open_on(Arc::new(disk.clone()), options()).expect("an empty disk");
        runtime().block_on(async {
            for nth in round * KEYS / 2..(round + 1) * KEYS / 2 {
                let Ok(ClaimOutcome::Granted(lease)) = store.claim(&ask(nth)).await else {
                    panic!("key {nth} is fresh")
                };
                // Every tenth is left unfinished.
                if nth % 10 != 9 {
                    let _ = store.settle(&lease, &end(nth)).await.expect("there is room");
                }
            }
        });
    }
    let files = disk.files();
    assert!(files.len() > 4 && files.contains_key("index.snap"), "{:?}", files.keys());
    files
}

/// What, to which file, where (two bytes), how much (two bytes), with what; and whereto, for what is moved.
fn damage(files: &mut Files, [what, file, high, low, length_high, length, value, to]: [u8; 8]) {
    let names: Vec<String> = files.keys().filter(|name| *name != "lock").cloned().collect();
    let Some(name) = names.get(usize::from(file) % names.len().max(1)) else { return };
    let bytes = files.get_mut(name).expect("it is there");
    // Half of the places are where headers and entries begin, for most of a segment is zeroes.
    let at = match file < 0x80 {
        true => usize::from(high) % (bytes.len() / 512 + 1) * 512 + usize::from(low) % 240,
        false => usize::from(u16::from_be_bytes([high, low])) % (bytes.len() + 1),
    };
    let at = at.min(bytes.len());
    let length = usize::from(u16::from_be_bytes([length_high, length])).min(bytes.len() - at);
    match what % 10 {
        // Most damage is small.
        0..=3 => bytes[at..].iter_mut().take(1).for_each(|byte| *byte = value),
        4 => bytes[at..].iter_mut().take(1).for_each(|byte| *byte ^= 1 << (value % 8)),
        5 => bytes[at..at + length].fill(value),
        6 => bytes.truncate(at),
        7 => {
            // A field of eight bytes at once: lengths, times and numbers at their limits.
            let field =
                [0, 1, u64::MAX, u64::MAX - 1, 1 << 63, 1 << 32, u64::from(u32::MAX), 4096][usize::from(value % 8)];
            bytes[at..].iter_mut().zip(field.to_le_bytes()).for_each(|(byte, new)| *byte = new);
        }
        8 => {
            let to = (usize::from(to) * 512).min(bytes.len() - length);
            bytes.copy_within(at..at + length, to);
        }
        _ if value % 4 == 0 => drop(files.remove(name)),
        _ => {
            let (copy, to) = (bytes.clone(), names[usize::from(to) % names.len()].clone());
            files.insert(to, copy);
        }
    }
}

fn options() -> EmbeddedOptions {
    let time = TimeSource::new(|| NOW);
    EmbeddedOptions { segment_size: 16 << 10, max_size: 1 << 20, time, ..EmbeddedOptions::default() }
}

fn address(nth: usize) -> Address {
    let mut address = [0x3c; 32];
    address[..8].copy_from_slice(&(nth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    Address(address)
}

fn ask(nth: usize) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest {
        address: address(nth),
        token: ClaimToken([nth as u8; 16]),
        fingerprint: Fingerprint { version: 1, digest: [nth as u8; 32] },
        tags: Tags::new("acme", "", "POST /payments", "k"),
        label: Bytes::from_static(b"label"),
        lease: HOUR,
        ttl: HOUR,
        take_over: None,
    })
}

fn record(nth: usize) -> Bytes {
    (0..nth * 13 % 900).map(|at| (at + nth) as u8).collect()
}

fn end(nth: usize) -> Settlement {
    Settlement::Complete {
        failed: false,
        record: record(nth),
        summary: RecordSummary::default(),
        ttl: HOUR * (1 + nth as u32 % 9),
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().expect("a runtime")
}
