//! The dials of a route for people, compared with its preset.

use ibid::{Policy, http::Protocol};
use ibid_tools::describe;

use super::is_webhook_preset;
use crate::routes::RouteEntry;

/// A dial of a route.
pub(crate) struct Dial {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    /// Whether the value differs from the preset's.
    pub(crate) overridden: bool,
}

/// All dials of a route, in the order of the guide's table.
pub(crate) fn route_dials(route: &RouteEntry) -> Vec<Dial> {
    let mut preset = Policy::preset(route.preset).expect("routes start from presets");
    if route.protocol == Protocol::Grpc {
        preset = preset.for_grpc();
    } else if !route.is_default_policy {
        // A route's methods always come from its match.
        preset.methods.clone_from(&route.policy.methods);
    }
    let both = describe::dial_values(&route.policy).into_iter().zip(describe::dial_values(&preset));
    let dials = both.map(|((name, value), (_, usual))| Dial { name, overridden: value != usual, value });
    let signature = is_webhook_preset(route.preset).then(|| describe::signature(&route.policy)).into_iter().flatten();
    dials.chain(signature.map(|(name, value, overridden)| Dial { name, value, overridden })).collect()
}
