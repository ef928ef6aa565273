//! A TCP proxy that cuts, delays and counts.
