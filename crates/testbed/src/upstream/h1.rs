//! One HTTP/1.1 connection of the upstream, handwritten so that it can break any rule.

use tokio::{io::AsyncWriteExt as _, net::tcp::OwnedWriteHalf};

use super::{reply::filler, *};
use crate::http1::{self, BodyFraming, MessageReader, malformed};

/// How long an early answer reads the rest of the request before the connection closes.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) async fn serve(stream: TcpStream, open: OpenUpstreamConnection) {
    let (reader, writer) = stream.into_split();
    let mut connection = UpstreamHttp1Connection { reader: MessageReader::new(reader), writer, open, served: 0 };
    let end = loop {
        match connection.exchange().await {
            Ok(true) => connection.served += 1,
            end => break end,
        }
    };
    if end.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset) {
        let _ = connection.writer.as_ref().set_zero_linger();
        connection.writer.forget();
    }
}

struct UpstreamHttp1Connection {
    reader: MessageReader,
    writer: OwnedWriteHalf,
    open: OpenUpstreamConnection,
    /// Requests answered on this connection before the current one.
    served: usize,
}

impl UpstreamHttp1Connection {
    /// Serves a request. Returns whether the connection stays open; the error `ConnectionReset` resets it.
    async fn exchange(&mut self) -> io::Result<bool> {
        if !self.reader.next_message().await? {
            return Ok(false);
        }
        let (mut seen, framing) = match self.read_head().await {
            Ok(head) => head,
            Err(error) => return self.reject(error).await,
        };
        let reply = self.open.request_log.next_reply(&seen.method, &seen.target);
        if reply.early {
            return self.answer_early(&reply, seen).await;
        }
        let reused = reply.fault == Some(UpstreamFault::CloseReused) && self.served > 0;
        if seen.headers.has_token("expect", "100-continue") {
            self.writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        match self.reader.body(framing).await {
            Ok((body, trailers)) => (seen.body, seen.trailers) = (body.into(), trailers),
            Err(error) => return self.reject(error).await,
        }
        seen.at = Instant::now();
        let (head_only, keep) = (seen.method == "HEAD", !seen.headers.has_token("connection", "close"));
        let upgrade = seen.header("upgrade").unwrap_or("echo").to_owned();
        let execution = self.open.request_log.record(seen, !reused);
        if reused {
            return Ok(false);
        }
        self.wait_until_due(&reply).await;
        match (reply.fault, &reply.content) {
            (Some(UpstreamFault::CloseReused), _) => self.answer(&reply, execution, head_only).await?,
            (Some(fault), _) => return self.inject_fault(fault, &reply, execution).await.map(|()| false),
            (None, ReplyContent::Echo) => return self.echo(&reply, &upgrade).await,
            (None, _) => self.answer(&reply, execution, head_only).await?,
        }
        let closes = |(name, value): &(String, String)| {
            name.eq_ignore_ascii_case("connection") && value.eq_ignore_ascii_case("close")
        };
        Ok(keep && !reply.headers.iter().any(closes))
    }

    async fn read_head(&mut self) -> io::Result<(LoggedRequest, BodyFraming)> {
        let line = self.reader.read_line().await?;
        let mut parts = line.split(' ');
        let (Some(method), Some(target), Some("HTTP/1.1"), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(malformed(format!("the request line is {line:?}")));
        };
        let headers = self.reader.read_fields().await?;
        let framing = BodyFraming::of(&headers, BodyFraming::Length(0))?;
        let seen = LoggedRequest {
            at: Instant::now(),
            connection: self.open.number,
            version: http::Version::HTTP_11,
            method: method.to_owned(),
            target: target.to_owned(),
            headers,
            body: Bytes::new(),
            trailers: HeaderList::default(),
            execution: None,
        };
        Ok((seen, framing))
    }

    /// Counts an incomplete request, and answers it if the client is still there.
    async fn reject(&mut self, error: io::Error) -> io::Result<bool> {
        self.open.request_log.state().malformed_requests += 1;
        if error.kind() == io::ErrorKind::InvalidData {
            let head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\n";
            let answer = format!("{head}content-length: {}\r\n\r\n{error}", error.to_string().len());
            self.writer.write_all(answer.as_bytes()).await?;
        }
        Ok(false)
    }

    async fn answer_early(&mut self, reply: &UpstreamReply, seen: LoggedRequest) -> io::Result<bool> {
        self.open.request_log.record(seen, false);
        self.wait_until_due(reply).await;
        if reply.fault.is_some() {
            let refusal = UpstreamReply::status(413).header("connection", "close").body("too large");
            self.answer(&refusal, None, false).await?;
            return Ok(false);
        }
        self.answer(reply, None, false).await?;
        self.writer.shutdown().await?;
        // Closing with unread bytes resets the connection, and the answer could be lost with it.
        let drained = async {
            while !self.reader.read_some().await?.is_empty() {}
            io::Result::Ok(())
        };
        let _ = timeout(DRAIN_TIMEOUT, drained).await;
        Ok(false)
    }

    /// Waits until the reply is due. Only records a disconnect: an app does not stop working when its caller leaves.
    async fn wait_until_due(&mut self, reply: &UpstreamReply) {
        let due = reply.wait_until_due();
        tokio::pin!(due);
        tokio::select! {
            biased;
            () = &mut due => return,
            () = self.reader.wait_closed() => self.open.request_log.state().client_disconnects += 1,
        }
        due.await;
    }

    async fn answer(&mut self, reply: &UpstreamReply, execution: Option<usize>, head_only: bool) -> io::Result<()> {
        let status = reply.status_for(execution);
        let whole = reply.whole_body(execution);
        let chunked = whole.is_none() || !reply.trailers.is_empty();
        let never_a_body = matches!(status, 100..200 | 204 | 304);
        let mut bytes = response_head(status, &reply.all_headers()).into_bytes();
        match &whole {
            _ if never_a_body => {}
            Some(body) if !chunked => bytes.extend(format!("content-length: {}\r\n", body.len()).as_bytes()),
            _ => bytes.extend(b"transfer-encoding: chunked\r\n"),
        }
        bytes.extend(b"\r\n");
        let head_only = head_only || never_a_body;
        if let (Some(body), false, false) = (&whole, chunked, head_only) {
            bytes.extend(body);
        }
        self.writer.write_all(&bytes).await?;
        if head_only || !chunked {
            return Ok(());
        }
        for (piece, pause) in reply.pieces(execution) {
            self.writer.write_all(&http1::chunk(&piece)).await?;
            sleep(pause).await;
        }
        self.writer.write_all(http1::last_chunk(&reply.trailers).as_bytes()).await
    }

    async fn echo(&mut self, reply: &UpstreamReply, protocol: &str) -> io::Result<bool> {
        let head = response_head(101, &reply.headers);
        let head = format!("{head}connection: upgrade\r\nupgrade: {protocol}\r\n\r\n");
        self.writer.write_all(head.as_bytes()).await?;
        loop {
            let bytes = self.reader.read_some().await?;
            if bytes.is_empty() {
                return Ok(false);
            }
            self.writer.write_all(&bytes).await?;
        }
    }

    async fn inject_fault(
        &mut self, fault: UpstreamFault, reply: &UpstreamReply, execution: Option<usize>,
    ) -> io::Result<()> {
        match fault {
            UpstreamFault::ResetAfterRequest => return Err(io::ErrorKind::ConnectionReset.into()),
            UpstreamFault::CloseWithoutReply => {}
            UpstreamFault::Truncated { content_length, sent } => {
                let mut bytes = response_head(200, &reply.headers).into_bytes();
                bytes.extend(format!("content-length: {content_length}\r\n\r\n").as_bytes());
                bytes.extend(filler(sent));
                self.writer.write_all(&bytes).await?;
            }
            UpstreamFault::TruncatedChunked => {
                let head = response_head(200, &[]) + "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n";
                self.writer.write_all(head.as_bytes()).await?;
            }
            UpstreamFault::Hang => {
                self.reader.wait_closed().await;
                self.open.request_log.state().client_disconnects += 1;
            }
            UpstreamFault::Garbage => self.writer.write_all(b"\x16\x03\x01 this is not HTTP\r\n\r\n").await?,
            UpstreamFault::UnexpectedUpgrade => {
                let head = response_head(101, &[]) + "connection: upgrade\r\nupgrade: websocket\r\n\r\n";
                self.writer.write_all(head.as_bytes()).await?;
                self.reader.wait_closed().await;
            }
            UpstreamFault::CloseIdle => self.answer(reply, execution, false).await?,
            UpstreamFault::EarlyReplyThenClose | UpstreamFault::CloseReused => {
                unreachable!("handled before the body is read")
            }
        }
        Ok(())
    }
}

fn response_head(status: u16, headers: &[(String, String)]) -> String {
    let reason = http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("-");
    format!("HTTP/1.1 {status} {reason}\r\n{}", http1::field_lines(headers))
}
