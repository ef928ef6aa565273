//! Fetches a server's descriptors by `grpc.reflection.v1`, or `v1alpha` if the server has no `v1`.

use std::{collections::BTreeSet, fmt};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, Version, header};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use tower_service::Service;

use super::{
    code::GrpcStatusCode,
    proto::{ProtoFields, ProtoValue, ProtoWriter},
};

const REFLECTION_VERSIONS: [&str; 2] = ["v1", "v1alpha"];
/// The maximum size of one response.
const MAX_RESPONSE_BYTES: usize = 32 << 20;
/// Flag and length of a message.
const FRAME_HEADER_BYTES: usize = 5;

/// Why a server's descriptors could not be fetched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReflectionError {
    /// The server was not reached, or the response broke off. The call may be repeated.
    #[error("it could not be asked: {0}")]
    Unreachable(String),
    /// The server has no reflection service.
    #[error("it has no reflection service (grpc.reflection.v1); add one, or name a file of descriptors")]
    Unimplemented,
    /// The server sent another response.
    #[error("its reflection service answered {0}")]
    Refused(String),
}

/// Fetches the descriptors of all services of a server: a `google.protobuf.FileDescriptorSet` for
/// [`UnaryMethods::from_descriptor_set`](super::UnaryMethods::from_descriptor_set).
///
/// `server` accepts requests whose URI is only a path, such as a tonic service in this process or a client of a remote
/// one.
///
/// # Errors
/// The server cannot be reached, or sends no descriptors.
pub async fn fetch_descriptors<S, B>(server: &mut S) -> Result<Bytes, ReflectionError>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: fmt::Display>,
    B: Body<Error: fmt::Display>,
{
    for version in REFLECTION_VERSIONS {
        let listed = match call_reflection(server, version, [ProtoWriter::default().bytes(7, b"*").finish()]).await {
            Err(ReflectionError::Unimplemented) => continue,
            listed => listed?,
        };
        let services = services(&listed)?;
        if services.is_empty() {
            return Err(ReflectionError::Refused("that there is no service".into()));
        }
        let files = call_reflection(
            server,
            version,
            services.iter().map(|name| ProtoWriter::default().bytes(4, name).finish()),
        )
        .await?;
        return descriptor_set(&files);
    }
    Err(ReflectionError::Unimplemented)
}

/// Sends all these requests in one call and returns the responses.
async fn call_reflection<S, B>(
    server: &mut S, version: &str, requests: impl IntoIterator<Item = Vec<u8>>,
) -> Result<Vec<Bytes>, ReflectionError>
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: fmt::Display>,
    B: Body<Error: fmt::Display>,
{
    let unreachable = |why: &dyn fmt::Display| ReflectionError::Unreachable(why.to_string());
    let request = Request::builder()
        .method(Method::POST)
        .version(Version::HTTP_2)
        .uri(format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"))
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::TE, "trailers")
        .body(Full::new(frame(requests)))
        .expect("all of it is valid");
    std::future::poll_fn(|cx| server.poll_ready(cx)).await.map_err(|why| unreachable(&why))?;
    let (head, body) = server.call(request).await.map_err(|why| unreachable(&why))?.into_parts();
    if !head.status.is_success() {
        return Err(ReflectionError::Refused(format!("HTTP status {}", head.status.as_u16())));
    }
    check_status(&head.headers)?;
    let body = Limited::new(std::pin::pin!(body).map_err(|why| why.to_string()), MAX_RESPONSE_BYTES).collect().await;
    let body = body.map_err(|why| match why.is::<LengthLimitError>() {
        true => ReflectionError::Refused(format!("more than {MAX_RESPONSE_BYTES} bytes")),
        false => unreachable(&why),
    })?;
    match body.trailers() {
        Some(trailers) => check_status(trailers)?,
        None if head.headers.contains_key("grpc-status") => {}
        None => return Err(ReflectionError::Unreachable("the answer broke off".into())),
    }
    unframe(body.to_bytes())
}

fn frame(messages: impl IntoIterator<Item = Vec<u8>>) -> Bytes {
    let mut frames = BytesMut::new();
    for message in messages {
        frames.extend_from_slice(&[0]);
        frames.extend_from_slice(&u32::try_from(message.len()).expect("a name is short").to_be_bytes());
        frames.extend_from_slice(&message);
    }
    frames.freeze()
}

fn unframe(mut frames: Bytes) -> Result<Vec<Bytes>, ReflectionError> {
    let mut messages = Vec::new();
    while !frames.is_empty() {
        if frames.len() < FRAME_HEADER_BYTES || frames[0] != 0 {
            return Err(malformed());
        }
        let length = u32::from_be_bytes([frames[1], frames[2], frames[3], frames[4]]) as usize;
        if frames.len() - FRAME_HEADER_BYTES < length {
            return Err(malformed());
        }
        let mut frame = frames.split_to(FRAME_HEADER_BYTES + length);
        messages.push(frame.split_off(FRAME_HEADER_BYTES));
    }
    Ok(messages)
}

/// Checks the status in a head or in trailers, if present.
fn check_status(fields: &HeaderMap) -> Result<(), ReflectionError> {
    let Some(status) = fields.get("grpc-status") else { return Ok(()) };
    match status.to_str().ok().and_then(|status| status.parse().ok()) {
        Some(0) => Ok(()),
        Some(code) if code == GrpcStatusCode::Unimplemented as u64 => Err(ReflectionError::Unimplemented),
        _ => Err(ReflectionError::Refused(format!("grpc-status {}", status.to_str().unwrap_or("?")))),
    }
}

fn malformed() -> ReflectionError {
    ReflectionError::Refused("what is no answer to that".into())
}

/// The values of all message or text fields with this number.
fn message_fields(message: &[u8], wanted: u32) -> Result<Vec<&[u8]>, ReflectionError> {
    let mut found = Vec::new();
    for field in ProtoFields(message) {
        match field.ok_or_else(malformed)? {
            (number, ProtoValue::Bytes(bytes)) if number == wanted => found.push(bytes),
            _ => {}
        }
    }
    Ok(found)
}

/// Reads a `ListServiceResponse`: `service = 1`, and in it `name = 1`. Skips the reflection service.
fn services(answers: &[Bytes]) -> Result<BTreeSet<Vec<u8>>, ReflectionError> {
    let mut names = BTreeSet::new();
    for answer in answers {
        check_no_error(answer)?;
        for list in message_fields(answer, 6)? {
            for service in message_fields(list, 1)? {
                names.extend(message_fields(service, 1)?.into_iter().map(<[u8]>::to_vec));
            }
        }
    }
    names.retain(|name| !name.starts_with(b"grpc.reflection."));
    Ok(names)
}

/// Reads each `FileDescriptorResponse` (`file_descriptor_proto = 1`) and writes each file once, as `file = 1` of a set.
fn descriptor_set(answers: &[Bytes]) -> Result<Bytes, ReflectionError> {
    let mut files = BTreeSet::new();
    for answer in answers {
        check_no_error(answer)?;
        for response in message_fields(answer, 4)? {
            files.extend(message_fields(response, 1)?);
        }
    }
    Ok(files.into_iter().fold(ProtoWriter::default(), |set, file| set.bytes(1, file)).finish().into())
}

/// Checks for `error_response = 7`, and in it `error_message = 2`.
fn check_no_error(answer: &[u8]) -> Result<(), ReflectionError> {
    let Some(error) = message_fields(answer, 7)?.pop() else { return Ok(()) };
    let message = message_fields(error, 2)?.pop().map(String::from_utf8_lossy).unwrap_or_default();
    Err(ReflectionError::Refused(format!("an error: {message:?}")))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::combinators::BoxBody;
    use tower::service_fn;

    use super::*;
    use crate::grpc::UnaryMethods;

    fn answer(status: &str, messages: Vec<Vec<u8>>) -> Response<BoxBody<Bytes, Infallible>> {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", status.parse().unwrap());
        Response::new(Full::new(frame(messages)).with_trailers(async { Some(Ok(trailers)) }).boxed())
    }

    /// A file with one service, `a.B`, and one method, `Do`.
    fn file() -> Vec<u8> {
        let method = ProtoWriter::default().text(1, "Do").finish();
        let service = ProtoWriter::default().text(1, "B").bytes(2, &method).finish();
        ProtoWriter::default().text(1, "a.proto").text(2, "a").bytes(6, &service).finish()
    }

    #[tokio::test]
    async fn a_server_of_the_older_version_is_asked_in_that() {
        let mut asked = Vec::new();
        let mut server = service_fn(|request: Request<Full<Bytes>>| {
            let path = request.uri().path().to_owned();
            asked.push(path.clone());
            async move {
                if !path.contains("v1alpha") {
                    return Ok::<_, Infallible>(answer("12", vec![]));
                }
                let Ok(body) = request.into_body().collect().await;
                let requests = unframe(body.to_bytes()).unwrap();
                let answers = requests.iter().map(|request| {
                    if !message_fields(request, 7).unwrap().is_empty() {
                        let named = ["a.B", "grpc.reflection.v1alpha.ServerReflection"]
                            .iter()
                            .fold(ProtoWriter::default(), |list, name| {
                                list.bytes(1, &ProtoWriter::default().text(1, name).finish())
                            });
                        return ProtoWriter::default().bytes(6, &named.finish()).finish();
                    }
                    assert_eq!(message_fields(request, 4).unwrap(), [b"a.B"]);
                    ProtoWriter::default().bytes(4, &ProtoWriter::default().bytes(1, &file()).finish()).finish()
                });
                Ok(answer("0", answers.collect()))
            }
        });
        let set = fetch_descriptors(&mut server).await.unwrap();
        assert_eq!(UnaryMethods::from_descriptor_set(&set).unwrap().paths().collect::<Vec<_>>(), ["/a.B/Do"]);
        assert_eq!(asked.len(), 3, "{asked:?}");
    }

    #[tokio::test]
    async fn what_is_no_answer_is_told_apart() {
        let refused = |what: &str| ReflectionError::Refused(what.into());
        let error = ProtoWriter::default().number(1, 5).text(2, "nope").finish();
        for (status, messages, expected) in [
            ("12", vec![], ReflectionError::Unimplemented),
            ("7", vec![], refused("grpc-status 7")),
            ("0", vec![], refused("that there is no service")),
            ("0", vec![vec![0xff]], refused("what is no answer to that")),
            ("0", vec![ProtoWriter::default().bytes(7, &error).finish()], refused("an error: \"nope\"")),
        ] {
            let mut server = service_fn(|_| {
                let answered = answer(status, messages.clone());
                async move { Ok::<_, Infallible>(answered) }
            });
            assert_eq!(fetch_descriptors(&mut server).await.unwrap_err(), expected);
        }
        let mut gone = service_fn(|_| async { Err::<Response<Full<Bytes>>, _>("no route to host") });
        let told = fetch_descriptors(&mut gone).await.unwrap_err();
        assert_eq!(told.to_string(), "it could not be asked: no route to host");
        // A response without its end is incomplete.
        let mut cut = service_fn(|_| async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::new()))) });
        assert!(matches!(fetch_descriptors(&mut cut).await, Err(ReflectionError::Unreachable(_))));
    }
}
