//! The label: what operators see of a request besides its tags. Opaque to stores.

use bytes::Bytes;

use crate::{
    fingerprint::PartDigests,
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
    /// Digests of the request's parts. `None` if nothing was compared, and in old labels.
    pub parts: Option<PartDigests>,
    /// The whole key, if [`label_key`](crate::http::IbidBuilder::label_key) is on; else empty.
    pub key: String,
}

/// The key is only stored together with digests.
pub(crate) fn encode(
    requested_at_ms: u64, parts: [&[u8]; 4], digests: Option<&PartDigests>, key: Option<&str>,
) -> Bytes {
    let parts = parts.map(|part| &part[..part.len().min(MAX_LABEL_PART_BYTES)]);
    let ends_with = digests.map_or(0, size_of_val);
    let mut out = Vec::with_capacity(9 + parts.iter().map(|part| part.len() + 4).sum::<usize>() + ends_with);
    out.push(LABEL_VERSION);
    out.extend_from_slice(&requested_at_ms.to_le_bytes());
    for part in parts {
        wire::put_framed(&mut out, part);
    }
    // At the end, which older readers ignore.
    for digest in digests.into_iter().flat_map(|digests| digests.0) {
        out.extend_from_slice(&digest.to_le_bytes());
    }
    if let Some(key) = key.filter(|_| digests.is_some()) {
        wire::put_framed(&mut out, &key.as_bytes()[..key.floor_char_boundary(MAX_LABEL_PART_BYTES)]);
    }
    out.into()
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
        let mut digests = || -> Option<PartDigests> {
            let mut all = [0; PartDigests::NAMES.len()];
            for digest in &mut all {
                *digest = reader.u32()?;
            }
            Some(PartDigests(all))
        };
        let parts = digests();
        let key = reader.framed().map(|key| String::from_utf8_lossy(&key).into_owned()).unwrap_or_default();
        Some(Self { requested_at_ms, method, path, peer, user_agent, parts, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_comes_back_and_is_bounded() {
        let digests = PartDigests([1, 2, 3, 4, u32::MAX]);
        let told: [&[u8]; 4] = [b"POST", b"/pay", b"127.0.0.1", &[b'x'; 2000]];
        let label = encode(7, told, Some(&digests), None);
        let text = LabelText::decode(&label).unwrap();
        assert_eq!((text.requested_at_ms, text.method.as_str(), text.path.as_str()), (7, "POST", "/pay"));
        assert_eq!(text.user_agent.len(), MAX_LABEL_PART_BYTES);
        assert_eq!(text.parts, Some(digests));
        let old = LabelText::decode(&encode(7, told, None, None)).unwrap();
        assert_eq!(old, LabelText { parts: None, ..text.clone() });
        let with_key = LabelText::decode(&encode(7, told, Some(&digests), Some("order-1841"))).unwrap();
        assert_eq!(with_key, LabelText { key: "order-1841".into(), ..text });
        assert_eq!(LabelText::decode(&Bytes::from_static(b"\x09")), None);
    }
}
