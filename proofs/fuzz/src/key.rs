//! The key parser: whatever the header holds, a key that comes out is visible ASCII, and is the same key however it is
//! written.

use ibid::key::extract_key;

/// See the module.
pub fn check(value: &[u8]) {
    let key = match extract_key(value) {
        Ok(key) => key,
        Err(why) => return assert!(!why.to_string().is_empty()),
    };
    assert!(!key.is_empty() && key.bytes().all(|byte| (0x21..=0x7e).contains(&byte)), "{key:?}");
    let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
    assert_eq!(extract_key(quoted.as_bytes()).as_ref(), Ok(&key));
    if !key.contains(['"', ',', ';']) {
        assert_eq!(extract_key(format!(" {key}\t").as_bytes()), Ok(key));
    }
}
