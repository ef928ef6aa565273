//! Replies of Redis: any bytes are read or refused; what was read is not read differently, or at all, if its end is missing.

use ibid_stores::redis::reply_length;

/// See the module.
pub fn check(bytes: &[u8]) {
    let Ok(Some(length)) = reply_length(bytes) else { return };
    assert!(length <= bytes.len() && length > 0);
    assert_eq!(reply_length(&bytes[..length]), Ok(Some(length)), "what follows does not matter");
    for cut in 0..length {
        assert_eq!(reply_length(&bytes[..cut]), Ok(None), "cut at {cut}");
    }
}
