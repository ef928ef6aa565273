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

use crate::server::CountingApp;

/// Executes once, and answers with status OK.
pub async fn create(State(app): State<Arc<CountingApp>>, request: Request) -> Response<Body> {
    Grpc::new(BytesCodec).unary(CreateMethod(app), request).await
}

struct CreateMethod(Arc<CountingApp>);

impl UnaryService<Bytes> for CreateMethod {
    type Response = Bytes;
    type Future = Ready<Result<tonic::Response<Bytes>, Status>>;

    fn call(&mut self, _: tonic::Request<Bytes>) -> Self::Future {
        ready(Ok(tonic::Response::new(self.0.execute())))
    }
}

struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = BytesCodec;
    type Decoder = BytesCodec;

    fn encoder(&mut self) -> BytesCodec {
        BytesCodec
    }

    fn decoder(&mut self) -> BytesCodec {
        BytesCodec
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(message);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
