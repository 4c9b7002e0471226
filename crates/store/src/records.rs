//! What is stored: the JSON form of every record, its key, and how the two meet the domain's types.
//!
//! Only this module knows how anything is spelled in the bucket. Reading parses and may refuse, with the key and the
//! place; writing cannot fail. What a newer program wrote and we do not know is kept and written back, at every depth.
//!
//! A record is an object with five common fields ([`Meta`]) and its own ones. `status` of an instance is written for
//! people and never read.

use nstance_core::{
    ids::Epoch,
    ports::objects::{ETag, Object},
    time::Timestamp,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

pub mod key;

pub mod instance;

pub mod groups;

pub mod leader;

pub mod operator;

pub mod nonce;

pub mod certlog;

mod duration;

mod jsonc;

mod text;

pub use key::{
    Key, ca_crt_key, certlog_key, cluster_certlog_key, config_keys, groups_key, instance_key, instance_prefix,
    lease_key, nonce_key, operator_key, operator_prefix, parse_instance_key, parse_operator_key, probe_key,
};

/// The schema we write, and the newest we read.
pub const VERSION: u32 = 1;

/// Largest record but the groups file.
pub const MAX_RECORD: usize = 64 * 1024;

/// Largest groups file.
pub const MAX_GROUPS: usize = 8 * 1024 * 1024;

/// Who wrote a record, in which term, and in which logical write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    pub version: u32,
    pub epoch: Epoch,
    /// `{shard}/{server-id}` or `admin/{host}`.
    pub writer: String,
    /// Equal over the retries of one write: a put whose answer was lost is recognised by it.
    pub write_id: String,
    pub updated_at: Timestamp,
}

/// A record as read or written: its value, the version of the object it lives in, and what we did not understand of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Versioned<T> {
    pub value: T,
    pub etag: ETag,
    pub meta: Meta,
    pub extra: Extra,
}

/// Fields of a stored record that this program does not know, in their places.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Extra(Vec<(String, Remnant)>);

#[derive(Debug, Clone, PartialEq)]
enum Remnant {
    /// A field nobody here knows.
    Unknown(Value),
    /// A known object with unknown fields in it. Written back only where that object still is.
    Inside(Extra),
}

impl Extra {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What `original` has and `known` has not.
    fn between(original: &Map<String, Value>, known: &Map<String, Value>) -> Self {
        Self(
            original
                .iter()
                .filter_map(|(key, value)| {
                    let remnant = match (value, known.get(key)) {
                        // A null is how some tools write an absent field; there is nothing in it to keep.
                        (Value::Null, _) => return None,
                        (_, None) => Remnant::Unknown(value.clone()),
                        (Value::Object(original), Some(Value::Object(known))) => {
                            let inside = Self::between(original, known);
                            if inside.is_empty() {
                                return None;
                            }
                            Remnant::Inside(inside)
                        }
                        (_, Some(_)) => return None,
                    };
                    Some((key.clone(), remnant))
                })
                .collect(),
        )
    }

    fn add_to(&self, known: &mut Map<String, Value>) {
        for (key, remnant) in &self.0 {
            match (remnant, known.get_mut(key)) {
                (Remnant::Unknown(value), None) => {
                    known.insert(key.clone(), value.clone());
                }
                (Remnant::Inside(extra), Some(Value::Object(inside))) => extra.add_to(inside),
                _ => {}
            }
        }
    }
}

/// Why a stored record could not be used. It is unknown then, never absent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("record {key} does not parse at {line}:{column}: {message}; repair or restore the object")]
    Corrupt { key: String, line: usize, column: usize, message: String },
    #[error("record {key} has version {version}, written by a newer nstance; upgrade this server")]
    TooNew { key: String, version: u32 },
}

impl DecodeError {
    pub fn key(&self) -> &str {
        match self {
            Self::Corrupt { key, .. } | Self::TooNew { key, .. } => key,
        }
    }
}

/// A domain value with a stored form.
pub trait Record: Sized {
    #[doc(hidden)]
    type Form: Serialize + DeserializeOwned;
    /// Comments and trailing commas are allowed, and it is written for people to read.
    const BY_HAND: bool = false;
    const MAX_BYTES: usize = MAX_RECORD;

    #[doc(hidden)]
    fn to_form(&self) -> Self::Form;
    /// Refuses in words what the types cannot.
    #[doc(hidden)]
    fn from_form(form: Self::Form, meta: &Meta, key: &str) -> Result<Self, String>;
    /// Notes the term that wrote the value, where the value itself carries it.
    #[doc(hidden)]
    fn stamp(&mut self, _epoch: Epoch) {}
    /// The form of a file without `version`, if such files are allowed.
    #[doc(hidden)]
    fn bare(_text: &[u8]) -> Option<serde_json::Result<Self::Form>> {
        None
    }
    /// The JSON of a file without `version`, as it would look with one.
    #[doc(hidden)]
    fn dress(bare: Map<String, Value>) -> Map<String, Value> {
        bare
    }
}

/// Times and numbers first, so that a person sees at once who wrote the file.
#[derive(Serialize, Deserialize)]
struct MetaForm {
    version: Option<u32>,
    #[serde(default)]
    epoch: u64,
    #[serde(default)]
    writer: String,
    #[serde(default)]
    write_id: String,
    #[serde(default, with = "text::option")]
    updated_at: Option<Timestamp>,
}

impl From<MetaForm> for Meta {
    fn from(form: MetaForm) -> Self {
        Self {
            version: form.version.unwrap_or(VERSION),
            epoch: Epoch(form.epoch),
            writer: form.writer,
            write_id: form.write_id,
            updated_at: form.updated_at.unwrap_or(Timestamp::EPOCH),
        }
    }
}

impl From<&Meta> for MetaForm {
    fn from(meta: &Meta) -> Self {
        Self {
            version: Some(VERSION),
            epoch: meta.epoch.0,
            writer: meta.writer.clone(),
            write_id: meta.write_id.clone(),
            updated_at: Some(meta.updated_at),
        }
    }
}

/// Parses the body of `key`.
pub fn decode<T: Record>(key: &str, body: &[u8]) -> Result<(T, Meta, Extra), DecodeError> {
    if let Some((form, meta)) = read_own::<T>(body) {
        let value = T::from_form(form, &meta, key).map_err(|message| refused(key, message))?;
        return Ok((value, meta, Extra::default()));
    }
    let stripped;
    let body = if T::BY_HAND {
        stripped = jsonc::blank(body);
        &stripped
    } else {
        body
    };
    let corrupt = |error: serde_json::Error| corrupt(key, &error);
    let original: Map<String, Value> = serde_json::from_slice(body).map_err(corrupt)?;
    let form: MetaForm = if original.contains_key("version") {
        serde_json::from_slice(body).map_err(corrupt)?
    } else {
        MetaForm { version: None, epoch: 0, writer: String::new(), write_id: String::new(), updated_at: None }
    };
    let (parsed, original) = match form.version {
        Some(version) if VERSION < version => return Err(DecodeError::TooNew { key: key.to_owned(), version }),
        Some(_) => (serde_json::from_slice(body).map_err(corrupt)?, original),
        None => match T::bare(body) {
            Some(parsed) => (parsed.map_err(corrupt)?, T::dress(original)),
            None => return Err(refused(key, "field `version` is missing".to_owned())),
        },
    };
    let meta = Meta::from(form);
    let extra = Extra::between(&original, &known(&parsed, &meta));
    let value = T::from_form(parsed, &meta, key).map_err(|message| refused(key, message))?;
    Ok((value, meta, extra))
}

/// Parses an object of the store.
pub fn decode_object<T: Record>(key: &str, object: Object) -> Result<Versioned<T>, DecodeError> {
    let (value, meta, extra) = decode(key, &object.body)?;
    Ok(Versioned { value, etag: object.etag, meta, extra })
}

/// The bytes of a record.
pub fn encode<T: Record>(value: &T, meta: &Meta, extra: &Extra) -> Vec<u8> {
    let form = value.to_form();
    if extra.is_empty()
        && let Some(body) = spell::<T>(&form, meta)
    {
        return body;
    }
    let mut json = known(&form, meta);
    extra.add_to(&mut json);
    let json = Value::Object(json);
    if T::BY_HAND { format!("{json:#}\n").into_bytes() } else { json.to_string().into_bytes() }
}

/// Reads a body that is to the letter what we would write of it: nothing in it is unknown to us then. That is so for
/// nearly all records of a shard, and a third of the work of looking for what is unknown.
fn read_own<T: Record>(body: &[u8]) -> Option<(T::Form, Meta)> {
    if T::BY_HAND {
        return None;
    }
    let meta: MetaForm = serde_json::from_slice(body).ok()?;
    if meta.version != Some(VERSION) {
        return None;
    }
    let meta = Meta::from(meta);
    let form = serde_json::from_slice(body).ok()?;
    (spell::<T>(&form, &meta)? == body).then_some((form, meta))
}

/// The bytes of a record without anything unknown, if it is not for people to read.
fn spell<T: Record>(form: &T::Form, meta: &Meta) -> Option<Vec<u8>> {
    if T::BY_HAND {
        return None;
    }
    let mut body = serde_json::to_vec(&MetaForm::from(meta)).ok()?;
    let form = serde_json::to_vec(form).ok()?;
    // `{…}` and `{…}` become one object; neither is ever empty.
    body.pop();
    body.push(b',');
    body.extend_from_slice(form.strip_prefix(b"{")?);
    Some(body)
}

fn known<F: Serialize>(form: &F, meta: &Meta) -> Map<String, Value> {
    let mut json = object(&MetaForm::from(meta));
    json.append(&mut object(form));
    json
}

fn object<F: Serialize>(form: &F) -> Map<String, Value> {
    match serde_json::to_value(form) {
        Ok(Value::Object(object)) => object,
        _ => unreachable!("forms are structs of strings, numbers, lists and maps with string keys"),
    }
}

fn corrupt(key: &str, error: &serde_json::Error) -> DecodeError {
    let text = error.to_string();
    // The library says the place as well; once is enough.
    let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message).to_owned();
    DecodeError::Corrupt { key: key.to_owned(), line: error.line(), column: error.column(), message }
}

fn refused(key: &str, message: String) -> DecodeError {
    DecodeError::Corrupt { key: key.to_owned(), line: 1, column: 1, message }
}

#[cfg(test)]
mod tests;
