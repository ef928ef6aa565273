//! Stores that fail, configuration, reload, shutdown, logs.
