//! Small byte strings that differ per request, such as ids and labels. They share the allocations of a buffer per thread.

use std::cell::RefCell;

use bytes::{Bytes, BytesMut};

/// The size of a buffer in bytes. A byte string keeps its whole buffer alive: do not keep one for long.
const BUFFER_BYTES: usize = 1024;

thread_local!(static BUFFER: RefCell<BytesMut> = RefCell::default());

/// Copies bytes into the buffer of this thread.
#[inline]
pub(crate) fn copy(bytes: &[u8]) -> Bytes {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.capacity() < bytes.len() {
            *buffer = BytesMut::with_capacity(BUFFER_BYTES.max(bytes.len()));
        }
        buffer.extend_from_slice(bytes);
        buffer.split().freeze()
    })
}
