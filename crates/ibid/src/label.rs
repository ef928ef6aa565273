//! The label: what operators see of a request besides its tags. Opaque to stores.

use bytes::Bytes;

use crate::{
    fingerprint::PartDigests,
    store::Address,
    wire::{self, ByteReader},
};

const LABEL_VERSION: u8 = 1;
/// The maximum length of each part in bytes. Longer parts are cut, so that labels cannot fill the store.
const MAX_LABEL_PART_BYTES: usize = 512;

/// Who sent the request, and when.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LabelText {
    /// When the request arrived, in milliseconds since the Unix epoch.
    pub requested_at_ms: u64,
    /// The request's method.
    pub method: String,
    /// The request's path, without its query.
    pub path: String,
    /// The address of the sender.
    pub peer: String,
    /// The User-Agent header as sent.
    pub user_agent: String,
    /// Digests of the request's parts. `None` if nothing was compared.
    pub parts: Option<PartDigests>,
    /// The whole key, if [`label_key`](crate::http::IbidBuilder::label_key) is on; else empty.
    pub key: String,
    /// The address of the request's intent, if the route has a [guard](crate::policy::IntentGuard).
    pub intent: Option<Address>,
}

const HAS_DIGESTS: u8 = 1;
const HAS_KEY: u8 = 2;
const HAS_INTENT: u8 = 4;

/// Appends the encoded label to `out`.
pub(crate) fn write(
    out: &mut Vec<u8>, requested_at_ms: u64, parts: [&[u8]; 4], digests: Option<&PartDigests>, key: Option<&str>,
    intent: Option<&Address>,
) {
    let key = key.map_or(&[][..], |key| &key.as_bytes()[..key.floor_char_boundary(MAX_LABEL_PART_BYTES)]);
    out.push(LABEL_VERSION);
    out.extend_from_slice(&requested_at_ms.to_le_bytes());
    for part in parts {
        wire::put_framed(out, &part[..part.len().min(MAX_LABEL_PART_BYTES)]);
    }
    let has = [(HAS_DIGESTS, digests.is_some()), (HAS_KEY, !key.is_empty()), (HAS_INTENT, intent.is_some())];
    out.push(has.iter().filter(|(_, is_there)| *is_there).map(|(flag, _)| flag).sum());
    for digest in digests.into_iter().flat_map(|digests| digests.0) {
        out.extend_from_slice(&digest.to_le_bytes());
    }
    if !key.is_empty() {
        wire::put_framed(out, key);
    }
    out.extend_from_slice(intent.map_or(&[], |intent| &intent.0));
}

impl LabelText {
    /// Decodes a label. Returns `None` if it has another version or is sealed.
    pub fn decode(label: &Bytes) -> Option<Self> {
        let mut reader = ByteReader(label.clone());
        if reader.u8()? != LABEL_VERSION {
            return None;
        }
        let requested_at_ms = reader.u64()?;
        let mut text = || Some(String::from_utf8_lossy(&reader.framed()?).into_owned());
        let [method, path, peer, user_agent] = [text()?, text()?, text()?, text()?];
        let has = reader.u8()?;
        let mut parts = None;
        if has & HAS_DIGESTS != 0 {
            let PartDigests(all) = parts.insert(PartDigests::default());
            for digest in all {
                *digest = reader.u32()?;
            }
        }
        let key = if has & HAS_KEY != 0 { reader.framed()? } else { Bytes::new() };
        let key = String::from_utf8_lossy(&key).into_owned();
        let intent = if has & HAS_INTENT != 0 { Some(Address(reader.array()?)) } else { None };
        Some(Self { requested_at_ms, method, path, peer, user_agent, parts, key, intent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_comes_back_and_is_bounded() {
        let encode = |ms, told, digests: Option<&PartDigests>, key: Option<&str>, intent: Option<&Address>| {
            let mut label = Vec::new();
            write(&mut label, ms, told, digests, key, intent);
            Bytes::from(label)
        };
        let digests = PartDigests([1, 2, 3, 4, u32::MAX]);
        let told: [&[u8]; 4] = [b"POST", b"/pay", b"127.0.0.1", &[b'x'; 2000]];
        let label = encode(7, told, Some(&digests), None, None);
        let text = LabelText::decode(&label).unwrap();
        assert_eq!((text.requested_at_ms, text.method.as_str(), text.path.as_str()), (7, "POST", "/pay"));
        assert_eq!(text.user_agent.len(), MAX_LABEL_PART_BYTES);
        assert_eq!(text.parts, Some(digests));
        let plain = LabelText::decode(&encode(7, told, None, None, None)).unwrap();
        assert_eq!(plain, LabelText { parts: None, ..text.clone() });
        let intent = Address([9; 32]);
        let all = LabelText::decode(&encode(7, told, Some(&digests), Some("order-1841"), Some(&intent))).unwrap();
        assert_eq!(all, LabelText { key: "order-1841".into(), intent: Some(intent), ..text });
        assert_eq!(LabelText::decode(&Bytes::from_static(b"\x09")), None);
    }
}
