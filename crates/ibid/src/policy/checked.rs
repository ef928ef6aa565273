//! A policy whose dials were checked: the only kind that layers and the engine take.

use std::{fmt, ops::Deref};

use super::Policy;

/// A policy whose dials were [checked](Policy::check). It cannot be changed any more.
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

/// Why a policy cannot be used: one sentence that names the dial, what was found and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidPolicy(String);

impl Policy {
    /// Checks the dials.
    ///
    /// # Errors
    /// Dials contradict each other, or one is out of its range.
    pub fn checked(self) -> Result<CheckedPolicy, InvalidPolicy> {
        match self.check() {
            Ok(()) => Ok(CheckedPolicy(self)),
            Err(why) => Err(InvalidPolicy(why)),
        }
    }

    /// The same for a policy of gRPC calls.
    ///
    /// # Errors
    /// Also if a dial makes no sense for gRPC calls.
    pub fn checked_for_grpc(self) -> Result<CheckedPolicy, InvalidPolicy> {
        match self.check_grpc() {
            Ok(()) => Ok(CheckedPolicy(self)),
            Err(why) => Err(InvalidPolicy(why)),
        }
    }
}

impl CheckedPolicy {
    /// The policy, to be changed and checked again.
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
