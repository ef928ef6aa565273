//! What is to be done once.

use ibid::{
    AddressSecret, IdempotencyKey, LabelKeyDisplay, OnMismatch, Policy, Scope, mask,
    store::{Address, Fingerprint},
};

use crate::{driver::Isolation, error::TxError};

/// A key in its scope, and what makes two calls with it the same.
///
/// A gateway or a layer finds what was remembered under the same scope, key and, where its policy compares requests,
/// fingerprint: make them with [`Scope::of`] and [`Fingerprint::of`] from the request, as those do.
#[derive(Debug, Clone)]
pub struct IdempotentCall {
    scope: Scope,
    key: String,
    secret: Option<AddressSecret>,
    pub(crate) fingerprint: Fingerprint,
    /// The same by the rules of other versions.
    older_fingerprints: OlderFingerprints,
    pub(crate) tenant: String,
    pub(crate) user: String,
    pub(crate) endpoint: String,
    pub(crate) isolation: Option<Isolation>,
}

#[derive(Debug, Clone)]
enum OlderFingerprints {
    /// Of plain bytes: the same in every version.
    RawBytes,
    Digested(Vec<Fingerprint>),
}

impl IdempotentCall {
    /// A key in a scope. Calls are not compared unless something is given to compare.
    pub fn new(scope: &Scope, key: impl Into<String>) -> Self {
        Self {
            scope: scope.clone(),
            key: key.into(),
            secret: None,
            fingerprint: Fingerprint::NONE,
            older_fingerprints: OlderFingerprints::RawBytes,
            tenant: String::new(),
            user: String::new(),
            endpoint: String::new(),
            isolation: None,
        }
    }

    /// What is asked for: with other bytes the key is refused, or as the policy says.
    pub fn request(mut self, request: &[u8]) -> Self {
        (self.fingerprint, self.older_fingerprints) = (Fingerprint::of_bytes(request), OlderFingerprints::RawBytes);
        self
    }

    /// The same, already digested.
    pub fn fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        (self.fingerprint, self.older_fingerprints) = (fingerprint, OlderFingerprints::Digested(Vec::new()));
        self
    }

    /// The same request's [fingerprint of an older version](Fingerprint::of_version), for what was recorded before an
    /// upgrade. Call it after [`fingerprint`](Self::fingerprint).
    pub fn older_fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        if let OlderFingerprints::Digested(older) = &mut self.older_fingerprints {
            older.push(fingerprint);
        }
        self
    }

    /// The fingerprint by the rules of a version, if it is known.
    pub(crate) fn fingerprint_of_version(&self, version: u8) -> Option<Fingerprint> {
        match &self.older_fingerprints {
            OlderFingerprints::RawBytes => {
                (version <= Fingerprint::VERSION).then_some(Fingerprint { version, ..self.fingerprint })
            }
            OlderFingerprints::Digested(older) => older.iter().find(|older| older.version == version).copied(),
        }
    }

    /// The secret that addresses are made with, if the gateway has one.
    pub fn address_secret(mut self, secret: AddressSecret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Whose data it is, for operators.
    pub fn tenant(mut self, tenant: &str) -> Self {
        self.tenant = postgres_text(tenant);
        self
    }

    /// Who asks, for operators.
    pub fn user(mut self, user: &str) -> Self {
        self.user = postgres_text(user);
        self
    }

    /// What it is about, for operators, such as `POST /payments`.
    pub fn endpoint(mut self, endpoint: &str) -> Self {
        self.endpoint = postgres_text(endpoint);
        self
    }

    /// The isolation of the transaction; the database's default if it is not said.
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = Some(isolation);
        self
    }

    /// Its key, in the spelling that a layer would give it.
    pub(crate) fn key(&self, policy: &Policy) -> Result<IdempotencyKey, TxError> {
        IdempotencyKey::new(&policy.key, self.key.as_str()).map_err(TxError::KeyInvalid)
    }

    /// Where a key of it is remembered.
    pub(crate) fn address(&self, policy: &Policy, key: &IdempotencyKey) -> Address {
        let own_entry = (policy.on_mismatch == OnMismatch::New).then_some(&self.fingerprint);
        self.scope.address(key.as_str(), own_entry, self.secret.as_ref())
    }

    /// The key as operators see it.
    pub(crate) fn displayed_key(&self, policy: &Policy, key: &IdempotencyKey) -> String {
        if policy.label.key == LabelKeyDisplay::Clear { postgres_text(key.as_str()) } else { mask(key.as_str()) }
    }
}

/// Text in PostgreSQL cannot hold a zero byte: people see its symbol instead.
fn postgres_text(value: &str) -> String {
    let value = &value[..value.floor_char_boundary(1024)];
    value.replace('\0', "\u{2400}")
}
