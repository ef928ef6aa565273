//! What the targets share.

pub mod disk;
pub mod repair;
