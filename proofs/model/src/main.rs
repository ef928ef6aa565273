//! Explores the larger worlds and prints what was found.
fn main(){}
