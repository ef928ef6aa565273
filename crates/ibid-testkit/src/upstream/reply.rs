//! What the upstream answers, and how it fails.

use std::time::Duration;

use bytes::Bytes;

use super::ReplyGate;

/// An answer. Starts as [`UpstreamReply::usual`] or [`UpstreamReply::status`] and is changed step by step.
#[derive(Clone, Debug, Default)]
pub struct UpstreamReply {
    /// None: 201 for an execution, 200 for anything else.
    pub(super) status: Option<u16>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) content: ReplyContent,
    pub(super) trailers: Vec<(String, String)>,
    pub(super) delay: Duration,
    pub(super) gate: Option<ReplyGate>,
    /// Answered when the head has arrived, the body unread.
    pub(super) early: bool,
    pub(super) fault: Option<UpstreamFault>,
}

#[derive(Clone, Debug, Default)]
pub(super) enum ReplyContent {
    /// `{"id":N,"run":N}` for execution N, `{"ok":true}` for anything else.
    #[default]
    Numbered,
    Whole(Bytes),
    Chunks(Vec<Bytes>),
    /// This many server-sent events, one per interval.
    Events(usize, Duration),
    /// 101, then every byte comes back.
    Echo,
}

/// What goes wrong after the request was read and logged, unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamFault {
    /// The connection is reset.
    ResetAfterRequest,
    /// The connection is closed in good order, without an answer.
    CloseWithoutReply,
    /// The answer announces more bytes than it has, then the connection is closed.
    Truncated {
        /// What it announces.
        content_length: usize,
        /// What it sends.
        sent: usize,
    },
    /// A chunked answer, closed after the first chunk.
    TruncatedChunked,
    /// No answer ever; the connection stays open until the other side gives up.
    Hang,
    /// Something that is not HTTP.
    Garbage,
    /// A 101 that nobody asked for.
    UnexpectedUpgrade,
    /// The usual answer, which promises to keep the connection; but it is closed right after it.
    CloseIdle,
    /// A 413 as soon as the head has arrived, and the connection is closed with the body unread, so that it ends in
    /// a reset for whoever is still sending. Not an execution.
    EarlyReplyThenClose,
    /// The connection is closed without an answer if it carried a request before: the race between reusing a
    /// connection and its end. Not an execution then; on a fresh connection, the usual answer.
    CloseReused,
}

impl UpstreamReply {
    /// What the upstream answers without a rule, to be delayed, gated or given headers.
    pub fn usual() -> UpstreamReply {
        UpstreamReply::default()
    }

    /// An answer with this status and an empty body.
    pub fn status(status: u16) -> UpstreamReply {
        UpstreamReply { status: Some(status), content: ReplyContent::Whole(Bytes::new()), ..UpstreamReply::default() }
    }

    /// An answer in chunks, without a length.
    pub fn chunks(chunks: impl IntoIterator<Item = impl Into<Bytes>>) -> UpstreamReply {
        let chunks = chunks.into_iter().map(Into::into).filter(|chunk: &Bytes| !chunk.is_empty()).collect();
        UpstreamReply { status: Some(200), content: ReplyContent::Chunks(chunks), ..UpstreamReply::default() }
    }

    /// A stream of server-sent events, `data: 1` and so on, one each `every`.
    pub fn events(count: usize, every: Duration) -> UpstreamReply {
        let content = ReplyContent::Events(count, every);
        UpstreamReply { status: Some(200), content, ..UpstreamReply::default() }
            .header("content-type", "text/event-stream")
    }

    /// A 101 to the protocol asked for, after which every byte is sent back.
    pub fn upgrade_echo() -> UpstreamReply {
        UpstreamReply { status: Some(101), content: ReplyContent::Echo, ..UpstreamReply::default() }
    }

    /// An answer (say 413) when the head has arrived; then the rest of the request is read and thrown away, and the
    /// connection closed. Not an execution.
    pub fn early(status: u16) -> UpstreamReply {
        UpstreamReply { early: true, ..UpstreamReply::status(status) }.header("connection", "close")
    }

    /// Adds a header; the same name twice sends two.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Adds `Jwks-Cookie`.
    pub fn set_cookie(self, cookie: &str) -> Self {
        self.header("set-cookie", cookie)
    }

    /// Adds `n` headers, `x-filler-1: 1` and so on.
    pub fn many_headers(self, n: usize) -> Self {
        (1..=n).fold(self, |reply, i| reply.header(format!("x-filler-{i}"), i.to_string()))
    }

    /// Sets the body.
    pub fn body(self, body: impl Into<Bytes>) -> Self {
        UpstreamReply { content: ReplyContent::Whole(body.into()), ..self }
    }

    /// Sets a JSON body and its type.
    pub fn json(self, body: &str) -> Self {
        self.header("content-type", "application/json").body(body.to_owned())
    }

    /// Sets the usual body, which has the execution's number, under another status.
    pub fn numbered(self) -> Self {
        UpstreamReply { content: ReplyContent::Numbered, ..self }
    }

    /// Sets a body of `n` bytes: [`filler`].
    pub fn large(self, n: usize) -> Self {
        self.body(filler(n))
    }

    /// Adds a trailer, which makes the body chunked.
    pub fn trailer(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        if let ReplyContent::Whole(body) = self.content {
            self.content = ReplyContent::Chunks(Some(body).filter(|body| !body.is_empty()).into_iter().collect());
        }
        self.trailers.push((name.into(), value.into()));
        self
    }

    /// Waits this long between logging the request and answering it.
    pub fn delay(self, delay: Duration) -> Self {
        UpstreamReply { delay, ..self }
    }

    /// Waits for the gate between logging the request and answering it (or failing).
    pub fn gated(self, gate: &ReplyGate) -> Self {
        UpstreamReply { gate: Some(gate.clone()), ..self }
    }

    /// Returns once the answer is due.
    pub(super) async fn wait_until_due(&self) {
        if let Some(gate) = &self.gate {
            gate.wait_open().await;
        }
        tokio::time::sleep(self.delay).await;
    }

    pub(super) fn status_for(&self, execution: Option<usize>) -> u16 {
        self.status.unwrap_or(if execution.is_some() { 201 } else { 200 })
    }

    /// The headers, with the type of the usual body.
    pub(super) fn all_headers(&self) -> Vec<(String, String)> {
        let mut headers = self.headers.clone();
        let typed = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type"));
        if matches!(self.content, ReplyContent::Numbered) && !typed {
            headers.push(("content-type".to_owned(), "application/json".to_owned()));
        }
        headers
    }

    /// The body, where it is known in one piece.
    pub(super) fn whole_body(&self, execution: Option<usize>) -> Option<Bytes> {
        match (&self.content, execution) {
            (ReplyContent::Numbered, Some(n)) => Some(format!(r#"{{"id":{n},"run":{n}}}"#).into()),
            (ReplyContent::Numbered, None) => Some(Bytes::from_static(br#"{"ok":true}"#)),
            (ReplyContent::Whole(body), _) => Some(body.clone()),
            (ReplyContent::Chunks(_) | ReplyContent::Events(..) | ReplyContent::Echo, _) => None,
        }
    }
}

impl From<UpstreamFault> for UpstreamReply {
    fn from(fault: UpstreamFault) -> UpstreamReply {
        UpstreamReply {
            fault: Some(fault),
            early: fault == UpstreamFault::EarlyReplyThenClose,
            ..UpstreamReply::default()
        }
    }
}

/// `n` bytes that differ from place to place, so that a lost or doubled piece shows.
pub fn filler(n: usize) -> Bytes {
    (0..n.div_ceil(8)).flat_map(|i| format!("{i:07}\n").into_bytes()).take(n).collect()
}
