//! Bad input over raw sockets: what it gets, and that nothing ran and nothing stays claimed.
