//! The server's side of the PostgreSQL protocol: reads messages, writes replies.

use bytes::Bytes;

/// A value of a column or parameter, in binary form; `None` is NULL.
pub type SqlValue = Option<Bytes>;

/// The types that the client uses, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[expect(missing_docs)]
pub enum SqlType {
    Bool = 16,
    Bytea = 17,
    Int8 = 20,
    Int2 = 21,
    Int4 = 23,
    Text = 25,
    TextArray = 1009,
}

/// Reads a message or an array.
#[derive(Debug)]
pub struct MessageReader(pub Bytes);

impl MessageReader {
    /// The next bytes.
    pub fn take(&mut self, count: usize) -> Bytes {
        self.0.split_to(count)
    }

    /// A number of four bytes.
    pub fn int(&mut self) -> i32 {
        i32::from_be_bytes(self.take(4)[..].try_into().expect("four bytes"))
    }

    /// A number of two bytes.
    pub fn short(&mut self) -> i16 {
        i16::from_be_bytes(self.take(2)[..].try_into().expect("two bytes"))
    }

    /// A text that ends with a zero.
    pub fn text(&mut self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).expect("a text ends with a zero");
        let text = String::from_utf8_lossy(&self.take(end)).into_owned();
        self.take(1);
        text
    }

    /// A length and so many bytes.
    pub fn value(&mut self) -> SqlValue {
        let length = self.int();
        (length >= 0).then(|| self.take(length as usize))
    }
}

/// The elements of an array parameter.
pub fn array_elements(array: &SqlValue) -> Vec<SqlValue> {
    let mut reader = MessageReader(array.clone().expect("an array"));
    let dimensions = reader.int();
    reader.take(8);
    if dimensions == 0 {
        return Vec::new();
    }
    let count = reader.int();
    reader.take(4);
    (0..count).map(|_| reader.value()).collect()
}

/// Takes the first message from the buffer, if it has arrived in full: its kind, or 0 for the first, and its contents.
pub fn take_message(buffer: &mut Vec<u8>, is_first: bool) -> Option<(u8, Bytes)> {
    let start = usize::from(!is_first);
    let length = u32::from_be_bytes(buffer.get(start..start + 4)?.try_into().ok()?) as usize;
    let message = Bytes::copy_from_slice(buffer.get(start + 4..start + length)?);
    let kind = if is_first { 0 } else { buffer[0] };
    buffer.drain(..start + length);
    Some((kind, message))
}

/// Appends a message.
pub fn put_message(buffer: &mut Vec<u8>, kind: u8, parts: &[&[u8]]) {
    buffer.push(kind);
    let length = 4 + parts.iter().map(|part| part.len()).sum::<usize>();
    buffer.extend_from_slice(&(length as u32).to_be_bytes());
    parts.iter().for_each(|part| buffer.extend_from_slice(part));
}

/// Appends the description of a result's columns.
pub fn put_columns(buffer: &mut Vec<u8>, columns: &[SqlType]) {
    let mut description = (columns.len() as i16).to_be_bytes().to_vec();
    for column in columns {
        // No name and no table.
        description.extend_from_slice(&[0; 7]);
        description.extend_from_slice(&(*column as u32).to_be_bytes());
        // Length, modifier, and that it is binary.
        description.extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 1]);
    }
    put_message(buffer, b'T', &[&description]);
}

/// Appends a row.
pub fn put_row(buffer: &mut Vec<u8>, row: &[SqlValue]) {
    let mut data = (row.len() as i16).to_be_bytes().to_vec();
    for value in row {
        let length = value.as_ref().map_or(-1, |value| value.len() as i32);
        data.extend_from_slice(&length.to_be_bytes());
        data.extend_from_slice(value.as_deref().unwrap_or_default());
    }
    put_message(buffer, b'D', &[&data]);
}

/// Appends an error that rolled a statement back.
pub fn put_error(buffer: &mut Vec<u8>, code: &str) {
    let text = format!("SERROR\0VERROR\0C{code}\0Msimulated\0\0");
    put_message(buffer, b'E', &[text.as_bytes()]);
}

/// A value of two bytes.
pub fn int2(number: i16) -> SqlValue {
    Some(Bytes::copy_from_slice(&number.to_be_bytes()))
}

/// A value of four bytes.
pub fn int4(number: i32) -> SqlValue {
    Some(Bytes::copy_from_slice(&number.to_be_bytes()))
}

/// A value of eight bytes.
pub fn int8(number: i64) -> SqlValue {
    Some(Bytes::copy_from_slice(&number.to_be_bytes()))
}

/// A truth value.
pub fn bool(is_true: bool) -> SqlValue {
    Some(Bytes::copy_from_slice(&[u8::from(is_true)]))
}

/// The number in a value of any length.
pub fn number(value: &SqlValue) -> i64 {
    let bytes = value.as_ref().expect("a number");
    let first = if bytes[0] & 0x80 == 0 { 0 } else { -1 };
    bytes.iter().fold(first, |number, byte| number << 8 | i64::from(*byte))
}
