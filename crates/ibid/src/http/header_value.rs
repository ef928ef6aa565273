//! Header values that differ per request, such as ids and numbers. They share the allocations of a buffer per thread.

use std::cell::RefCell;

use bytes::BytesMut;
use http::HeaderValue;

/// The size of a buffer in bytes. A value keeps its whole buffer alive.
const BUFFER_BYTES: usize = 1024;

thread_local!(static BUFFER: RefCell<BytesMut> = RefCell::default());

/// Creates a header value from bytes that are known to be valid in one.
pub(super) fn from_bytes(value: &[u8]) -> HeaderValue {
    let value = BUFFER.with_borrow_mut(|buffer| {
        if buffer.capacity() < value.len() {
            *buffer = BytesMut::with_capacity(BUFFER_BYTES.max(value.len()));
        }
        buffer.extend_from_slice(value);
        buffer.split().freeze()
    });
    HeaderValue::from_maybe_shared(value).expect("valid in a header")
}

/// Creates a header value of decimal digits. One digit, which most runs have as their number, needs no buffer.
pub(super) fn from_number(mut number: u64) -> HeaderValue {
    const DIGITS: &str = "0123456789";
    if let Some(digit) = DIGITS.get(number as usize..=number as usize) {
        return HeaderValue::from_static(digit);
    }
    let mut digits = [0; 20];
    let mut start = digits.len();
    while number > 0 {
        let two = (number % 100) as u8;
        number /= 100;
        start -= 2;
        digits[start..start + 2].copy_from_slice(&[b'0' + two / 10, b'0' + two % 10]);
    }
    start += usize::from(digits[start] == b'0');
    from_bytes(&digits[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_bytes_while_the_buffer_is_used_on() {
        let numbers = [0, 7, 10, 99, 1_000_000, u64::MAX];
        let values: Vec<_> = (0..500).map(|at| (numbers[at % 6], from_number(numbers[at % 6]))).collect();
        for (number, value) in values {
            assert_eq!(value, number.to_string());
        }
        assert_eq!(from_bytes(&[b'x'; 3000]).len(), 3000);
        assert_eq!(from_bytes(b""), "");
    }
}
