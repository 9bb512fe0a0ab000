//! JSON from untrusted files: numbers, and objects whose keys are all visited, so that duplicates are found.
//!
//! serde's errors are text. Rules with an error of their own store it in a [`StoredError`].

use std::cell::RefCell;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// Stores a rule's error while serde returns an error of its own.
pub(crate) struct StoredError<E>(RefCell<Option<E>>);

impl<E> StoredError<E> {
    pub fn new() -> Self {
        Self(RefCell::new(None))
    }

    /// Stores `error` and returns an error for serde.
    pub fn raise<D: de::Error>(&self, error: E) -> D {
        *self.0.borrow_mut() = Some(error);
        D::custom("a rule is broken")
    }

    /// The result, with the stored error if there is one.
    pub fn settle<T>(
        self,
        result: serde_json::Result<T>,
        json: impl FnOnce(serde_json::Error) -> E,
    ) -> Result<T, E> {
        result.map_err(|e| self.0.into_inner().unwrap_or_else(|| json(e)))
    }
}

/// Parses all of `text` with `seed`.
pub(crate) fn parse<'de, S: DeserializeSeed<'de>>(text: &'de [u8], seed: S) -> serde_json::Result<S::Value> {
    let text = std::str::from_utf8(text)
        .map_err(|e| de::Error::custom(format_args!("byte {} is not UTF-8", e.valid_up_to())))?;
    let mut json = serde_json::Deserializer::from_str(text);
    let value = seed.deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}

/// An object: `each` gets every key and takes its value. It decides about duplicate keys.
pub(crate) struct Object<F>(pub &'static str, pub F);

/// Takes the values of an object's keys.
pub(crate) trait Each<'de> {
    /// Takes the value of `key` out of `map`.
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error>;
}

impl<'de, F: Each<'de>> DeserializeSeed<'de> for Object<&mut F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de, F: Each<'de>> Visitor<'de> for Object<&mut F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            self.1.take(key, &mut map)?;
        }
        Ok(())
    }
}

/// An object of strings, in the order of the file.
#[derive(Default)]
pub(crate) struct StringPairs(pub Vec<(String, String)>);

impl<'de> Each<'de> for StringPairs {
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        self.0.push((key, map.next_value()?));
        Ok(())
    }
}

/// A value that is validated and discarded. `IgnoredAny` would accept text that other parsers refuse, such as lone
/// surrogates; this also respects the parser's depth limit.
pub(crate) struct Skip;

impl<'de> de::Deserialize<'de> for Skip {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Skip {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self, A::Error> {
        while seq.next_element::<Self>()?.is_some() {}
        Ok(Self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<Self, Self>()?.is_some() {}
        Ok(Self)
    }
}

/// A list of lengths, offsets or dimensions.
#[derive(Default)]
pub(crate) struct UnsignedList {
    /// The first numbers, at most as many as any caller needs.
    pub first: Vec<u64>,
    /// Their number.
    pub count: usize,
    /// The first value that is not an unsigned integer, as text.
    pub invalid: Option<String>,
}

/// Number of list elements to keep.
pub(crate) const KEPT: usize = 64;

impl<'de> de::Deserialize<'de> for UnsignedList {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(UnsignedListVisitor)
    }
}

struct UnsignedListVisitor;

impl<'de> Visitor<'de> for UnsignedListVisitor {
    type Value = UnsignedList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<UnsignedList, A::Error> {
        let mut list = UnsignedList::default();
        while let Some(number) = seq.next_element::<Whole>()? {
            list.count += 1;
            match number.0 {
                Ok(n) if list.first.len() < KEPT => list.first.push(n),
                Ok(_) => {}
                Err(text) => list.invalid = list.invalid.or(Some(text)),
            }
        }
        Ok(list)
    }
}

/// One number, or the text of a value that is not an unsigned integer.
pub(crate) struct Whole(pub Result<u64, String>);

impl<'de> de::Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_u64(UnsignedVisitor)
    }
}

struct UnsignedVisitor;

impl Visitor<'_> for UnsignedVisitor {
    type Value = Whole;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_u64<E>(self, n: u64) -> Result<Whole, E> {
        Ok(Whole(Ok(n)))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Whole, E> {
        Ok(Whole(u64::try_from(n).map_err(|_| n.to_string())))
    }

    fn visit_f64<E>(self, n: f64) -> Result<Whole, E> {
        // With its point: 16.0 is not 16.
        Ok(Whole(Err(format!("{n:?}"))))
    }
}
