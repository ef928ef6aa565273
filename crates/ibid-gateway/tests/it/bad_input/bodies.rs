//! Bodies that are hard to compare: what counts as the same request, and what is too odd to be looked into.

use std::fs;

use super::{TestGateway, assert_problem};

const JSON: &str = "application/json";
const FORM: &str = "application/x-www-form-urlencoded";

#[derive(Clone, Copy, Debug)]
enum SameRequest {
    Yes,
    No,
}
use SameRequest::{No, Yes};

/// Sends the first body, then the second under the same key: a replay, or a refusal; never a second run.
async fn assert_comparison(
    world: &TestGateway, at: usize, case: &str, kind: [&str; 2], first: &[u8], second: &[u8], same: SameRequest,
) {
    let key = format!("body-{at:03}-compared");
    let request =
        |kind: &str, body: &[u8]| world.shop_post("/pay").key(&key).header("Content-Type", kind).body(body.to_vec());
    let answer = request(kind[0], first).send().await;
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, None), "{case}: {answer:?}");
    assert_eq!(world.upstream.last().body, first, "{case}: the app gets what was sent");
    let run = answer.json()["run"].clone();
    let answer = request(kind[1], second).send().await;
    match same {
        Yes => assert_eq!((answer.status, &answer.json()["run"]), (201, &run), "{case}: {answer:?}"),
        No => assert_problem(case, &answer, 422, "key-reused", Some(&key)),
    }
    let answer = request(kind[0], first).send().await;
    assert_eq!((answer.status, &answer.json()["run"]), (201, &run), "{case}, the first again: {answer:?}");
    assert_eq!(world.upstream.executions_with_key(&key), 1, "{case}");
}

#[tokio::test]
async fn json_is_compared_by_what_it_means() {
    let world = TestGateway::in_memory("").await;
    let cases = [
        ("order of members", r#"{"a":1,"b":{"c":2,"d":3}}"#, r#"{"b":{"d":3,"c":2},"a":1}"#, Yes),
        ("white space", r#"{"a":[1,2]}"#, " {\t\"a\" :\r\n[ 1 , 2 ] }\n", Yes),
        ("escapes", r#"{"aé/\n":"\u20ac"}"#, "{\"\\u0061\\u00E9\\/\\u000a\":\"€\"}", Yes),
        ("a surrogate pair", r#"{"a":"😀"}"#, r#"{"a":"\ud83d\uDE00"}"#, Yes),
        ("the empty object", "{}", "{ }", Yes),
        ("order of elements", "[1,2]", "[2,1]", No),
        ("a member more", r#"{"a":1}"#, r#"{"a":1,"b":null}"#, No),
        ("a member in another case", r#"{"a":1}"#, r#"{"A":1}"#, No),
        ("composed and decomposed", r#"{"a":"é"}"#, "{\"a\":\"e\u{301}\"}", No),
        ("a string and a number", r#"{"a":"1"}"#, r#"{"a":1}"#, No),
        ("null and absent", r#"{"a":null}"#, "{}", No),
        ("nesting", r#"{"a":{"b":1}}"#, r#"{"a":{},"b":1}"#, No),
    ];
    for (at, (case, first, second, same)) in cases.into_iter().enumerate() {
        assert_comparison(&world, at, case, [JSON; 2], first.as_bytes(), second.as_bytes(), same).await;
    }
}

#[tokio::test]
async fn numbers_are_compared_as_written() {
    let world = TestGateway::in_memory("").await;
    let cases = [
        ("beyond 2^53", "9007199254740992", "9007199254740993", No),
        ("far beyond", "123456789012345678901234567890", "123456789012345678901234567891", No),
        ("1e400", "1e400", "1e400", Yes),
        ("1e400 and 1e401", "1e400", "1e401", No),
        ("1e400 in capitals", "1e400", "1E400", No),
        ("-1e400", "-1e400", "1e400", No),
        ("1e-400 and 0", "1e-400", "0", No),
        ("1 and 1.0", "1", "1.0", No),
        ("0 and -0", "0", "-0", No),
        ("a long fraction", "0.10000000000000000000000001", "0.1", No),
        ("an exponent of many digits", "1e99999999999999999999", "1e99999999999999999999", Yes),
    ];
    for (at, (case, first, second, same)) in cases.into_iter().enumerate() {
        let body = |number: &str, space: &str| format!("{{\"amount\":{space}{number}}}").into_bytes();
        assert_comparison(&world, at, case, [JSON; 2], &body(first, ""), &body(second, " "), same).await;
    }
}

#[tokio::test]
async fn what_is_not_quite_json_is_compared_byte_by_byte() {
    let world = TestGateway::in_memory("").await;
    let nested = |depth: usize, inside: &str| format!("{}{inside}{}", "[".repeat(depth), "]".repeat(depth));
    let odd: Vec<(&str, Vec<u8>, Vec<u8>)> = vec![
        ("duplicate members", br#"{"a":1,"a":2}"#.to_vec(), br#"{"a":2,"a":1}"#.to_vec()),
        ("equal duplicates", br#"{"a":1,"a":1}"#.to_vec(), br#"{"a":1, "a":1}"#.to_vec()),
        ("duplicates by escape", br#"{"a":1,"\u0061":2}"#.to_vec(), br#"{"a":1, "\u0061":2}"#.to_vec()),
        ("duplicates further down", br#"[{"b":{"a":1,"a":2}}]"#.to_vec(), br#"[{"b":{"a":1, "a":2}}]"#.to_vec()),
        ("a lone surrogate", br#"{"a":"\ud800"}"#.to_vec(), br#"{"a":"\uD800"}"#.to_vec()),
        ("the second half alone", br#"{"a":"\udc00"}"#.to_vec(), br#"{ "a":"\udc00"}"#.to_vec()),
        ("halves in the wrong order", br#"{"a":"\ude00\ud83d"}"#.to_vec(), br#"{ "a":"\ude00\ud83d"}"#.to_vec()),
        ("invalid UTF-8", b"{\"a\":\"\xff\"}".to_vec(), b"{\"a\":\"\xfe\"}".to_vec()),
        ("overlong UTF-8", b"{\"a\":\"\xc0\xaf\"}".to_vec(), b"{\"a\":\"/\"}".to_vec()),
        ("depth 10,000", nested(10_000, "1").into(), nested(10_000, " 1").into()),
        ("depth 100,000, unclosed", "[".repeat(100_000).into(), "[".repeat(99_999).into()),
        ("objects of depth 10,000", "{\"a\":".repeat(10_000).into(), "{\"a\": ".repeat(10_000).into()),
        ("depth 129", nested(129, "").into(), nested(129, " ").into()),
        ("cut short", b"{\"a\":1".to_vec(), b"{\"a\": 1".to_vec()),
        ("something after it", b"{} {}".to_vec(), b"{}  {}".to_vec()),
        ("a byte order mark", b"\xef\xbb\xbf{}".to_vec(), b"\xef\xbb\xbf{ }".to_vec()),
        ("NaN", b"{\"a\":NaN}".to_vec(), b"{\"a\": NaN}".to_vec()),
        ("a leading zero", b"{\"a\":01}".to_vec(), b"{\"a\": 01}".to_vec()),
        ("a trailing comma", b"[1,]".to_vec(), b"[1, ]".to_vec()),
        ("a comment", b"{}//".to_vec(), b"{ }//".to_vec()),
        ("NUL", b"{}\0".to_vec(), b"{ }\0".to_vec()),
        ("nothing", b"".to_vec(), b" ".to_vec()),
    ];
    for (at, (case, first, second)) in odd.iter().enumerate() {
        assert_comparison(&world, at, case, [JSON; 2], first, first, Yes).await;
        assert_comparison(&world, 100 + at, case, [JSON; 2], first, second, No).await;
    }
    // The last depth that is looked into.
    assert_comparison(&world, 99, "depth 128", [JSON; 2], nested(128, "").as_bytes(), nested(128, " ").as_bytes(), Yes)
        .await;
}

#[tokio::test]
async fn forms_are_compared_by_their_pairs() {
    let world = TestGateway::in_memory("").await;
    let cases = [
        ("order of names", "a=1&b=2", "b=2&a=1", Yes),
        ("spellings", "a=x+y&b=%7E", "a=x%20y&b=~", Yes),
        ("order of equal names", "a=1&a=2", "a=2&a=1", No),
        ("a value moved", "a=1&b=2", "a=2&b=1", No),
        ("a delimiter in a value", "a=1%26b=2", "a=1&b=2", No),
        ("an equals sign in a name", "a%3Db=1", "a=b=1", No),
        ("broken escapes", "a=%zz", "a=%zy", No),
        ("a pair more", "a=1", "a=1&a=1", No),
    ];
    for (at, (case, first, second, same)) in cases.into_iter().enumerate() {
        assert_comparison(&world, at, case, [FORM; 2], first.as_bytes(), second.as_bytes(), same).await;
    }
    assert_comparison(&world, 50, "the same bytes as text", [FORM, "text/plain"], b"a=1", b"a=1", No).await;
    assert_comparison(
        &world,
        51,
        "a charset",
        [FORM, "application/x-www-form-urlencoded; charset=utf-8"],
        b"a=1",
        b"a=1",
        Yes,
    )
    .await;
}

fn multipart(boundary: &str, file_name: &str, file: &[u8]) -> Vec<u8> {
    let field = "Content-Disposition: form-data; name=\"note\"\r\n\r\nhello";
    let head =
        format!("Content-Disposition: form-data; name=\"file\"; filename=\"{file_name}\"\r\nContent-Type: image/png");
    let mut body = format!("--{boundary}\r\n{field}\r\n--{boundary}\r\n{head}\r\n\r\n").into_bytes();
    body.extend(file);
    body.extend(format!("\r\n--{boundary}--\r\n").as_bytes());
    body
}

#[tokio::test]
async fn multipart_is_compared_by_its_parts() {
    let world = TestGateway::in_memory("").await;
    let kind = |boundary: &str| format!("multipart/form-data; boundary={boundary}");
    let (one, two) = (kind("AaB03x"), kind("----WebKitFormBoundary7MA4YWxk"));
    let kinds = [one.as_str(), two.as_str()];
    let first = multipart("AaB03x", "a.png", b"\x89PNG\0\r\n\xff");
    let again = |name: &str, file: &[u8]| multipart("----WebKitFormBoundary7MA4YWxk", name, file);
    assert_comparison(&world, 0, "another boundary", kinds, &first, &again("a.png", b"\x89PNG\0\r\n\xff"), Yes).await;
    assert_comparison(&world, 1, "another file", kinds, &first, &again("a.png", b"\x89PNG\0\r\n\xfe"), No).await;
    assert_comparison(&world, 2, "another file name", kinds, &first, &again("b.png", b"\x89PNG\0\r\n\xff"), No).await;
    let like = b"x\r\n--AaB03\r\n-- AaB03x";
    let inside = multipart("AaB03x", "a.png", like);
    assert_comparison(&world, 3, "something like the boundary inside", kinds, &inside, &again("a.png", like), Yes)
        .await;
    // A line that begins with the boundary and goes on ends the part for some parsers and not for others: bytes.
    let longer = multipart("AaB03x", "a.png", b"\r\n--AaB03xY");
    assert_comparison(&world, 7, "a longer boundary inside", kinds, &longer, &again("a.png", b"\r\n--AaB03xY"), No)
        .await;
    // Not multipart after all: bytes.
    let cut = &first[..first.len() - 12];
    assert_comparison(&world, 4, "cut short", kinds, cut, &again("a.png", b"\x89PNG\0\r\n\xff"), No).await;
    assert_comparison(&world, 5, "no boundary", ["multipart/form-data"; 2], &first, &first, Yes).await;
    assert_comparison(&world, 6, "no boundary, another", ["multipart/form-data"; 2], &first, cut, No).await;
}

#[tokio::test]
async fn other_bodies_are_compared_as_sent() {
    let world = TestGateway::in_memory("").await;
    let every: Vec<u8> = (0..=255).collect();
    let mut other = every.clone();
    other[128] ^= 1;
    assert_comparison(&world, 0, "every byte", ["application/octet-stream"; 2], &every, &every, Yes).await;
    assert_comparison(&world, 1, "one bit", ["application/octet-stream"; 2], &every, &other, No).await;
    assert_comparison(&world, 2, "JSON as text", ["text/plain"; 2], b"{}", b"{ }", No).await;
    let vendor = "application/vnd.api+json; v=1";
    assert_comparison(&world, 3, "JSON of a vendor", [vendor, "APPLICATION/VND.API+JSON;v=1"], b"{}", b"{ }", Yes)
        .await;
    assert_comparison(&world, 4, "another type", [JSON, "text/plain"], b"{}", b"{}", No).await;
    assert_comparison(&world, 5, "a type that is none", ["\u{e9};;=,"; 2], b"{}", b"{ }", No).await;
    assert_comparison(&world, 6, "JSON of a vendor and plain JSON", [vendor, JSON], b"{}", b"{}", No).await;
}

/// A gzip stream of `inflated` zero bytes and more, by hand: one literal, then "258 times the last byte" over and over. Its
/// checksum is wrong, but whoever sees that has inflated it.
fn gzip_bomb(inflated: usize) -> Vec<u8> {
    let mut bytes = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let (mut pending, mut count) = (0_u32, 0);
    let mut put = |bits: u32, length: u32| {
        pending |= bits << count;
        count += length;
        while count >= 8 {
            bytes.push(pending as u8);
            pending >>= 8;
            count -= 8;
        }
    };
    put(0b011, 3); // the last block, with the fixed code
    put(0b0000_1100, 8); // the literal 0; codes go out highest bit first
    for _ in 0..inflated / 258 {
        put(0b1010_0011, 8); // length 258
        put(0, 5); // distance 1
    }
    put(0, 7); // the end of the block
    put(0, 7);
    bytes.extend([0; 8]);
    bytes
}

/// The most memory that the process ever had, in kB.
fn peak_memory_kb(world: &TestGateway) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", world.gateway.id())).expect("Linux tells");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("the peak");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

#[tokio::test]
async fn compressed_bodies_are_compared_as_sent_and_never_inflated() {
    let world = TestGateway::in_memory("").await;
    let bomb = gzip_bomb(128 << 20);
    assert!(bomb.len() < 1 << 20, "{} bytes", bomb.len());
    let request = |key: &str, kind: &str, body: &[u8]| {
        world
            .shop_post("/pay")
            .key(key)
            .header("Content-Type", kind)
            .header("Content-Encoding", "gzip")
            .body(body.to_vec())
    };
    assert_eq!(request("warm-up", JSON, &vec![b'x'; bomb.len()]).send().await.status, 201);
    let before = peak_memory_kb(&world);
    for (at, kind) in [JSON, FORM, "multipart/form-data; boundary=a", "text/plain"].into_iter().enumerate() {
        let key = format!("bomb-{at:02}-never-inflated");
        assert_eq!(request(&key, kind, &bomb).send().await.status, 201);
        assert_eq!(world.upstream.last().body, bomb);
        assert_eq!(request(&key, kind, &bomb).send().await.header("idempotent-replayed"), Some("true"));
        // Another compression of the same bytes is another body: the checksum's last byte differs.
        let mut other = bomb.clone();
        *other.last_mut().expect("not empty") ^= 1;
        assert_problem(kind, &request(&key, kind, &other).send().await, 422, "key-reused", Some(&key));
    }
    let grown = peak_memory_kb(&world) - before;
    assert!(grown < 64 << 10, "the peak grew by {grown} kB; inflated it would have been 128 MiB");
    assert_eq!(world.upstream.executions(), 5);
    // Plain JSON under that label is not looked into either.
    assert_eq!(request("labelled", JSON, b"{}").send().await.status, 201);
    assert_problem("labelled", &request("labelled", JSON, b"{ }").send().await, 422, "key-reused", Some("labelled"));
}
