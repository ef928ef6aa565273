//! Parses the replies of the scripts. An unexpected reply is an error, never guessed at.

use std::vec;

use ibid::store::{CompletedEntry, Fingerprint, Holder, RecordSummary, Tags};

use super::*;

pub(super) struct ReplyParts(vec::IntoIter<Value>);

impl ReplyParts {
    pub(super) fn from_value(answer: Value) -> Result<Self, StoreError> {
        match answer {
            Value::Array(parts) => Ok(Self(parts.into_iter())),
            _ => Err(corrupt_reply("it is no list")),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, StoreError> {
        match self.0.next() {
            Some(Value::BulkString(bytes)) => Ok(bytes.into()),
            Some(Value::SimpleString(text)) => Ok(text.into()),
            _ => Err(corrupt_reply("a text is missing")),
        }
    }

    pub(super) fn number(&mut self) -> Result<u64, StoreError> {
        match self.0.next() {
            Some(Value::Int(number)) => u64::try_from(number).map_err(|_| corrupt_reply("a number is below zero")),
            Some(Value::BulkString(digits)) => std::str::from_utf8(&digits)
                .ok()
                .and_then(|digits| digits.parse().ok())
                .ok_or_else(|| corrupt_reply("a number is not one")),
            _ => Err(corrupt_reply("a number is missing")),
        }
    }

    pub(super) fn value(&mut self) -> Option<Value> {
        self.0.next()
    }

    fn fence(&mut self) -> Result<Fence, StoreError> {
        self.number().map(Fence)
    }

    fn attempt(&mut self) -> Result<u32, StoreError> {
        u32::try_from(self.number()?).map_err(|_| corrupt_reply("an attempt is too high"))
    }

    fn duration(&mut self) -> Result<Duration, StoreError> {
        self.number().map(Duration::from_micros)
    }

    fn fingerprint(&mut self) -> Result<Fingerprint, StoreError> {
        let bytes = self.bytes()?;
        match bytes.split_first() {
            Some((version, digest)) => {
                let digest = digest.try_into().map_err(|_| corrupt_reply("a fingerprint is not 33 bytes long"))?;
                Ok(Fingerprint { version: *version, digest })
            }
            None => Err(corrupt_reply("a fingerprint is empty")),
        }
    }
}

/// Parses a claim's outcome. `ask` is the claim request, or `None` for a read.
pub(super) fn parse_claim_outcome(answer: Value, ask: Option<&Arc<ClaimRequest>>) -> Result<ClaimOutcome, StoreError> {
    let mut parts = ReplyParts::from_value(answer)?;
    let tag = parts.bytes()?;
    Ok(match (&tag[..], ask) {
        (b"G", Some(ask)) => ClaimOutcome::Granted(Lease {
            request: ask.clone(),
            fence: parts.fence()?,
            attempt: parts.attempt()?,
            front_only: false,
        }),
        (b"B", _) => ClaimOutcome::InProgress(parse_holder(&mut parts)?),
        (b"U", _) => ClaimOutcome::OutcomeUnknown(parse_holder(&mut parts)?),
        (b"D", _) => ClaimOutcome::Completed(CompletedEntry {
            fence: parts.fence()?,
            attempt: parts.attempt()?,
            fingerprint: parts.fingerprint()?,
            failed: parts.number()? == 1,
            expires_in: parts.duration()?,
            record: parts.bytes()?,
        }),
        (b"S", _) => ClaimOutcome::TokenSpent,
        _ => return Err(corrupt_reply("its kind is not known")),
    })
}

fn parse_holder(parts: &mut ReplyParts) -> Result<Holder, StoreError> {
    Ok(Holder {
        fence: parts.fence()?,
        attempt: parts.attempt()?,
        fingerprint: parts.fingerprint()?,
        age: parts.duration()?,
        takeover_in: parts.duration()?,
    })
}

pub(super) fn parse_settle_outcome(answer: Value) -> Result<SettleOutcome, StoreError> {
    let mut parts = ReplyParts::from_value(answer)?;
    let tag = parts.bytes()?;
    Ok(match &tag[..] {
        b"H" => SettleOutcome::Applied,
        b"R" => SettleOutcome::Restored,
        b"L" => SettleOutcome::ClaimLost(Box::new(parse_claim_outcome(parts.value().unwrap_or(Value::Nil), None)?)),
        _ => return Err(corrupt_reply("its kind is not known")),
    })
}

/// Parses one row of a listing. Returns `None` if there is no entry.
pub(super) fn parse_entry_info(row: Value, address: Address) -> Result<Option<EntryInfo>, StoreError> {
    if row == Value::Nil {
        return Ok(None);
    }
    let mut parts = ReplyParts::from_value(row)?;
    let state = match &parts.bytes()?[..] {
        b"P" => EntryState::Processing,
        b"U" => EntryState::Unknown,
        b"D" => EntryState::Done,
        b"F" => EntryState::Failed,
        _ => return Err(corrupt_reply("a state is not known")),
    };
    let (fence, attempt, fingerprint) = (parts.fence()?, parts.attempt()?, parts.fingerprint()?);
    let tags = Tags::from_bytes(parts.bytes()?).ok_or_else(|| corrupt_reply("tags"))?;
    let (label, age, expires_in) = (parts.bytes()?, parts.duration()?, parts.duration()?);
    let outline = match &parts.bytes()?[..] {
        b"" => None,
        bytes => Some(parse_summary(bytes).ok_or_else(|| corrupt_reply("an outline"))?),
    };
    Ok(Some(EntryInfo { address, state, fence, attempt, fingerprint, tags, label, age, expires_in, summary: outline }))
}

/// Returns the stored form of a fingerprint.
pub(super) fn fingerprint_bytes(fingerprint: &Fingerprint) -> Bytes {
    [&[fingerprint.version][..], &fingerprint.digest].concat().into()
}

/// Returns the stored form of a summary, which is readable for people.
pub(super) fn summary_text(outline: &RecordSummary) -> String {
    let RecordSummary { status, requested_at_ms, completed_at_ms, took } = outline;
    format!("{status} {requested_at_ms} {completed_at_ms} {}", took.as_micros().min(u128::from(u64::MAX)))
}

fn parse_summary(bytes: &[u8]) -> Option<RecordSummary> {
    let mut numbers = std::str::from_utf8(bytes).ok()?.split(' ').map(str::parse::<u64>);
    let mut next = || numbers.next()?.ok();
    let (status, requested_at_ms, completed_at_ms) = (u16::try_from(next()?).ok()?, next()?, next()?);
    let outline = RecordSummary { status, requested_at_ms, completed_at_ms, took: Duration::from_micros(next()?) };
    numbers.next().is_none().then_some(outline)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bulk(text: impl AsRef<[u8]>) -> Value {
        Value::BulkString(text.as_ref().to_vec())
    }

    #[test]
    fn outlines_come_back() {
        let took = Duration::from_micros(1_234_567);
        let outline = RecordSummary { status: 201, requested_at_ms: 1, completed_at_ms: u64::MAX, took };
        assert_eq!(parse_summary(summary_text(&outline).as_bytes()), Some(outline));
        for wrong in ["", "1 2 3", "1 2 3 4 5", "70000 1 1 1", "a b c d"] {
            assert_eq!(parse_summary(wrong.as_bytes()), None, "{wrong:?}");
        }
    }

    #[test]
    fn what_is_not_understood_is_corrupt() {
        for answer in [
            Value::Nil,
            Value::Array(vec![]),
            Value::Array(vec![bulk("X")]),
            Value::Array(vec![bulk("G"), bulk("1"), Value::Int(1)]),
            Value::Array(vec![bulk("B"), bulk("1"), Value::Int(1), bulk([0; 32]), Value::Int(1), Value::Int(1)]),
            Value::Array(vec![
                bulk("D"),
                bulk("1"),
                Value::Int(1),
                bulk([0; 33]),
                Value::Int(0),
                Value::Int(1),
                Value::Nil,
            ]),
        ] {
            let error = parse_claim_outcome(answer.clone(), None).unwrap_err();
            assert_eq!(error.kind, ibid::store::ErrorKind::Corrupt, "{answer:?}");
        }
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Nil),
            any::<i64>().prop_map(Value::Int),
            prop_oneof![Just("G"), Just("B"), Just("U"), Just("D"), Just("H"), Just("L"), Just("P"), Just("7")]
                .prop_map(bulk),
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Value::BulkString),
        ];
        leaf.prop_recursive(3, 24, 10, |inner| proptest::collection::vec(inner, 0..10).prop_map(Value::Array))
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(value in values()) {
            let _ = parse_claim_outcome(value.clone(), None);
            let _ = parse_settle_outcome(value.clone());
            let _ = parse_entry_info(value, Address([0; 32]));
        }
    }
}
