//! Shares the bytes of large records among concurrent replays: each record is in memory once, and decompressed once.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::{record, store::Address};

/// Records below this size in bytes are not shared.
const MIN_SHARED_BYTES: usize = 16 << 10;

#[derive(Debug, Default)]
pub(super) struct SharedRecords(Mutex<HashMap<Address, Weak<SharedRecord>>>);

#[derive(Debug)]
struct SharedRecord {
    /// The record as stored.
    stored: Bytes,
    decompressed: Bytes,
}

struct SharedRecordBytes(Arc<SharedRecord>);

impl SharedRecords {
    /// Returns a large record decompressed, sharing the bytes of an earlier replay that is still running. Returns a
    /// small record unchanged.
    pub(super) fn share(&self, at: &Address, record: Bytes) -> Bytes {
        if record::decompressed_length(&record) < MIN_SHARED_BYTES {
            return record;
        }
        let earlier = self.0.lock().get(at).and_then(Weak::upgrade);
        if let Some(earlier) = earlier.filter(|earlier| earlier.stored == record) {
            return Bytes::from_owner(SharedRecordBytes(earlier));
        }
        let record = Arc::new(SharedRecord { decompressed: record::decompress(record.clone()), stored: record });
        let mut records = self.0.lock();
        if records.len() == records.capacity() {
            records.retain(|_, record| record.strong_count() > 0);
        }
        records.insert(*at, Arc::downgrade(&record));
        Bytes::from_owner(SharedRecordBytes(record))
    }
}

impl AsRef<[u8]> for SharedRecordBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0.decompressed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_records_are_in_memory_once() {
        let records = SharedRecords::default();
        let (at, other) = (Address([1; 32]), Address([2; 32]));
        let record = |byte: u8| Bytes::from(vec![byte; MIN_SHARED_BYTES]);
        let first = records.share(&at, record(1));
        assert_eq!(records.share(&at, record(1)).as_ptr(), first.as_ptr());
        assert_ne!(records.share(&other, record(1)).as_ptr(), first.as_ptr());
        assert_eq!(records.share(&at, record(3)), record(3), "another record is never taken for it");
        drop(first);
        for at in 0..=255 {
            drop(records.share(&Address([at; 32]), record(at)));
        }
        assert!(records.0.lock().capacity() < 64, "those that nobody reads are forgotten");
    }

    #[test]
    fn a_compressed_record_is_decompressed_once() {
        let plain = record::Record {
            status: http::StatusCode::OK,
            requested_at_ms: 1,
            completed_at_ms: 2,
            headers: http::HeaderMap::new(),
            body: record::RecordBody::Whole(vec![b'x'; MIN_SHARED_BYTES].into()),
            trailers: http::HeaderMap::new(),
            cookies: Vec::new(),
        };
        let stored = record::compress(plain.encode());
        assert!(stored.len() < 1024);
        let (records, at) = (SharedRecords::default(), Address([1; 32]));
        let first = records.share(&at, stored.clone());
        assert_eq!(first, plain.encode());
        assert_eq!(records.share(&at, stored).as_ptr(), first.as_ptr());
    }
}
