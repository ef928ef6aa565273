//! Checks the host name of admin requests, against DNS rebinding.
//!
//! Any website can make its own name resolve to this machine, so that a browser sends requests here as if to the site's
//! own origin. Such a request still has the site's name in `Host`. So the API and the console accept only `localhost`,
//! loopback addresses, the address that the client connected to, and the names in `admin.hosts`. Health and metrics
//! accept any name, because probes and scrapers use various ones; they reveal nothing about requests.

use std::net::IpAddr;

use http::{Request, StatusCode, header, uri::Authority};

use super::AdminProblem;

pub(super) fn check_host<B>(
    request: &Request<B>, connected_to: IpAddr, allowed: &[String],
) -> Result<(), AdminProblem> {
    let mut names = request.headers().get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or_default());
    let named = (names.next(), names.next());
    let target = request.uri().authority().map(Authority::as_str);
    let is_ours = |name: &str| is_allowed_host(name, connected_to, allowed);
    if let ((Some(host), None), true) = (named, target.is_none_or(is_ours))
        && is_ours(host)
    {
        return Ok(());
    }
    let host = target.or(named.0).unwrap_or_default();
    let detail = format!(
        "this port does not answer to the host {host:?}; use localhost or the address that it listens on, or add the name \
         to admin.hosts in the gateway's configuration, which is taken up without a restart"
    );
    Err(AdminProblem::new(StatusCode::MISDIRECTED_REQUEST, detail))
}

fn is_allowed_host(host: &str, connected_to: IpAddr, allowed: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    if authority.as_str().contains('@') {
        return false;
    }
    let name = authority.host();
    let bare = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    if let Ok(address) = bare.parse::<IpAddr>() {
        let (address, connected_to) = (address.to_canonical(), connected_to.to_canonical());
        return address.is_loopback()
            || address == connected_to
            || allowed.iter().any(|allowed| allowed.parse() == Ok(address));
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || allowed.iter().any(|allowed| name.eq_ignore_ascii_case(allowed))
}

/// Whether a text is a valid entry of `admin.hosts`: a host name without a port, or an IP address.
pub(crate) fn is_host_name(text: &str) -> bool {
    let is_address = text.parse::<IpAddr>().is_ok();
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    is_address || (text.len() <= 253 && text.split('.').all(is_label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_and_configured_ones() {
        let listens: IpAddr = "192.0.2.7".parse().unwrap();
        let allowed = ["ibid.example.com".to_owned(), "198.51.100.1".to_owned()];
        for ours in [
            "localhost",
            "LocalHost:8081",
            "localhost.",
            "127.0.0.1:8081",
            "127.8.9.1",
            "[::1]:8081",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "192.0.2.7:8081",
            "IBID.example.com:443",
            "198.51.100.1",
        ] {
            assert!(is_allowed_host(ours, listens, &allowed), "{ours}");
        }
        for other in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "192.0.2.8",
            "0.0.0.0",
            "[::2]:8081",
            "x.ibid.example.com",
            "localhost@evil.example",
            "evil.example@localhost",
            "localhost, evil.example",
            "2130706433",
            "local host",
        ] {
            assert!(!is_allowed_host(other, listens, &allowed), "{other}");
        }
    }

    #[test]
    fn a_name_has_neither_scheme_nor_port() {
        for good in ["ibid.example.com", "ibid", "ibid-admin.ops.svc.cluster.local", "192.0.2.7", "::1"] {
            assert!(is_host_name(good), "{good}");
        }
        for bad in ["", "http://a", "a:81", "a/b", "*", "*.example.com", "a..b", "[::1]", "a b", ".a"] {
            assert!(!is_host_name(bad), "{bad}");
        }
    }
}
