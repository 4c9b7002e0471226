//! What the provider told in this term of the sizes of instance types. They are constants of the cloud: one answer is
//! enough for the term, and only a type without an answer is asked for again.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nstance_config::MergedGroup;
use nstance_core::{
    ids::GroupRef,
    ports::{clock::Entropy, provider::InstanceType},
    time::Mono,
};
use nstance_rt::backoff::Backoff;

use super::{State, World};

/// A type that the provider does not know may be new to its catalogue: it is asked for again after this and a growing
/// part of `UNKNOWN_SPREAD`.
const UNKNOWN_AGAIN: Duration = Duration::from_secs(180);
const UNKNOWN_SPREAD: Duration = Duration::from_secs(1800);

/// A question that failed says nothing about the type: the first repeat comes soon, the later ones come rarely.
const FAILED_AGAIN: Duration = Duration::from_secs(5);
const FAILED_SPREAD: Duration = Duration::from_secs(300);

/// What came of one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TypeAnswer {
    Size(InstanceType),
    /// The provider answered that it does not know the type.
    Unknown,
    Failed,
}

/// The answers by the name of the type. A group that names no type stands under the empty name.
#[derive(Debug, Default)]
pub struct InstanceTypes {
    known: BTreeMap<String, InstanceType>,
    missing: BTreeMap<String, Missing>,
}

#[derive(Debug)]
struct Missing {
    unknown: Backoff,
    failed: Backoff,
    again_at: Mono,
}

impl InstanceTypes {
    pub fn get(&self, name: &str) -> Option<&InstanceType> {
        self.known.get(name)
    }

    /// Those of `names` to be asked for now.
    pub fn due(&self, names: &BTreeSet<String>, now: Mono) -> Vec<String> {
        let is_due = |name: &&String| {
            !self.known.contains_key(*name) && self.missing.get(*name).is_none_or(|it| it.again_at <= now)
        };
        names.iter().filter(is_due).cloned().collect()
    }

    /// How long until the next of `names` is due; `None` if all are known.
    pub fn next_due(&self, names: &BTreeSet<String>, now: Mono) -> Option<Duration> {
        let waits = names
            .iter()
            .filter(|name| !self.known.contains_key(*name))
            .map(|name| self.missing.get(name).map_or(Duration::ZERO, |it| it.again_at.since(now)));
        waits.min()
    }

    /// Takes in an answer. Says whether the size became known by it.
    pub fn learn(&mut self, name: &str, answer: TypeAnswer, now: Mono, entropy: &dyn Entropy) -> bool {
        if let TypeAnswer::Size(size) = answer {
            self.missing.remove(name);
            return self.known.insert(name.to_owned(), size.clone()) != Some(size);
        }
        let missing = self.missing.entry(name.to_owned()).or_insert_with(|| Missing {
            unknown: Backoff::new(UNKNOWN_AGAIN, UNKNOWN_SPREAD),
            failed: Backoff::new(FAILED_AGAIN, FAILED_SPREAD),
            again_at: now,
        });
        let wait = match answer {
            TypeAnswer::Unknown => UNKNOWN_AGAIN + missing.unknown.next(entropy),
            _ => FAILED_AGAIN + missing.failed.next(entropy),
        };
        missing.again_at = now + wait;
        false
    }
}

/// The name under which the size of a group's instances stands.
pub fn type_name(merged: &MergedGroup) -> &str {
    merged.instance_type.as_deref().unwrap_or_default()
}

impl World {
    /// The instance types that groups are made of.
    pub fn instance_types(&self) -> BTreeSet<String> {
        let state = self.lock();
        state.groups.values().filter_map(|it| it.merged.as_deref()).map(|it| type_name(it).to_owned()).collect()
    }
}

impl State {
    /// Groups whose instances are of one of these types.
    pub fn groups_of_types(&self, names: &BTreeSet<String>) -> Vec<GroupRef> {
        let is_of = |merged: &MergedGroup| names.contains(type_name(merged));
        let groups = self.groups.iter().filter(|(_, it)| it.merged.as_deref().is_some_and(is_of));
        groups.map(|(group, _)| group.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    fn size(cpu: u32) -> InstanceType {
        InstanceType { arch: None, cpu, memory_bytes: 1 << 30, ephemeral_storage_bytes: None, gpus: 0 }
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|it| (*it).to_owned()).collect()
    }

    #[test]
    fn a_known_type_is_never_asked_for_again() {
        let (mut types, entropy, now) = (InstanceTypes::default(), SeededEntropy::new(1), Mono::default());
        assert_eq!(types.due(&names(&["small", "large"]), now), ["large", "small"]);
        assert!(types.learn("small", TypeAnswer::Size(size(2)), now, &entropy));
        assert!(!types.learn("small", TypeAnswer::Size(size(2)), now, &entropy), "nothing new");
        let late = now + Duration::from_secs(1_000_000);
        assert_eq!(types.due(&names(&["small", "large"]), late), ["large"]);
        assert_eq!(types.next_due(&names(&["small"]), late), None);
        assert_eq!(types.get("small"), Some(&size(2)));
    }

    #[test]
    fn an_unknown_type_is_asked_for_again_after_minutes_and_then_more_rarely() {
        let (mut types, entropy, asked) = (InstanceTypes::default(), SeededEntropy::new(1), names(&["odd"]));
        let mut now = Mono::default();
        let mut waits = Vec::new();
        for _ in 0..40 {
            assert!(!types.learn("odd", TypeAnswer::Unknown, now, &entropy));
            let wait = types.next_due(&asked, now).unwrap();
            assert!(types.due(&asked, now + (wait - Duration::from_millis(1))).is_empty());
            now = now + wait;
            assert_eq!(types.due(&asked, now), ["odd"]);
            waits.push(wait);
        }
        assert!(waits.iter().all(|wait| UNKNOWN_AGAIN <= *wait && *wait <= UNKNOWN_AGAIN + UNKNOWN_SPREAD));
        assert!(waits.iter().max() > Some(&(3 * UNKNOWN_AGAIN)), "{waits:?}");
    }

    #[test]
    fn a_failed_question_is_repeated_soon_and_its_answer_ends_the_repeats() {
        let (mut types, entropy, asked) = (InstanceTypes::default(), SeededEntropy::new(1), names(&["small"]));
        let now = Mono::default();
        types.learn("small", TypeAnswer::Failed, now, &entropy);
        assert!(types.next_due(&asked, now).unwrap() <= 2 * FAILED_AGAIN);
        assert!(types.learn("small", TypeAnswer::Size(size(4)), now, &entropy));
        assert_eq!(types.next_due(&asked, now), None);
    }
}
