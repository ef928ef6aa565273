//! Secrets, and how they are found again in whatever form.

/// A part of a secret that is this long is found, too.
const MIN_SECRET_PART_LENGTH: usize = 12;

/// Something that must not be seen.
#[derive(Clone)]
pub(super) struct PlantedSecret {
    /// For whoever reads that it was.
    pub(super) name: &'static str,
    forms: Vec<String>,
}

impl PlantedSecret {
    /// Text that is unlike any other.
    pub(super) fn text(name: &'static str, text: &str) -> PlantedSecret {
        assert!(text.len() > MIN_SECRET_PART_LENGTH, "{text} may be found by chance");
        let parts = text
            .as_bytes()
            .windows(MIN_SECRET_PART_LENGTH)
            .map(|part| String::from_utf8(part.to_vec()).expect("ASCII"));
        PlantedSecret { name, forms: parts.chain(encoded(text.as_bytes())).collect() }
    }

    /// Bytes that are no text.
    pub(super) fn bytes(name: &'static str, bytes: &[u8]) -> PlantedSecret {
        PlantedSecret { name, forms: encoded(bytes) }
    }

    /// What of it is in there.
    pub(super) fn found_in(&self, text: &str) -> Option<&str> {
        self.forms.iter().find(|form| text.contains(form.as_str())).map(String::as_str)
    }
}

/// What code makes of bytes that it does not show as they are.
fn encoded(bytes: &[u8]) -> Vec<String> {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let list = |form: fn(&u8) -> String| bytes.iter().map(form).collect::<Vec<_>>().join(", ");
    let percent = |all: bool, form: fn(u8) -> String| -> String {
        let plain = |byte: &u8| !all && byte.is_ascii_alphanumeric();
        bytes.iter().map(|byte| if plain(byte) { char::from(*byte).to_string() } else { form(*byte) }).collect()
    };
    let (upper, lower) = (|byte: u8| format!("%{byte:02X}"), |byte: u8| format!("%{byte:02x}"));
    let mut forms = vec![hex.to_uppercase(), hex, list(|byte| byte.to_string()), list(|byte| format!("{byte:#04x}"))];
    forms.extend([percent(false, upper), percent(false, lower), percent(true, upper), percent(true, lower)]);
    forms.push(bytes.escape_ascii().to_string());
    // Wherever in a longer text it stood when that was encoded: whole groups of three bytes are what is sure.
    for start in 0..3 {
        let whole = (bytes.len() - start) / 3 * 3;
        let text = base64(&bytes[start..start + whole]);
        forms.extend([text.replace('+', "-").replace('/', "_"), text]);
    }
    forms
}

pub(super) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups = bytes.chunks(3).flat_map(|group| {
        let at = |n: usize| group.get(n).copied().unwrap_or(0);
        let bits = u32::from_be_bytes([0, at(0), at(1), at(2)]);
        let digits = [18, 12, 6, 0].map(|shift| DIGITS[(bits >> shift & 63) as usize] as char);
        digits.into_iter().take(group.len() + 1).chain(std::iter::repeat_n('=', 3 - group.len()))
    });
    groups.collect()
}

const SECRET: &str = "planted/secret?of=this test+1";

#[test]
fn base64_is_what_others_write() {
    for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
        assert_eq!(base64(bytes.as_bytes()), text);
    }
}

#[test]
fn what_is_planted_into_a_line_on_purpose_is_found_in_every_form() {
    let planted = PlantedSecret::text("a secret", SECRET);
    let bytes = SECRET.as_bytes();
    let url64 = |bytes: &[u8]| base64(bytes).replace('+', "-").replace('/', "_").trim_end_matches('=').to_owned();
    let leaks = [
        SECRET.to_owned(),
        format!("{SECRET:?}"),
        format!("{:?}", SECRET.as_bytes()),
        format!("{:x?}", SECRET.as_bytes()).replace('[', "[0x").replace(", ", ", 0x"),
        SECRET[3..20].to_owned(),
        base64(bytes),
        base64(format!("user:{SECRET}").as_bytes()),
        base64(format!("{SECRET}:x").as_bytes()),
        url64(format!("ab{SECRET}yz").as_bytes()),
        bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        bytes.iter().map(|byte| format!("{byte:02X}")).collect(),
        "planted%2Fsecret%3Fof%3Dthis%20test%2B1".to_owned(),
        "planted%2fsecret%3fof%3dthis%20test%2b1".to_owned(),
        bytes.iter().map(|byte| format!("%{byte:02X}")).collect(),
        serde_json::json!({ "message": SECRET }).to_string(),
    ];
    for leak in leaks {
        let line = format!("2026-11-15T08:00:00Z ERROR store unavailable why=\"{leak}\" attempt=1");
        assert!(planted.found_in(&line).is_some(), "{line}");
    }
    let clean = "2026-11-15T08:00:00Z INFO answer stored key=\"plan****st+1\" a planted secret, and this test";
    assert_eq!(planted.found_in(clean), None);
}

#[test]
fn bytes_that_are_no_text_are_found_too() {
    let bytes: Vec<u8> = (0..32u8).map(|n| n.wrapping_mul(37).wrapping_add(200)).collect();
    let planted = PlantedSecret::bytes("a key", &bytes);
    for leak in [format!("{bytes:?}"), base64(&bytes), base64(&[&[1][..], &bytes].concat())] {
        assert!(planted.found_in(&format!("key={leak}")).is_some(), "{leak}");
    }
    assert_eq!(planted.found_in("key=****"), None);
}
