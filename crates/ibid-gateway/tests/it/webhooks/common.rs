//! Five senders, played by the test: each signs as its documentation says, in code that shares nothing with the gateway's.

use std::{
    fmt::Write as _,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use testbed::{
    client::{self, TestRequest},
    process::GatewayLauncher,
};

use crate::support::TestGateway;

/// The letters and digits in it are looked for where they must not be.
pub(super) const SECRET: &str = "whsec_cGxhbnRlZC1zZWNyZXQtb2YtMjQtYnl0ZXM=";
pub(super) const OTHER_SECRET: &str = "whsec_b3RoZXItc2VjcmV0LXRoYXQtdGFrZXMtb3Zlcg==";

/// Who sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WebhookSender {
    Standard,
    Svix,
    GitHub,
    Stripe,
    Shopify,
}

pub(super) const SENDERS: [WebhookSender; 5] = [
    WebhookSender::Standard,
    WebhookSender::Svix,
    WebhookSender::GitHub,
    WebhookSender::Stripe,
    WebhookSender::Shopify,
];

/// A delivery, not signed yet.
#[derive(Debug, Clone)]
pub(super) struct SignedDelivery {
    pub(super) sender: WebhookSender,
    pub(super) id: String,
    pub(super) at: u64,
    pub(super) secret: &'static str,
    pub(super) body: String,
}

impl WebhookSender {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Svix => "svix",
            Self::GitHub => "github",
            Self::Stripe => "stripe",
            Self::Shopify => "shopify",
        }
    }

    pub(super) fn path(self) -> String {
        format!("/hooks/{}", self.name())
    }

    /// Whether an old delivery can be told from a new one.
    pub(super) fn has_time(self) -> bool {
        matches!(self, Self::Standard | Self::Svix | Self::Stripe)
    }

    pub(super) fn signature_header(self) -> &'static str {
        match self {
            Self::Standard => "webhook-signature",
            Self::Svix => "svix-signature",
            Self::GitHub => "X-Hub-Signature-256",
            Self::Stripe => "Stripe-Signature",
            Self::Shopify => "X-Shopify-Hmac-Sha256",
        }
    }

    /// A delivery of now.
    pub(super) fn delivery(self, id: &str) -> SignedDelivery {
        let body = format!(r#"{{"id":"{id}", "type":"order.paid", "amount":1.50}}"#);
        SignedDelivery { sender: self, id: id.into(), at: now(), secret: SECRET, body }
    }
}

impl SignedDelivery {
    /// Another attempt: the same id and body, signed later.
    pub(super) fn resigned_later(&self, seconds: u64) -> SignedDelivery {
        SignedDelivery { at: self.at + seconds, ..self.clone() }
    }

    pub(super) fn headers(&self) -> Vec<(&'static str, String)> {
        let Self { sender, id, at, secret, body } = self;
        let raw = |content: &str| mac(secret.as_bytes(), content);
        let standard = |names: [&'static str; 3]| {
            let key = from_base64(secret.strip_prefix("whsec_").unwrap());
            let signature = format!("v1,{}", base64(&mac(&key, &format!("{id}.{at}.{body}"))));
            vec![(names[0], id.clone()), (names[1], at.to_string()), (names[2], signature)]
        };
        match sender {
            WebhookSender::Standard => standard(["webhook-id", "webhook-timestamp", "webhook-signature"]),
            WebhookSender::Svix => standard(["svix-id", "svix-timestamp", "svix-signature"]),
            WebhookSender::GitHub => vec![
                ("X-GitHub-Event", "push".into()),
                ("X-GitHub-Delivery", id.clone()),
                ("X-Hub-Signature-256", format!("sha256={}", hex(&raw(body)))),
            ],
            WebhookSender::Stripe => {
                vec![("Stripe-Signature", format!("t={at},v1={}", hex(&raw(&format!("{at}.{body}")))))]
            }
            WebhookSender::Shopify => vec![
                ("X-Shopify-Topic", "orders/paid".into()),
                ("X-Shopify-Webhook-Id", id.clone()),
                ("X-Shopify-Hmac-Sha256", base64(&raw(body))),
            ],
        }
    }

    /// As it is sent.
    pub(super) fn request(&self, bench: &TestGateway) -> TestRequest {
        self.request_with_headers(bench, self.headers())
    }

    /// With these headers in place of its own.
    pub(super) fn request_with_headers(
        &self, bench: &TestGateway, headers: Vec<(&'static str, String)>,
    ) -> TestRequest {
        let request = client::post(bench.gateway.addr(), self.sender.path()).json(&self.body);
        headers.into_iter().fold(request, |request, (name, value)| request.header(name, value))
    }
}

impl TestGateway {
    /// With a route per sender, at `/hooks/NAME`, and these dials on every route.
    pub(super) async fn webhooks(dials: &str) -> TestGateway {
        TestGateway::with_hook_secrets(&routes(dials)).await
    }

    pub(super) async fn with_hook_secrets(config: &str) -> TestGateway {
        TestGateway::launch(config, |launch| hook_secrets(launch).arg("--store").arg("memory:")).await
    }
}

pub(super) fn hook_secrets(launch: GatewayLauncher) -> GatewayLauncher {
    launch.env("HOOK_SECRET", SECRET).env("OTHER_SECRET", OTHER_SECRET)
}

pub(super) fn routes(dials: &str) -> String {
    let mut text = String::new();
    for sender in SENDERS {
        let (path, name) = (sender.path(), sender.name());
        let _ = write!(
            text,
            "[[route]]\nmatch = \"POST {path}\"\npreset = \"webhook:{name}\"\nsecrets = [\"env:HOOK_SECRET\"]\n{dials}\n"
        );
    }
    text
}

pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

pub(super) fn mac(key: &[u8], content: &str) -> [u8; 32] {
    let mut mac = <Hmac<Sha256>>::new_from_slice(key).unwrap();
    mac.update(content.as_bytes());
    mac.finalize().into_bytes().into()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn base64(bytes: &[u8]) -> String {
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

/// Of text that is known to be base64.
fn from_base64(text: &str) -> Vec<u8> {
    let letters = text.trim_end_matches('=').bytes();
    let values = letters.map(|byte| LETTERS.iter().position(|letter| *letter == byte).expect("base64"));
    let bits: Vec<usize> = values.flat_map(|value| (0..6).rev().map(move |bit| value >> bit & 1)).collect();
    bits.chunks_exact(8).map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | *bit as u8)).collect()
}
