//! The part of the protobuf wire format that descriptors and error details need.

#[derive(Debug, Default)]
pub(super) struct ProtoWriter(Vec<u8>);

impl ProtoWriter {
    /// Writes a number, unless it is zero.
    pub(super) fn number(mut self, field: u32, value: u64) -> Self {
        if value != 0 {
            self.varint(u64::from(field) << 3);
            self.varint(value);
        }
        self
    }

    /// Writes a text, unless it is empty.
    pub(super) fn text(self, field: u32, text: &str) -> Self {
        if text.is_empty() { self } else { self.bytes(field, text.as_bytes()) }
    }

    /// Writes bytes or a message, even if empty.
    pub(super) fn bytes(mut self, field: u32, bytes: &[u8]) -> Self {
        self.varint(u64::from(field) << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtoValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A wire type that is not read here.
    Other,
}

/// Iterates over the fields of a message. An item is `None` if the bytes are not a message.
pub(super) struct ProtoFields<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for ProtoFields<'a> {
    type Item = Option<(u32, ProtoValue<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}

impl<'a> ProtoFields<'a> {
    fn field(&mut self) -> Option<(u32, ProtoValue<'a>)> {
        let key = self.varint()?;
        let field = u32::try_from(key >> 3).ok().filter(|field| (1..1 << 29).contains(field))?;
        let value = match key & 7 {
            0 => ProtoValue::Number(self.varint()?),
            1 => self.take(8).map(|_| ProtoValue::Other)?,
            2 => {
                let length = self.varint()?;
                ProtoValue::Bytes(self.take(usize::try_from(length).ok()?)?)
            }
            5 => self.take(4).map(|_| ProtoValue::Other)?,
            // Groups do not occur in the messages that are read here.
            _ => return None,
        };
        Some((field, value))
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for at in 0..10 {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            if at == 9 && *byte > 1 {
                return None;
            }
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let bytes =
            ProtoWriter::default().number(1, 300).text(2, "").bytes(3, b"").text(16, "ab").number(4, 0).finish();
        assert_eq!(bytes, [0x08, 0xac, 0x02, 0x1a, 0x00, 0x82, 0x01, 0x02, b'a', b'b']);
        let fields: Option<Vec<_>> = ProtoFields(&bytes).collect();
        assert_eq!(
            fields.unwrap(),
            [(1, ProtoValue::Number(300)), (3, ProtoValue::Bytes(b"")), (16, ProtoValue::Bytes(b"ab"))]
        );
        let most = ProtoWriter::default().number(1, u64::MAX).finish();
        assert_eq!(ProtoFields(&most).next(), Some(Some((1, ProtoValue::Number(u64::MAX)))));
    }

    #[test]
    fn bytes_that_are_no_message_end_it_without_a_panic() {
        let bytes = ProtoWriter::default().number(1, 300).text(2, "abc").finish();
        for cut in [1, 2, 4, 5, 7] {
            assert_eq!(ProtoFields(&bytes[..cut]).last(), Some(None), "{cut}");
        }
        for wrong in [&[0x0b][..], &[0x00, 0x01], &[0x08, 0xff], &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f], &[0xff; 12]] {
            assert_eq!(ProtoFields(wrong).last(), Some(None), "{wrong:?}");
        }
        assert_eq!(ProtoFields(&[0x09, 1, 2, 3, 4, 5, 6, 7, 8, 0x15, 1, 2, 3, 4]).flatten().count(), 2);
    }
}
