use std::{net::IpAddr, str::FromStr};

use crate::policy::InvalidSetting;

/// The networks whose scope headers are accepted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrustedProxies {
    networks: Vec<(IpAddr, u8)>,
    everyone: bool,
}

impl TrustedProxies {
    /// Trusts loopback only.
    pub fn loopback() -> Self {
        Self {
            networks: vec![([127, 0, 0, 0].into(), 8), (IpAddr::from_str("::1").expect("valid"), 128)],
            everyone: false,
        }
    }

    /// Trusts every sender, for a service that only trusted proxies can reach.
    pub fn everyone() -> Self {
        Self { networks: Vec::new(), everyone: true }
    }

    /// Trusts these networks, such as `10.0.0.0/8` or `::1/128`.
    ///
    /// # Errors
    /// Names the invalid network.
    pub fn parse<'a>(networks: impl IntoIterator<Item = &'a str>) -> Result<Self, InvalidSetting> {
        let network = |text: &str| {
            let (address, bits) = text.split_once('/').unwrap_or((text, ""));
            let address = IpAddr::from_str(address).ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = if bits.is_empty() { most } else { bits.parse().ok()? };
            (bits <= most).then_some((address, bits))
        };
        let wrong = |text| format!("{text:?} is no network; write one such as \"10.0.0.0/8\" or \"::1/128\"");
        let networks = networks.into_iter().map(|text| network(text).ok_or_else(|| wrong(text)));
        Ok(Self { networks: networks.collect::<Result<_, _>>()?, everyone: false })
    }

    /// Whether the scope headers of this sender are accepted.
    pub fn trusts(&self, peer: Option<IpAddr>) -> bool {
        self.everyone || peer.is_some_and(|peer| self.networks.iter().any(|network| contains(*network, peer)))
    }
}

fn contains((network, bits): (IpAddr, u8), peer: IpAddr) -> bool {
    let wide = |address: IpAddr| match address.to_canonical() {
        IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, true),
        IpAddr::V6(address) => (address.to_bits(), false),
    };
    let ((network, four), (peer, peer_four)) = (wide(network), wide(peer));
    four == peer_four && (bits == 0 || (network ^ peer) >> (128 - u32::from(bits)) == 0)
}
