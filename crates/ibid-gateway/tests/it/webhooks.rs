//! Deliveries of webhooks, as their senders send them and their receivers see them.

mod common;
mod custom_sender;
mod disclosure;
mod forged_deliveries;
mod redeliveries;
mod senders;
mod settings;
