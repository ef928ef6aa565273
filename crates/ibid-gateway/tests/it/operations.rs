//! Stores that fail, configuration, reload, shutdown, logs, metrics.

mod admin_store;
mod common;
mod cors;
mod crowd;
mod demo;
mod exposition;
mod health;
mod late_answers;
mod logs;
mod logs_lost;
mod logs_secret;
mod metrics;
mod recording;
mod reload;
mod reload_order;
mod reload_refused;
mod shadow;
mod shared_store;
mod shutdown;
mod startup;
mod startup_wins;
mod store_down;
