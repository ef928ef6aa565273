//! Each preset as its page says, seen on the wire.
