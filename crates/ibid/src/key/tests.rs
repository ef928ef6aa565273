use super::*;

#[test]
fn a_quoted_and_a_bare_key_are_one_key() {
    assert_eq!(extract_key(b"abc").unwrap(), "abc");
    assert_eq!(extract_key(b"  \"abc\" ").unwrap(), "abc");
    assert_eq!(extract_key(br#""a\"b\\c""#).unwrap(), r#"a"b\c"#);
    assert_eq!(extract_key(b"\"a,b\"").unwrap(), "a,b");
}

#[test]
fn what_can_be_read_in_two_ways_is_refused() {
    let bad: [&[u8]; 17] = [
        b"",
        b"  ",
        b"\"\"",
        b"\"   \"",
        b"a,b",
        b"\"a\", \"b\"",
        b"\"a\";p=1",
        b"a;p",
        b"\"a",
        b"\"a\\x\"",
        b"\"a\\",
        b"a b",
        b"\"a b\"",
        b"a\x7fb",
        b"a\xc3\xa9",
        b"a\"b",
        b"\"a\"b",
    ];
    for value in bad {
        assert!(extract_key(value).is_err(), "{:?}", String::from_utf8_lossy(value));
    }
}

#[test]
fn a_raw_key_is_the_headers_value_as_it_is() {
    let mut rules = crate::Policy::ietf().key;
    rules.format = KeyFormat::Raw;
    for key in ["order 1", "order,1", "order;1", "\"order\"", "\"a", "a\\\"b", "k"] {
        assert_eq!(IdempotencyKey::from_header(&rules, key.as_bytes()).unwrap().as_str(), key);
        assert_eq!(IdempotencyKey::new(&rules, key).unwrap().as_str(), key);
    }
    assert_eq!(IdempotencyKey::from_header(&rules, b" \t k ").unwrap().as_str(), "k");
    for bad in ["", "  ", "a\tb", "a\x7f", "\u{e9}", &"k".repeat(256)] {
        assert!(IdempotencyKey::from_header(&rules, bad.as_bytes()).is_err(), "{bad:?}");
    }
}

#[test]
fn every_way_in_gives_one_key_one_spelling() {
    let upper = "550E8400-E29B-41D4-A716-446655440000";
    for format in [KeyFormat::Uuid, KeyFormat::Uuid4] {
        let rules = KeyPolicy { format, ..crate::Policy::ietf().key };
        let key = IdempotencyKey::new(&rules, upper).unwrap();
        assert_eq!(key.as_str(), upper.to_lowercase());
        assert_eq!(IdempotencyKey::from_header(&rules, format!("\"{upper}\"").as_bytes()).unwrap(), key);
        assert_eq!(format!("{key:?}"), "IdempotencyKey(550e****0000)");
    }
    let rules = crate::Policy::ietf().key;
    assert_eq!(IdempotencyKey::new(&rules, upper).unwrap().into_string(), upper);
    for bad in ["", "a b", "a\n", "\u{e9}"] {
        assert!(IdempotencyKey::new(&rules, bad).is_err(), "{bad:?}");
    }
}

#[test]
fn formats_accept_what_they_name() {
    let uuid4 = "550e8400-e29b-41d4-a716-446655440000";
    let uuid1 = "550e8400-e29b-11d4-a716-446655440000";
    assert!(KeyFormat::Uuid4.check(&uuid4.to_uppercase()).is_ok());
    assert!(KeyFormat::Uuid4.check(uuid1).is_err());
    let uuid7 = "017F22E2-79B0-7CC3-98C4-DC0C0C07398F";
    for uuid in [uuid7, &uuid7.to_lowercase()] {
        assert!(KeyFormat::Uuid7.check(uuid).is_ok() && KeyFormat::Uuid4.check(uuid).is_err(), "{uuid}");
        let rules = KeyPolicy { format: KeyFormat::Uuid7, ..crate::Policy::ietf().key };
        assert_eq!(IdempotencyKey::new(&rules, uuid).unwrap().as_str(), uuid7.to_lowercase());
    }
    for other in [uuid4, uuid1, "017F22E2-79B0-7CC3-18C4-DC0C0C07398F", "017F22E279B07CC398C4DC0C0C07398F"] {
        assert!(KeyFormat::Uuid7.check(other).is_err(), "{other}");
    }
    assert!(KeyFormat::Uuid.check(uuid1).is_ok());
    assert!(KeyFormat::Uuid.check(&uuid1.replace('-', "")).is_err());
    for valid in [uuid4, "user_123_application_2024_abc123", "req-1234567890abcdef"] {
        assert!(is_valid_key(valid), "{valid}");
    }
    for invalid in ["short", "contains spaces in it", "special@chars!and-more"] {
        assert!(!is_valid_key(invalid), "{invalid}");
    }
    assert!(KeyFormat::Operation.check("usr_abc123:booking.create:res_xyz:1704067200000").is_ok());
    for invalid in ["a:b:c", "a:b:c:d", ":b:c:1", "a:b:c:", "a:b:c:d:1", "a:b:c:123456789012345678901"] {
        assert!(KeyFormat::Operation.check(invalid).is_err(), "{invalid}");
    }
    let regex: KeyFormat = "regex:ord_[0-9]+".parse().unwrap();
    assert!(regex.check("ord_12").is_ok());
    assert!(regex.check("xord_12").is_err());
    assert!(regex.check("ord_12\n").is_err());
    assert!("regex:(".parse::<KeyFormat>().is_err());
}

#[test]
fn masks_hide_all_but_the_ends() {
    assert_eq!(mask("550e8400-e29b-41d4-a716-446655440000"), "550e****0000");
    assert_eq!(mask("elevenchars"), "****");
    assert_eq!(mask("twelve-chars"), "twel****hars");
}

#[test]
fn made_keys_are_valid() {
    assert!(KeyFormat::Uuid4.check(&generate_key()).is_ok());
    assert_ne!(generate_key(), generate_key());
    assert_eq!(derive_key(&["ab", "c"]), derive_key(&["ab", "c"]));
    assert_ne!(derive_key(&["ab", "c"]), derive_key(&["a", "bc"]));
    assert!(KeyFormat::Uuid4.check(&derive_key(&["x"])).is_ok());
}
