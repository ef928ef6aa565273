use proptest::prelude::*;

const TYPE: &str = "multipart/form-data; boundary=XyZ";

fn canonical(content_type: &str, body: impl AsRef<[u8]>) -> Option<Vec<u8>> {
    let mut out = b"kept".to_vec();
    let written = super::canonical(content_type, body.as_ref(), &mut out);
    assert!(out.starts_with(b"kept"), "what was there has to stay");
    assert!(written || out == b"kept", "nothing is appended on failure");
    written.then(|| out.split_off(4))
}

#[derive(Clone, Debug)]
struct TestFormPart {
    headers: String,
    content: Vec<u8>,
}

fn part(headers: &str, content: impl AsRef<[u8]>) -> TestFormPart {
    TestFormPart { headers: headers.to_owned(), content: content.as_ref().to_vec() }
}

fn body(boundary: &str, parts: &[TestFormPart]) -> Vec<u8> {
    let mut body = Vec::new();
    for part in parts {
        body.extend_from_slice(format!("--{boundary}\r\n{}\r\n\r\n", part.headers).as_bytes());
        body.extend_from_slice(&part.content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
    body
}

/// The canonical form of one part with these headers.
fn one(headers: &str) -> Option<Vec<u8>> {
    canonical(TYPE, body("XyZ", &[part(headers, "1")]))
}

fn framed(text: &[u8]) -> Vec<u8> {
    let (low, high) = (text.len() as u8 & 0x7f, text.len() >> 7);
    assert!(high < 0x80);
    let length = if high == 0 { vec![low] } else { vec![low | 0x80, high as u8] };
    [&length, text].concat()
}

#[test]
fn parts_are_framed_in_order() {
    let body = body(
        "XyZ",
        &[
            part("Content-Disposition: form-data; name=\"a\"", "1"),
            part("content-disposition: form-data; name=f; filename=\"x.png\"\r\nContent-Type:  image/png ", "\0\r\n-"),
        ],
    );
    let expected = [
        framed(b"a"),
        vec![0],
        vec![0],
        vec![0],
        framed(b"1"),
        framed(b"f"),
        vec![1],
        framed(b"x.png"),
        vec![1],
        framed(b"image/png"),
        vec![0],
        framed(b"\0\r\n-"),
    ];
    assert_eq!(canonical(TYPE, body), Some(expected.concat()));
}

#[test]
fn boundary_does_not_matter() {
    let parts = [part("Content-Disposition: form-data; name=\"a\"", "1")];
    let expected = canonical(TYPE, body("XyZ", &parts));
    assert!(expected.is_some());
    for (content_type, boundary) in [
        ("multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxk", "----WebKitFormBoundary7MA4YWxk"),
        ("Multipart/Form-Data;BOUNDARY=\"a b:c\"; charset=utf-8", "a b:c"),
        ("multipart/form-data; charset=\"x;boundary=no\"; boundary=yes ;", "yes"),
    ] {
        assert_eq!(canonical(content_type, body(boundary, &parts)), expected, "{content_type}");
    }
}

#[test]
fn content_type_without_a_usable_boundary_is_raw() {
    let long = "b".repeat(71);
    for (content_type, boundary) in [
        ("multipart/form-data", "XyZ"),
        ("multipart/mixed; boundary=XyZ", "XyZ"),
        ("multipart/form-data; boundary=", ""),
        ("multipart/form-data; boundary=\"\"", ""),
        ("multipart/form-data; boundary=\"XyZ", "XyZ"),
        ("multipart/form-data; boundary=XyZ; boundary=XyZ", "XyZ"),
        ("multipart/form-data; boundary=X@Z", "X@Z"),
        ("multipart/form-data; boundary=\"X \"", "X "),
        ("multipart/form-data; boundary=\"XyZ\"x", "XyZ"),
        (&format!("multipart/form-data; boundary={long}"), &long),
    ] {
        let body = body(boundary, &[part("Content-Disposition: form-data; name=a", "1")]);
        assert_eq!(canonical(content_type, body), None, "{content_type}");
    }
    let longest = "b".repeat(70);
    let body = body(&longest, &[]);
    assert_eq!(canonical(&format!("multipart/form-data; boundary={longest}"), body), Some(vec![]));
}

#[test]
fn preamble_and_epilogue_do_not_matter() {
    let plain = body("XyZ", &[part("Content-Disposition: form-data; name=a", "1")]);
    let expected = canonical(TYPE, &plain);
    assert!(expected.is_some());
    assert_eq!(canonical(TYPE, [b"pre --XyZ amble\r\n", &plain[..]].concat()), expected);
    assert_eq!(canonical(TYPE, [b"\r\n", &plain[..]].concat()), expected);
    assert_eq!(canonical(TYPE, [&plain[..], b"epilogue\r\n--XyZ"].concat()), expected);
    assert_eq!(canonical(TYPE, plain.strip_suffix(b"\r\n").unwrap()), expected);
}

#[test]
fn padding_after_a_boundary_does_not_matter() {
    let text = "--XyZ \t\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--XyZ-- \r\n";
    assert_eq!(canonical(TYPE, text), one("Content-Disposition: form-data; name=a"));
    assert!(canonical(TYPE, text).is_some());
}

#[test]
fn form_without_parts_is_empty() {
    assert_eq!(canonical(TYPE, "--XyZ--"), Some(vec![]));
}

#[test]
fn malformed_bodies_are_raw() {
    for text in [
        "",
        "no boundary at all",
        "--XyZ",
        "--XyZ\r\n",
        "--XyZ\r\nContent-Disposition: form-data; name=a\r\n\r\n1",
        "--XyZ\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--XyZ",
        "--XyZ\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--XyZ-",
        "--XyZ\r\nContent-Disposition: form-data; name=a\r\n\r\n1\n--XyZ--",
        "--XyZ\nContent-Disposition: form-data; name=a\n\n1\n--XyZ--",
        "--XyZ\r\nContent-Disposition: form-data; name=a\r\n--XyZ--",
        "--XyZ\r\nContent-Disposition: form-data; name=a\r\n\r\n--XyZ--",
        "--XyZ\r\n\r\n1\r\n--XyZ--",
        "--XyZ--x",
        "--XyZ--\n",
    ] {
        assert_eq!(canonical(TYPE, text), None, "{text:?}");
    }
}

#[test]
fn line_that_only_starts_like_the_boundary_is_ambiguous() {
    let text = "--XyZ\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--XyZ2\r\n--XyZ--";
    assert_eq!(canonical(TYPE, text), None);
}

#[test]
fn part_headers_that_cannot_be_trusted_are_raw() {
    for headers in [
        "Content-Type: text/plain",
        "Content-Disposition: form-data",
        "Content-Disposition: form-data; filename=a",
        "Content-Disposition: attachment; name=a",
        "Content-Disposition: form-data; name=\"a",
        "Content-Disposition: form-data; name=\"a\"b",
        "Content-Disposition: form-data; name=",
        "Content-Disposition: form-data; name",
        "Content-Disposition: form-data; name=a b",
        "Content-Disposition: form-data; name=a; name=a",
        "Content-Disposition: form-data; name=a; filename=b; filename=c",
        "Content-Disposition: form-data; name=a; filename*=utf-8''b",
        "Content-Disposition: form-data; name=a\r\nContent-Disposition: form-data; name=a",
        "Content-Disposition: form-data; name=a\r\nContent-Type: a/b\r\nContent-Type: a/b",
        "Content-Disposition: form-data;\r\n name=a",
        "Content-Disposition: form-data; name=a\nX: y",
        "Content-Disposition: form-data; name=a\rX: y",
        "Content-Disposition : form-data; name=a",
        "Content-Disposition: form-data; name=a\r\nno colon",
        ": form-data",
    ] {
        assert_eq!(one(headers), None, "{headers:?}");
    }
}

#[test]
fn spelling_of_headers_does_not_matter() {
    let expected = one("Content-Disposition: form-data; name=\"a\"; filename=\"b\"");
    assert!(expected.is_some());
    for headers in [
        "CONTENT-DISPOSITION:Form-Data;NAME=a;FileName=b",
        "content-disposition:   form-data ; filename=b ; name=\"a\" ; ",
    ] {
        assert_eq!(one(headers), expected, "{headers:?}");
    }
}

#[test]
fn absent_differs_from_empty() {
    let name = "Content-Disposition: form-data; name=a";
    let all = [
        name.to_owned(),
        format!("{name}; filename=\"\""),
        format!("{name}\r\nContent-Type:"),
        format!("{name}; filename=\"\"\r\nContent-Type:"),
    ];
    let all: Vec<_> = all.iter().map(|headers| one(headers).unwrap()).collect();
    for (i, a) in all.iter().enumerate() {
        assert!(all[i + 1..].iter().all(|b| a != b));
    }
    assert!(one("Content-Disposition: form-data; name=\"\"").is_some());
}

#[test]
fn quoted_names_may_hold_delimiters_and_escapes() {
    let found = one(r#"Content-Disposition: form-data; name="a;b=\"c\"\\"; filename="C:\dir\é""#).unwrap();
    assert!(found.starts_with(&framed(br#"a;b="c"\"#)));
    let file_name = framed(r"C:\dir\é".as_bytes());
    assert!(found.windows(file_name.len()).any(|window| window == file_name));
}

#[test]
fn every_piece_of_a_part_matters() {
    let mut all = vec![
        one("Content-Disposition: form-data; name=a").unwrap(),
        one("Content-Disposition: form-data; name=b").unwrap(),
        one("Content-Disposition: form-data; name=a; filename=b").unwrap(),
        one("Content-Disposition: form-data; name=a\r\nContent-Type: text/plain").unwrap(),
        one("Content-Disposition: form-data; name=a\r\nContent-Type: text/html").unwrap(),
        one("Content-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64").unwrap(),
        canonical(TYPE, body("XyZ", &[part("Content-Disposition: form-data; name=a", "2")])).unwrap(),
    ];
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
}

#[test]
fn order_of_parts_matters() {
    let a = part("Content-Disposition: form-data; name=a", "1");
    let b = part("Content-Disposition: form-data; name=b", "1");
    let (ab, ba) = (body("XyZ", &[a.clone(), b.clone()]), body("XyZ", &[b, a]));
    assert_ne!(canonical(TYPE, ab), canonical(TYPE, ba));
}

#[test]
fn more_parts_than_allowed_are_raw() {
    let parts = vec![part("Content-Disposition: form-data; name=a", "1"); super::MAX_PARTS + 1];
    assert_eq!(canonical(TYPE, body("XyZ", &parts)), None);
    assert!(canonical(TYPE, body("XyZ", &parts[1..])).is_some());
}

#[test]
fn bodies_made_to_confuse_the_search_take_linear_time() {
    let mut text = b"--XyZ\r\nContent-Disposition: form-data; name=a\r\n\r\n".to_vec();
    text.extend(b"\r\n--Xy".repeat(300_000));
    text.extend_from_slice(b"\r\n--XyZ--");
    let start = std::time::Instant::now();
    assert!(canonical(TYPE, text).is_some());
    assert!(start.elapsed().as_secs() < 10);
}

proptest! {
    #[test]
    fn any_bytes_are_survived(content_type: String, text: Vec<u8>) {
        canonical(&content_type, &text);
        canonical(TYPE, [b"--XyZ\r\n", &text[..], b"\r\n--XyZ--"].concat());
        canonical(TYPE, [b"--XyZ\r\nContent-Disposition: form-data; ", &text[..], b"\r\n\r\n\r\n--XyZ--"].concat());
    }

    #[test]
    fn any_content_comes_through_any_boundary(
        contents in prop::collection::vec(prop::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), any::<u8>()], 0..200), 0..5),
        boundary in "[0-9A-Za-z'()+_,./:=?-]{8,70}",
    ) {
        let parts: Vec<_> = contents.iter().map(|content| part("Content-Disposition: form-data; name=a", content)).collect();
        let expected: Vec<u8> = contents
            .iter()
            .flat_map(|content| [framed(b"a"), vec![0; 3], framed(content)].concat())
            .collect();
        let quoted = format!("multipart/form-data; boundary=\"{boundary}\"");
        prop_assert_eq!(canonical(&quoted, body(&boundary, &parts)), Some(expected));
    }
}
