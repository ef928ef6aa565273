//! Test vectors that senders publish, and variations that must be refused.

use http::HeaderValue;
use proptest::prelude::*;

use super::*;

type HeaderPairs<'a> = [(&'a str, &'a str)];

fn headers(pairs: &HeaderPairs<'_>) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap());
    }
    map
}

/// A valid delivery: scheme, secret, time and content.
struct WebhookVector {
    scheme: WebhookScheme,
    secret: &'static str,
    at: u64,
    headers: Vec<(&'static str, &'static str)>,
    body: &'static str,
}

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const SIGNED: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

fn slack() -> WebhookScheme {
    WebhookScheme::Custom(CustomWebhookScheme {
        header: HeaderName::from_static("x-slack-signature"),
        prefix: "v0=".into(),
        encoding: SignatureEncoding::Hex,
        content: "v0:{X-Slack-Request-Timestamp}:{body}".parse().unwrap(),
        timestamp: Some(HeaderName::from_static("x-slack-request-timestamp")),
    })
}

/// Standard Webhooks, Svix, GitHub and Slack publish these in their documentation. Stripe and Shopify publish none;
/// theirs are generated with OpenSSL.
fn vectors() -> Vec<WebhookVector> {
    let standard = |scheme, prefix: [&'static str; 3]| WebhookVector {
        scheme,
        secret: SECRET,
        at: 1_614_265_330,
        headers: vec![(prefix[0], "msg_p5jXN8AQM9LWM0D4loKWxJek"), (prefix[1], "1614265330"), (prefix[2], SIGNED)],
        body: r#"{"test": 2432232314}"#,
    };
    let (webhook, svix) =
        (["webhook-id", "webhook-timestamp", "webhook-signature"], ["svix-id", "svix-timestamp", "svix-signature"]);
    vec![
        standard(WebhookScheme::Standard, webhook),
        standard(WebhookScheme::Svix, svix),
        standard(WebhookScheme::Svix, webhook),
        WebhookVector {
            scheme: WebhookScheme::GitHub,
            secret: "It's a Secret to Everybody",
            at: 0,
            headers: vec![(
                "x-hub-signature-256",
                "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
            )],
            body: "Hello, World!",
        },
        WebhookVector {
            scheme: WebhookScheme::Stripe,
            secret: "whsec_test_secret",
            at: 1_492_774_577,
            headers: vec![(
                "stripe-signature",
                "t=1492774577,v1=88a022085c6bdb887b02cb26ff76dd681234d9675c0f22844059f55552a8883a,v0=6ffbb59b2300aae63f272406069a9788598b792a944a07aba816edb039989a39",
            )],
            body: r#"{"id":"evt_test_webhook","object":"event"}"#,
        },
        WebhookVector {
            scheme: WebhookScheme::Shopify,
            secret: "hush",
            at: 0,
            headers: vec![("x-shopify-hmac-sha256", "qBvrsZF7RfB1iS6BX6IHqJTp5L911P7intnPeTPsH0I=")],
            body: r#"{"id":820982911946154508}"#,
        },
        WebhookVector {
            scheme: slack(),
            secret: "8f742231b10e8888abcd99yyyzzz85a5",
            at: 1_531_420_618,
            headers: vec![
                ("x-slack-request-timestamp", "1531420618"),
                ("x-slack-signature", "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"),
            ],
            body: "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&\
                   channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&\
                   response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F\
                   96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c",
        },
    ]
}

impl WebhookVector {
    fn verify(&self, headers: &HeaderMap, body: &[u8], at: u64) -> Result<(), WebhookSignatureError> {
        let verifier = WebhookVerifier::new(self.scheme.clone(), [self.secret]).unwrap();
        verifier.verify(headers, body, UNIX_EPOCH + Duration::from_secs(at))
    }
}

#[test]
fn what_the_senders_publish_is_believed() {
    for vector in vectors() {
        assert_eq!(
            vector.verify(&headers(&vector.headers), vector.body.as_bytes(), vector.at),
            Ok(()),
            "{}",
            vector.scheme
        );
    }
}

#[test]
fn one_changed_byte_is_enough() {
    for vector in vectors() {
        let genuine = headers(&vector.headers);
        for at in 0..vector.body.len() {
            let mut body = vector.body.as_bytes().to_vec();
            body[at] ^= 1;
            assert!(vector.verify(&genuine, &body, vector.at).is_err(), "{} at {at}", vector.scheme);
        }
        for body in [&b""[..], &vector.body.as_bytes()[1..], format!("{}\n", vector.body).as_bytes()] {
            assert!(
                matches!(vector.verify(&genuine, body, vector.at), Err(WebhookSignatureError::Mismatch(_))),
                "{}",
                vector.scheme
            );
        }
        let other = WebhookVerifier::new(vector.scheme.clone(), ["whsec_b3RoZXI="]).unwrap();
        let now = UNIX_EPOCH + Duration::from_secs(vector.at);
        assert!(matches!(other.verify(&genuine, vector.body.as_bytes(), now), Err(WebhookSignatureError::Mismatch(_))));
        let nobody = WebhookVerifier { secrets: Vec::new(), ..other };
        assert!(matches!(
            nobody.verify(&genuine, vector.body.as_bytes(), now),
            Err(WebhookSignatureError::Mismatch(_))
        ));
    }
}

#[test]
fn every_header_of_a_scheme_is_needed_once() {
    for vector in vectors() {
        for (name, value) in &vector.headers {
            let mut without = headers(&vector.headers);
            without.remove(*name);
            let told = vector.verify(&without, vector.body.as_bytes(), vector.at);
            assert!(
                matches!(told, Err(WebhookSignatureError::Missing(_))),
                "{} without {name}: {told:?}",
                vector.scheme
            );
            let mut twice = headers(&vector.headers);
            twice.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
            let told = vector.verify(&twice, vector.body.as_bytes(), vector.at);
            assert!(
                matches!(told, Err(WebhookSignatureError::Malformed(..))),
                "{} with {name} twice: {told:?}",
                vector.scheme
            );
        }
    }
}

#[test]
fn the_time_may_be_five_minutes_off_to_either_side_and_no_more() {
    for vector in vectors() {
        let verify = |at| vector.verify(&headers(&vector.headers), vector.body.as_bytes(), at);
        if !vector.scheme.has_timestamp() {
            assert_eq!(verify(u64::from(u32::MAX)), Ok(()), "{}", vector.scheme);
            continue;
        }
        for off in [vector.at - 300, vector.at + 300] {
            assert_eq!(verify(off), Ok(()), "{}", vector.scheme);
        }
        for off in [vector.at - 301, vector.at + 301, 0] {
            assert_eq!(
                verify(off),
                Err(WebhookSignatureError::Stale(vector.at, DEFAULT_TOLERANCE)),
                "{}",
                vector.scheme
            );
        }
    }
}

/// During a rotation, the sender signs with either secret or both, and the receiver has either or both.
#[test]
fn any_signature_under_any_secret_will_do() {
    let [id, time] = [("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"), ("webhook-timestamp", "1614265330")];
    let now = UNIX_EPOCH + Duration::from_secs(1_614_265_330);
    let body = br#"{"test": 2432232314}"#;
    let other = "v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc=";
    let verify = |secrets: &[&str], signatures: &str| {
        let verifier = WebhookVerifier::new(WebhookScheme::Standard, secrets.iter().copied()).unwrap();
        verifier.verify(&headers(&[id, time, ("webhook-signature", signatures)]), body, now)
    };
    for secrets in [&[SECRET][..], &["whsec_b3RoZXI=", SECRET], &[SECRET, "b3RoZXI="], &[&SECRET[6..]]] {
        for signatures in
            [SIGNED.to_owned(), format!("{other} {SIGNED}"), format!("{SIGNED} {other} v1a,x v2,{SIGNED}")]
        {
            assert_eq!(verify(secrets, &signatures), Ok(()), "{signatures}");
        }
        assert!(matches!(verify(secrets, other), Err(WebhookSignatureError::Mismatch(_))));
    }
    // The right signature under another version's name is not accepted.
    for wrong in [SIGNED.replacen("v1,", "v1a,", 1), SIGNED.replacen("v1,", "v0,", 1), SIGNED[3..].into(), "".into()] {
        assert!(matches!(verify(&[SECRET], &wrong), Err(WebhookSignatureError::Malformed(..))), "{wrong}");
    }
}

#[test]
fn bytes_cannot_move_between_what_is_signed() {
    let verifier = WebhookVerifier::new(WebhookScheme::Standard, [SECRET]).unwrap();
    let signed =
        SigningSecret(SignatureEncoding::Base64.decode(&SECRET.as_bytes()[6..]).unwrap()).sign(&[b"msg.1.2.{}"]);
    let mut text = String::from("v1,");
    text.push_str(&to_base64(&signed));
    let now = UNIX_EPOCH + Duration::from_secs(1);
    let verify = |id, time, body: &[u8]| {
        let headers = headers(&[("webhook-id", id), ("webhook-timestamp", time), ("webhook-signature", &text)]);
        verifier.verify(&headers, body, now)
    };
    assert_eq!(verify("msg", "1", b"2.{}"), Ok(()));
    assert!(matches!(verify("msg.1", "2", b"{}"), Err(WebhookSignatureError::Malformed(..))));
    for time in ["+1", "1 ", "01x", "", "-1", "1.2", "99999999999999999999999"] {
        assert!(verify("msg", time, b"2.{}").is_err(), "{time:?}");
    }
}

#[test]
fn two_families_of_headers_must_say_the_same() {
    let [svix, webhook] = [("svix-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"), ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek")];
    let rest = [("svix-timestamp", "1614265330"), ("svix-signature", SIGNED)];
    let vector = &vectors()[1];
    let verify =
        |pairs: &[&HeaderPairs<'_>]| vector.verify(&headers(&pairs.concat()), vector.body.as_bytes(), vector.at);
    assert_eq!(verify(&[&[svix, webhook], &rest]), Ok(()));
    assert!(matches!(
        verify(&[&[svix, ("webhook-id", "msg_other")], &rest]),
        Err(WebhookSignatureError::Malformed(..))
    ));
    // The signature of one header family does not cover the id of the other.
    assert!(verify(&[&[webhook], &rest]).is_err());
}

#[test]
fn stripe_takes_one_time_and_any_number_of_signatures() {
    let vector = &vectors()[4];
    let genuine = vector.headers[0].1;
    let v1 = genuine.split(',').nth(1).unwrap();
    let verify =
        |value: &str| vector.verify(&headers(&[("stripe-signature", value)]), vector.body.as_bytes(), vector.at);
    for fine in [
        format!("t=1492774577,{v1}"),
        format!("{v1},t=1492774577"),
        format!("t=1492774577, {v1}"),
        format!("t=1492774577,v1=bad_signature,v1={},{v1}", "0".repeat(64)),
        format!("t=1492774577,{}", v1.to_uppercase().replace("V1", "v1")),
    ] {
        assert_eq!(verify(&fine), Ok(()), "{fine}");
    }
    for wrong in [
        v1.to_owned(),
        format!("t=,{v1}"),
        format!("t=1492774577,t=1492774577,{v1}"),
        format!("t=1492774578,{v1}"),
        format!("t=1492774577,{}", v1.replace("v1", "v0")),
        format!("t=1492774577;{v1}"),
        "t=1492774577".into(),
        "v1,t=1".into(),
        ",,,===".into(),
    ] {
        assert!(verify(&wrong).is_err(), "{wrong}");
    }
}

#[test]
fn secrets_are_read_as_their_senders_show_them_and_never_shown() {
    assert_eq!(WebhookScheme::Standard.parse_secret("whsec_Zm9v").unwrap(), SigningSecret(b"foo".to_vec()));
    assert_eq!(WebhookScheme::Svix.parse_secret("Zm9v").unwrap(), SigningSecret(b"foo".to_vec()));
    for shown in ["whsec_Zm8=", "whsec_Zm8", "Zm8"] {
        assert_eq!(WebhookScheme::Svix.parse_secret(shown).unwrap(), SigningSecret(b"fo".to_vec()), "{shown}");
    }
    assert_eq!(WebhookScheme::Stripe.parse_secret("whsec_Zm9v").unwrap(), SigningSecret(b"whsec_Zm9v".to_vec()));
    assert_ne!(WebhookScheme::GitHub.parse_secret("a").unwrap(), WebhookScheme::GitHub.parse_secret("b").unwrap());
    for wrong in ["whsec_", "whsec_s3cret!", "s3cret", "whpk_Zm9vs3cret", "whsk_s3cret"] {
        let told = WebhookScheme::Standard.parse_secret(wrong).unwrap_err().to_string();
        assert!(!told.contains("s3cret"), "{told}");
    }
    assert!(WebhookScheme::GitHub.parse_secret("").is_err());
    let verifier = WebhookVerifier::new(WebhookScheme::GitHub, ["s3cret"]).unwrap();
    assert!(!format!("{verifier:?}").contains("s3cret") && !format!("{verifier:?}").contains("115"), "{verifier:?}");
}

#[test]
fn a_time_that_is_not_signed_is_refused() {
    let WebhookScheme::Custom(mut custom) = slack() else { unreachable!() };
    assert_eq!(custom.check(), Ok(()));
    custom.content = SignedContent::body();
    assert!(custom.check().unwrap_err().to_string().starts_with("signature.timestamp"));
    custom.timestamp = None;
    assert_eq!(custom.check(), Ok(()));
}

fn to_base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..4 {
            let letter = char::from(LETTERS[(bits >> (18 - 6 * at) & 63) as usize]);
            text.push(if at > group.len() { '=' } else { letter });
        }
    }
    text
}

proptest! {
    #[test]
    fn base64_is_read_back(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        prop_assert_eq!(SignatureEncoding::Base64.decode(to_base64(&bytes).as_bytes()), Some(bytes));
    }

    /// A value has one spelling: encoding it again gives the same text.
    #[test]
    fn base64_that_is_read_is_written_the_same(text in "[A-Za-z0-9+/=]{0,16}") {
        if let Some(bytes) = SignatureEncoding::Base64.decode(text.as_bytes()) {
            prop_assert_eq!(to_base64(&bytes), text);
        }
    }

    /// No headers make a forged body pass, and nothing panics.
    #[test]
    fn no_header_makes_a_forged_body_pass(
        which in 0_usize..7, at in 0_usize..3, value in proptest::collection::vec(any::<u8>(), 0..200),
        splice in any::<bool>(),
    ) {
        let vector = &vectors()[which];
        let mut all = headers(&vector.headers);
        let (name, genuine) = vector.headers[at % vector.headers.len()];
        let value = if splice {
            let cut = value.len() % (genuine.len() + 1);
            [&genuine.as_bytes()[..cut], &value, &genuine.as_bytes()[cut..]].concat()
        } else {
            value
        };
        if let Ok(value) = HeaderValue::from_bytes(&value) {
            all.insert(name.parse::<HeaderName>().unwrap(), value);
        }
        let told = vector.verify(&all, br#"{"forged":true}"#, vector.at);
        prop_assert!(told.is_err());
    }
}
