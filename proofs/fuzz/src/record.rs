//! The record decoder: any bytes are read or refused, and what is read is what encoding it gives back.
//!
//! The input is tried as it is, which shows that the checksum is looked at; and with a checksum that fits, which gets
//! past it.

use bytes::Bytes;
use ibid::record::Record;

/// See the module.
pub fn check(input: &[u8]) {
    decode(input.to_vec());
    decode([input, &crc32c::crc32c(input).to_le_bytes()].concat());
}

fn decode(bytes: Vec<u8>) {
    if let Ok(record) = Record::decode(Bytes::from(bytes)) {
        assert_eq!(Record::decode(record.encode()).as_ref(), Ok(&record));
    }
}
