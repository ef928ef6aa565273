//! What no policy covers passes through untouched.

mod http2;
mod mutual_tls;
mod requests;
mod streams;
mod timeouts;
mod tls;
mod upgrades;

/// One route is covered; every other path passes through.
const ONE_ROUTE: &str = "[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST|PUT /pay\"\npreset = \"ietf\"\n";
