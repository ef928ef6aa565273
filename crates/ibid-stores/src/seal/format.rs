//! Format of encrypted bytes.
//!
//! ```text
//! "ibid-sl" │ version u8 │ kind u8 │ flags u8 │ attempt u32 │ length u32 │ key id: length u8, bytes
//! nonce [24] │ XChaCha20-Poly1305: ciphertext, tag [16]
//! ```
//! Numbers are little-endian. `length` is that of the plain content before compression. `attempt` is that of the run
//! that produced the record; it is 0 for a claim whose answer was lost, and for all other kinds.
//!
//! Associated data: everything before the nonce, the address, the fingerprint's version and digest, and whether the
//! record is a failure. So moved bytes, or bytes with another attempt or state, do not decrypt.

use std::str;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use chacha20poly1305::{AeadInOut as _, XNonce};
use ibid::{
    compression,
    store::{Address, Fingerprint},
};

use super::keys::{MAX_KEY_ID_LEN, Sealer, is_key_id};

const MAGIC: [u8; 7] = *b"ibid-sl";
const VERSION: u8 = 1;
const COMPRESSED_FLAG: u8 = 1;
const NONCE_LEN: usize = 24;
const TAG_LEN: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SealedKind {
    Record = 1,
    Label = 2,
    Journal = 3,
}

/// The context that encrypted bytes are bound to.
#[derive(Debug, Clone, Copy)]
pub(super) struct AssociatedData<'a> {
    pub(super) kind: SealedKind,
    pub(super) address: &'a Address,
    /// The request's own fingerprint, not its stored form.
    pub(super) fingerprint: &'a Fingerprint,
    /// 0 if unknown.
    pub(super) attempt: u32,
    pub(super) failed: bool,
}

/// Why bytes cannot be decrypted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnsealError {
    /// The bytes are not encrypted.
    #[error("is not sealed, and seal.accept_plain is off")]
    NotSealed,
    /// The format version is unknown.
    #[error("is sealed in format version {0}; this ibid opens up to version {VERSION}; use the ibid that wrote it")]
    UnknownVersion(u8),
    /// The named key is not configured.
    #[error("is sealed with the key {0:?}, which seal.keys does not have")]
    UnknownKey(String),
    /// Authentication failed: the bytes were changed or belong to another context.
    #[error("was altered, or belongs to another key, attempt or state")]
    Altered,
}

/// The unencrypted header. It must not be trusted before the bytes are decrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SealedHeader {
    kind: u8,
    flags: u8,
    attempt: u32,
    length: u32,
    pub(super) key_id: String,
    /// The encoded header.
    raw_bytes: Bytes,
}

/// Returns the id of the key that bytes are encrypted with, or `None` if they are not encrypted.
pub fn sealing_key_id(bytes: &Bytes) -> Option<String> {
    SealedHeader::take_from(&mut bytes.clone()).ok().flatten().map(|head| head.key_id)
}

impl SealedHeader {
    /// Splits the header off encrypted bytes. Leaves other bytes unchanged.
    pub(super) fn take_from(bytes: &mut Bytes) -> Result<Option<Self>, UnsealError> {
        if !bytes.starts_with(&MAGIC) {
            return Ok(None);
        }
        let all = bytes.clone();
        bytes.advance(MAGIC.len());
        let version = bytes.try_get_u8().map_err(|_| UnsealError::Altered)?;
        if version != VERSION {
            return Err(UnsealError::UnknownVersion(version));
        }
        Self::parse_fields(&all, bytes).ok_or(UnsealError::Altered).map(Some)
    }

    fn parse_fields(all: &Bytes, bytes: &mut Bytes) -> Option<Self> {
        let (kind, flags) = (bytes.try_get_u8().ok()?, bytes.try_get_u8().ok()?);
        let (attempt, length) = (bytes.try_get_u32_le().ok()?, bytes.try_get_u32_le().ok()?);
        let id_length = usize::from(bytes.try_get_u8().ok()?);
        if bytes.len() < id_length + NONCE_LEN + TAG_LEN {
            return None;
        }
        let id = bytes.split_to(id_length);
        let id = str::from_utf8(&id).ok().filter(|id| is_key_id(id.as_bytes()))?.to_owned();
        Some(Self { kind, flags, attempt, length, key_id: id, raw_bytes: all.slice(..all.len() - bytes.len()) })
    }
}

impl AssociatedData<'_> {
    fn encode_with(&self, head: &[u8]) -> Vec<u8> {
        let mut bound = Vec::with_capacity(head.len() + 32 + 34);
        bound.extend_from_slice(head);
        bound.extend_from_slice(&self.address.0);
        bound.push(self.fingerprint.version);
        bound.extend_from_slice(&self.fingerprint.digest);
        bound.push(u8::from(self.failed));
        bound
    }
}

impl Sealer {
    /// Encrypts with the first key.
    ///
    /// # Panics
    /// If the system has no source of randomness.
    pub(super) fn seal(&self, place: &AssociatedData<'_>, plain: &[u8]) -> Bytes {
        let with = self.key_ring();
        let (id, cipher) = with.sealing_key();
        let squeeze = with.options.compress && place.kind != SealedKind::Label;
        let squeezed = if squeeze { compression::compress(plain) } else { None };
        let content = squeezed.as_deref().unwrap_or(plain);
        let mut out = BytesMut::with_capacity(MAGIC.len() + 12 + MAX_KEY_ID_LEN + NONCE_LEN + content.len() + TAG_LEN);
        out.put_slice(&MAGIC);
        out.put_slice(&[VERSION, place.kind as u8, if squeezed.is_some() { COMPRESSED_FLAG } else { 0 }]);
        out.put_u32_le(place.attempt);
        out.put_u32_le(u32::try_from(plain.len()).expect("bounded by max_response"));
        out.put_u8(id.len() as u8);
        out.put_slice(id.as_bytes());
        let bound = place.encode_with(&out);
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).expect("the system's source of randomness");
        out.put_slice(&nonce);
        let start = out.len();
        out.put_slice(content);
        let tag = cipher
            .encrypt_inout_detached(&XNonce::from(nonce), &bound, (&mut out[start..]).into())
            .expect("shorter than 256 GiB");
        out.put_slice(&tag);
        out.freeze()
    }

    /// Decrypts bytes that were encrypted for this context.
    ///
    /// # Errors
    /// Returns why the bytes cannot be decrypted. They must never be served.
    pub(super) fn open(&self, place: &AssociatedData<'_>, mut bytes: Bytes) -> Result<Bytes, UnsealError> {
        let with = self.key_ring();
        let Some(head) = SealedHeader::take_from(&mut bytes)? else {
            return if with.options.accept_plain { Ok(bytes) } else { Err(UnsealError::NotSealed) };
        };
        let Some(cipher) = with.find_cipher(&head.key_id) else { return Err(UnsealError::UnknownKey(head.key_id)) };
        let is_its_attempt = head.attempt == 0 || head.attempt == place.attempt;
        if head.kind != place.kind as u8 || head.flags & !COMPRESSED_FLAG != 0 || !is_its_attempt {
            return Err(UnsealError::Altered);
        }
        let nonce: [u8; NONCE_LEN] = bytes.split_to(NONCE_LEN).as_ref().try_into().expect("its length was checked");
        let tag: [u8; TAG_LEN] =
            bytes.split_off(bytes.len() - TAG_LEN).as_ref().try_into().expect("its length was checked");
        let mut content = BytesMut::from(&bytes[..]);
        cipher
            .decrypt_inout_detached(
                &XNonce::from(nonce),
                &place.encode_with(&head.raw_bytes),
                (&mut content[..]).into(),
                &tag.into(),
            )
            .map_err(|_| UnsealError::Altered)?;
        let length = head.length as usize;
        let opened: Bytes = match head.flags & COMPRESSED_FLAG {
            0 => content.freeze(),
            _ => compression::decompress(&content, length).ok_or(UnsealError::Altered)?.into(),
        };
        if opened.len() == length { Ok(opened) } else { Err(UnsealError::Altered) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::seal::{SealKey, SealOptions};

    const FINGERPRINT: Fingerprint = Fingerprint { version: 1, digest: [5; 32] };

    fn key(id: &str) -> SealKey {
        let mut bytes = [0x40; 32];
        bytes[..id.len()].copy_from_slice(id.as_bytes());
        SealKey::new(id, bytes).unwrap()
    }

    fn sealing(first: &str, others: &[&str], rules: SealOptions) -> Sealer {
        Sealer::new(key(first), others.iter().map(|id| key(id)).collect(), &[9; 32], rules)
    }

    fn place(kind: SealedKind, at: &Address) -> AssociatedData<'_> {
        AssociatedData { kind, address: at, fingerprint: &FINGERPRINT, attempt: 3, failed: false }
    }

    const AT: Address = Address([4; 32]);

    #[test]
    fn what_is_sealed_shows_nothing_and_is_never_the_same() {
        let sealing = sealing("2026-11", &[], SealOptions::default());
        let place = place(SealedKind::Record, &AT);
        let (one, other) = (sealing.seal(&place, b"planted content"), sealing.seal(&place, b"planted content"));
        assert_ne!(one, other);
        assert!(!one.windows(7).any(|part| part == b"planted"));
        assert_eq!(sealing_key_id(&one).as_deref(), Some("2026-11"));
        assert_eq!(sealing_key_id(&Bytes::from_static(b"ibid-sl")), None);
        assert_eq!(sealing_key_id(&Bytes::from_static(b"\x01 plain")), None);
    }

    #[test]
    fn every_flipped_bit_is_noticed_and_every_cut() {
        for rules in [SealOptions::default(), SealOptions { compress: false, ..SealOptions::default() }] {
            let sealing = sealing("2026-11", &["2026-10"], rules);
            let place = place(SealedKind::Record, &AT);
            let sealed = sealing.seal(&place, &[b'x'; 200]);
            for bit in 0..sealed.len() * 8 {
                let mut flipped = sealed.to_vec();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(sealing.open(&place, flipped.into()).is_err(), "bit {bit}");
            }
            for cut in 0..sealed.len() {
                assert!(sealing.open(&place, sealed.slice(..cut)).is_err(), "cut at {cut}");
            }
            let longer = [&sealed[..], b"x"].concat();
            assert_eq!(sealing.open(&place, longer.into()), Err(UnsealError::Altered));
        }
    }

    /// Encrypted by format version 1, compressed and not. These must decrypt forever.
    #[test]
    fn version_1_stays_openable() {
        let sealing = sealing("2026-11", &[], SealOptions::default());
        let place = place(SealedKind::Record, &AT);
        for (sealed, plain) in [
            (&include_bytes!("../../tests/fixtures/sealed-v1.bin")[..], &b"an answer"[..]),
            (include_bytes!("../../tests/fixtures/sealed-v1-compressed.bin"), &[b'x'; 200]),
        ] {
            assert_eq!(sealing.open(&place, Bytes::from_static(sealed)).unwrap(), plain);
        }
    }

    #[test]
    fn it_opens_nowhere_else() {
        let sealing = sealing("k", &[], SealOptions::default());
        let here = place(SealedKind::Record, &AT);
        let sealed = sealing.seal(&here, b"an answer");
        assert_eq!(sealing.open(&here, sealed.clone()).unwrap(), &b"an answer"[..]);
        let other = Fingerprint { version: 2, ..FINGERPRINT };
        for (what, place) in [
            ("address", AssociatedData { address: &Address([5; 32]), ..here }),
            ("fingerprint", AssociatedData { fingerprint: &Fingerprint::NONE, ..here }),
            ("fingerprint's version", AssociatedData { fingerprint: &other, ..here }),
            ("attempt", AssociatedData { attempt: 4, ..here }),
            ("no attempt", AssociatedData { attempt: 0, ..here }),
            ("state", AssociatedData { failed: true, ..here }),
            ("kind", AssociatedData { kind: SealedKind::Label, ..here }),
        ] {
            assert_eq!(sealing.open(&place, sealed.clone()), Err(UnsealError::Altered), "{what}");
        }
        let unseen = sealing.seal(&AssociatedData { attempt: 0, ..here }, b"an answer");
        assert!(sealing.open(&here, unseen).is_ok(), "of a claim whose attempt nobody saw");
    }

    #[test]
    fn the_first_key_seals_and_all_open() {
        let (old, both, new) = (
            sealing("old", &[], SealOptions::default()),
            sealing("new", &["old"], SealOptions::default()),
            sealing("new", &[], SealOptions::default()),
        );
        let place = place(SealedKind::Record, &AT);
        let (first, second) = (old.seal(&place, b"1"), both.seal(&place, b"2"));
        assert_eq!(sealing_key_id(&second).as_deref(), Some("new"));
        assert_eq!(both.open(&place, first.clone()).unwrap(), &b"1"[..]);
        assert_eq!(new.open(&place, second).unwrap(), &b"2"[..]);
        assert_eq!(new.open(&place, first.clone()), Err(UnsealError::UnknownKey("old".into())));
        new.rekey(key("new"), vec![key("old")], SealOptions::default());
        assert_eq!(new.open(&place, first).unwrap(), &b"1"[..]);
    }

    #[test]
    fn what_is_in_clear_is_believed_only_if_told_so() {
        let place = place(SealedKind::Record, &AT);
        let plain = Bytes::from_static(b"planted");
        let strict = sealing("k", &[], SealOptions::default());
        assert_eq!(strict.open(&place, plain.clone()), Err(UnsealError::NotSealed));
        let lenient = sealing("k", &[], SealOptions { accept_plain: true, ..SealOptions::default() });
        assert_eq!(lenient.open(&place, plain.clone()).unwrap(), plain);
        // Bytes with the magic prefix must decrypt.
        let claims = Bytes::from_static(b"ibid-sl\x01planted");
        assert_eq!(lenient.open(&place, claims), Err(UnsealError::Altered));
        assert_eq!(lenient.open(&place, Bytes::from_static(b"ibid-sl\x02")), Err(UnsealError::UnknownVersion(2)));
    }

    proptest! {
        #[test]
        fn what_was_sealed_opens(
            plain in prop::collection::vec(any::<u8>(), 0..5000), repeated in 1_usize..20, compress: bool, at: [u8; 32],
        ) {
            let plain = plain.repeat(repeated);
            let sealing = sealing("k", &[], SealOptions { compress, accept_plain: false });
            let at = Address(at);
            for kind in [SealedKind::Record, SealedKind::Label, SealedKind::Journal] {
                let place = place(kind, &at);
                prop_assert_eq!(&sealing.open(&place, sealing.seal(&place, &plain)).unwrap(), &plain);
            }
        }

        #[test]
        fn noise_never_opens(noise in prop::collection::vec(any::<u8>(), 0..400), headed: bool) {
            let sealing = sealing("k", &[], SealOptions::default());
            let mut bytes = Vec::new();
            if headed {
                bytes.extend_from_slice(b"ibid-sl\x01\x01\x00\x03\0\0\0\x09\0\0\0\x01k");
            }
            bytes.extend(noise);
            prop_assert!(sealing.open(&place(SealedKind::Record, &AT), bytes.into()).is_err());
        }
    }
}
