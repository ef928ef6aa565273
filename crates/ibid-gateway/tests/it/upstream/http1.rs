//! HTTP/1.1 upstreams: what is proved, what is read, what is reused.

mod connections;
mod replies;
mod sending;
