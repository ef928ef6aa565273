//! One HTTP/1.1 connection of the upstream, written by hand so that it can break any rule.

use std::{
    io,
    ops::ControlFlow::{self, Break, Continue},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpStream, tcp::OwnedWriteHalf},
    time::{sleep, timeout},
};

use super::{
    Fault, Reply, Seen,
    ledger::Open,
    reply::{Content, filler},
};
use crate::http1::{Framing, Headers, Wire, malformed};

/// How long an early answer waits for the rest of the request before it closes.
const DRAIN: Duration = Duration::from_secs(2);

/// What becomes of the connection.
enum End {
    Close,
    Reset,
}

pub(super) async fn serve(stream: TcpStream, open: Open) {
    let (reader, writer) = stream.into_split();
    let mut connection = Connection { wire: Wire::new(reader), writer, open, served: 0 };
    let end = loop {
        match connection.exchange().await {
            Ok(Continue(())) => connection.served += 1,
            Ok(Break(end)) => break end,
            Err(_) => break End::Close,
        }
    };
    if let End::Reset = end {
        let _ = connection.writer.as_ref().set_zero_linger();
        connection.writer.forget();
    }
}

struct Connection {
    wire: Wire,
    writer: OwnedWriteHalf,
    open: Open,
    /// Requests answered on this connection before the present one.
    served: usize,
}

impl Connection {
    async fn exchange(&mut self) -> io::Result<ControlFlow<End>> {
        if !self.wire.next_message().await? {
            return Ok(Break(End::Close));
        }
        let (mut seen, framing) = match self.head().await {
            Ok(head) => head,
            Err(error) => return self.refuse(error).await,
        };
        let reply = self.open.ledger.next_reply(&seen.method, &seen.target);
        if reply.early {
            return self.answer_early(&reply, seen).await;
        }
        let reused = reply.fault == Some(Fault::CloseReused) && self.served > 0;
        if seen.headers.has_token("expect", "100-continue") {
            self.writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        match self.wire.body(framing).await {
            Ok((body, trailers)) => (seen.body, seen.trailers) = (body.into(), trailers),
            Err(error) => return self.refuse(error).await,
        }
        seen.at = Instant::now();
        let (head_only, keep) = (seen.method == "HEAD", !seen.headers.has_token("connection", "close"));
        let upgrade = seen.header("upgrade").unwrap_or("echo").to_owned();
        let execution = self.open.ledger.record(seen, !reused);
        if reused {
            return Ok(Break(End::Close));
        }
        self.until_due(&reply).await;
        match (reply.fault, &reply.content) {
            (Some(Fault::CloseReused), _) => self.answer(&reply, execution, head_only).await?,
            (Some(fault), _) => return self.fail(fault, &reply, execution).await,
            (None, Content::Echo) => return self.echo(&reply, &upgrade).await,
            (None, _) => self.answer(&reply, execution, head_only).await?,
        }
        let close = !keep || reply.headers.iter().any(|(name, value)| is_close(name, value));
        Ok(if close { Break(End::Close) } else { Continue(()) })
    }

    async fn head(&mut self) -> io::Result<(Seen, Framing)> {
        let line = self.wire.line().await?;
        let mut parts = line.split(' ');
        let (Some(method), Some(target), Some("HTTP/1.1"), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(malformed(format!("the request line is {line:?}")));
        };
        let headers = self.wire.fields().await?;
        let framing = Framing::of(&headers, Framing::Length(0))?;
        let seen = Seen {
            at: Instant::now(),
            connection: self.open.number,
            version: http::Version::HTTP_11,
            method: method.to_owned(),
            target: target.to_owned(),
            headers,
            body: Bytes::new(),
            trailers: Headers::default(),
            execution: None,
        };
        Ok((seen, framing))
    }

    /// Counts a request that is not whole; answers it if the other side is still there.
    async fn refuse(&mut self, error: io::Error) -> io::Result<ControlFlow<End>> {
        self.open.ledger.note_broken();
        if error.kind() == io::ErrorKind::InvalidData {
            let head = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\n";
            let answer = format!("{head}content-length: {}\r\n\r\n{error}", error.to_string().len());
            self.writer.write_all(answer.as_bytes()).await?;
        }
        Ok(Break(End::Close))
    }

    async fn answer_early(&mut self, reply: &Reply, seen: Seen) -> io::Result<ControlFlow<End>> {
        self.open.ledger.record(seen, false);
        self.until_due(reply).await;
        if reply.fault.is_some() {
            let refusal = Reply::status(413).header("connection", "close").body("too large");
            self.answer(&refusal, None, false).await?;
            return Ok(Break(End::Close));
        }
        self.answer(reply, None, false).await?;
        self.writer.shutdown().await?;
        // Closing with bytes unread resets the connection, and the answer could be lost with it.
        let drained = async {
            while !self.wire.some().await?.is_empty() {}
            io::Result::Ok(())
        };
        let _ = timeout(DRAIN, drained).await;
        Ok(Break(End::Close))
    }

    /// Waits until the reply is due; an app does not stop working when its caller hangs up, so this only notes that.
    async fn until_due(&mut self, reply: &Reply) {
        let due = reply.due();
        tokio::pin!(due);
        tokio::select! {
            biased;
            () = &mut due => return,
            () = self.wire.gone() => self.open.ledger.note_hung_up(),
        }
        due.await;
    }

    async fn answer(&mut self, reply: &Reply, execution: Option<usize>, head_only: bool) -> io::Result<()> {
        let status = reply.status_for(execution);
        let whole = reply.whole_body(execution);
        let chunked = whole.is_none() || !reply.trailers.is_empty();
        let never_a_body = matches!(status, 100..200 | 204 | 304);
        let mut bytes = head(status, &reply.all_headers()).into_bytes();
        match &whole {
            _ if never_a_body => {}
            Some(body) if !chunked => bytes.extend(format!("content-length: {}\r\n", body.len()).as_bytes()),
            _ => bytes.extend(b"transfer-encoding: chunked\r\n"),
        }
        bytes.extend(b"\r\n");
        if never_a_body || head_only {
            return self.writer.write_all(&bytes).await;
        }
        match whole {
            Some(body) if !chunked => {
                bytes.extend(&body);
                return self.writer.write_all(&bytes).await;
            }
            Some(body) => {
                self.writer.write_all(&bytes).await?;
                self.chunk(&body).await?;
            }
            None => {
                self.writer.write_all(&bytes).await?;
                self.stream(&reply.content).await?;
            }
        }
        self.last_chunk(reply).await
    }

    async fn stream(&mut self, content: &Content) -> io::Result<()> {
        match content {
            Content::Chunks(chunks) => {
                for chunk in chunks {
                    self.chunk(chunk).await?;
                }
            }
            Content::Events(count, every) => {
                for event in 1..=*count {
                    self.chunk(format!("data: {event}\n\n").as_bytes()).await?;
                    sleep(*every).await;
                }
            }
            Content::Numbered | Content::Whole(_) | Content::Echo => {}
        }
        Ok(())
    }

    async fn chunk(&mut self, chunk: &[u8]) -> io::Result<()> {
        let mut bytes = format!("{:x}\r\n", chunk.len()).into_bytes();
        bytes.extend(chunk);
        bytes.extend(b"\r\n");
        self.writer.write_all(&bytes).await
    }

    async fn last_chunk(&mut self, reply: &Reply) -> io::Result<()> {
        let trailers: String = reply.trailers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        self.writer.write_all(format!("0\r\n{trailers}\r\n").as_bytes()).await
    }

    async fn echo(&mut self, reply: &Reply, protocol: &str) -> io::Result<ControlFlow<End>> {
        let head = head(101, &reply.headers);
        let head = format!("{head}connection: upgrade\r\nupgrade: {protocol}\r\n\r\n");
        self.writer.write_all(head.as_bytes()).await?;
        loop {
            let bytes = self.wire.some().await?;
            if bytes.is_empty() {
                return Ok(Break(End::Close));
            }
            self.writer.write_all(&bytes).await?;
        }
    }

    async fn fail(&mut self, fault: Fault, reply: &Reply, execution: Option<usize>) -> io::Result<ControlFlow<End>> {
        match fault {
            Fault::ResetAfterRequest => return Ok(Break(End::Reset)),
            Fault::CloseWithoutReply => {}
            Fault::Truncated { content_length, sent } => {
                let mut bytes = head(200, &reply.headers).into_bytes();
                bytes.extend(format!("content-length: {content_length}\r\n\r\n").as_bytes());
                bytes.extend(filler(sent));
                self.writer.write_all(&bytes).await?;
            }
            Fault::TruncatedChunked => {
                let head = head(200, &[]) + "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n";
                self.writer.write_all(head.as_bytes()).await?;
            }
            Fault::Hang => {
                self.wire.gone().await;
                self.open.ledger.note_hung_up();
            }
            Fault::Garbage => self.writer.write_all(b"\x16\x03\x01 this is not HTTP\r\n\r\n").await?,
            Fault::UnexpectedUpgrade => {
                let head = head(101, &[]) + "connection: upgrade\r\nupgrade: websocket\r\n\r\n";
                self.writer.write_all(head.as_bytes()).await?;
                self.wire.gone().await;
            }
            Fault::CloseIdle => self.answer(reply, execution, false).await?,
            Fault::EarlyReplyThenClose | Fault::CloseReused => unreachable!("handled before the body is read"),
        }
        Ok(Break(End::Close))
    }
}

fn head(status: u16, headers: &[(String, String)]) -> String {
    let reason = http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("-");
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("HTTP/1.1 {status} {reason}\r\n{headers}")
}

fn is_close(name: &str, value: &str) -> bool {
    name.eq_ignore_ascii_case("connection") && value.eq_ignore_ascii_case("close")
}
