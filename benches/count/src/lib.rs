//! Exact counts of the library's operations: what one of them executes, hashes, allocates and asks the clock.
//!
//! Times move with the machine and with whatever else it does; these figures do not. So they are compared with a budget
//! that is committed beside them, and a change that makes an operation more expensive fails the tests.
//!
//! | module | what it holds |
//! |---|---|
//! | [`operations`] | the operations: a fixed number of them in process, without sockets |
//! | [`callgrind`] | what valgrind's callgrind writes |
//! | [`measure`] | the operations run under callgrind and with a counting allocator: one row of figures for each |
//! | [`budget`] | the committed maximum of each figure |
//!
//! The machine shows in two figures, and both are kept out of what is compared: valgrind knows no SHA instructions, so
//! SHA-256 is computed in software there and counted as *blocks*; and libc chooses its `memcpy` by the processor and its
//! `malloc` by its version, so instructions in libc are shown apart.

pub mod budget;
pub mod callgrind;
pub mod measure;
pub mod operations;

use std::fmt::Write;

/// Valid JSON of exactly `bytes` bytes, shaped like an order: many small members, unsorted, so that a gateway which
/// canonicalises JSON has its real work to do. Below the smallest such document it is a padded string.
#[must_use]
pub fn json_body(bytes: usize) -> String {
    let item = |line: u32| {
        let (quantity, price) = (line % 9 + 1, line * 37);
        format!(r#"{{"sku":"A-{line:05}","quantity":{quantity},"price":{price},"gift":false}}"#)
    };
    order(bytes, r#"{"order":"o-1","lines":["#, item, r#"],"currency":"EUR","note":""#, r#""}"#)
}

/// The same with its members in canonical order.
#[must_use]
pub fn sorted_json_body(bytes: usize) -> String {
    let item = |line: u32| {
        let (quantity, price) = (line % 9 + 1, line * 37);
        format!(r#"{{"gift":false,"price":{price},"quantity":{quantity},"sku":"A-{line:05}"}}"#)
    };
    order(bytes, r#"{"currency":"EUR","lines":["#, item, r#"],"note":""#, r#"","order":"o-1"}"#)
}

fn order(bytes: usize, open: &str, item: impl Fn(u32) -> String, close: &str, end: &str) -> String {
    let mut body = String::with_capacity(bytes + 64);
    if bytes < open.len() + close.len() + end.len() {
        let _ = write!(body, "\"{:x<1$}\"", "", bytes.saturating_sub(2));
        return body;
    }
    body.push_str(open);
    for line in 1_u32.. {
        let item = item(line);
        let comma = usize::from(line > 1);
        if body.len() + comma + item.len() + close.len() + end.len() > bytes {
            break;
        }
        body.push_str(&","[..comma]);
        body.push_str(&item);
    }
    body.push_str(close);
    let padding = bytes - body.len() - end.len();
    let _ = write!(body, "{:x<1$}{end}", "", padding);
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_orders_have_the_size_that_was_asked_for() {
        for bytes in [2, 50, 300, 1024, 16384] {
            assert_eq!((json_body(bytes).len(), sorted_json_body(bytes).len()), (bytes, bytes));
        }
        assert!(json_body(300).contains(r#"{"sku":"A-00002""#) && json_body(300).ends_with("x\"}"));
        assert!(sorted_json_body(300).contains(r#""sku":"A-00002"}"#));
    }
}
