//! Replies of upstreams over HTTP/1.1: any bytes are read or refused, and the same bytes give the same in one piece and byte by
//! byte.

use ibid_gateway::upstream::decode_reply;

/// See the module.
pub fn check(bytes: &[u8]) {
    let whole = decode_reply(bytes, bytes.len());
    let pieces = decode_reply(bytes, 1);
    assert_eq!(whole, pieces);
}
