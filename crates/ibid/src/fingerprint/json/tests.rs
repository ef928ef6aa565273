use std::borrow::Cow;

use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::{HashStream, JsonLookup, JsonNumbers, JsonPointer, find, splice_member};

fn canonical(body: impl AsRef<[u8]>) -> Option<String> {
    without(body, &[])
}

fn without(body: impl AsRef<[u8]>, ignore: &[&str]) -> Option<String> {
    let ignore: Vec<_> = ignore.iter().map(|written| pointer(written)).collect();
    let canonical = super::canonical(body.as_ref(), &ignore, super::NameEquality::Exact)?.into_owned();
    Some(String::from_utf8(canonical).expect("canonical JSON is text"))
}

fn pointer(written: &str) -> JsonPointer {
    JsonPointer::parse(written).unwrap()
}

#[track_caller]
fn assert_canonical(body: &str, expected: &str) {
    assert_eq!(canonical(body).as_deref(), Some(expected), "{body}");
}

#[test]
fn example_of_the_module_holds() {
    assert_canonical(r#"{ "b": 1.0, "\u0061": [true, "\/"] }"#, r#"{"a":[true,"/"],"b":1.0}"#);
}

#[test]
fn members_are_sorted_at_every_depth() {
    assert_canonical(r#"{"b":{"d":1,"c":[{"z":0,"y":0}]},"a":2}"#, r#"{"a":2,"b":{"c":[{"y":0,"z":0}],"d":1}}"#);
}

#[test]
fn names_sort_by_bytes_beyond_their_first_eight() {
    assert_canonical(
        r#"{"customer_name":1,"customer":2,"customer_id":3,"":4,"custome":5}"#,
        r#"{"":4,"custome":5,"customer":2,"customer_id":3,"customer_name":1}"#,
    );
}

#[test]
fn many_members_are_sorted() {
    let names: Vec<_> = (0..100).map(|i| format!("name{:02}", i * 37 % 100)).collect();
    let object =
        |names: &[String]| format!("{{{}}}", names.iter().map(|n| format!("\"{n}\":0")).collect::<Vec<_>>().join(","));
    let mut sorted = names.clone();
    sorted.sort();
    assert_canonical(&object(&names), &object(&sorted));
}

#[test]
fn order_of_elements_is_kept() {
    assert_canonical("[3, 1,2 ,\"b\",\"\\u0061\",null]", "[3,1,2,\"b\",\"a\",null]");
}

#[test]
fn space_is_removed_outside_of_strings_only() {
    assert_canonical(" \t\r\n{ \"a b\" :\n[ 1 , 2 ] , \"c\":{ } ,\"d\":[ ]} ", r#"{"a b":[1,2],"c":{},"d":[]}"#);
}

#[test]
fn scalars_are_documents() {
    for scalar in ["null", "true", "false", "0", "-1.5e+3", "\"\"", "\"a\""] {
        assert_canonical(&format!(" {scalar}\n"), scalar);
    }
}

#[test]
fn numbers_differ_when_written_differently() {
    let numbers = [
        "0",
        "-0",
        "0.0",
        "1",
        "1.0",
        "1e0",
        "1E0",
        "1e+0",
        "10e-1",
        "1e400",
        "9007199254740992",
        "9007199254740993",
        "0.1",
        "0.10",
        "1e-400",
    ];
    for number in numbers {
        assert_canonical(&format!("[{number} ]"), &format!("[{number}]"));
    }
}

#[test]
fn each_code_point_has_one_spelling() {
    for (spellings, expected) in [
        (&["A", "\\u0041"][..], "A"),
        (&["/", "\\/", "\\u002f", "\\u002F"], "/"),
        (&["é", "\\u00e9", "\\u00E9"], "é"),
        (&["😀", "\\ud83d\\ude00", "\\uD83D\\uDE00"], "😀"),
        (&["\u{10ffff}", "\\udbff\\udfff"], "\u{10ffff}"),
        (&["\u{7f}", "\\u007f"], "\u{7f}"),
        (&["\u{2028}", "\\u2028"], "\u{2028}"),
        (&["\\\"", "\\u0022"], "\\\""),
        (&["\\\\", "\\u005c"], "\\\\"),
        (&["\\n", "\\u000a", "\\u000A"], "\\n"),
        (&["\\t", "\\u0009"], "\\t"),
        (&["\\r", "\\u000d"], "\\r"),
        (&["\\b", "\\u0008"], "\\b"),
        (&["\\f", "\\u000c"], "\\f"),
        (&["\\u0000"], "\\u0000"),
        (&["\\u001F", "\\u001f"], "\\u001f"),
    ] {
        for spelling in spellings {
            assert_canonical(&format!("[\"x{spelling}y\"]"), &format!("[\"x{expected}y\"]"));
            assert_canonical(&format!("{{\"{spelling}\":0}}"), &format!("{{\"{expected}\":0}}"));
        }
    }
}

#[test]
fn canonical_body_is_not_copied() {
    for body in [r#"{"a":[1,{"b":"\n\\é"}],"c":{}}"#, "1", "\"\\\"\""] {
        assert!(
            matches!(super::canonical(body.as_bytes(), &[], super::NameEquality::Exact), Some(Cow::Borrowed(same)) if same == body.as_bytes())
        );
    }
}

#[test]
fn invalid_json_is_raw() {
    for body in [
        "",
        " ",
        "{",
        "}",
        "[",
        "]",
        "[1",
        "[1,",
        "[1,]",
        "[,1]",
        "[1 2]",
        "[1}",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{,}",
        "{\"a\":1",
        "{\"a\":1]",
        "{\"a\" 1}",
        "{a:1}",
        "{1:1}",
        "{'a':1}",
        "{\"a\":1 \"b\":2}",
        "{\"a\"::1}",
        "01",
        "-01",
        "-",
        "+1",
        "1.",
        ".5",
        "1.e5",
        "1e",
        "1e+",
        "0x1",
        "1_000",
        "NaN",
        "Infinity",
        "tru",
        "truE",
        "nul",
        "True",
        "nulll",
        "1 2",
        "{} {}",
        "[] x",
        "\"",
        "\"a",
        "\"\\\"",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "\"\\u+123\"",
        "\"a\nb\"",
        "\"a\tb\"",
        "\"\0\"",
        "[\x0c1]",
        "[\x011]",
        "\u{feff}{}",
        "[\u{a0}1]",
        "// c\n1",
        "\0",
        "1\0",
    ] {
        assert_eq!(canonical(body), None, "{body:?}");
    }
    assert_eq!(canonical(b"\"\xff\""), None);
    assert_eq!(canonical(b"\"\xc0\xaf\""), None);
    assert_eq!(canonical(b"\"\xed\xa0\x80\""), None);
}

#[test]
fn control_characters_are_seen_anywhere_in_a_string() {
    for at in 0..200 {
        let mut text = "\"".to_owned() + &"a".repeat(200) + "\"";
        assert_eq!(canonical(&text).as_ref(), Some(&text));
        text.replace_range(at + 1..at + 2, "\n");
        assert_eq!(canonical(&text), None, "at {at}");
        text.replace_range(at + 1..at + 2, "\\u0061");
        assert_eq!(canonical(&text), Some("\"".to_owned() + &"a".repeat(200) + "\""), "at {at}");
    }
}

#[test]
fn duplicate_members_are_raw() {
    for body in [
        r#"{"a":1,"a":1}"#,
        r#"{"a":1,"b":2,"a":1}"#,
        r#"{"b":2,"a":1,"a":1}"#,
        r#"{"a":1,"\u0061":2}"#,
        r#"{"\u0061":1,"b":0,"\u0061":2}"#,
        r#"[{"x":{"same-long-name":1,"other":2,"same-long-name":1}}]"#,
        r#"{"":1,"":2}"#,
    ] {
        assert_eq!(canonical(body), None, "{body}");
    }
    let many: Vec<_> = (0..40).map(|i| format!("\"{}\":0", i * 7 % 39)).collect();
    assert_eq!(canonical(format!("{{{}}}", many.join(","))), None);
    assert_canonical(r#"[{"a":1},{"a":1}]"#, r#"[{"a":1},{"a":1}]"#);
    assert_canonical(r#"{"a":{"a":1}}"#, r#"{"a":{"a":1}}"#);
    assert_canonical(r#"{"a\u0000":1,"a":2}"#, r#"{"a":2,"a\u0000":1}"#);
}

#[test]
fn lone_surrogates_are_raw() {
    for text in [
        "\\ud800",
        "\\udc00",
        "\\ud800x",
        "\\ud800\\n",
        "\\ud800\\ud800",
        "\\udc00\\ud800",
        "\\ud800\\u0041",
        "\\ud83d\\ude0",
    ] {
        assert_eq!(canonical(format!("\"{text}\"")), None, "{text}");
        assert_eq!(canonical(format!("{{\"{text}\":1}}")), None, "{text}");
    }
}

#[test]
fn nesting_is_limited() {
    let nested = |open: &str, close: &str, depth: usize| open.repeat(depth) + "1" + &close.repeat(depth);
    for (open, close) in [("[", "]"), ("{\"a\":", "}"), ("[ ", "]")] {
        assert!(canonical(nested(open, close, 128)).is_some());
        assert_eq!(canonical(nested(open, close, 129)), None);
        assert_eq!(canonical(nested(open, close, 10_000)), None);
        assert_eq!(splice_member(nested(open, close, 10_000).as_bytes(), "a", b"1"), None);
        assert_eq!(find(nested(open, close, 10_000).as_bytes(), &pointer("/a")), None);
    }
    assert_eq!(canonical("[".repeat(1_000_000)), None);
}

#[test]
fn ignored_places_are_left_out() {
    let body = r#"{"b":{"c":1,"d":2},"a":[{"ts":1,"v":2},{"ts":3}],"x/y":1,"m~n":2}"#;
    for (ignore, expected) in [
        (&["/b/c"][..], r#"{"a":[{"ts":1,"v":2},{"ts":3}],"b":{"d":2},"m~n":2,"x/y":1}"#),
        (&["/a/0/ts", "/a/1/ts"], r#"{"a":[{"v":2},{}],"b":{"c":1,"d":2},"m~n":2,"x/y":1}"#),
        (&["/a/0", "/a/1"], r#"{"a":[],"b":{"c":1,"d":2},"m~n":2,"x/y":1}"#),
        (&["/a", "/b", "/x~1y", "/m~0n"], "{}"),
        (&["/b", "/b/c", "/a/1"], r#"{"a":[{"ts":1,"v":2}],"m~n":2,"x/y":1}"#),
        (&["/q", "/a/2", "/a/-", "/a/00", "/a/x", "/b/c/d", "/b/0"], canonical(body).unwrap().as_str()),
    ] {
        assert_eq!(without(body, ignore).as_deref(), Some(expected), "{ignore:?}");
    }
}

#[test]
fn ignored_member_is_as_good_as_absent() {
    assert_eq!(without(r#"{"a":1,"t":{"deep":[1]}}"#, &["/t"]), without(r#"{"a":1}"#, &["/t"]));
    assert_eq!(without(r#"{"\u0074":1}"#, &["/t"]).as_deref(), Some("{}"));
    assert_eq!(without(r#"{"é\n":1}"#, &["/é\n"]).as_deref(), Some("{}"));
    assert_eq!(without(r#"{"7":1}"#, &["/7"]).as_deref(), Some("{}"));
    assert_eq!(without("5", &["/a"]).as_deref(), Some("5"));
}

#[test]
fn ignored_members_still_count_as_duplicates() {
    assert_eq!(without(r#"{"t":1,"a":2,"t":3}"#, &["/t"]), None);
}

#[test]
fn pointers_are_checked() {
    for written in ["/a", "/", "/a/b/0", "/~0~1", "//", "/é"] {
        assert_eq!(pointer(written).to_string(), written);
    }
    for (written, reason) in
        [("", "whole document"), ("a", "start with `/`"), ("/~", "~0"), ("/~2", "~0"), ("/a~", "~0"), ("/~é", "~0")]
    {
        let message = JsonPointer::parse(written).unwrap_err().to_string();
        assert!(message.contains(reason), "{message}");
        assert!(message.contains(&format!("`{written}`")), "{message}");
    }
    assert_eq!(pointer("/a"), pointer("/a"));
    assert_ne!(pointer("/a"), pointer("/b"));
}

#[test]
fn strings_and_numbers_are_found() {
    let body = br#"{"s":"plain","e":"\u0041\n\"\ud83d\ude00","n":-1.50e2,"a":[0,{"k":"v"}],"":{"":"empty"},"z":""}"#;
    let text = |plain: &'static str| Some(JsonLookup::String(Cow::Borrowed(plain)));
    assert_eq!(find(body, &pointer("/s")), text("plain"));
    assert!(matches!(find(body, &pointer("/s")), Some(JsonLookup::String(Cow::Borrowed(_)))));
    assert_eq!(find(body, &pointer("/e")), text("A\n\"😀"));
    assert_eq!(find(body, &pointer("/n")), Some(JsonLookup::Number("-1.50e2")));
    assert_eq!(find(body, &pointer("/a/0")), Some(JsonLookup::Number("0")));
    assert_eq!(find(body, &pointer("/a/1/k")), text("v"));
    assert_eq!(find(body, &pointer("//")), text("empty"));
    assert_eq!(find(body, &pointer("/z")), text(""));
}

#[test]
fn absent_and_unusable_values_are_told_apart() {
    let body = br#"{"t":true,"f":false,"0":null,"o":{},"a":[1],"s":"x"}"#;
    for at in ["/x", "/a/1", "/a/01", "/a/-", "/s/0", "/o/x", "/a/99999999999999"] {
        assert_eq!(find(body, &pointer(at)), Some(JsonLookup::Absent), "{at}");
    }
    for at in ["/f", "/0", "/o", "/a"] {
        assert_eq!(find(body, &pointer(at)), Some(JsonLookup::OtherType), "{at}");
    }
    assert_eq!(find(body, &pointer("/t")), Some(JsonLookup::True));
}

#[test]
fn nothing_is_found_in_a_raw_body() {
    for body in [r#"{"k":"a","k":"b"}"#, r#"{"k":"a"} x"#, r#"{"k":"a","x":"\ud800"}"#, ""] {
        assert_eq!(find(body.as_bytes(), &pointer("/k")), None, "{body}");
    }
}

#[test]
fn member_is_spliced_in_and_nothing_else_changes() {
    for (body, expected) in [
        (r#"{}"#, r#"{"k":[9]}"#),
        (" { \n} ", " {\"k\":[9] \n} "),
        ("{ \"a\" : 1.0\n}\n", "{ \"a\" : 1.0,\"k\":[9]\n}\n"),
        (r#"{"k":1}"#, r#"{"k":[9]}"#),
        (r#"{"z":"\u0041", "k" : {"k":[1,"}"]} ,"a":1e5 }"#, r#"{"z":"\u0041", "k" : [9] ,"a":1e5 }"#),
        (r#"{"\u006b":"x","b":2}"#, r#"{"\u006b":[9],"b":2}"#),
        (r#"{"a":{"k":1}}"#, r#"{"a":{"k":1},"k":[9]}"#),
    ] {
        let spliced = splice_member(body.as_bytes(), "k", b"[9]").map(|bytes| String::from_utf8(bytes).unwrap());
        assert_eq!(spliced.as_deref(), Some(expected));
    }
}

#[test]
fn spliced_name_is_escaped() {
    assert_eq!(splice_member(b"{}", "a\"\n", b"1").unwrap(), br#"{"a\"\n":1}"#);
    assert_eq!(splice_member(br#"{"a\u0022\n":0}"#, "a\"\n", b"1").unwrap(), br#"{"a\u0022\n":1}"#);
}

#[test]
fn only_objects_can_be_spliced() {
    for body in ["", "[]", "1", "{", "{} x", "\"{}\"", r#"{"k":1,"k":2}"#, r#"{"a":1,"a":2}"#, r#"{"a":01}"#] {
        assert_eq!(splice_member(body.as_bytes(), "k", b"1"), None, "{body}");
    }
    for value in ["", "1,", "}", "1,\"x\":2"] {
        assert_eq!(splice_member(b"{}", "k", value.as_bytes()), None, "{value}");
    }
}

/// A document, independent of its spelling.
#[derive(Clone, Debug)]
enum GeneratedJson {
    Bare(String),
    Text(String),
    Array(Vec<GeneratedJson>),
    Object(Vec<(String, GeneratedJson)>),
}

/// Random choices for spelling a document in one of many ways.
struct JsonRng(u64);

impl JsonRng {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }
}

impl GeneratedJson {
    fn spell(&self, dice: &mut JsonRng) -> String {
        let mut out = String::new();
        self.spell_into(dice, &mut out);
        out
    }

    fn spell_into(&self, dice: &mut JsonRng, out: &mut String) {
        space(dice, out);
        match self {
            GeneratedJson::Bare(bare) => out.push_str(bare),
            GeneratedJson::Text(text) => spell_text(text, dice, out),
            GeneratedJson::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i > 0 { "," } else { "" });
                    item.spell_into(dice, out);
                }
                space(dice, out);
                out.push(']');
            }
            GeneratedJson::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                for i in (1..members.len()).rev() {
                    members.swap(i, dice.roll(i + 1));
                }
                out.push('{');
                for (i, (name, value)) in members.into_iter().enumerate() {
                    out.push_str(if i > 0 { "," } else { "" });
                    space(dice, out);
                    spell_text(name, dice, out);
                    space(dice, out);
                    out.push(':');
                    value.spell_into(dice, out);
                }
                space(dice, out);
                out.push('}');
            }
        }
        space(dice, out);
    }

    fn scalars(&mut self) -> Vec<&mut GeneratedJson> {
        match self {
            GeneratedJson::Array(items) => items.iter_mut().flat_map(GeneratedJson::scalars).collect(),
            GeneratedJson::Object(members) => members.iter_mut().flat_map(|(_, value)| value.scalars()).collect(),
            scalar => vec![scalar],
        }
    }
}

fn space(dice: &mut JsonRng, out: &mut String) {
    while dice.roll(4) == 0 {
        out.push([' ', '\n', '\t', '\r'][dice.roll(4)]);
    }
}

fn spell_text(text: &str, dice: &mut JsonRng, out: &mut String) {
    out.push('"');
    let plain = dice.roll(2) == 0;
    for c in text.chars() {
        let short = match c {
            '"' | '\\' | '/' => Some(c),
            '\n' => Some('n'),
            '\r' => Some('r'),
            '\t' => Some('t'),
            '\x08' => Some('b'),
            '\x0c' => Some('f'),
            _ => None,
        };
        let must = matches!(c, '"' | '\\' | '\0'..'\x20');
        if !must && (plain || dice.roll(3) > 0) {
            out.push(c);
        } else if let Some(short) = short.filter(|_| dice.roll(2) == 0) {
            out.extend(['\\', short]);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                out.push_str(&if dice.roll(2) == 0 { format!("\\u{unit:04x}") } else { format!("\\u{unit:04X}") });
            }
        }
    }
    out.push('"');
}

/// The canonical form, computed the slow way from the output of another parser.
fn oracle(value: &serde_json::Value, out: &mut String) {
    match value {
        serde_json::Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                oracle(item, out);
            }
            out.push(']');
        }
        serde_json::Value::Object(members) => {
            let mut members: Vec<_> = members.iter().map(|(name, value)| (oracle_text(name), value)).collect();
            members.sort_by(|a, b| a.0[1..a.0.len() - 1].cmp(&b.0[1..b.0.len() - 1]));
            out.push('{');
            for (i, (name, value)) in members.into_iter().enumerate() {
                out.push_str(if i > 0 { "," } else { "" });
                out.push_str(&name);
                out.push(':');
                oracle(value, out);
            }
            out.push('}');
        }
        serde_json::Value::String(text) => out.push_str(&oracle_text(text)),
        bare => out.push_str(&bare.to_string()),
    }
}

fn oracle_text(text: &str) -> String {
    // serde_json escapes the same characters in the same way.
    serde_json::to_string(text).unwrap()
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-c]{0,3}",
        "[a-z_]{7,12}",
        "customer[a-c]{0,2}",
        "[\\x00-\\x22/\\\\\\x7fé😀\u{2028}]{0,6}",
        "\\PC{0,80}",
        any::<String>(),
    ]
}

fn any_doc() -> impl Strategy<Value = GeneratedJson> {
    let number = "-?(0|[1-9][0-9]{0,20})(\\.[0-9]{1,4})?(e[+-][0-9]{1,3})?";
    let scalar = prop_oneof![
        prop::sample::select(vec!["null", "true", "false"]).prop_map(|bare| GeneratedJson::Bare(bare.to_owned())),
        number.prop_map(GeneratedJson::Bare),
        any_text().prop_map(GeneratedJson::Text),
    ];
    scalar.prop_recursive(5, 80, 24, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(GeneratedJson::Array),
            prop::collection::hash_map(any_text(), inner, 0..24)
                .prop_map(|members| GeneratedJson::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn canonical_form_is_that_of_the_oracle(doc in any_doc(), seed: u64) {
        let body = doc.spell(&mut JsonRng(seed));
        let mut expected = String::new();
        oracle(&serde_json::from_str(&body).unwrap(), &mut expected);
        prop_assert_eq!(canonical(&body), Some(expected.clone()));
        prop_assert_eq!(without(&body, &["/no such member/0"]), Some(expected));
    }

    #[test]
    fn spelling_does_not_matter(doc in any_doc(), one: u64, other: u64) {
        prop_assert_eq!(canonical(doc.spell(&mut JsonRng(one))), canonical(doc.spell(&mut JsonRng(other))));
    }

    #[test]
    fn canonical_form_is_canonical(doc in any_doc(), seed: u64) {
        let once = canonical(doc.spell(&mut JsonRng(seed))).unwrap();
        let twice = super::canonical(once.as_bytes(), &[], super::NameEquality::Exact);
        prop_assert!(matches!(twice, Some(Cow::Borrowed(same)) if same == once.as_bytes()));
    }

    #[test]
    fn every_scalar_matters(mut doc in any_doc(), pick: prop::sample::Index, seed: u64) {
        let before = canonical(doc.spell(&mut JsonRng(seed))).unwrap();
        let mut scalars = doc.scalars();
        prop_assume!(!scalars.is_empty());
        match pick.get_mut(&mut scalars) {
            GeneratedJson::Bare(bare) if bare.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {
                *bare = if bare.contains('e') { format!("{bare}0") } else { format!("{bare}e1") };
            }
            GeneratedJson::Bare(bare) => *bare = if bare == "null" { "0".to_owned() } else { "null".to_owned() },
            GeneratedJson::Text(text) => text.push('x'),
            GeneratedJson::Array(_) | GeneratedJson::Object(_) => unreachable!("not a scalar"),
        }
        prop_assert_ne!(canonical(doc.spell(&mut JsonRng(seed))).unwrap(), before);
    }

    #[test]
    fn any_bytes_are_survived(body: Vec<u8>, text: String) {
        prop_assert_eq!(super::canonical(&body, &[], super::NameEquality::Exact).is_some(), find(&body, &pointer("/a/0")).is_some());
        splice_member(&body, &text, &body);
        canonical(text);
    }

    #[test]
    fn mutated_documents_are_judged_like_the_oracle_does(
        doc in any_doc(), seed: u64, at: prop::sample::Index, byte in prop_oneof![prop::sample::select(b"{}[],:\"\\0-1e. \nu".to_vec()), any::<u8>()],
    ) {
        let mut body = doc.spell(&mut JsonRng(seed)).into_bytes();
        let at = at.index(body.len());
        body[at] = byte;
        let found = super::canonical(&body, &[], super::NameEquality::Exact);
        splice_member(&body, "a", b"1");
        // The oracle accepts duplicate members and keeps the last, where there is no canonical form. Everything else
        // must agree.
        match (found, serde_json::from_slice::<serde_json::Value>(&body)) {
            (Some(found), Ok(value)) => {
                let mut expected = String::new();
                oracle(&value, &mut expected);
                // The oracle writes exponents differently.
                let alike = |text: &str| text.replace('E', "e").replace("e+", "e");
                prop_assert_eq!(alike(std::str::from_utf8(&found).unwrap()), alike(&expected));
            }
            (Some(_), Err(error)) => prop_assert!(false, "taken, but {}", error),
            (None, _) => {}
        }
    }

    #[test]
    fn spliced_body_has_the_member_and_all_others(members in prop::collection::hash_map(any_text(), any_doc(), 0..8), name in any_text(), value in any_doc(), seed: u64) {
        let body = GeneratedJson::Object(members.into_iter().collect()).spell(&mut JsonRng(seed));
        let value = value.spell(&mut JsonRng(!seed));
        let spliced = splice_member(body.as_bytes(), &name, value.as_bytes()).unwrap();
        let mut expected: serde_json::Value = serde_json::from_str(&body).unwrap();
        expected[&name] = serde_json::from_str(&value).unwrap();
        prop_assert_eq!(serde_json::from_slice::<serde_json::Value>(&spliced).unwrap(), expected);
    }

    #[test]
    fn ignoring_a_member_is_like_never_sending_it(mut members in prop::collection::hash_map("[a-d]{1,2}", any_doc(), 1..8), seed: u64) {
        let name = members.keys().next().unwrap().clone();
        let with = GeneratedJson::Object(members.clone().into_iter().collect()).spell(&mut JsonRng(seed));
        members.remove(&name);
        let less = GeneratedJson::Object(members.into_iter().collect()).spell(&mut JsonRng(!seed));
        prop_assert_eq!(without(with, &[&format!("/{name}")]), canonical(less));
    }
}

/// The second read of each body meets what was learned from the first.
#[test]
fn a_body_is_read_alike_every_time() {
    let names = super::NameEquality::IgnoreCase;
    for body in [
        r#"{"same_up_to_here{":1,"same_up_to_here[":2,"a":3}"#,
        r#"{"same_up_to_here~":1,"same_up_to_here^":2,"a":3}"#,
        r#"{"same_up_to_here":1,"Same_Up_To_Here":2,"a":3}"#,
        r#"{"b":1,"a":2}"#,
    ] {
        let [first, second] = [0; 2].map(|_| super::canonical(body.as_bytes(), &[], names).map(Cow::into_owned));
        assert_eq!(first, second, "{body}");
    }
    assert!(super::canonical(br#"{"{_______":1,"[_______":2}"#, &[], names).is_some(), "brackets have no case");
}

#[test]
fn names_that_differ_in_case_only_are_in_the_order_in_which_they_were_sent() {
    let canonical = |body: &str| super::canonical(body.as_bytes(), &[], super::NameEquality::IgnoreCase).is_some();
    for body in [
        r#"{"a":1,"A":2}"#,
        r#"{"amount":1,"currency":"EUR","Amount":2}"#,
        r#"{"x":[{"longer_than_eight":1,"Longer_Than_Eight":2}]}"#,
        r#"{"é":1,"É":2}"#,
        "{\"\u{212a}\":1,\"k\":2}",
        "{\"\u{17f}\":1,\"S\":2}",
    ] {
        assert!(!canonical(body), "{body}");
        assert!(super::canonical(body.as_bytes(), &[], super::NameEquality::Exact).is_some(), "{body}");
    }
    let many: Vec<_> = (0..40).rev().map(|n| format!("\"name{n}\":{n}")).collect();
    assert!(canonical(&format!("{{{}}}", many.join(","))));
    assert!(!canonical(&format!("{{{},\"NAME7\":0}}", many.join(","))));
    for body in [r#"{"A":1,"a":2}"#, r#"{"b":1,"a":2}"#, r#"{"b":{"x":1},"a":{"X":2}}"#, r#"{"é":1,"e":2,"É_":3}"#] {
        assert!(canonical(body), "{body}");
    }
}

/// An array of objects that mostly have the same names in the same order, at any distance from the start.
fn alike_objects() -> impl Strategy<Value = String> {
    let long = format!("\"{}\"", "long ".repeat(30));
    let plain = ["1", "1234567", "true", "false", "null", "\"\"", "\"text\"", "\"}{,:\"", &long].map(str::to_owned);
    let other = ["12345678", "-1", "1.5", "0", "\"a\\nb\"", "\"\\u0041\"", "\"é\"", "[1]", r#"{"b":1,"a":2}"#, " 1"]
        .map(str::to_owned);
    let value = prop_oneof![20 => prop::sample::select(plain.to_vec()), 1 => prop::sample::select(other.to_vec())];
    let names = Just(["id", "sku", "twelve_bytes", "thirteen_byte", "Gift", "z"]).prop_shuffle();
    let separator = prop_oneof![40 => Just(","), 1 => Just(", "), 1 => Just(r#","x":0,"#)];
    let row = prop::collection::vec((value, separator), 5);
    (names, 1..6_usize, prop::collection::vec(row, 0..8), 0..80_usize).prop_map(|(names, count, rows, padding)| {
        let row = |row: Vec<(String, &str)>| {
            let members = names[..count].iter().zip(row).enumerate();
            let texts = members.map(|(i, (name, (value, separator)))| match i {
                0 => format!("\"{name}\":{value}"),
                _ => format!("{separator}\"{name}\":{value}"),
            });
            format!("{{{}}}", texts.collect::<String>())
        };
        let rows: Vec<_> = rows.into_iter().map(row).collect();
        format!(r#"{{"padding":"{}","rows":[{}]}}"#, "x".repeat(padding), rows.join(","))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn objects_like_the_last_one_are_read_like_all_others(body in alike_objects(), at: prop::sample::Index, byte: Option<u8>) {
        let mut body = body.into_bytes();
        if let Some(byte) = byte {
            let at = at.index(body.len());
            body[at] = byte;
        }
        for _ in 0..2 {
            let names = super::NameEquality::Exact;
            let (found, mut stream) = (super::canonical(&body, &[], names), HashStream::new());
            prop_assert_eq!(super::hash_canonical(&body, &[], names, JsonNumbers::AsWritten, &mut stream), found.is_some());
            let found = found.unwrap_or_default().into_owned();
            prop_assert_eq!(stream.finish(), <[u8; 32]>::from(Sha256::digest(&found)));
            // Looking into a document uses no shapes.
            let with_every_node = without(&body, &["/no such member/0"]).unwrap_or_default();
            prop_assert_eq!(String::from_utf8(found.clone()).unwrap(), with_every_node);
            // The canonical form comes next.
            if !found.is_empty() {
                body = found;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The hash is that of the canonical text, however the body is spelled.
    #[test]
    fn what_is_hashed_is_the_canonical_form(doc in any_doc(), seed: u64, at: prop::sample::Index, byte: Option<u8>) {
        let mut bodies = vec![doc.spell(&mut JsonRng(seed)).into_bytes()];
        bodies.extend(canonical(&bodies[0]).map(String::into_bytes));
        if let Some(byte) = byte {
            for body in &mut bodies {
                let at = at.index(body.len());
                body[at] = byte;
            }
        }
        for body in bodies {
            for names in [super::NameEquality::Exact, super::NameEquality::IgnoreCase] {
                let mut stream = HashStream::new();
                let is_hashed = super::hash_canonical(&body, &[], names, JsonNumbers::AsWritten, &mut stream);
                let text = super::canonical(&body, &[], names);
                prop_assert_eq!(is_hashed, text.is_some());
                prop_assert_eq!(stream.finish(), <[u8; 32]>::from(Sha256::digest(text.unwrap_or_default())));
            }
        }
    }
}
