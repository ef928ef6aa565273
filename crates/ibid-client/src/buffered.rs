//! Buffers a response body before the response counts.
//!
//! If the connection breaks inside a body, the next attempt with the same key gets the whole response. Event streams
//! and bodies above the limit are streamed to the caller.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use http::header;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt as _;
use reqwest::{Body, Response, ResponseBuilderExt as _};

use crate::retry::TransportError;

pub(crate) struct BufferedResponse {
    /// Its body can still be read from the start.
    pub(crate) response: Response,
    /// The whole body; `None` if it is streamed.
    pub(crate) body: Option<Bytes>,
}

pub(crate) async fn buffer_response(response: Response, max: usize) -> Result<BufferedResponse, TransportError> {
    let kind = response.headers().get(header::CONTENT_TYPE).map(|value| value.as_bytes().to_ascii_lowercase());
    let streams = kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"));
    let large = response.content_length().is_some_and(|length| length > max as u64);
    if streams || large {
        return Ok(BufferedResponse { response, body: None });
    }
    let url = response.url().clone();
    let (mut parts, mut rest) = http::Response::<Body>::from(response).into_parts();
    // The conversion to `http::Response` drops the URL.
    let (addressed, ()) = http::Response::builder().url(url).body(()).expect("nothing but a URL").into_parts();
    parts.extensions.extend(addressed.extensions);
    let mut read = BytesMut::new();
    while let Some(frame) = rest.frame().await {
        let frame = frame.map_err(|error| TransportError { error: error.into(), is_permanent: false })?;
        let Ok(data) = frame.into_data() else { continue };
        read.extend_from_slice(&data);
        if read.len() > max {
            let body = Body::wrap(PrefixedBody { first: Some(read.freeze()), rest });
            return Ok(BufferedResponse { response: http::Response::from_parts(parts, body).into(), body: None });
        }
    }
    let body = read.freeze();
    let response = http::Response::from_parts(parts, Body::from(body.clone())).into();
    Ok(BufferedResponse { response, body: Some(body) })
}

/// A body whose first part is already read.
struct PrefixedBody {
    first: Option<Bytes>,
    rest: Body,
}

impl HttpBody for PrefixedBody {
    type Data = Bytes;
    type Error = reqwest::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>, cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, reqwest::Error>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(Ok(Frame::data(first)))),
            None => Pin::new(&mut self.rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
