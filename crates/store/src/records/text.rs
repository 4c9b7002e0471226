//! Serde for what is stored as text: ids and times, which the domain keeps free of serde.

use std::{fmt::Display, str::FromStr};

use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

pub(super) fn serialize<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// The same for a field that may be missing; the form adds `default` and `skip_serializing_if`.
pub(super) mod option {
    use super::{Display, FromStr};
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(in super::super) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    pub(in super::super) fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        Option::<String>::deserialize(deserializer)?.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}
