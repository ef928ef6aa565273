//! PostgreSQL and pgbouncer.
