//! The console, in a browser and without one.

mod browser;
mod kit;
mod operator;
mod pages;
mod phone;
mod screenshots;
mod strangers;
mod turning;
