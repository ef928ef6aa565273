//! A policy whose settings were checked: the only kind that layers accept. The engine needs its [`Terms`] only.

use std::{ops::Deref, time::Duration};

use super::{OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Policy};

/// A policy whose settings were [checked](Policy::check). It is immutable.
///
/// ```
/// use std::time::Duration;
/// use ibid::Policy;
///
/// let mut policy = Policy::ietf();
/// assert!(policy.clone().checked().is_ok());
/// policy.lease = Duration::ZERO;
/// assert!(policy.checked().unwrap_err().to_string().starts_with("lease is zero"));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedPolicy {
    policy: Policy,
    terms: Terms,
}

/// The settings that the engine needs. They are part of a [`CheckedPolicy`], so they are always valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    pub(crate) ttl: Duration,
    pub(crate) lease: Duration,
    pub(crate) wait_timeout: Duration,
    pub(crate) on_mismatch: OnMismatch,
    pub(crate) on_concurrent: OnConcurrent,
    pub(crate) on_unknown: OnUnknown,
    pub(crate) on_store_down: OnStoreDown,
    /// Whether the app can be asked about an unknown outcome.
    pub(crate) can_probe: bool,
}

/// Why a policy is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct InvalidPolicy(#[from] InvalidSetting);

/// Why a setting is invalid: one sentence that says what was expected and what was found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{setting}{}{message}", if setting.is_empty() { "" } else { " " })]
pub struct InvalidSetting {
    setting: &'static str,
    message: String,
}

impl InvalidSetting {
    pub(crate) fn new(setting: &'static str, message: impl Into<String>) -> Self {
        Self { setting, message: message.into() }
    }

    /// The name of the setting, such as `key.from`. Empty if only its value was read.
    pub fn setting(&self) -> &'static str {
        self.setting
    }

    /// The sentence without the name of the setting.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl From<String> for InvalidSetting {
    fn from(message: String) -> Self {
        Self::new("", message)
    }
}

/// Returns an error about the setting unless the condition holds.
pub(crate) fn require(holds: bool, setting: &'static str, message: impl Into<String>) -> Result<(), InvalidSetting> {
    if holds { Ok(()) } else { Err(InvalidSetting::new(setting, message)) }
}

impl Policy {
    /// Checks the settings.
    ///
    /// # Errors
    /// A setting is out of range, or settings contradict each other.
    pub fn checked(self) -> Result<CheckedPolicy, InvalidPolicy> {
        self.check()?;
        Ok(CheckedPolicy::new(self))
    }

    /// Checks the settings for gRPC calls.
    ///
    /// # Errors
    /// As [`checked`](Self::checked), and if a setting has no meaning for gRPC calls.
    pub fn checked_for_grpc(self) -> Result<CheckedPolicy, InvalidPolicy> {
        self.check_grpc()?;
        Ok(CheckedPolicy::new(self))
    }
}

impl CheckedPolicy {
    fn new(policy: Policy) -> Self {
        let Policy { ttl, lease, wait_timeout, on_mismatch, on_concurrent, on_unknown, on_store_down, .. } = policy;
        let can_probe = policy.resolve.is_some();
        let terms =
            Terms { ttl, lease, wait_timeout, on_mismatch, on_concurrent, on_unknown, on_store_down, can_probe };
        Self { policy, terms }
    }

    /// Returns the settings that the engine needs.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Returns the policy, to be changed and checked again.
    pub fn into_policy(self) -> Policy {
        self.policy
    }
}

impl Deref for CheckedPolicy {
    type Target = Policy;

    fn deref(&self) -> &Policy {
        &self.policy
    }
}
