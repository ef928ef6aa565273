//! Routes and paths: a path and its normal form are covered by the same route, and normalising twice changes nothing.

use std::sync::LazyLock;

use http::{Method, Uri};
use ibid_gateway::{
    config::{Env, GatewaySettings, ServeArgs},
    routes::normalise,
};

const CONFIG: &str = r#"
upstream = "http://127.0.0.1:1"
[[route]]
match = "POST /payments/:id/refunds"
[[route]]
match = "POST /payments/*"
[[route]]
match = "POST /a%20b"
"#;

static SETTINGS: LazyLock<GatewaySettings> = LazyLock::new(|| {
    GatewaySettings::from_text(CONFIG, None, &ServeArgs::default(), &Env::from_pairs(&[])).expect("a valid file")
});

/// See the module.
pub fn check(path: &[u8]) {
    let Ok(path) = std::str::from_utf8(path) else { return };
    let path = format!("/{path}");
    let normal = normalise(&path);
    assert_eq!(normalise(&normal), normal);
    // Only what can be in a request line.
    if path.parse::<Uri>().is_err() || path.contains(['?', '#']) {
        return;
    }
    let found = |path: &str| SETTINGS.routes.find(&Method::POST, path).map(|route| route.name.clone());
    assert_eq!(found(&path), found(&normal), "{path:?} and {normal:?}");
}
