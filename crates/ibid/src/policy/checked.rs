//! A policy whose settings were checked: the only kind that layers and the engine accept.

use std::{fmt, ops::Deref};

use super::Policy;

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
pub struct CheckedPolicy(Policy);

/// Why a policy is invalid: one sentence that names the setting, the expected range and the actual value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidPolicy(String);

impl Policy {
    /// Checks the settings.
    ///
    /// # Errors
    /// A setting is out of range, or settings contradict each other.
    pub fn checked(self) -> Result<CheckedPolicy, InvalidPolicy> {
        match self.check() {
            Ok(()) => Ok(CheckedPolicy(self)),
            Err(why) => Err(InvalidPolicy(why)),
        }
    }

    /// Checks the settings for gRPC calls.
    ///
    /// # Errors
    /// As [`checked`](Self::checked), and if a setting has no meaning for gRPC calls.
    pub fn checked_for_grpc(self) -> Result<CheckedPolicy, InvalidPolicy> {
        match self.check_grpc() {
            Ok(()) => Ok(CheckedPolicy(self)),
            Err(why) => Err(InvalidPolicy(why)),
        }
    }
}

impl CheckedPolicy {
    /// Returns the policy, to be changed and checked again.
    pub fn into_policy(self) -> Policy {
        self.0
    }
}

impl Deref for CheckedPolicy {
    type Target = Policy;

    fn deref(&self) -> &Policy {
        &self.0
    }
}

impl TryFrom<Policy> for CheckedPolicy {
    type Error = InvalidPolicy;

    fn try_from(policy: Policy) -> Result<Self, InvalidPolicy> {
        policy.checked()
    }
}

impl fmt::Display for InvalidPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidPolicy {}
