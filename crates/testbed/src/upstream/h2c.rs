//! One HTTP/2 connection of the upstream without TLS, by hyper. It shares the log and the rules with HTTP/1.1.

use http::{HeaderMap, Request, Response, Version};
use http_body_util::{BodyExt as _, channel::Channel};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};

use super::{reply::filler, *};

type ChannelBody = Channel<Bytes, io::Error>;

fn stream_abort() -> io::Error {
    io::Error::other("aborted by a rule of the test")
}

/// Panics if a rule needs a raw connection.
pub(super) fn check_supported(reply: &UpstreamReply) {
    let possible = match reply.fault {
        None => !reply.early && !matches!(reply.content, ReplyContent::Echo),
        Some(fault) => matches!(
            fault,
            UpstreamFault::ResetAfterRequest
                | UpstreamFault::CloseWithoutReply
                | UpstreamFault::Hang
                | UpstreamFault::Truncated { .. }
                | UpstreamFault::TruncatedChunked
        ),
    };
    assert!(possible, "an h2c upstream cannot do this: {reply:?}");
}

pub(super) async fn serve(stream: TcpStream, open: OpenUpstreamConnection) {
    let open = Arc::new(open);
    let service = service_fn(move |request| exchange(request, Arc::clone(&open)));
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

/// An error resets the stream.
async fn exchange(
    request: Request<Incoming>, open: Arc<OpenUpstreamConnection>,
) -> Result<Response<ChannelBody>, io::Error> {
    let (head, body) = request.into_parts();
    let target = head.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
    let reply = open.request_log.next_reply(head.method.as_str(), &target);
    let body = match body.collect().await {
        Ok(body) => body,
        Err(_) => {
            open.request_log.state().malformed_requests += 1;
            return Err(stream_abort());
        }
    };
    let mut headers = HeaderList::default();
    if let (Version::HTTP_2, Some(authority)) = (head.version, head.uri.authority()) {
        headers.push(":authority", authority.as_str());
    }
    HeaderList::from(&head.headers).iter().for_each(|(name, value)| headers.push(name, value));
    let seen = LoggedRequest {
        at: Instant::now(),
        connection: open.number,
        version: head.version,
        method: head.method.to_string(),
        target,
        headers,
        trailers: body.trailers().map(HeaderList::from).unwrap_or_default(),
        body: body.to_bytes(),
        execution: None,
    };
    let execution = open.request_log.record(seen, true);
    reply.wait_until_due().await;
    answer(reply, execution).await
}

async fn answer(reply: UpstreamReply, execution: Option<usize>) -> Result<Response<ChannelBody>, io::Error> {
    let mut builder = Response::builder().status(reply.status_for(execution));
    match reply.fault {
        None => {}
        Some(UpstreamFault::Hang) => return std::future::pending().await,
        Some(UpstreamFault::Truncated { content_length, sent }) => {
            let head = builder.status(200).header("content-length", content_length);
            return Ok(respond(head, vec![(filler(sent), Duration::ZERO)], Err(stream_abort())));
        }
        Some(UpstreamFault::TruncatedChunked) => {
            let part = Bytes::from_static(b"hello");
            return Ok(respond(builder.status(200), vec![(part, Duration::ZERO)], Err(stream_abort())));
        }
        Some(_) => return Err(stream_abort()),
    }
    for (name, value) in reply.all_headers() {
        builder = builder.header(name, value);
    }
    if let (Some(body), true) = (reply.whole_body(execution), reply.trailers.is_empty()) {
        builder = builder.header("content-length", body.len());
    }
    let trailer = |(name, value): &(String, String)| {
        (name.parse().expect("the name of a trailer"), value.parse().expect("the value of a trailer"))
    };
    Ok(respond(builder, reply.pieces(execution), Ok(reply.trailers.iter().map(trailer).collect())))
}

/// Sends the pieces, each with the pause after it, then the trailers or the abort. Ends by itself when the client is
/// gone.
fn respond(
    head: http::response::Builder, pieces: Vec<(Bytes, Duration)>, end: io::Result<HeaderMap>,
) -> Response<ChannelBody> {
    let (mut sender, body) = Channel::new(1);
    tokio::spawn(async move {
        for (piece, pause) in pieces {
            if sender.send_data(piece).await.is_err() {
                return;
            }
            sleep(pause).await;
        }
        match end {
            Ok(trailers) if trailers.is_empty() => {}
            Ok(trailers) => drop(sender.send_trailers(trailers).await),
            Err(error) => sender.abort(error),
        }
    });
    head.body(body).expect("the test's headers are valid")
}
