//! The remembered answer: a versioned, checksummed byte format in one compact allocation.
//!
//! Stores keep these bytes unchanged, so records can move between stores. A record does not keep the connection's
//! buffers alive: everything is copied into one allocation, and replays borrow from it.
//!
//! ```text
//! version u8 │ kind u8 │ status u16 │ requested_at_ms u64 │ completed_at_ms u64
//! headers:  count u16 │ (name length u16, name, value length u32, value) …
//! body:     kind 0: length u32, bytes │ kind 1 (digest): length u64, SHA-256 │ kind 2 (none): nothing
//! trailers: as headers
//! cookies:  count u16 │ SHA-256 … (only in version 2)
//! CRC-32C u32 of all that
//! ```
//! Version 3 is a compressed record of version 1 or 2: `version u8 │ length u32 │ raw DEFLATE of that record with its
//! checksum │ CRC-32C`, where `length` is the uncompressed length.
//!
//! Numbers are little-endian. A reader reads all older versions and refuses unknown ones. A record without cookies is
//! written as version 1.

use bytes::{BufMut, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::{
    compression,
    wire::{self, ByteReader},
};

const VERSION_WITHOUT_COOKIES: u8 = 1;
const VERSION_WITH_COOKIES: u8 = 2;
const VERSION_COMPRESSED: u8 = 3;
const LATEST_VERSION: u8 = VERSION_COMPRESSED;
/// Records up to this size in bytes are not compressed: it would save next to nothing.
const MAX_UNCOMPRESSED_BYTES: usize = 1024;
/// DEFLATE compresses to about a thousandth at best. A record that claims a higher ratio is invalid.
const MAX_COMPRESSION_RATIO: usize = 1100;

/// The number of headers for which a decoded record has room, so that a replay can add its own.
const REPLAY_HEADERS: usize = 4;

/// A remembered answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The HTTP status.
    pub status: StatusCode,
    /// When the first request arrived, in milliseconds since the Unix epoch.
    pub requested_at_ms: u64,
    /// When its answer was complete, in milliseconds since the Unix epoch.
    pub completed_at_ms: u64,
    /// The headers, without Set-Cookie, hop-by-hop headers and those that the policy drops.
    pub headers: HeaderMap,
    /// The stored part of the body.
    pub body: RecordBody,
    /// The trailers.
    pub trailers: HeaderMap,
    /// Hashes of the cookies that the response set, only for anonymous callers. A retry that sends these cookies and no
    /// others comes from the same caller.
    pub cookies: Vec<[u8; 32]>,
}

/// The stored part of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordBody {
    /// The whole body.
    Whole(Bytes),
    /// Only a digest, because the body was too large.
    Digest {
        /// The length of the body in bytes.
        length: u64,
        /// The SHA-256 of the body.
        sha256: [u8; 32],
    },
    /// Nothing: the policy remembers only the status.
    None,
}

/// Why a record cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The checksum does not match.
    #[error("the record's checksum does not hold")]
    Checksum,
    /// A later version of the format.
    #[error(
        "the record is of format version {0}, and this ibid reads up to version {LATEST_VERSION}; use the ibid that wrote it"
    )]
    Version(u8),
    /// The checksum matches, but the bytes are not a record.
    #[error("the record is malformed")]
    Malformed,
}

impl Record {
    /// Encodes the record, uncompressed.
    pub fn encode(&self) -> Bytes {
        self.source().encode()
    }

    pub(crate) fn source(&self) -> RecordSource<'_, fn(&HeaderName) -> bool> {
        let Self { status, requested_at_ms, completed_at_ms, headers, body, trailers, cookies } = self;
        RecordSource {
            status: *status,
            requested_at_ms: *requested_at_ms,
            completed_at_ms: *completed_at_ms,
            headers,
            is_stored: |_| true,
            body,
            trailers: Some(trailers),
            cookies,
        }
    }
}

/// The content of a record to encode.
pub(crate) struct RecordSource<'a, F> {
    pub(crate) status: StatusCode,
    pub(crate) requested_at_ms: u64,
    pub(crate) completed_at_ms: u64,
    pub(crate) headers: &'a HeaderMap,
    /// Selects the headers to store.
    pub(crate) is_stored: F,
    pub(crate) body: &'a RecordBody,
    pub(crate) trailers: Option<&'a HeaderMap>,
    pub(crate) cookies: &'a [[u8; 32]],
}

impl<F: Fn(&HeaderName) -> bool> RecordSource<'_, F> {
    pub(crate) fn encode(&self) -> Bytes {
        let headers = || self.headers.iter().filter(|(name, _)| (self.is_stored)(name));
        let trailers = || self.trailers.into_iter().flatten();
        let (kind, body) = match &self.body {
            RecordBody::Whole(body) => (0, body.len() + 4),
            RecordBody::Digest { .. } => (1, 40),
            RecordBody::None => (2, 0),
        };
        let cookies = if self.cookies.is_empty() { 0 } else { 2 + 32 * self.cookies.len() };
        let mut out = Vec::with_capacity(24 + headers_size(headers()) + body + headers_size(trailers()) + cookies);
        out.put_u8(if cookies == 0 { VERSION_WITHOUT_COOKIES } else { VERSION_WITH_COOKIES });
        out.put_u8(kind);
        out.put_u16_le(self.status.as_u16());
        out.put_u64_le(self.requested_at_ms);
        out.put_u64_le(self.completed_at_ms);
        put_headers(&mut out, headers());
        match &self.body {
            RecordBody::Whole(body) => wire::put_framed(&mut out, body),
            RecordBody::Digest { length, sha256 } => {
                out.put_u64_le(*length);
                out.put_slice(sha256);
            }
            RecordBody::None => {}
        }
        put_headers(&mut out, trailers());
        if cookies > 0 {
            out.put_u16_le(u16::try_from(self.cookies.len()).expect("no more than headers"));
            self.cookies.iter().for_each(|cookie| out.put_slice(cookie));
        }
        wire::append_checksum(out)
    }
}

impl Record {
    /// Decodes a record; header values and body borrow from `bytes`.
    ///
    /// # Errors
    /// If the bytes are damaged or of a later version. Never answer from such a record.
    pub fn decode(bytes: Bytes) -> Result<Self, RecordError> {
        let content = wire::verify_checksum(bytes).ok_or(RecordError::Checksum)?;
        let mut reader = ByteReader(content);
        match reader.u8() {
            Some(version @ (VERSION_WITHOUT_COOKIES | VERSION_WITH_COOKIES)) => {
                read_record(version, &mut reader).ok_or(RecordError::Malformed)
            }
            Some(VERSION_COMPRESSED) => decompress_rest(reader).ok_or(RecordError::Malformed).and_then(Self::decode),
            Some(version) => Err(RecordError::Version(version)),
            None => Err(RecordError::Malformed),
        }
    }
}

/// Compresses a record above 1 KiB if that makes it smaller; otherwise returns it unchanged.
pub(crate) fn compress(record: Bytes) -> Bytes {
    if record.len() <= MAX_UNCOMPRESSED_BYTES || record[0] == VERSION_COMPRESSED {
        return record;
    }
    let (Some(small), Ok(length)) = (compression::compress(&record), u32::try_from(record.len())) else {
        return record;
    };
    let mut out = Vec::with_capacity(5 + small.len() + 4);
    out.put_u8(VERSION_COMPRESSED);
    out.put_u32_le(length);
    out.put_slice(&small);
    wire::append_checksum(out)
}

/// Decompresses a compressed record; returns any other unchanged.
pub(crate) fn decompress(record: Bytes) -> Bytes {
    if record.first() != Some(&VERSION_COMPRESSED) {
        return record;
    }
    let inside = wire::verify_checksum(record.clone()).and_then(|content| {
        let mut reader = ByteReader(content);
        reader.u8().and_then(|_| decompress_rest(reader))
    });
    inside.unwrap_or(record)
}

/// The uncompressed length of a record, as its bytes declare it. The value is not verified.
pub(crate) fn decompressed_length(record: &[u8]) -> usize {
    match record {
        [VERSION_COMPRESSED, a, b, c, d, ..] => u32::from_le_bytes([*a, *b, *c, *d]) as usize,
        record => record.len(),
    }
}

/// Decompresses what follows the version. The result must not be compressed itself.
fn decompress_rest(mut reader: ByteReader) -> Option<Bytes> {
    let length = reader.u32()? as usize;
    let small = reader.0;
    if length / MAX_COMPRESSION_RATIO > small.len() {
        return None;
    }
    let record = compression::decompress(&small, length)?;
    matches!(record.first()?, &VERSION_WITHOUT_COOKIES | &VERSION_WITH_COOKIES).then(|| record.into())
}

fn read_record(version: u8, reader: &mut ByteReader) -> Option<Record> {
    let kind = reader.u8()?;
    let status = StatusCode::from_u16(reader.u16()?).ok()?;
    let (requested_at_ms, completed_at_ms) = (reader.u64()?, reader.u64()?);
    let headers = read_headers(reader, REPLAY_HEADERS)?;
    let body = match kind {
        0 => RecordBody::Whole(reader.framed()?),
        1 => RecordBody::Digest { length: reader.u64()?, sha256: reader.array()? },
        2 => RecordBody::None,
        _ => return None,
    };
    let trailers = read_headers(reader, 0)?;
    let count = if version == VERSION_WITHOUT_COOKIES { 0 } else { reader.u16()? };
    let cookies = (0..count).map(|_| reader.array()).collect::<Option<_>>()?;
    reader.0.is_empty().then_some(Record { status, requested_at_ms, completed_at_ms, headers, body, trailers, cookies })
}

fn headers_size<'a>(headers: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>) -> usize {
    2 + headers.map(|(name, value)| 6 + name.as_str().len() + value.len()).sum::<usize>()
}

fn put_headers<'a>(out: &mut Vec<u8>, headers: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>) {
    let count_at = out.len();
    out.put_u16_le(0);
    let mut count: u16 = 0;
    for (name, value) in headers {
        count = count.checked_add(1).expect("a header map holds fewer than 32,768");
        out.put_u16_le(u16::try_from(name.as_str().len()).expect("a name is shorter than 64 KiB"));
        out.put_slice(name.as_str().as_bytes());
        wire::put_framed(out, value.as_bytes());
    }
    out[count_at..count_at + 2].copy_from_slice(&count.to_le_bytes());
}

/// Reads headers into a map with room for `more`.
fn read_headers(reader: &mut ByteReader, more: usize) -> Option<HeaderMap> {
    let count = reader.u16()?;
    if usize::from(count) + more == 0 {
        return Some(HeaderMap::new());
    }
    // A count beyond the capacity of a map is invalid.
    let mut headers = HeaderMap::try_with_capacity(usize::from(count) + more).ok()?;
    for _ in 0..count {
        let length = reader.u16()?;
        let name = HeaderName::from_bytes(&reader.take(length.into())?).ok()?;
        let value = HeaderValue::from_maybe_shared(reader.framed()?).ok()?;
        headers.try_append(name, value).ok()?;
    }
    Some(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(body: RecordBody) -> Record {
        let mut headers = HeaderMap::new();
        headers.append("content-type", HeaderValue::from_static("application/json"));
        headers.append("link", HeaderValue::from_static("</a>"));
        headers.append("link", HeaderValue::from_static("</b>"));
        headers.append("x-latin", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        let mut trailers = HeaderMap::new();
        trailers.append("grpc-status", HeaderValue::from_static("0"));
        let cookies = Vec::new();
        Record { status: StatusCode::CREATED, requested_at_ms: 1, completed_at_ms: 2, headers, body, trailers, cookies }
    }

    #[test]
    fn a_record_comes_back_as_it_was_written() {
        for body in [
            RecordBody::Whole(Bytes::from_static(b"\0\xff binary")),
            RecordBody::Whole(Bytes::new()),
            RecordBody::Digest { length: 1 << 40, sha256: [9; 32] },
            RecordBody::None,
        ] {
            let mut record = sample(body);
            assert_eq!(Record::decode(record.encode()).unwrap(), record);
            assert_eq!(record.encode()[0], VERSION_WITHOUT_COOKIES);
            record.cookies = vec![[1; 32], [2; 32]];
            assert_eq!(Record::decode(record.encode()).unwrap(), record);
            assert_eq!(record.encode()[0], VERSION_WITH_COOKIES);
        }
    }

    #[test]
    fn the_buffer_is_sized_exactly() {
        let record = sample(RecordBody::Whole(Bytes::from_static(b"hello")));
        let expected = 24 - 4 + 4 + headers_size(record.headers.iter()) + 9 + headers_size(record.trailers.iter());
        assert_eq!(record.encode().len(), expected);
        let with_cookies = Record { cookies: vec![[1; 32]; 3], ..record };
        assert_eq!(with_cookies.encode().len(), expected + 2 + 96);
    }

    #[test]
    fn more_headers_than_a_map_can_hold_are_malformed() {
        for count in [24_577, u16::MAX] {
            let mut out = Vec::new();
            out.put_slice(&[VERSION_WITHOUT_COOKIES, 2]);
            out.put_u16_le(201);
            out.put_bytes(0, 16);
            out.put_u16_le(count);
            for _ in 0..count {
                out.put_slice(b"\x01\0a\0\0\0\0");
            }
            out.put_u16_le(0);
            assert_eq!(Record::decode(wire::append_checksum(out)), Err(RecordError::Malformed), "{count}");
        }
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let bytes = sample(RecordBody::Whole(Bytes::from_static(b"hello"))).encode();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(flipped.into()), Err(RecordError::Checksum), "bit {bit}");
        }
        for cut in 0..bytes.len() {
            assert!(Record::decode(bytes.slice(..cut)).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn a_later_version_is_refused_by_name() {
        let bytes = b"\x07whatever".to_vec();
        assert_eq!(Record::decode(wire::append_checksum(bytes)), Err(RecordError::Version(7)));
    }

    #[test]
    fn a_large_record_is_compressed_and_reads_the_same() {
        let body: Vec<u8> = b"{\"id\":17,\"paid\":true}".iter().copied().cycle().take(8192).collect();
        let with_cookies = Record { cookies: vec![[1; 32]], ..sample(RecordBody::Whole(body.clone().into())) };
        assert_eq!(Record::decode(compress(with_cookies.encode())).unwrap(), with_cookies);
        let record = sample(RecordBody::Whole(body.into()));
        let (plain, small) = (record.encode(), compress(record.encode()));
        assert!(small.len() < plain.len() / 10, "{} of {}", small.len(), plain.len());
        assert_eq!(Record::decode(small.clone()).unwrap(), record);
        assert_eq!(compress(small.clone()), small, "twice is once");
        assert_eq!((decompress(small.clone()), decompress(plain.clone())), (plain.clone(), plain.clone()));
        assert_eq!([&small, &plain].map(|record| decompressed_length(record)), [plain.len(); 2]);
        for cut in 0..small.len() - 4 {
            let content = small[..cut].to_vec();
            assert!(Record::decode(wire::append_checksum(content)).is_err(), "cut at {cut}");
        }
        let mut bomb = small[..small.len() - 4].to_vec();
        bomb[1..5].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Record::decode(wire::append_checksum(bomb)), Err(RecordError::Malformed));
    }

    #[test]
    fn what_is_small_or_does_not_become_smaller_is_left_alone() {
        let small = sample(RecordBody::Whole(vec![b'x'; 500].into())).encode();
        assert_eq!(compress(small.clone()), small);
        let mut noise = vec![0; 4096];
        getrandom::fill(&mut noise).unwrap();
        let noise = sample(RecordBody::Whole(noise.into())).encode();
        assert_eq!(compress(noise.clone()), noise);
    }

    /// What each format version wrote: with cookies is version 2, compressed is version 3.
    fn kept() -> [(std::path::PathBuf, Record, Bytes); 3] {
        let plain = sample(RecordBody::Whole(Bytes::from_static(b"{\"id\":1}")));
        let with_cookies = Record { cookies: vec![[1; 32], [2; 32]], ..plain.clone() };
        let large = sample(RecordBody::Whole(vec![b'x'; 2000].into()));
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        [
            (folder.join("record-v1.bin"), plain.clone(), plain.encode()),
            (folder.join("record-v2.bin"), with_cookies.clone(), with_cookies.encode()),
            (folder.join("record-v3.bin"), large.clone(), compress(large.encode())),
        ]
    }

    #[test]
    #[ignore = "writes the files that are kept"]
    fn write_the_files_of_all_versions() {
        for (path, _, bytes) in kept() {
            std::fs::write(path, bytes).unwrap();
        }
    }

    /// They must stay readable forever.
    #[test]
    fn all_versions_stay_readable() {
        for (version, (path, record, _)) in (1..).zip(kept()) {
            let written = Bytes::from(std::fs::read(path).unwrap());
            assert_eq!((written[0], Record::decode(written).unwrap()), (version, record));
        }
    }

    #[test]
    fn malformed_content_under_a_good_checksum_is_an_error_not_a_panic() {
        let without = sample(RecordBody::Whole(Bytes::from_static(b"hello")));
        let with_cookies = Record { cookies: vec![[1; 32]], ..without.clone() };
        for bytes in [without.encode(), with_cookies.encode()] {
            for cut in 0..bytes.len() - 4 {
                let content = bytes[..cut].to_vec();
                assert!(Record::decode(wire::append_checksum(content)).is_err(), "cut at {cut}");
            }
        }
    }
}
