//! The layer, seen from outside.

mod layer;
