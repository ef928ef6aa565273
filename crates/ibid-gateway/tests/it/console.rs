//! The console, in a browser and without one.

pub(crate) mod browser;
mod kit;
mod operator;
mod pages;
mod phone;
mod screenshots;
mod strangers;
mod turning;
