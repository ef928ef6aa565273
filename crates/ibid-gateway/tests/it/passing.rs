//! What no policy covers passes through untouched.
