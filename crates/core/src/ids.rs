//! Names of things, each a type of its own, so that a shard can never be passed where a tenant is meant.
//!
//! An instance id is a kind and a UUIDv7. It has two spellings: the one people and certificates see
//! (`knc06bgm7733st2576nx5jht4ecjw`) and the storage key (`01970a1c-e31e-7422-9cd5-e9651d11cc97-knc`), which sorts by
//! time. Both parse back to the same value, and nothing else does.

use std::{
    borrow::Borrow,
    fmt,
    str::FromStr,
    sync::{Arc, LazyLock},
};

use data_encoding::Encoding;

use crate::time::Timestamp;

/// Longest identifier; short enough that `{cluster}-{group}-{id}` fits every provider's name limit.
pub const MAX_IDENTIFIER: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("{what} `{value}` is not valid: use 1 to 32 lower-case letters and digits, parts joined by single `-`")]
    Identifier { what: &'static str, value: String },
    #[error("instance kind `{value}` is not valid: use three lower-case letters, not `opr`")]
    Kind { value: String },
    #[error(
        "`{value}` is not {what}: expected three lower-case letters and 26 characters of 0-9 a-z without i, l, o, u"
    )]
    Id { what: &'static str, value: String },
    #[error("`{value}` is not a storage key: expected {{uuid}}-{{kind}}")]
    StorageKey { value: String },
    #[error("server id `{value}` is not valid: use 1 to 64 of A-Z a-z 0-9 _ -, beginning with a letter or digit")]
    ServerId { value: String },
}

/// The identifier grammar: `[a-z0-9]+(-[a-z0-9]+)*`, at most 32 characters.
pub fn is_identifier(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= MAX_IDENTIFIER
        && text
            .split('-')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()))
}

macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                if is_identifier(text) {
                    Ok(Self(text.into()))
                } else {
                    Err(IdError::Identifier { what: $what, value: text.to_owned() })
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

identifier!(
    /// One Nstance installation: one CA, one bucket.
    ClusterId, "cluster id"
);
identifier!(
    /// An independent partition of a cluster, usually one per availability zone.
    Shard, "shard"
);
identifier!(
    /// Isolation scope, usually one Kubernetes cluster.
    Tenant, "tenant"
);
identifier!(
    /// The key of a group inside its tenant. Never a group's name by itself: that is [`GroupRef`].
    GroupKey, "group"
);
identifier!(
    /// Portable name for a list of provider subnets.
    SubnetPool, "subnet pool"
);
identifier!(
    /// Key of a load balancer in the config.
    LbKey, "load balancer"
);

impl Tenant {
    /// The tenant that always exists.
    pub fn default_tenant() -> Self {
        Self("default".into())
    }
}

/// A group's full name. Two tenants may use the same key, and nothing of theirs may touch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupRef {
    pub tenant: Tenant,
    pub group: GroupKey,
}

impl GroupRef {
    pub fn new(tenant: Tenant, group: GroupKey) -> Self {
        Self { tenant, group }
    }
}

impl fmt::Display for GroupRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tenant, self.group)
    }
}

/// Name of one server process's configuration slot (`--id`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(Arc<str>);

impl ServerId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ServerId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let mut bytes = text.bytes();
        let first = bytes.next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        let rest = bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
        if first && rest && text.len() <= 64 {
            Ok(Self(text.into()))
        } else {
            Err(IdError::ServerId { value: text.to_owned() })
        }
    }
}

impl fmt::Display for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The three letters before an instance id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind([u8; 3]);

impl Kind {
    const OPERATOR: Self = Self(*b"opr");

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a kind is three ASCII letters by construction")
    }

    fn letters(text: &str) -> Option<Self> {
        let bytes: [u8; 3] = text.as_bytes().try_into().ok()?;
        bytes.iter().all(u8::is_ascii_lowercase).then_some(Self(bytes))
    }
}

impl FromStr for Kind {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::letters(text)
            .filter(|kind| *kind != Self::OPERATOR)
            .ok_or_else(|| IdError::Kind { value: text.to_owned() })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// Lower-case Crockford base32, padded at the tail: 16 bytes are 26 characters, the last two bits zero.
static BASE32: LazyLock<Encoding> = LazyLock::new(|| {
    let mut spec = data_encoding::Specification::new();
    spec.symbols.push_str("0123456789abcdefghjkmnpqrstvwxyz");
    spec.encoding().expect("the alphabet is a constant of 32 distinct symbols")
});

fn encode_id(kind: Kind, uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(29);
    text.push_str(kind.as_str());
    BASE32.encode_append(uuid, &mut text);
    text
}

fn decode_id(text: &str) -> Option<(Kind, [u8; 16])> {
    if text.len() != 29 || !text.is_ascii() {
        return None;
    }
    let kind = Kind::letters(&text[..3])?;
    let uuid = BASE32.decode(&text.as_bytes()[3..]).ok()?.try_into().ok()?;
    Some((kind, uuid))
}

/// A UUIDv7 from its two sources: milliseconds of now, and chance.
pub fn uuid_v7(now: Timestamp, random: [u8; 10]) -> [u8; 16] {
    let mut bytes = [0; 16];
    let millis = u64::try_from(now.as_millis()).unwrap_or(0);
    bytes[..6].copy_from_slice(&millis.to_be_bytes()[2..]);
    bytes[6..].copy_from_slice(&random);
    bytes[6] = 0x70 | (bytes[6] & 0x0f);
    bytes[8] = 0x80 | (bytes[8] & 0x3f);
    bytes
}

/// The hyphenated form of a UUID, lower case.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = data_encoding::HEXLOWER.encode(uuid);
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let parts: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    if lengths != [8, 4, 4, 4, 12] {
        return None;
    }
    data_encoding::HEXLOWER.decode(parts.concat().as_bytes()).ok()?.try_into().ok()
}

/// One instance, for ever: ids are never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct InstanceId {
    kind: Kind,
    uuid: [u8; 16],
}

impl InstanceId {
    pub fn new(kind: Kind, uuid: [u8; 16]) -> Self {
        Self { kind, uuid }
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The UUID in its usual spelling, for providers that take one as a request id.
    pub fn uuid_text(&self) -> String {
        uuid_text(&self.uuid)
    }

    /// `{uuid}-{kind}`: how the instance is named in object storage, sorted by time of creation.
    pub fn storage_key(&self) -> String {
        format!("{}-{}", uuid_text(&self.uuid), self.kind)
    }

    pub fn from_storage_key(text: &str) -> Result<Self, IdError> {
        text.rsplit_once('-')
            .and_then(|(uuid, kind)| Some(Self { kind: kind.parse().ok()?, uuid: parse_uuid(uuid)? }))
            .ok_or_else(|| IdError::StorageKey { value: text.to_owned() })
    }
}

impl Ord for InstanceId {
    /// By time of creation, like the storage keys.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // As numbers, which compare in one step: whatever looks an instance up compares a dozen of them.
        let number = |it: &Self| (u128::from_be_bytes(it.uuid), it.kind);
        number(self).cmp(&number(other))
    }
}

impl PartialOrd for InstanceId {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl FromStr for InstanceId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        decode_id(text)
            .filter(|(kind, _)| *kind != Kind::OPERATOR)
            .map(|(kind, uuid)| Self { kind, uuid })
            .ok_or_else(|| IdError::Id { what: "an instance id", value: text.to_owned() })
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode_id(self.kind, &self.uuid))
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode_id(self.kind, &self.uuid))
    }
}

/// One operator identity: `opr` and 26 characters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperatorId([u8; 16]);

impl OperatorId {
    pub fn new(uuid: [u8; 16]) -> Self {
        Self(uuid)
    }
}

impl FromStr for OperatorId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        decode_id(text)
            .filter(|(kind, _)| *kind == Kind::OPERATOR)
            .map(|(_, uuid)| Self(uuid))
            .ok_or_else(|| IdError::Id { what: "an operator id", value: text.to_owned() })
    }
}

impl fmt::Display for OperatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode_id(Kind::OPERATOR, &self.0))
    }
}

impl fmt::Debug for OperatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The number of a leadership term. It only grows, and every write and command carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Epoch(pub u64);

impl Epoch {
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPOKEN: &str = "knc06bgm7733st2576nx5jht4ecjw";
    const STORED: &str = "01970a1c-e31e-7422-9cd5-e9651d11cc97-knc";

    #[test]
    fn documented_id_reads_and_writes_both_ways() {
        let id: InstanceId = SPOKEN.parse().unwrap();
        assert_eq!(id.storage_key(), STORED);
        assert_eq!(InstanceId::from_storage_key(STORED).unwrap(), id);
        assert_eq!(id.to_string(), SPOKEN);
        assert_eq!(id.kind().as_str(), "knc");
    }

    #[test]
    fn foreign_spellings_of_ids_are_refused() {
        for bad in [
            "",
            "knc",
            "knc06bgm7733st2576nx5jht4ecj",
            "knc06bgm7733st2576nx5jht4ecjww",
            "KNC06bgm7733st2576nx5jht4ecjw",
            "knc06BGM7733st2576nx5jht4ecjw",
            "knc06bgm7733st2576nx5jht4ecjx", // a pad bit is set
            "knc06bgm7733st2576nx5jht4ecju", // u is no symbol
            "opr06bgm7733st2576nx5jht4ecjw", // an operator is no instance
            "kn106bgm7733st2576nx5jht4ecjw",
            "knc06bgm7733st2576nx5jht4ecj\u{e9}",
        ] {
            assert!(bad.parse::<InstanceId>().is_err(), "{bad}");
        }
        for bad in ["", "knc", STORED.trim_end_matches("-knc"), "01970A1C-e31e-7422-9cd5-e9651d11cc97-knc"] {
            assert!(InstanceId::from_storage_key(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn identifiers_follow_their_grammar() {
        for good in ["a", "0", "default", "us-west-2a", "a-b-c", &"x".repeat(32)] {
            assert!(good.parse::<Tenant>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "a--b", "A", "a_b", "a.b", "é", &"x".repeat(33)] {
            assert!(bad.parse::<Tenant>().is_err(), "{bad}");
        }
        assert!("opr".parse::<Kind>().is_err());
        assert!("knc".parse::<Kind>().is_ok());
    }

    proptest! {
        #[test]
        fn any_id_survives_both_round_trips(bytes: [u8; 16], kind in "[a-z]{3}") {
            prop_assume!(kind != "opr");
            let id = InstanceId::new(kind.parse().unwrap(), bytes);
            prop_assert_eq!(id.to_string().parse::<InstanceId>().unwrap(), id);
            prop_assert_eq!(InstanceId::from_storage_key(&id.storage_key()).unwrap(), id);
        }

        #[test]
        fn storage_keys_sort_by_time(early in 0_i64..1 << 46, later in 1_i64..1000, a: [u8; 10], b: [u8; 10]) {
            let kind: Kind = "knc".parse().unwrap();
            let first = InstanceId::new(kind, uuid_v7(Timestamp::from_millis(early), a));
            let second = InstanceId::new(kind, uuid_v7(Timestamp::from_millis(early + later), b));
            prop_assert!(first.storage_key() < second.storage_key());
            prop_assert!(first < second);
        }
    }
}
