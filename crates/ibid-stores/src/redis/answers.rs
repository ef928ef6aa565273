//! What the scripts answer, read. Whatever is not understood is corrupt, never guessed at.

use std::{sync::Arc, time::Duration, vec};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, Fence, Fingerprint, Finished, Held, Holder, Lease, Listed, Outline, State, StoreError, Tags,
};
use redis::Value;

use super::trouble::corrupt;

/// The parts of an answer, one after the other.
pub(super) struct Parts(vec::IntoIter<Value>);

impl Parts {
    pub(super) fn of(answer: Value) -> Result<Self, StoreError> {
        match answer {
            Value::Array(parts) => Ok(Self(parts.into_iter())),
            _ => Err(corrupt("it is no list")),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, StoreError> {
        match self.0.next() {
            Some(Value::BulkString(bytes)) => Ok(bytes.into()),
            Some(Value::SimpleString(text)) => Ok(text.into()),
            _ => Err(corrupt("a text is missing")),
        }
    }

    pub(super) fn number(&mut self) -> Result<u64, StoreError> {
        match self.0.next() {
            Some(Value::Int(number)) => u64::try_from(number).map_err(|_| corrupt("a number is below zero")),
            Some(Value::BulkString(digits)) => std::str::from_utf8(&digits)
                .ok()
                .and_then(|digits| digits.parse().ok())
                .ok_or_else(|| corrupt("a number is not one")),
            _ => Err(corrupt("a number is missing")),
        }
    }

    pub(super) fn value(&mut self) -> Option<Value> {
        self.0.next()
    }

    fn fence(&mut self) -> Result<Fence, StoreError> {
        self.number().map(Fence)
    }

    fn attempt(&mut self) -> Result<u32, StoreError> {
        u32::try_from(self.number()?).map_err(|_| corrupt("an attempt is too high"))
    }

    fn duration(&mut self) -> Result<Duration, StoreError> {
        self.number().map(Duration::from_micros)
    }

    fn fingerprint(&mut self) -> Result<Fingerprint, StoreError> {
        let bytes = self.bytes()?;
        match bytes.split_first() {
            Some((version, digest)) => {
                let digest = digest.try_into().map_err(|_| corrupt("a fingerprint is not 33 bytes long"))?;
                Ok(Fingerprint { version: *version, digest })
            }
            None => Err(corrupt("a fingerprint is empty")),
        }
    }
}

/// What a claim found. `ask` is what was asked, if anything was.
pub(super) fn claim(answer: Value, ask: Option<&Arc<Ask>>) -> Result<Claim, StoreError> {
    let mut parts = Parts::of(answer)?;
    let tag = parts.bytes()?;
    Ok(match (&tag[..], ask) {
        (b"G", Some(ask)) => {
            Claim::Granted(Lease { ask: ask.clone(), fence: parts.fence()?, attempt: parts.attempt()?, solo: false })
        }
        (b"B", _) => Claim::Busy(holder(&mut parts)?),
        (b"U", _) => Claim::Unknown(holder(&mut parts)?),
        (b"D", _) => Claim::Done(Finished {
            fence: parts.fence()?,
            attempt: parts.attempt()?,
            fingerprint: parts.fingerprint()?,
            failed: parts.number()? == 1,
            expires_in: parts.duration()?,
            record: parts.bytes()?,
        }),
        (b"S", _) => Claim::Spent,
        _ => return Err(corrupt("its kind is not known")),
    })
}

fn holder(parts: &mut Parts) -> Result<Holder, StoreError> {
    Ok(Holder {
        fence: parts.fence()?,
        attempt: parts.attempt()?,
        fingerprint: parts.fingerprint()?,
        age: parts.duration()?,
        takeover_in: parts.duration()?,
    })
}

/// Whether a holder still was the holder.
pub(super) fn held(answer: Value) -> Result<Held, StoreError> {
    let mut parts = Parts::of(answer)?;
    let tag = parts.bytes()?;
    Ok(match &tag[..] {
        b"H" => Held::Held,
        b"R" => Held::Restored,
        b"L" => Held::Lost(Box::new(claim(parts.value().unwrap_or(Value::Nil), None)?)),
        _ => return Err(corrupt("its kind is not known")),
    })
}

/// One row of a listing; `None` where nothing is to be seen.
pub(super) fn listed(row: Value, address: Address) -> Result<Option<Listed>, StoreError> {
    if row == Value::Nil {
        return Ok(None);
    }
    let mut parts = Parts::of(row)?;
    let state = match &parts.bytes()?[..] {
        b"P" => State::Processing,
        b"U" => State::Unknown,
        b"D" => State::Done,
        b"F" => State::Failed,
        _ => return Err(corrupt("a state is not known")),
    };
    let (fence, attempt, fingerprint) = (parts.fence()?, parts.attempt()?, parts.fingerprint()?);
    let tags = Tags::from_bytes(parts.bytes()?).ok_or_else(|| corrupt("tags"))?;
    let (label, age, expires_in) = (parts.bytes()?, parts.duration()?, parts.duration()?);
    let outline = match &parts.bytes()?[..] {
        b"" => None,
        bytes => Some(outline_from(bytes).ok_or_else(|| corrupt("an outline"))?),
    };
    Ok(Some(Listed { address, state, fence, attempt, fingerprint, tags, label, age, expires_in, outline }))
}

/// A fingerprint in the form in which it is kept.
pub(super) fn fingerprint_bytes(fingerprint: &Fingerprint) -> Bytes {
    [&[fingerprint.version][..], &fingerprint.digest].concat().into()
}

/// An outline in the form in which it is kept: readable, for people who look.
pub(super) fn outline_text(outline: &Outline) -> String {
    let Outline { status, requested_at_ms, completed_at_ms, took } = outline;
    format!("{status} {requested_at_ms} {completed_at_ms} {}", took.as_micros().min(u128::from(u64::MAX)))
}

fn outline_from(bytes: &[u8]) -> Option<Outline> {
    let mut numbers = std::str::from_utf8(bytes).ok()?.split(' ').map(str::parse::<u64>);
    let mut next = || numbers.next()?.ok();
    let (status, requested_at_ms, completed_at_ms) = (u16::try_from(next()?).ok()?, next()?, next()?);
    let outline = Outline { status, requested_at_ms, completed_at_ms, took: Duration::from_micros(next()?) };
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
        let outline = Outline { status: 201, requested_at_ms: 1, completed_at_ms: u64::MAX, took };
        assert_eq!(outline_from(outline_text(&outline).as_bytes()), Some(outline));
        for wrong in ["", "1 2 3", "1 2 3 4 5", "70000 1 1 1", "a b c d"] {
            assert_eq!(outline_from(wrong.as_bytes()), None, "{wrong:?}");
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
            let error = claim(answer.clone(), None).unwrap_err();
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
            let _ = claim(value.clone(), None);
            let _ = held(value.clone());
            let _ = listed(value, Address([0; 32]));
        }
    }
}
