//! The app's one gRPC method, as tonic serves it; messages are bytes as they are.

use std::{
    future::{Ready, ready},
    sync::Arc,
};

use axum::extract::{Request, State};
use bytes::{Buf, BufMut, Bytes};
use http::Response;
use tonic::{
    Status,
    body::Body,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    server::{Grpc, UnaryService},
};

use crate::server::App;

/// Executes once, and answers with status OK.
pub async fn create(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    Grpc::new(AsIs).unary(Create(app), request).await
}

struct Create(Arc<App>);

impl UnaryService<Bytes> for Create {
    type Response = Bytes;
    type Future = Ready<Result<tonic::Response<Bytes>, Status>>;

    fn call(&mut self, _: tonic::Request<Bytes>) -> Self::Future {
        ready(Ok(tonic::Response::new(self.0.execute())))
    }
}

struct AsIs;

impl Codec for AsIs {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = AsIs;
    type Decoder = AsIs;

    fn encoder(&mut self) -> AsIs {
        AsIs
    }

    fn decoder(&mut self) -> AsIs {
        AsIs
    }
}

impl Encoder for AsIs {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(message);
        Ok(())
    }
}

impl Decoder for AsIs {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
