//! The console, in a browser and without one.

mod access_control;
pub(crate) mod browser;
mod common;
mod mobile_and_keyboard;
mod operator;
mod pages;
mod pagination;
mod screenshots;
