//! One HTTP/1.1 connection, one request at a time.

use std::io;

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::LoadPlan;
use crate::wire::{self, PreparedRequest, ResponseFrame};

/// A response must fit; doubled from [`INITIAL_BUFFER_BYTES`].
const MAX_RESPONSE_BYTES: usize = 16 << 20;
pub(super) const INITIAL_BUFFER_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct Http1LoadConnection {
    stream: TcpStream,
    request: PreparedRequest,
    buffer: Vec<u8>,
    /// How much of the buffer is the last response.
    last: usize,
}

impl Http1LoadConnection {
    pub(super) fn new(stream: TcpStream, plan: &LoadPlan) -> Self {
        let request = PreparedRequest::new(&plan.addr.to_string(), &plan.path, plan.namespace, plan.body_bytes);
        Self { stream, request, buffer: vec![0; INITIAL_BUFFER_BYTES], last: 0 }
    }

    pub(super) async fn exchange(&mut self, serial: u64) -> io::Result<u16> {
        self.request.set_serial(serial);
        self.stream.write_all(self.request.bytes()).await?;
        let response = read_response(&mut self.stream, &mut self.buffer).await?;
        self.last = response.len;
        Ok(response.status)
    }

    /// The last response, for people.
    pub(super) fn last(&self) -> String {
        String::from_utf8_lossy(&self.buffer[..self.last.min(600)]).into_owned()
    }
}

/// Reads exactly one response into the start of `buffer`.
pub(super) async fn read_response(
    stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>,
) -> io::Result<ResponseFrame> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let mut filled = 0;
    loop {
        if filled == buffer.len() {
            if filled >= MAX_RESPONSE_BYTES {
                return Err(invalid("the response is larger than the generator reads".into()));
            }
            buffer.resize(filled * 2, 0);
        }
        match stream.read(&mut buffer[filled..]).await? {
            0 => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"));
            }
            read => filled += read,
        }
        match wire::parse_response(&buffer[..filled]) {
            Ok(None) => {}
            Ok(Some(response)) if response.len == filled => return Ok(response),
            Ok(Some(_)) => return Err(invalid("bytes after the end of the response".into())),
            Err(wire::MalformedResponse(what)) => {
                return Err(invalid(format!("{what}:\n{}", String::from_utf8_lossy(&buffer[..filled.min(600)]))));
            }
        }
    }
}
