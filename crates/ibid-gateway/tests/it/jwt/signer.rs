//! An issuer of tokens, played by the test: signs by hand, in code that shares nothing with the gateway's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::{
    encoding::AsDer as _,
    hmac,
    rand::SystemRandom,
    rsa::KeySize,
    signature::{
        self, ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair,
        KeyPair as _, RsaEncoding, RsaKeyPair,
    },
};
use serde_json::{Value, json};

pub(super) const SECRET: &str = "planted-secret-of-the-issuer-0123456789";
pub(super) const ISSUER: &str = "https://id.example.com";

pub(super) enum TokenSigner {
    Secret(Vec<u8>),
    Rsa(RsaKeyPair),
    P256(EcdsaKeyPair),
    P384(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

impl TokenSigner {
    pub(super) fn secret() -> TokenSigner {
        TokenSigner::Secret(SECRET.into())
    }

    pub(super) fn rsa() -> TokenSigner {
        TokenSigner::Rsa(RsaKeyPair::generate(KeySize::Rsa2048).unwrap())
    }

    pub(super) fn p256() -> TokenSigner {
        TokenSigner::P256(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap())
    }

    pub(super) fn p384() -> TokenSigner {
        TokenSigner::P384(EcdsaKeyPair::generate(&ECDSA_P384_SHA384_FIXED_SIGNING).unwrap())
    }

    pub(super) fn ed() -> TokenSigner {
        TokenSigner::Ed(Ed25519KeyPair::generate().unwrap())
    }

    /// What it signs with.
    pub(super) fn algorithms(&self) -> &'static [&'static str] {
        match self {
            TokenSigner::Secret(_) => &["HS256", "HS384", "HS512"],
            TokenSigner::Rsa(_) => &["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"],
            TokenSigner::P256(_) => &["ES256"],
            TokenSigner::P384(_) => &["ES384"],
            TokenSigner::Ed(_) => &["EdDSA"],
        }
    }

    /// A token with the first of its algorithms.
    pub(super) fn token(&self, claims: &Value) -> String {
        self.signed(&json!({ "alg": self.algorithms()[0] }), claims)
    }

    pub(super) fn token_with_kid(&self, kid: &str, claims: &Value) -> String {
        self.signed(&json!({ "alg": self.algorithms()[0], "kid": kid }), claims)
    }

    pub(super) fn signed(&self, header: &Value, claims: &Value) -> String {
        let content = format!("{}.{}", base64url(header.to_string()), base64url(claims.to_string()));
        let signature = self.sign(header["alg"].as_str().unwrap(), content.as_bytes());
        format!("{content}.{}", base64url(signature))
    }

    fn sign(&self, algorithm: &str, content: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match self {
            TokenSigner::Secret(secret) => {
                let by = match algorithm {
                    "HS384" => hmac::HMAC_SHA384,
                    "HS512" => hmac::HMAC_SHA512,
                    _ => hmac::HMAC_SHA256,
                };
                hmac::sign(&hmac::Key::new(by, secret), content).as_ref().to_vec()
            }
            TokenSigner::Rsa(key) => {
                let by: &'static dyn RsaEncoding = match algorithm {
                    "RS384" => &signature::RSA_PKCS1_SHA384,
                    "RS512" => &signature::RSA_PKCS1_SHA512,
                    "PS256" => &signature::RSA_PSS_SHA256,
                    "PS384" => &signature::RSA_PSS_SHA384,
                    "PS512" => &signature::RSA_PSS_SHA512,
                    _ => &signature::RSA_PKCS1_SHA256,
                };
                let mut signed = vec![0; key.public_modulus_len()];
                key.sign(by, &random, content, &mut signed).unwrap();
                signed
            }
            TokenSigner::P256(key) | TokenSigner::P384(key) => key.sign(&random, content).unwrap().as_ref().to_vec(),
            TokenSigner::Ed(key) => key.sign(content).as_ref().to_vec(),
        }
    }

    /// The public key, as PEM files have it.
    pub(super) fn pem(&self) -> String {
        let der = match self {
            TokenSigner::Secret(_) => panic!("a secret has no public half"),
            TokenSigner::Rsa(key) => key.public_key().as_der().unwrap(),
            TokenSigner::P256(key) | TokenSigner::P384(key) => key.public_key().as_der().unwrap(),
            TokenSigner::Ed(key) => key.public_key().as_der().unwrap(),
        };
        let text = base64url(der.as_ref()).replace('-', "+").replace('_', "/");
        let lines: Vec<_> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
        let padding = "=".repeat((4 - text.len() % 4) % 4);
        format!("-----BEGIN PUBLIC KEY-----\n{}{padding}\n-----END PUBLIC KEY-----\n", lines.join("\n"))
    }

    /// The public key, as issuers publish it.
    pub(super) fn jwk(&self, kid: &str) -> Value {
        match self {
            TokenSigner::Secret(_) => panic!("a secret has no public half"),
            TokenSigner::Rsa(key) => {
                let key = key.public_key();
                let number = |number: &[u8]| base64url(number);
                let n = number(key.modulus().big_endian_without_leading_zero());
                let e = number(key.exponent().big_endian_without_leading_zero());
                json!({ "kty": "RSA", "kid": kid, "use": "sig", "n": n, "e": e })
            }
            TokenSigner::P256(key) | TokenSigner::P384(key) => {
                let point = &key.public_key().as_ref()[1..];
                let (x, y) = point.split_at(point.len() / 2);
                let curve = if x.len() == 32 { "P-256" } else { "P-384" };
                json!({ "kty": "EC", "kid": kid, "crv": curve, "x": base64url(x), "y": base64url(y) })
            }
            TokenSigner::Ed(key) => {
                json!({ "kty": "OKP", "kid": kid, "crv": "Ed25519", "alg": "EdDSA", "x": base64url(key.public_key().as_ref()) })
            }
        }
    }
}

/// The claims of a good token.
pub(super) fn claims(sub: &str) -> Value {
    json!({ "iss": ISSUER, "sub": sub, "exp": now() + 300 })
}

pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

pub(super) fn base64url(bytes: impl AsRef<[u8]>) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for group in bytes.as_ref().chunks(3) {
        let bits = group.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        (0..=group.len()).for_each(|at| text.push(char::from(LETTERS[(bits >> (18 - 6 * at) & 63) as usize])));
    }
    text
}
