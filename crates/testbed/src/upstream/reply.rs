//! The upstream's answers and faults.

use super::*;

/// An answer, built from [`UpstreamReply::usual`] or [`UpstreamReply::status`].
#[derive(Clone, Debug, Default)]
pub struct UpstreamReply {
    /// `None`: 201 for an execution, 200 for other requests.
    pub(super) status: Option<u16>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) content: ReplyContent,
    pub(super) trailers: Vec<(String, String)>,
    pub(super) delay: Duration,
    pub(super) gate: Option<ReplyGate>,
    /// Answers after the head of the request, without reading the body.
    pub(super) early: bool,
    pub(super) fault: Option<UpstreamFault>,
}

#[derive(Clone, Debug, Default)]
pub(super) enum ReplyContent {
    /// `{"id":N,"run":N}` for execution N, `{"ok":true}` for other requests.
    #[default]
    Numbered,
    Whole(Bytes),
    Chunks(Vec<Bytes>),
    /// This many server-sent events, one per interval.
    Events(usize, Duration),
    /// 101, then echoes every byte.
    Echo,
}

/// A fault, which happens after the request is read and logged unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamFault {
    ResetAfterRequest,
    CloseWithoutReply,
    /// Announces more bytes than it sends, then closes the connection.
    Truncated {
        content_length: usize,
        sent: usize,
    },
    /// Closes the connection after the first chunk of an answer.
    TruncatedChunked,
    /// Never answers; the connection stays open until the client closes it.
    Hang,
    /// Sends bytes that are not HTTP.
    Garbage,
    /// Sends a 101 without a request to upgrade.
    UnexpectedUpgrade,
    /// Sends the usual answer without `Connection: close`, then closes the connection.
    CloseIdle,
    /// Sends a 413 after the head of the request, and closes the connection with the body unread, which
    /// resets it for a client that is still sending. Not an execution.
    EarlyReplyThenClose,
    /// Closes the connection without an answer if it carried a request before: the race between the reuse of a
    /// connection and its close. Then it is not an execution; a new connection gets the usual answer.
    CloseReused,
}

impl UpstreamReply {
    /// The default answer, which can be delayed, gated or given headers.
    pub fn usual() -> UpstreamReply {
        UpstreamReply::default()
    }

    /// An answer with this status and an empty body.
    pub fn status(status: u16) -> UpstreamReply {
        UpstreamReply { status: Some(status), content: ReplyContent::Whole(Bytes::new()), ..UpstreamReply::default() }
    }

    /// A chunked answer without a length.
    pub fn chunks(chunks: impl IntoIterator<Item = impl Into<Bytes>>) -> UpstreamReply {
        let chunks = chunks.into_iter().map(Into::into).filter(|chunk: &Bytes| !chunk.is_empty()).collect();
        UpstreamReply { status: Some(200), content: ReplyContent::Chunks(chunks), ..UpstreamReply::default() }
    }

    /// A stream of server-sent events, `data: 1` and so on, at this interval.
    pub fn events(count: usize, every: Duration) -> UpstreamReply {
        let content = ReplyContent::Events(count, every);
        UpstreamReply { status: Some(200), content, ..UpstreamReply::default() }
            .header("content-type", "text/event-stream")
    }

    /// A 101 to the requested protocol, then an echo of every byte.
    pub fn upgrade_echo() -> UpstreamReply {
        UpstreamReply { status: Some(101), content: ReplyContent::Echo, ..UpstreamReply::default() }
    }

    /// An answer (such as 413) after the head of the request; then the rest of the request is read and discarded, and
    /// the connection closed. Not an execution.
    pub fn early(status: u16) -> UpstreamReply {
        UpstreamReply { early: true, ..UpstreamReply::status(status) }.header("connection", "close")
    }

    /// Adds a header; adding a name twice sends two lines.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn set_cookie(self, cookie: &str) -> Self {
        self.header("set-cookie", cookie)
    }

    /// Adds `n` headers, `x-filler-1: 1` and so on.
    pub fn many_headers(self, n: usize) -> Self {
        (1..=n).fold(self, |reply, i| reply.header(format!("x-filler-{i}"), i.to_string()))
    }

    pub fn body(self, body: impl Into<Bytes>) -> Self {
        UpstreamReply { content: ReplyContent::Whole(body.into()), ..self }
    }

    pub fn json(self, body: &str) -> Self {
        self.header("content-type", "application/json").body(body.to_owned())
    }

    /// Sets the usual body, which contains the number of the execution.
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

    pub(super) async fn wait_until_due(&self) {
        if let Some(gate) = &self.gate {
            gate.wait_open().await;
        }
        tokio::time::sleep(self.delay).await;
    }

    pub(super) fn status_for(&self, execution: Option<usize>) -> u16 {
        self.status.unwrap_or(if execution.is_some() { 201 } else { 200 })
    }

    /// The headers, including the content type of the usual body.
    pub(super) fn all_headers(&self) -> Vec<(String, String)> {
        let mut headers = self.headers.clone();
        let typed = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type"));
        if matches!(self.content, ReplyContent::Numbered) && !typed {
            headers.push(("content-type".to_owned(), "application/json".to_owned()));
        }
        headers
    }

    /// The body in pieces, each with the pause after it.
    pub(super) fn pieces(&self, execution: Option<usize>) -> Vec<(Bytes, Duration)> {
        match &self.content {
            ReplyContent::Chunks(chunks) => chunks.iter().map(|chunk| (chunk.clone(), Duration::ZERO)).collect(),
            ReplyContent::Events(count, every) => {
                (1..=*count).map(|event| (format!("data: {event}\n\n").into(), *every)).collect()
            }
            _ => {
                let whole = self.whole_body(execution).filter(|body| !body.is_empty());
                whole.map(|body| (body, Duration::ZERO)).into_iter().collect()
            }
        }
    }

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

/// `n` bytes that differ by position, so that a lost or duplicated piece is visible.
pub fn filler(n: usize) -> Bytes {
    (0..n.div_ceil(8)).flat_map(|i| format!("{i:07}\n").into_bytes()).take(n).collect()
}
