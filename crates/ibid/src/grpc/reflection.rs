//! Fetches a server's descriptors by `grpc.reflection.v1`, or `v1alpha` if the server has no `v1`.

use std::{collections::BTreeSet, fmt};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, Version, header};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use prost::Message;
use tower_service::Service;

use super::{
    code::GrpcStatusCode,
    messages::{RawFileDescriptors, ReflectionRequest, ReflectionResponse},
};

const REFLECTION_VERSIONS: [&str; 2] = ["v1", "v1alpha"];
/// The maximum size of one response.
const MAX_RESPONSE_BYTES: usize = 32 << 20;

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
        let list = ReflectionRequest { list_services: Some("*".into()), ..Default::default() };
        let listed = match call_reflection(server, version, [list]).await {
            Err(ReflectionError::Unimplemented) => continue,
            listed => listed?,
        };
        let services = listed.into_iter().filter_map(|answer| answer.services).flat_map(|list| list.services);
        let mut names: BTreeSet<_> = services.map(|service| service.name).collect();
        names.retain(|name| !name.starts_with("grpc.reflection."));
        if names.is_empty() {
            return Err(ReflectionError::Refused("that there is no service".into()));
        }
        let ask = |name| ReflectionRequest { file_containing_symbol: Some(name), ..Default::default() };
        let answers = call_reflection(server, version, names.into_iter().map(ask)).await?;
        let files: BTreeSet<_> =
            answers.into_iter().filter_map(|answer| answer.files).flat_map(|files| files.files).collect();
        return Ok(RawFileDescriptors { files: files.into_iter().collect() }.encode_to_vec().into());
    }
    Err(ReflectionError::Unimplemented)
}

/// Sends all these requests in one call and returns the responses, none of which is an error.
async fn call_reflection<S, B>(
    server: &mut S, version: &str, requests: impl IntoIterator<Item = ReflectionRequest>,
) -> Result<Vec<ReflectionResponse>, ReflectionError>
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
    let answers: Vec<ReflectionResponse> = unframe(body.to_bytes())?;
    match answers.iter().find_map(|answer| answer.error.as_ref()) {
        Some(error) => Err(ReflectionError::Refused(format!("an error: {:?}", error.message))),
        None => Ok(answers),
    }
}

fn frame(messages: impl IntoIterator<Item = impl Message>) -> Bytes {
    let mut frames = BytesMut::new();
    for message in messages {
        frames.put_u8(0);
        frames.put_u32(u32::try_from(message.encoded_len()).expect("a name is short"));
        message.encode(&mut frames).expect("the buffer grows");
    }
    frames.freeze()
}

fn unframe<M: Message + Default>(mut frames: Bytes) -> Result<Vec<M>, ReflectionError> {
    let malformed = || ReflectionError::Refused("what is no answer to that".into());
    let mut messages = Vec::new();
    while !frames.is_empty() {
        let (0, Ok(length)) = (frames.get_u8(), frames.try_get_u32()) else { return Err(malformed()) };
        if frames.len() < length as usize {
            return Err(malformed());
        }
        messages.push(M::decode(frames.split_to(length as usize)).map_err(|_| malformed())?);
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::combinators::BoxBody;
    use tower::service_fn;

    use prost_types::{FileDescriptorProto, MethodDescriptorProto, ServiceDescriptorProto};

    use super::*;
    use crate::grpc::{
        UnaryMethods,
        messages::{ReflectionErrorDetail, ServiceList, ServiceName},
    };

    fn answer(status: &str, frames: Bytes) -> Response<BoxBody<Bytes, Infallible>> {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", status.parse().unwrap());
        Response::new(Full::new(frames).with_trailers(async { Some(Ok(trailers)) }).boxed())
    }

    /// A file with one service, `a.B`, and one method, `Do`.
    fn file() -> Bytes {
        let method = MethodDescriptorProto { name: Some("Do".into()), ..Default::default() };
        let service = ServiceDescriptorProto { name: Some("B".into()), method: vec![method], ..Default::default() };
        let (name, package) = (Some("a.proto".into()), Some("a".into()));
        let file = FileDescriptorProto { name, package, service: vec![service], ..Default::default() };
        file.encode_to_vec().into()
    }

    #[tokio::test]
    async fn a_server_of_the_older_version_is_asked_in_that() {
        let mut asked = Vec::new();
        let mut server = service_fn(|request: Request<Full<Bytes>>| {
            let path = request.uri().path().to_owned();
            asked.push(path.clone());
            async move {
                if !path.contains("v1alpha") {
                    return Ok::<_, Infallible>(answer("12", Bytes::new()));
                }
                let Ok(body) = request.into_body().collect().await;
                let requests: Vec<ReflectionRequest> = unframe(body.to_bytes()).unwrap();
                let answers = requests.iter().map(|request| {
                    if request.list_services.is_some() {
                        let named = ["a.B", "grpc.reflection.v1alpha.ServerReflection"];
                        let services = named.map(|name| ServiceName { name: name.into() }).into();
                        return ReflectionResponse { services: Some(ServiceList { services }), ..Default::default() };
                    }
                    assert_eq!(request.file_containing_symbol.as_deref(), Some("a.B"));
                    let files = Some(RawFileDescriptors { files: vec![file()] });
                    ReflectionResponse { files, ..Default::default() }
                });
                Ok(answer("0", frame(answers)))
            }
        });
        let set = fetch_descriptors(&mut server).await.unwrap();
        assert_eq!(UnaryMethods::from_descriptor_set(&set).unwrap().paths().collect::<Vec<_>>(), ["/a.B/Do"]);
        assert_eq!(asked.len(), 3, "{asked:?}");
    }

    #[tokio::test]
    async fn what_is_no_answer_is_told_apart() {
        let refused = |what: &str| ReflectionError::Refused(what.into());
        let error = Some(ReflectionErrorDetail { message: "nope".into() });
        let error = frame([ReflectionResponse { error, ..Default::default() }]);
        let garbage = Bytes::from_static(&[0, 0, 0, 0, 1, 0xff]);
        for (status, frames, expected) in [
            ("12", Bytes::new(), ReflectionError::Unimplemented),
            ("7", Bytes::new(), refused("grpc-status 7")),
            ("0", Bytes::new(), refused("that there is no service")),
            ("0", garbage, refused("what is no answer to that")),
            ("0", error, refused("an error: \"nope\"")),
        ] {
            let mut server = service_fn(|_| {
                let answered = answer(status, frames.clone());
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
