//! Classifies failed calls. Safety depends on this table.
//!
//! - *Not sent* (no connection, breaker open): [`ErrorKind::NotApplied`].
//! - *Sent, but no reply* (deadline, connection lost): [`ErrorKind::Ambiguous`], for any cause.
//! - *Error reply.* A native command that fails has written nothing. A script is validated before its first write and
//!   then runs to its end, so the errors listed in [`RedisCallError::kind`] occur before any write. Any other error of a
//!   script is ambiguous.

use ibid::store::{ErrorKind, StoreError};

pub(super) const STORE_NAME: &str = "redis";

/// Temporarily unavailable, as if unreachable: another store can stand in.
const UNAVAILABLE: [&str; 8] = ["READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "MOVED", "ASK"];
/// Available, but rejecting the call: out of memory, no permission, disk error, too few replicas.
const REJECTED: [&str; 9] =
    ["OOM", "NOPERM", "NOAUTH", "WRONGPASS", "DENIED", "MISCONF", "NOREPLICAS", "NOSCRIPT", "CROSSSLOT"];

/// Why a call has no usable reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RedisCallError {
    NotSent(String),
    Unanswered(String),
    Refused { code: String, text: String },
}

impl RedisCallError {
    /// Parses an error reply: a code in capitals, then text.
    pub(super) fn from_server(error: &[u8]) -> Self {
        let error = String::from_utf8_lossy(error);
        let (code, text) = error.split_once(' ').unwrap_or((&error, ""));
        Self::Refused { code: code.to_owned(), text: text.to_owned() }
    }

    /// Whether the server refuses writes, but may still be read.
    pub(super) fn refuses_writes(&self) -> bool {
        ["OOM", "READONLY", "MISCONF", "NOREPLICAS"].iter().any(|code| self.has_code(code))
    }

    /// Whether the server reports that it is not a working primary.
    pub(super) fn says_wrong_server(&self) -> bool {
        self.has_code("READONLY") || self.has_code("MASTERDOWN") || self.has_code("CLUSTERDOWN")
    }

    /// Whether the user may run scripts but not all of their commands: the script may have stopped halfway. Redis 7.0,
    /// then later servers.
    fn denies_a_scripts_command(&self) -> bool {
        let texts = ["executing the script", "ACL failure in script"];
        matches!(self, Self::Refused { text, .. } if texts.iter().any(|part| text.contains(part)))
    }

    /// Servers before version 7 wrap a command's error in the script's error.
    pub(super) fn has_code(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { code, text } if code == wanted || text.contains(&format!("-{wanted} ")))
    }

    pub(super) fn redirect_target(&self) -> Option<(&str, u16)> {
        let Self::Refused { text, .. } = self else { return None };
        let (name, port) = text.split_whitespace().nth(1)?.rsplit_once(':')?;
        Some((name, port.parse().ok()?))
    }

    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::NotSent(_) => ErrorKind::NotApplied,
            Self::Unanswered(_) => ErrorKind::Ambiguous,
            _ if UNAVAILABLE.iter().any(|code| self.has_code(code)) => ErrorKind::NotApplied,
            _ if self.denies_a_scripts_command() => ErrorKind::Ambiguous,
            _ if REJECTED.iter().any(|code| self.has_code(code)) => ErrorKind::Rejected,
            Self::Refused { text, .. } if text.starts_with("unknown command") => ErrorKind::Rejected,
            Self::Refused { text, .. } if text.contains("max number of clients") => ErrorKind::NotApplied,
            // The server does not even read a large call before the login.
            Self::Refused { text, .. } if text.contains("unauthenticated") => ErrorKind::Rejected,
            Self::Refused { code, text }
                if code == "WRONGTYPE" || text.contains("WRONGTYPE") || text.contains("CORRUPT") =>
            {
                ErrorKind::Corrupt
            }
            Self::Refused { .. } => ErrorKind::Ambiguous,
        }
    }

    fn message(&self) -> String {
        let hint = match self {
            _ if self.has_code("OOM") => "; raise maxmemory, or shorten ttl",
            _ if self.has_code("NOPERM") || self.denies_a_scripts_command() => {
                "; docs/redis.md lists what the user must be allowed"
            }
            Self::Refused { text, .. } if self.has_code("NOAUTH") || text.contains("unauthenticated") => {
                "; the store's URL names no password"
            }
            _ if self.has_code("TRYAGAIN") => "; its slot is being moved to another node",
            _ => "",
        };
        match self {
            Self::NotSent(why) | Self::Unanswered(why) => why.clone(),
            Self::Refused { code, text } => format!("{code} {text}{hint}"),
        }
    }
}

impl From<RedisCallError> for StoreError {
    fn from(trouble: RedisCallError) -> Self {
        StoreError::new(trouble.kind(), STORE_NAME, trouble.message())
    }
}

/// The error for stored data that this version cannot read.
pub(super) fn corrupt_reply(what: &str) -> StoreError {
    StoreError::new(ErrorKind::Corrupt, STORE_NAME, format!("an answer could not be read: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(code: &str, text: &str) -> ErrorKind {
        RedisCallError::Refused { code: code.into(), text: text.into() }.kind()
    }

    #[test]
    fn refusals_before_anything_was_written_are_told_from_what_may_have_been() {
        assert_eq!(kind("OOM", "command not allowed when used memory > 'maxmemory'."), ErrorKind::Rejected);
        assert_eq!(kind("READONLY", "You can't write against a read only replica."), ErrorKind::NotApplied);
        assert_eq!(
            kind("ERR", "Error running script (call to f_1): @user_script: 9: -READONLY You can't"),
            ErrorKind::NotApplied
        );
        assert_eq!(
            kind("ERR", "Error running script (call to f_1): @user_script: 9: -OOM command"),
            ErrorKind::Rejected
        );
        assert_eq!(kind("ERR", "user_script:9: CORRUPT fields in k script: 12"), ErrorKind::Corrupt);
        assert_eq!(kind("NOPERM", "No permissions to access a key"), ErrorKind::Rejected);
        for code in ["ERR", "NOPERM"] {
            assert_eq!(kind(code, "The user executing the script can't run this command"), ErrorKind::Ambiguous);
            assert_eq!(kind(code, "ACL failure in script: User u has no permissions"), ErrorKind::Ambiguous);
        }
        assert_eq!(kind("ERR", "unknown command 'EVALSHA', with args"), ErrorKind::Rejected);
        assert_eq!(kind("ERR", "Unknown Redis command called from script script: 1"), ErrorKind::Ambiguous);
        assert_eq!(kind("ERR", "Protocol error: unauthenticated multibulk length"), ErrorKind::Rejected);
        assert_eq!(kind("ERR", "user_script:9: attempt to perform arithmetic"), ErrorKind::Ambiguous);
        assert_eq!(RedisCallError::NotSent(String::new()).kind(), ErrorKind::NotApplied);
        assert_eq!(RedisCallError::Unanswered(String::new()).kind(), ErrorKind::Ambiguous);
    }

    #[test]
    fn a_redirection_says_where_to() {
        let moved = |text: &str| RedisCallError::Refused { code: "MOVED".into(), text: text.into() };
        assert_eq!(moved("3999 127.0.0.1:6381").redirect_target(), Some(("127.0.0.1", 6381)));
        assert_eq!(moved("3999 ::1:6381").redirect_target(), Some(("::1", 6381)));
        assert_eq!(moved("3999 :6381").redirect_target(), Some(("", 6381)));
        assert_eq!(moved("3999").redirect_target(), None);
    }
}
