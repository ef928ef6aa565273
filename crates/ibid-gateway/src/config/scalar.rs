//! Scalar values, and lists that may be written as one value.

use std::{fmt, marker::PhantomData};

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Unexpected, Visitor};

/// A value that is written as one word, number or boolean.
///
/// Every type can be parsed from text, also numbers and booleans, because `env:` and `file:` yield text.
pub(super) trait Scalar: Sized {
    /// The allowed values, for error messages.
    const ALLOWED: &'static str;

    /// # Errors
    /// Returns the value found and the values allowed.
    fn from_text(text: &str) -> Result<Self, String>;

    /// Like [`from_text`](Self::from_text); `None` if the type has no number syntax.
    fn from_number(_: i64) -> Option<Result<Self, String>> {
        None
    }

    /// `None` if the type is not a boolean.
    fn from_bool(_: bool) -> Option<Self> {
        None
    }
}

#[derive(Debug, Clone)]
pub(super) struct Single<T>(pub(super) T);

/// A list of values. A single value is a list of one.
#[derive(Debug, Clone)]
pub(super) struct List<T>(pub(super) Vec<T>);

struct ScalarVisitor<T>(PhantomData<T>);

impl<'de, T: Scalar> Visitor<'de> for ScalarVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::ALLOWED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        T::from_text(text).map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        match T::from_number(number) {
            Some(value) => value.map_err(E::custom),
            None => Err(E::invalid_type(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_bool<E: Error>(self, switch: bool) -> Result<T, E> {
        T::from_bool(switch).ok_or_else(|| E::invalid_type(Unexpected::Bool(switch), &self))
    }
}

impl<'de, T: Scalar> Deserialize<'de> for Single<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor(PhantomData)).map(Self)
    }
}

impl<'de, T: Scalar> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListVisitor(PhantomData)).map(Self)
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Scalar> Visitor<'de> for ListVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list, each {}", T::ALLOWED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Vec<T>, E> {
        ScalarVisitor(PhantomData).visit_str(text).map(|value| vec![value])
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Vec<T>, E> {
        ScalarVisitor(PhantomData).visit_i64(number).map(|value| vec![value])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut values = Vec::new();
        while let Some(Single(value)) = list.next_element()? {
            values.push(value);
        }
        Ok(values)
    }
}
