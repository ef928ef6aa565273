//! Deliveries of webhooks, as their senders send them and their receivers see them.

mod custom;
mod forged;
mod kit;
mod repeated;
mod senders;
mod settings;
mod shown;
