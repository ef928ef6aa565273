//! The identity of an operation that runs once.

use ibid::{
    IdempotencyKey, Policy, Scope, mask,
    policy::{LabelKeyDisplay, OnMismatch},
    scope::AddressSecret,
    store::{Address, Fingerprint},
};

use crate::{driver::Isolation, error::TxError};

/// A key in its scope, and the fingerprint that identifies the request.
///
/// A gateway or layer finds the remembered answer under the same scope, key and, if its policy compares requests,
/// fingerprint. Create them from the request with [`Scope::of`] and [`Fingerprint::of`], as those do.
#[derive(Debug, Clone)]
pub struct IdempotentCall {
    scope: Scope,
    key: String,
    secret: Option<AddressSecret>,
    pub(crate) fingerprint: Fingerprint,
    /// Fingerprints of the same request by the rules of other versions. `None` for raw bytes, whose fingerprint is the
    /// same in every version.
    older_fingerprints: Option<Vec<Fingerprint>>,
    pub(crate) tenant: String,
    pub(crate) user: String,
    pub(crate) endpoint: String,
    pub(crate) isolation: Option<Isolation>,
}

impl IdempotentCall {
    /// Creates a call for a key in a scope. Requests are not compared unless a request or fingerprint is set.
    pub fn new(scope: &Scope, key: impl Into<String>) -> Self {
        Self {
            scope: scope.clone(),
            key: key.into(),
            secret: None,
            fingerprint: Fingerprint::NONE,
            older_fingerprints: None,
            tenant: String::new(),
            user: String::new(),
            endpoint: String::new(),
            isolation: None,
        }
    }

    /// Sets the request's bytes. The policy decides about the same key with other bytes; by default it is rejected.
    pub fn request(mut self, request: &[u8]) -> Self {
        (self.fingerprint, self.older_fingerprints) = (Fingerprint::of_bytes(request), None);
        self
    }

    /// Sets the request's fingerprint instead of its bytes.
    pub fn fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        (self.fingerprint, self.older_fingerprints) = (fingerprint, Some(Vec::new()));
        self
    }

    /// Adds the request's [fingerprint of an older version](Fingerprint::of_version), for answers recorded before an
    /// upgrade. Call it after [`fingerprint`](Self::fingerprint).
    pub fn older_fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        if let Some(older) = &mut self.older_fingerprints {
            older.push(fingerprint);
        }
        self
    }

    pub(crate) fn fingerprint_of_version(&self, version: u8) -> Option<Fingerprint> {
        match &self.older_fingerprints {
            None => (version <= Fingerprint::VERSION).then_some(Fingerprint { version, ..self.fingerprint }),
            Some(older) => older.iter().find(|older| older.version == version).copied(),
        }
    }

    /// Sets the secret for deriving addresses, if the gateway uses one.
    pub fn address_secret(mut self, secret: AddressSecret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Sets the tenant that operators see.
    pub fn tenant(mut self, tenant: &str) -> Self {
        self.tenant = postgres_text(tenant);
        self
    }

    /// Sets the user that operators see.
    pub fn user(mut self, user: &str) -> Self {
        self.user = postgres_text(user);
        self
    }

    /// Sets the endpoint that operators see, such as `POST /payments`.
    pub fn endpoint(mut self, endpoint: &str) -> Self {
        self.endpoint = postgres_text(endpoint);
        self
    }

    /// Sets the isolation level of the transaction. Without it, the database's default applies.
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = Some(isolation);
        self
    }

    /// Returns the validated key, normalized like in a layer.
    pub(crate) fn key(&self, policy: &Policy) -> Result<IdempotencyKey, TxError> {
        IdempotencyKey::new(&policy.key, self.key.as_str()).map_err(TxError::KeyInvalid)
    }

    pub(crate) fn address(&self, policy: &Policy, key: &IdempotencyKey) -> Address {
        let own_entry = (policy.on_mismatch == OnMismatch::New).then_some(&self.fingerprint);
        self.scope.address(key.as_str(), own_entry, self.secret.as_ref())
    }

    pub(crate) fn displayed_key(&self, policy: &Policy, key: &IdempotencyKey) -> String {
        if policy.label.key == LabelKeyDisplay::Clear { postgres_text(key.as_str()) } else { mask(key.as_str()) }
    }
}

/// PostgreSQL text cannot contain zero bytes: they are replaced with a visible symbol.
fn postgres_text(value: &str) -> String {
    let value = &value[..value.floor_char_boundary(1024)];
    value.replace('\0', "\u{2400}")
}
