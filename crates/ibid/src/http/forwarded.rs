use std::net::IpAddr;

use http::{HeaderMap, HeaderName, header};

use crate::scope::TrustedProxies;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Finds the client's address: the last address in the chain that is not a trusted proxy. The chain is
/// `X-Forwarded-For`, or without it `Forwarded` (RFC 7239). Each proxy appends the address that it saw, so the chain is
/// walked from its end while its writers are trusted. An invalid entry ends it.
pub(super) fn client_address(headers: &HeaderMap, peer: Option<IpAddr>, trusted: &TrustedProxies) -> Option<IpAddr> {
    if !trusted.trusts(peer) {
        return peer;
    }
    let is_x = headers.contains_key(FORWARDED_FOR);
    let lines = headers.get_all(if is_x { FORWARDED_FOR } else { header::FORWARDED });
    let mut client = peer;
    for line in lines.iter().rev() {
        for entry in line.to_str().unwrap_or_default().rsplit(',') {
            let named = if is_x { Some(entry.trim()) } else { forwarded_for(entry) };
            let Some(address) = named.and_then(parse_node_address) else { return client };
            client = Some(address.to_canonical());
            if !trusted.trusts(client) {
                return client;
            }
        }
    }
    client
}

/// The node in an element of `Forwarded`.
fn forwarded_for(element: &str) -> Option<&str> {
    element.split(';').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        name.trim().eq_ignore_ascii_case("for").then(|| value.trim().trim_matches('"'))
    })
}

/// Parses an address with or without a port: `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]:80`.
fn parse_node_address(node: &str) -> Option<IpAddr> {
    if let Ok(address) = node.parse() {
        return Some(address);
    }
    match node.strip_prefix('[') {
        Some(rest) => rest.split_once(']').and_then(|(address, _)| address.parse().ok()),
        None => node.rsplit_once(':').and_then(|(address, _)| address.parse().ok()),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn client(lines: &[(&'static str, &'static str)], peer: &str) -> String {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        let trusted = TrustedProxies::parse(["127.0.0.0/8", "10.0.0.0/8"]).expect("networks");
        client_address(&headers, Some(peer.parse().expect("an address")), &trusted).expect("one").to_string()
    }

    #[test]
    fn the_chain_is_walked_from_its_end_past_trusted_proxies() {
        const X: &str = "x-forwarded-for";
        for (lines, expected) in [
            (&[][..], "127.0.0.1"),
            (&[(X, "203.0.113.7")], "203.0.113.7"),
            (&[(X, "198.51.100.9, 203.0.113.7, 10.0.0.3")], "203.0.113.7"),
            (&[(X, "198.51.100.9"), (X, "203.0.113.7"), (X, "10.0.0.3, 10.0.0.4")], "203.0.113.7"),
            (&[(X, "10.0.0.2, 10.0.0.3")], "10.0.0.2"),
            (&[(X, "203.0.113.7, unknown, 10.0.0.3")], "10.0.0.3"),
            (&[(X, "203.0.113.7:4711")], "203.0.113.7"),
            (&[(X, "[2001:db8::1]:4711")], "2001:db8::1"),
            (&[("forwarded", "for=198.51.100.9, for=203.0.113.7;proto=https;by=10.0.0.3")], "203.0.113.7"),
            (&[("forwarded", "For=\"[2001:db8:cafe::17]:4711\"")], "2001:db8:cafe::17"),
            (&[("forwarded", "for=203.0.113.7, for=_hidden")], "127.0.0.1"),
            (&[("forwarded", "for=198.51.100.9"), (X, "203.0.113.7")], "203.0.113.7"),
        ] {
            assert_eq!(client(lines, "127.0.0.1"), expected, "{lines:?}");
        }
        assert_eq!(client(&[(X, "203.0.113.7")], "198.51.100.1"), "198.51.100.1", "who is not trusted is not believed");
    }
}
