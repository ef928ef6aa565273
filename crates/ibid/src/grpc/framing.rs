//! The single message of a unary call: its frame, and its fingerprint.
//!
//! A frame is a flag (compressed or not), a length in four bytes, and the message. A unary call has exactly one frame.
//! Any other body is refused, because the server might read a different call than the one that is compared.

use std::io::{self, Read};

use flate2::bufread::{GzDecoder, ZlibDecoder};
use http::{HeaderMap, HeaderValue};
use sha2::{Digest, Sha256};

use crate::{
    fingerprint::{FingerprintInput, PartDigests},
    policy::{FingerprintPart, Policy},
    refusal::{Refusal, RefusalReason},
    store::Fingerprint,
};

/// Flag and length.
const FRAME_HEADER_BYTES: usize = 5;
/// The buffer for inflating. Only the hash of the output is kept.
const INFLATE_CHUNK_BYTES: usize = 8 << 10;

/// Computes the fingerprint with the decompressed message, so that a compressed and an uncompressed call are the same.
/// Returns `None` if the version of the rules is unknown.
///
/// # Errors
/// The body is not a single message, or inflates to more than `max_request`.
pub(crate) fn fingerprint(
    version: u8, policy: &Policy, input: &FingerprintInput<'_>,
) -> Result<Option<(Fingerprint, PartDigests)>, Refusal> {
    let (compressed, message) = single_message(input.body)?;
    if !policy.fingerprint.contains(&FingerprintPart::Body) {
        return Ok(input.with_body(version, policy, |_| {}));
    }
    let digest = message_digest(input.headers, compressed, message, policy.max_request)?;
    Ok(input.with_body(version, policy, |printing| printing.framed(b'g', &digest)))
}

/// Returns the message of a body with exactly one, and whether it is compressed.
fn single_message(body: &[u8]) -> Result<(bool, &[u8]), Refusal> {
    let ambiguous = |what: &str| {
        let detail = format!("{what}; the body of a unary call is exactly one length-prefixed message");
        Err(Refusal::new(RefusalReason::RequestAmbiguous, detail))
    };
    let Some((prefix, rest)) = body.split_at_checked(FRAME_HEADER_BYTES) else {
        let what = if body.is_empty() { "the call has no message" } else { "the call's message breaks off" };
        return ambiguous(what);
    };
    let length = u32::from_be_bytes(prefix[1..].try_into().expect("4 of 5")) as usize;
    match prefix[0] {
        0 | 1 => {}
        flag => return ambiguous(&format!("the call's message has the flag {flag}, which means nothing")),
    }
    match rest.len().cmp(&length) {
        std::cmp::Ordering::Less => ambiguous("the call's message breaks off"),
        std::cmp::Ordering::Greater => ambiguous("the call has more than one message"),
        std::cmp::Ordering::Equal => Ok((prefix[0] == 1, rest)),
    }
}

/// Hashes a message as the server will read it. If its coding is unknown here, or it does not decode cleanly to its
/// last byte, the raw bytes are hashed together with the name of the coding.
fn message_digest(headers: &HeaderMap, compressed: bool, message: &[u8], at_most: u64) -> Result<[u8; 32], Refusal> {
    let mut hash = Sha256::new();
    if !compressed {
        hash.update(b"m");
        hash.update(message);
        return Ok(hash.finalize().into());
    }
    let coding = headers.get("grpc-encoding").map(HeaderValue::as_bytes).unwrap_or_default();
    hash.update(b"m");
    let inflated = match coding {
        b"gzip" => hash_inflated(&mut hash, GzDecoder::new(message), GzDecoder::into_inner, at_most),
        b"deflate" => hash_inflated(&mut hash, ZlibDecoder::new(message), ZlibDecoder::into_inner, at_most),
        b"" | b"identity" => {
            let detail = "the call's message is marked as compressed, and grpc-encoding does not say how";
            return Err(Refusal::new(RefusalReason::RequestAmbiguous, detail));
        }
        _ => Ok(false),
    };
    match inflated {
        Ok(true) => Ok(hash.finalize().into()),
        Ok(false) => {
            let mut hash = Sha256::new();
            hash.update(b"c");
            hash.update((coding.len() as u64).to_le_bytes());
            hash.update(coding);
            hash.update(message);
            Ok(hash.finalize().into())
        }
        Err(InflatedTooLarge) => {
            let detail =
                format!("the message inflates to more than {at_most} bytes, the most that this route protects");
            Err(Refusal::new(RefusalReason::BodyTooLarge, detail))
        }
    }
}

struct InflatedTooLarge;

/// Hashes the output of a decoder. Returns `false` if it fails or leaves trailing bytes, which some servers would read
/// and others would not.
fn hash_inflated<'a, D: Read>(
    hash: &mut Sha256, mut decoder: D, rest: fn(D) -> &'a [u8], at_most: u64,
) -> Result<bool, InflatedTooLarge> {
    let mut step = [0; INFLATE_CHUNK_BYTES];
    let mut length = 0;
    loop {
        match decoder.read(&mut step) {
            Ok(0) => return Ok(rest(decoder).is_empty()),
            Ok(read) => {
                length += read as u64;
                if length > at_most {
                    return Err(InflatedTooLarge);
                }
                hash.update(&step[..read]);
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{
        Compression,
        write::{GzEncoder, ZlibEncoder},
    };
    use http::Request;

    use super::*;
    use crate::{fingerprint::FoundHeaders, sent_names::SentHeaders};

    fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
        let mut body = vec![flag];
        body.extend((message.len() as u32).to_be_bytes());
        body.extend(message);
        body
    }

    fn gzip(bytes: &[u8], level: u32) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn of(encoding: &str, body: &[u8]) -> Result<Fingerprint, RefusalReason> {
        of_policy(&Policy::platform(), encoding, body)
    }

    fn of_policy(policy: &Policy, encoding: &str, body: &[u8]) -> Result<Fingerprint, RefusalReason> {
        let request = Request::post("/shop.Orders/Create").header("content-type", "application/grpc");
        let request = if encoding.is_empty() { request } else { request.header("grpc-encoding", encoding) };
        let parts = request.body(()).unwrap().into_parts().0;
        let http::request::Parts { method, uri, headers, .. } = &parts;
        let found = FoundHeaders::of(&SentHeaders::of(headers));
        let input = FingerprintInput { method, uri, headers, found, body, trailers: None };
        let made = fingerprint(Fingerprint::VERSION, policy, &input).map_err(|refusal| refusal.reason);
        made.map(|made| made.expect("the current version is known").0)
    }

    #[test]
    fn a_call_is_exactly_one_frame() {
        let one = framed(0, b"hello");
        assert_eq!(single_message(&one), Ok((false, &b"hello"[..])));
        assert_eq!(single_message(&[0; 5]), Ok((false, &b""[..])));
        assert_eq!(single_message(&framed(1, b"x")), Ok((true, &b"x"[..])));
        let two = [one.clone(), one.clone()].concat();
        let detail = |body: &[u8]| single_message(body).unwrap_err().detail;
        assert!(detail(b"").starts_with("the call has no message;"));
        assert!(detail(&two).starts_with("the call has more than one message;"));
        assert!(detail(&[one.clone(), vec![0; 5]].concat()).starts_with("the call has more than one message;"));
        assert!(detail(&framed(2, b"x")).starts_with("the call's message has the flag 2"));
        for cut in 1..one.len() {
            assert!(detail(&one[..cut]).starts_with("the call's message breaks off;"), "{cut}");
        }
        assert!(detail(&[0, 0xff, 0xff, 0xff, 0xff]).starts_with("the call's message breaks off;"));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic_and_only_one_frame_passes(body: Vec<u8>, inflates: bool) {
            let found = of(if inflates { "gzip" } else { "" }, &body);
            let whole = body.len() >= 5 && body[1..5] == ((body.len() - 5) as u32).to_be_bytes();
            proptest::prop_assert!(whole || found.is_err());
        }

        #[test]
        fn what_a_client_packs_is_what_it_means(message: Vec<u8>, level in 0u32..=9) {
            let plain = of("", &framed(0, &message));
            proptest::prop_assert!(plain.is_ok());
            proptest::prop_assert_eq!(of("gzip", &framed(1, &gzip(&message, level))), plain);
        }
    }

    #[test]
    fn the_same_message_is_the_same_call_however_it_is_compressed() {
        let message = b"the same message, the same message, the same message";
        let plain = of("", &framed(0, message)).unwrap();
        assert_eq!(of("gzip", &framed(0, message)), Ok(plain), "the flag decides, not the header");
        for level in [0, 1, 9] {
            assert_eq!(of("gzip", &framed(1, &gzip(message, level))), Ok(plain), "{level}");
        }
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
        zlib.write_all(message).unwrap();
        assert_eq!(of("deflate", &framed(1, &zlib.finish().unwrap())), Ok(plain));
        assert_ne!(of("gzip", &framed(1, &gzip(b"another", 6))), Ok(plain));
        assert_ne!(of("", &framed(0, b"")), Ok(plain));
    }

    #[test]
    fn what_does_not_decode_is_compared_as_it_came() {
        let packed = gzip(b"message", 6);
        let whole = of("gzip", &framed(1, &packed)).unwrap();
        let trailing = of("gzip", &framed(1, &[packed.clone(), packed.clone()].concat())).unwrap();
        assert_ne!(trailing, whole, "a second member is not ignored");
        let broken = of("gzip", &framed(1, &packed[..packed.len() - 1])).unwrap();
        assert_ne!(broken, whole);
        assert_eq!(of("snappy", &framed(1, b"x")), of("snappy", &framed(1, b"x")));
        assert_ne!(of("snappy", &framed(1, b"x")), of("zstd", &framed(1, b"x")));
        assert_ne!(of("snappy", &framed(1, b"x")), of("", &framed(0, b"x")));
        assert_eq!(of("", &framed(1, b"x")), Err(RefusalReason::RequestAmbiguous));
        assert_eq!(of("identity", &framed(1, b"x")), Err(RefusalReason::RequestAmbiguous));
    }

    #[test]
    fn a_bomb_is_refused_at_the_limit() {
        let policy = Policy { max_request: 100 << 10, ..Policy::platform() };
        let fits = gzip(&vec![0; 100 << 10], 9);
        assert!(of_policy(&policy, "gzip", &framed(1, &fits)).is_ok());
        let bomb = gzip(&vec![0; (100 << 10) + 1], 9);
        assert!(bomb.len() < 1000);
        assert_eq!(of_policy(&policy, "gzip", &framed(1, &bomb)), Err(RefusalReason::BodyTooLarge));
    }

    #[test]
    fn without_the_body_in_the_fingerprint_frames_are_still_checked() {
        let policy = Policy::bookings();
        assert_eq!(of_policy(&policy, "", &framed(0, b"a")), of_policy(&policy, "", &framed(0, b"b")));
        assert_eq!(of_policy(&policy, "", b"junk!!"), Err(RefusalReason::RequestAmbiguous));
    }
}
