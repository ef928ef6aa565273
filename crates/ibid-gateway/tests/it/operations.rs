//! Stores that fail, configuration, reload, shutdown, logs, metrics.

mod admin_store;
mod concurrency;
mod cors;
mod demo;
mod health;
mod late_answers;
mod log_backpressure;
mod logs;
mod logs_secret;
mod metrics;
mod metrics_format;
mod record_failures;
mod reload;
mod reload_order;
mod reload_refused;
mod setting_precedence;
mod shadow;
mod shared_store;
mod shutdown;
mod startup;
mod store_down;
