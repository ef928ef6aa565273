//! What the fuzzer of replies calls.

use super::*;

/// Decodes a reply that arrives in pieces of `step` bytes, as the connection does, and describes it.
pub fn decode_reply(bytes: &[u8], step: usize) -> Result<String, String> {
    let (mut input, mut out, mut head) = (BytesMut::new(), String::new(), None);
    let mut body = Vec::new();
    for piece in bytes.chunks(step.max(1)) {
        input.extend_from_slice(piece);
        if head.is_none() {
            head = decode_head(&mut input, &Method::POST)?;
            if let Some(ReplyHead { response, keeps_alive, .. }) = &head {
                out = format!("{} {:?} {keeps_alive}", response.status(), response.headers());
            }
        }
        let Some(ReplyHead { framing, .. }) = &mut head else { continue };
        match framing {
            ReplyFraming::Length(left) => {
                let taken = input.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= taken as u64;
                body.extend_from_slice(&input.split_to(taken));
            }
            ReplyFraming::UntilClose => body.extend_from_slice(&input.split()),
            ReplyFraming::Chunked(decoder) => loop {
                match decoder.decode(&mut input)? {
                    DecodedChunk::Data(data) => body.extend_from_slice(&data),
                    DecodedChunk::End(trailers) => return Ok(format!("{out} {body:?} {trailers:?}")),
                    DecodedChunk::Incomplete => break,
                }
            },
        }
    }
    Ok(format!("{out} {body:?}"))
}
