//! The description of the API holds.
