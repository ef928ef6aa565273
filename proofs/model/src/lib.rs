//! A model of claims, leases and stores.
