//! The format of sealed bytes.
//!
//! ```text
//! "ibid-sl" │ version u8 │ kind u8 │ flags u8 │ attempt u32 │ length u32 │ key id: length u8, bytes
//! nonce [24] │ XChaCha20-Poly1305: ciphertext, tag [16]
//! ```
//! Numbers are little-endian. `length` is that of the content before it was compressed. `attempt` is that of the run whose
//! record it is; 0 in a record of a claim whose answer was lost, and in all other kinds.
//!
//! Associated data: all that stands before the nonce; then where it belongs: the address; the fingerprint's version and
//! digest, and whether it is a failure. So bytes that are moved, or whose attempt or state is changed, do not open.

use std::str;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use chacha20poly1305::{AeadInOut as _, XNonce};
use ibid::store::{Address, Fingerprint};

use super::{
    keys::{LONGEST_ID, Sealing, is_id},
    squeeze,
};

const MAGIC: [u8; 7] = *b"ibid-sl";
const VERSION: u8 = 1;
const SQUEEZED: u8 = 1;
const NONCE: usize = 24;
const TAG: usize = 16;

/// What sealed bytes are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Record,
    Label,
    Journal,
}

/// Where sealed bytes belong.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) kind: Kind,
    pub(super) at: &'a Address,
    /// As the request has it, not as the store does.
    pub(super) fingerprint: &'a Fingerprint,
    /// 0: not known.
    pub(super) attempt: u32,
    pub(super) failed: bool,
}

/// Why bytes do not open.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unopened {
    /// They are in clear.
    #[error("is not sealed, and seal.accept_plain is off")]
    Plain,
    /// Sealed in a form that is not known.
    #[error("is sealed in format version {0}; this version of ibid opens up to {VERSION}")]
    Version(u8),
    /// Sealed with a key that is not there.
    #[error("is sealed with the key {0:?}, which seal.keys does not have")]
    Key(String),
    /// Anything else: there is no telling what was done to them.
    #[error("was altered, or belongs to another key, attempt or state")]
    Altered,
}

/// What sealed bytes say about themselves. Nothing of it is to be trusted before they are opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    kind: u8,
    flags: u8,
    attempt: u32,
    length: u32,
    pub(super) id: String,
    /// Its own.
    bytes: Bytes,
}

/// The name of the key that bytes are sealed with. `None` if they are not sealed.
pub fn sealed_with(bytes: &Bytes) -> Option<String> {
    Head::take(&mut bytes.clone()).ok().flatten().map(|head| head.id)
}

impl Head {
    /// Takes it off the front of sealed bytes; takes nothing off others.
    pub(super) fn take(bytes: &mut Bytes) -> Result<Option<Self>, Unopened> {
        if !bytes.starts_with(&MAGIC) {
            return Ok(None);
        }
        let all = bytes.clone();
        bytes.advance(MAGIC.len());
        let version = bytes.try_get_u8().map_err(|_| Unopened::Altered)?;
        if version != VERSION {
            return Err(Unopened::Version(version));
        }
        Self::rest(&all, bytes).ok_or(Unopened::Altered).map(Some)
    }

    fn rest(all: &Bytes, bytes: &mut Bytes) -> Option<Self> {
        let (kind, flags) = (bytes.try_get_u8().ok()?, bytes.try_get_u8().ok()?);
        let (attempt, length) = (bytes.try_get_u32_le().ok()?, bytes.try_get_u32_le().ok()?);
        let id_length = usize::from(bytes.try_get_u8().ok()?);
        if bytes.len() < id_length + NONCE + TAG {
            return None;
        }
        let id = bytes.split_to(id_length);
        let id = str::from_utf8(&id).ok().filter(|id| is_id(id.as_bytes()))?.to_owned();
        Some(Self { kind, flags, attempt, length, id, bytes: all.slice(..all.len() - bytes.len()) })
    }
}

impl Place<'_> {
    /// What is sealed along, so that bytes open nowhere else.
    fn bind(&self, head: &[u8]) -> Vec<u8> {
        let mut bound = Vec::with_capacity(head.len() + 32 + 34);
        bound.extend_from_slice(head);
        bound.extend_from_slice(&self.at.0);
        bound.push(self.fingerprint.version);
        bound.extend_from_slice(&self.fingerprint.digest);
        bound.push(u8::from(self.failed));
        bound
    }
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Record => 1,
            Self::Label => 2,
            Self::Journal => 3,
        }
    }
}

impl Sealing {
    /// Seals with the first key.
    ///
    /// # Panics
    /// If the system has no source of randomness.
    pub(super) fn seal(&self, place: &Place<'_>, plain: &[u8]) -> Bytes {
        let with = self.with();
        let (id, cipher) = with.first();
        let squeeze = with.rules.compress && place.kind != Kind::Label;
        let squeezed = if squeeze { squeeze::squeezed(plain) } else { None };
        let content = squeezed.as_deref().unwrap_or(plain);
        let mut out = BytesMut::with_capacity(MAGIC.len() + 12 + LONGEST_ID + NONCE + content.len() + TAG);
        out.put_slice(&MAGIC);
        out.put_slice(&[VERSION, place.kind.code(), if squeezed.is_some() { SQUEEZED } else { 0 }]);
        out.put_u32_le(place.attempt);
        out.put_u32_le(u32::try_from(plain.len()).expect("bounded by max_response"));
        out.put_u8(id.len() as u8);
        out.put_slice(id.as_bytes());
        let bound = place.bind(&out);
        let mut nonce = [0; NONCE];
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

    /// What was sealed for this place.
    ///
    /// # Errors
    /// Why it does not open. Never answer from such bytes.
    pub(super) fn open(&self, place: &Place<'_>, mut bytes: Bytes) -> Result<Bytes, Unopened> {
        let with = self.with();
        let Some(head) = Head::take(&mut bytes)? else {
            return if with.rules.accept_plain { Ok(bytes) } else { Err(Unopened::Plain) };
        };
        let Some(cipher) = with.named(&head.id) else { return Err(Unopened::Key(head.id)) };
        let is_its_attempt = head.attempt == 0 || head.attempt == place.attempt;
        if head.kind != place.kind.code() || head.flags & !SQUEEZED != 0 || !is_its_attempt {
            return Err(Unopened::Altered);
        }
        let nonce: [u8; NONCE] = bytes.split_to(NONCE).as_ref().try_into().expect("its length was checked");
        let tag: [u8; TAG] = bytes.split_off(bytes.len() - TAG).as_ref().try_into().expect("its length was checked");
        let mut content = BytesMut::from(&bytes[..]);
        cipher
            .decrypt_inout_detached(
                &XNonce::from(nonce),
                &place.bind(&head.bytes),
                (&mut content[..]).into(),
                &tag.into(),
            )
            .map_err(|_| Unopened::Altered)?;
        let length = head.length as usize;
        let opened: Bytes = match head.flags & SQUEEZED {
            0 => content.freeze(),
            _ => squeeze::spread(&content, length).ok_or(Unopened::Altered)?.into(),
        };
        if opened.len() == length { Ok(opened) } else { Err(Unopened::Altered) }
    }
}
