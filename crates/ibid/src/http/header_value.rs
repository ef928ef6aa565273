//! Header values that differ per request, such as ids and numbers.

use http::HeaderValue;

use crate::thread_buffer;

/// Creates a header value from bytes that are known to be valid in one.
pub(super) fn from_bytes(value: &[u8]) -> HeaderValue {
    HeaderValue::from_maybe_shared(thread_buffer::copy(value)).expect("valid in a header")
}

/// Creates a header value of decimal digits. One digit, which most runs have as their number, needs no buffer.
pub(super) fn from_number(number: u64) -> HeaderValue {
    const DIGITS: &str = "0123456789";
    const EIGHT_DIGITS: u64 = 100_000_000;
    if let Some(digit) = DIGITS.get(number as usize..=number as usize) {
        return HeaderValue::from_static(digit);
    }
    let (high, low) = (number / EIGHT_DIGITS, number % EIGHT_DIGITS);
    let mut digits = [0; 24];
    digits[..8].copy_from_slice(&eight_digits(high / EIGHT_DIGITS));
    digits[8..16].copy_from_slice(&eight_digits(high % EIGHT_DIGITS));
    digits[16..].copy_from_slice(&eight_digits(low));
    let digits = if high == 0 { &digits[16..] } else { &digits[8 * usize::from(high < EIGHT_DIGITS)..] };
    let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    from_bytes(&digits[zeros..])
}

/// The decimal digits of a number below 100,000,000, all at once.
fn eight_digits(number: u64) -> [u8; 8] {
    // The first digits are in the low bits. `x * 10486 >> 20` is `x / 100` up to 9,999, and `x * 103 >> 10` is `x / 10` up to 99.
    let fours = (number / 10_000) | ((number % 10_000) << 32);
    let hundreds = ((fours * 10_486) >> 20) & 0x0000_007f_0000_007f;
    let twos = hundreds | ((fours - hundreds * 100) << 16);
    let tens = ((twos * 103) >> 10) & 0x000f_000f_000f_000f;
    let ones = tens | ((twos - tens * 10) << 8);
    (ones | 0x3030_3030_3030_3030).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_bytes_while_the_buffer_is_used_on() {
        let numbers = [0, 7, 10, 99, 1_000_000, 99_999_999, 100_000_000, 1_234_567_890_123_456, u64::MAX];
        let values: Vec<_> = numbers.iter().cycle().take(500).map(|number| (number, from_number(*number))).collect();
        for (number, value) in values {
            assert_eq!(value, number.to_string());
        }
        for number in 0..10_000 {
            assert_eq!(from_number(number), number.to_string());
        }
        assert_eq!(from_bytes(&[b'x'; 3000]).len(), 3000);
        assert_eq!(from_bytes(b""), "");
    }
}
