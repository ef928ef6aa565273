//! gRPC through the layer, on the wire: raw HTTP/2 against a hand-written service, and a real tonic server.

mod calls;
mod common;
mod tonic;
