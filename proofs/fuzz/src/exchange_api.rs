//! Messages of the exchange API: any bytes are read or refused with a problem that says something.

/// See the module.
pub fn check(body: &[u8]) {
    if let Err(why) = ibid_gateway::api::parse_any_message(body) {
        assert!(!why.is_empty());
    }
}
