//! Trailers besides tonic's own after an answer of one message, which its handlers cannot set.

use axum::{body::Body, response::Response};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::BodyExt;

/// What a handler leaves in its answer's extensions.
#[derive(Clone)]
pub(crate) struct ExtraTrailers(pub(crate) HeaderMap);

/// The answer, with its handler's trailers among those of tonic.
pub(crate) async fn add_trailers(mut answer: Response) -> Response {
    let Some(ExtraTrailers(more)) = answer.extensions_mut().remove() else { return answer };
    answer.map(|body| {
        Body::new(body.map_frame(move |frame| match frame.into_trailers() {
            Ok(mut trailers) => {
                for (name, value) in &more {
                    trailers.append(name, value.clone());
                }
                Frame::trailers(trailers)
            }
            Err(data) => data,
        }))
    })
}
