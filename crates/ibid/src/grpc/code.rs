//! The seventeen status codes, and what each says about the outcome of a call.

use http::StatusCode;

use crate::policy::{Policy, Remember};

/// Separates gRPC codes from HTTP statuses (three digits) if both share a field.
const GRPC_SUMMARY_OFFSET: u16 = 1000;

struct CodeInfo {
    code: GrpcStatusCode,
    name: &'static str,
    http: u16,
    /// What happens to a call under [`Remember::Final`], if the server uses codes as specified: the same call would get
    /// the same answer again, it was rejected before it had any effect, or it may have taken effect.
    outcome: CallOutcome,
}

macro_rules! codes {
    ($($code:ident $name:literal $http:literal $outcome:ident,)+) => {
        /// A gRPC status code.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)]
        pub enum GrpcStatusCode { $($code),+ }

        const CODES: &[CodeInfo] = &[$(CodeInfo {
            code: GrpcStatusCode::$code, name: $name, http: $http, outcome: CallOutcome::$outcome,
        }),+];
    };
}

codes! {
    Ok                 "OK"                  200 Remembered,
    Cancelled          "CANCELLED"           499 OutcomeUnknown,
    Unknown            "UNKNOWN"             500 OutcomeUnknown,
    InvalidArgument    "INVALID_ARGUMENT"    400 Remembered,
    DeadlineExceeded   "DEADLINE_EXCEEDED"   504 OutcomeUnknown,
    NotFound           "NOT_FOUND"           404 Remembered,
    AlreadyExists      "ALREADY_EXISTS"      409 Remembered,
    PermissionDenied   "PERMISSION_DENIED"   403 Released,
    ResourceExhausted  "RESOURCE_EXHAUSTED"  429 Released,
    FailedPrecondition "FAILED_PRECONDITION" 400 Remembered,
    Aborted            "ABORTED"             409 Released,
    OutOfRange         "OUT_OF_RANGE"        400 Remembered,
    // The call did not run; the next release of the server may support it.
    Unimplemented      "UNIMPLEMENTED"       501 Released,
    Internal           "INTERNAL"            500 OutcomeUnknown,
    Unavailable        "UNAVAILABLE"         503 Released,
    DataLoss           "DATA_LOSS"           500 OutcomeUnknown,
    Unauthenticated    "UNAUTHENTICATED"     401 Released,
}

impl GrpcStatusCode {
    /// All codes, by number.
    pub fn all() -> impl Iterator<Item = Self> {
        CODES.iter().map(|row| row.code)
    }

    /// Returns the code with this number. Undefined numbers are `UNKNOWN`, as the protocol specifies.
    pub fn from_number(number: u32) -> Self {
        CODES.get(number as usize).map_or(Self::Unknown, |row| row.code)
    }

    /// Returns the code with this name, such as `NOT_FOUND`.
    pub fn from_name(name: &str) -> Option<Self> {
        CODES.iter().find(|row| row.name == name).map(|row| row.code)
    }

    /// The number, 0 to 16.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The name, such as `NOT_FOUND`.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// The corresponding HTTP status, which the status lists of a policy refer to.
    pub fn status(self) -> StatusCode {
        StatusCode::from_u16(self.info().http).expect("the table holds valid codes")
    }

    /// The value in fields for HTTP statuses: 1000 plus the number. See [`RecordSummary`](crate::store::RecordSummary).
    pub fn summary_status(self) -> u16 {
        GRPC_SUMMARY_OFFSET + u16::from(self.number())
    }

    /// The inverse of [`summary_status`](Self::summary_status); `None` for an HTTP status.
    pub fn from_summary_status(status: u16) -> Option<Self> {
        CODES.get(usize::from(status.checked_sub(GRPC_SUMMARY_OFFSET)?)).map(|row| row.code)
    }

    fn info(self) -> &'static CodeInfo {
        &CODES[self as usize]
    }
}

impl std::fmt::Display for GrpcStatusCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What happens to a call that ended with a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallOutcome {
    /// The answer is remembered.
    Remembered,
    /// The claim is released: a retry runs the call again.
    Released,
    /// The outcome is unknown.
    OutcomeUnknown,
}

impl CallOutcome {
    /// Classifies a complete response by the policy. `unknown_status` takes precedence over `remember`. A call that is
    /// not remembered and may have taken effect has an unknown outcome under every policy.
    pub fn of(policy: &Policy, code: GrpcStatusCode) -> Self {
        let outcome = code.info().outcome;
        let remembered = match &policy.remember {
            Remember::All => true,
            Remember::Final => outcome == Self::Remembered,
            Remember::Success => code == GrpcStatusCode::Ok,
            list @ Remember::List { .. } => list.matches(code.status()),
        };
        match outcome {
            _ if policy.unknown_status.contains(&code.status()) => Self::OutcomeUnknown,
            _ if remembered => Self::Remembered,
            Self::OutcomeUnknown => Self::OutcomeUnknown,
            Self::Remembered | Self::Released => Self::Released,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::StatusRange;

    fn with(remember: Remember) -> Policy {
        Policy { remember, unknown_status: Vec::new(), ..Policy::ietf() }
    }

    /// The names of the codes with this meaning.
    fn those(policy: &Policy, meaning_is: CallOutcome) -> Vec<&'static str> {
        GrpcStatusCode::all()
            .filter(|code| CallOutcome::of(policy, *code) == meaning_is)
            .map(GrpcStatusCode::name)
            .collect()
    }

    const OPEN: [&str; 5] = ["CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED", "INTERNAL", "DATA_LOSS"];

    #[test]
    fn the_table_is_in_the_order_of_the_numbers() {
        for (at, row) in CODES.iter().enumerate() {
            assert_eq!(usize::from(row.code.number()), at, "{}", row.name);
            assert_eq!(GrpcStatusCode::from_number(at as u32), row.code);
            assert_eq!(GrpcStatusCode::from_name(row.name), Some(row.code));
            assert_eq!(GrpcStatusCode::from_summary_status(row.code.summary_status()), Some(row.code));
        }
        assert_eq!(GrpcStatusCode::from_number(17), GrpcStatusCode::Unknown);
        assert_eq!(GrpcStatusCode::from_summary_status(200), None);
        assert_eq!(GrpcStatusCode::from_summary_status(1017), None);
    }

    #[test]
    fn under_final_what_would_come_again_is_remembered_and_what_may_have_happened_is_unknown() {
        let policy = with(Remember::Final);
        assert_eq!(
            those(&policy, CallOutcome::Remembered),
            ["OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "OUT_OF_RANGE"]
        );
        assert_eq!(
            those(&policy, CallOutcome::Released),
            ["PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "ABORTED", "UNIMPLEMENTED", "UNAVAILABLE", "UNAUTHENTICATED"]
        );
        assert_eq!(those(&policy, CallOutcome::OutcomeUnknown), OPEN);
        for code in GrpcStatusCode::all() {
            assert_eq!(
                CallOutcome::of(&policy, code),
                CallOutcome::of(&Policy::ietf(), code),
                "{code}: 502 and 504 change nothing"
            );
        }
    }

    #[test]
    fn all_remembers_every_status_and_success_only_one() {
        assert_eq!(those(&with(Remember::All), CallOutcome::Remembered).len(), 17);
        assert_eq!(those(&with(Remember::Success), CallOutcome::Remembered), ["OK"]);
        assert_eq!(those(&with(Remember::Success), CallOutcome::OutcomeUnknown), OPEN);
    }

    #[test]
    fn lists_go_by_the_http_status_of_the_same_meaning() {
        let include = vec![StatusRange::Class(2), StatusRange::Code(StatusCode::NOT_FOUND)];
        let list = with(Remember::List { include, exclude: Vec::new() });
        assert_eq!(those(&list, CallOutcome::Remembered), ["OK", "NOT_FOUND"]);
        let all_but = with(Remember::all_except([StatusCode::NOT_FOUND]));
        assert_eq!(those(&all_but, CallOutcome::Remembered).len(), 16);
        assert_eq!(those(&all_but, CallOutcome::Released), ["NOT_FOUND"]);
        let mut all = with(Remember::All);
        all.unknown_status = vec![StatusCode::SERVICE_UNAVAILABLE];
        assert_eq!(those(&all, CallOutcome::OutcomeUnknown), ["UNAVAILABLE"]);
    }
}
