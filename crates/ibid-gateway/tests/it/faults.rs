//! Upstreams, clients and holders that fail: the settle table, seen on the wire.
