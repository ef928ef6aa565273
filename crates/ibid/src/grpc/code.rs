//! The seventeen codes, and what each says about the operation: the settle table of gRPC.

use http::StatusCode;

use crate::{
    http::Meaning,
    policy::{Policy, Remember},
};

/// Told apart from HTTP statuses, which have three digits, where both are kept in one number.
const OUTLINE: u16 = 1000;

/// A gRPC status code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Code {
    Ok,
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

/// What a status says about the operation, if its server keeps to what the codes mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    /// The same call would get the same answer again.
    Final,
    /// It was turned away before it did anything, and may go better another time.
    NotNow,
    /// It may have taken effect.
    Open,
}

struct Row {
    code: Code,
    name: &'static str,
    http: u16,
    says: Says,
}

#[rustfmt::skip]
const TABLE: [Row; 17] = [
    Row { code: Code::Ok,                 name: "OK",                  http: 200, says: Says::Final },
    Row { code: Code::Cancelled,          name: "CANCELLED",           http: 499, says: Says::Open },
    Row { code: Code::Unknown,            name: "UNKNOWN",             http: 500, says: Says::Open },
    Row { code: Code::InvalidArgument,    name: "INVALID_ARGUMENT",    http: 400, says: Says::Final },
    Row { code: Code::DeadlineExceeded,   name: "DEADLINE_EXCEEDED",   http: 504, says: Says::Open },
    Row { code: Code::NotFound,           name: "NOT_FOUND",           http: 404, says: Says::Final },
    Row { code: Code::AlreadyExists,      name: "ALREADY_EXISTS",      http: 409, says: Says::Final },
    Row { code: Code::PermissionDenied,   name: "PERMISSION_DENIED",   http: 403, says: Says::NotNow },
    Row { code: Code::ResourceExhausted,  name: "RESOURCE_EXHAUSTED",  http: 429, says: Says::NotNow },
    Row { code: Code::FailedPrecondition, name: "FAILED_PRECONDITION", http: 400, says: Says::Final },
    Row { code: Code::Aborted,            name: "ABORTED",             http: 409, says: Says::NotNow },
    Row { code: Code::OutOfRange,         name: "OUT_OF_RANGE",        http: 400, says: Says::Final },
    // Nobody ran it; the next release of the server may.
    Row { code: Code::Unimplemented,      name: "UNIMPLEMENTED",       http: 501, says: Says::NotNow },
    Row { code: Code::Internal,           name: "INTERNAL",            http: 500, says: Says::Open },
    Row { code: Code::Unavailable,        name: "UNAVAILABLE",         http: 503, says: Says::NotNow },
    Row { code: Code::DataLoss,           name: "DATA_LOSS",           http: 500, says: Says::Open },
    Row { code: Code::Unauthenticated,    name: "UNAUTHENTICATED",     http: 401, says: Says::NotNow },
];

impl Code {
    /// All of them, by number.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.code)
    }

    /// The code of that number. Numbers that nobody has given a meaning are `UNKNOWN`, as the protocol says.
    pub fn of(number: u32) -> Self {
        TABLE.get(number as usize).map_or(Self::Unknown, |row| row.code)
    }

    /// The code of that name, such as `NOT_FOUND`.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.name == name).map(|row| row.code)
    }

    /// Its number.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Its name, such as `NOT_FOUND`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The HTTP status of the same meaning: what lists of statuses in a policy say about it.
    pub fn status(self) -> StatusCode {
        StatusCode::from_u16(self.row().http).expect("the table holds valid codes")
    }

    /// How it is kept where HTTP statuses are: 1000 and its number. See [`Outline`](crate::store::Outline).
    pub fn outline(self) -> u16 {
        OUTLINE + u16::from(self.number())
    }

    /// The code that [`outline`](Self::outline) wrote; `None` for an HTTP status.
    pub fn of_outline(status: u16) -> Option<Self> {
        TABLE.get(usize::from(status.checked_sub(OUTLINE)?)).map(|row| row.code)
    }

    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What becomes of a call that ended with a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallEnd {
    /// Its answer is remembered.
    Remembered,
    /// A retry runs it again.
    Released,
    /// Nobody knows whether it took effect.
    Open,
}

impl CallEnd {
    /// By the policy's `remember` and `unknown_status`.
    pub fn of(policy: &Policy, code: Code) -> Self {
        match meaning(policy, code) {
            Meaning::Remember => Self::Remembered,
            Meaning::Release => Self::Released,
            Meaning::Unknown => Self::Open,
        }
    }
}

/// What a complete answer means. `unknown_status` wins over `remember`; what is not remembered and may have taken
/// effect is unknown, whatever the policy.
pub(crate) fn meaning(policy: &Policy, code: Code) -> Meaning {
    let says = code.row().says;
    let remembered = match &policy.remember {
        Remember::All => true,
        Remember::Final => says == Says::Final,
        Remember::Success => code == Code::Ok,
        list @ Remember::List { .. } => list.keeps(code.status()),
    };
    match says {
        _ if policy.unknown_status.contains(&code.status()) => Meaning::Unknown,
        _ if remembered => Meaning::Remember,
        Says::Open => Meaning::Unknown,
        Says::Final | Says::NotNow => Meaning::Release,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::StatusRange;

    fn with(remember: Remember) -> Policy {
        Policy { remember, unknown_status: Vec::new(), ..Policy::ietf() }
    }

    /// The names of the codes that mean this.
    fn those(policy: &Policy, meaning_is: Meaning) -> Vec<&'static str> {
        Code::all().filter(|code| meaning(policy, *code) == meaning_is).map(Code::name).collect()
    }

    const OPEN: [&str; 5] = ["CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "INTERNAL", "DATA_LOSS"];

    #[test]
    fn the_table_is_in_the_order_of_the_numbers() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(usize::from(row.code.number()), at, "{}", row.name);
            assert_eq!(Code::of(at as u32), row.code);
            assert_eq!(Code::from_name(row.name), Some(row.code));
            assert_eq!(Code::of_outline(row.code.outline()), Some(row.code));
        }
        assert_eq!(Code::of(17), Code::Unknown);
        assert_eq!(Code::of_outline(200), None);
        assert_eq!(Code::of_outline(1017), None);
    }

    #[test]
    fn under_final_what_would_come_again_is_remembered_and_what_may_have_happened_is_unknown() {
        let policy = with(Remember::Final);
        assert_eq!(
            those(&policy, Meaning::Remember),
            ["OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "OUT_OF_RANGE"]
        );
        assert_eq!(
            those(&policy, Meaning::Release),
            ["PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "ABORTED", "UNIMPLEMENTED", "UNAVAILABLE", "UNAUTHENTICATED"]
        );
        assert_eq!(those(&policy, Meaning::Unknown), OPEN);
        for code in Code::all() {
            assert_eq!(meaning(&policy, code), meaning(&Policy::ietf(), code), "{code}: 502 and 504 change nothing");
        }
    }

    #[test]
    fn all_remembers_every_status_and_success_only_one() {
        assert_eq!(those(&with(Remember::All), Meaning::Remember).len(), 17);
        assert_eq!(those(&with(Remember::Success), Meaning::Remember), ["OK"]);
        assert_eq!(those(&with(Remember::Success), Meaning::Unknown), OPEN);
    }

    #[test]
    fn lists_go_by_the_http_status_of_the_same_meaning() {
        let include = vec![StatusRange::Class(2), StatusRange::Code(StatusCode::NOT_FOUND)];
        let list = with(Remember::List { include, exclude: Vec::new() });
        assert_eq!(those(&list, Meaning::Remember), ["OK", "NOT_FOUND"]);
        let all_but = with(Remember::all_but([StatusCode::NOT_FOUND]));
        assert_eq!(those(&all_but, Meaning::Remember).len(), 16);
        assert_eq!(those(&all_but, Meaning::Release), ["NOT_FOUND"]);
        let mut all = with(Remember::All);
        all.unknown_status = vec![StatusCode::SERVICE_UNAVAILABLE];
        assert_eq!(those(&all, Meaning::Unknown), ["UNAVAILABLE"]);
    }
}
