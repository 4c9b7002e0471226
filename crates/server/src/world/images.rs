//! What the names of images stand for now. Never an empty id: a name is known, or its groups are held.

use std::collections::{BTreeMap, BTreeSet};

use nstance_core::{
    snapshot::{BlockKind, CreateBlock},
    time::Timestamp,
};

/// Where an id comes from, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Lookup,
    /// Looked up before this term.
    Cache,
    Fallback,
}

impl Source {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Cache => "cache",
            Self::Fallback => "fallback",
        }
    }
}

#[derive(Debug)]
struct Known {
    /// What was asked for: another question makes the old answer worthless.
    query: String,
    value: Option<(String, Source)>,
    /// Since when lookups fail, and why.
    problem: Option<(Timestamp, String)>,
}

/// What an answer changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The name stands for another id.
    pub value: bool,
    /// Lookups failed before and do no more, or the other way round.
    pub health: bool,
}

#[derive(Debug)]
pub struct Images {
    /// Before the first answer a name is unknown since then.
    began: Timestamp,
    known: BTreeMap<String, Known>,
}

impl Images {
    pub fn new(began: Timestamp) -> Self {
        Self { began, known: BTreeMap::new() }
    }

    /// Goes by these questions from here on: what is no longer asked is forgotten, and so is an answer to another one.
    pub fn ask(&mut self, queries: &BTreeMap<String, String>) {
        self.known.retain(|name, known| queries.get(name) == Some(&known.query));
        for (name, query) in queries {
            self.known.entry(name.clone()).or_insert_with(|| Known {
                query: query.clone(),
                value: None,
                problem: None,
            });
        }
    }

    /// The last good id of an earlier term, until there is a better one.
    pub fn recall(&mut self, name: &str, query: &str, id: &str) {
        let known = self.known.get_mut(name).filter(|known| known.query == query && known.value.is_none());
        if let Some(known) = known
            && !id.is_empty()
        {
            known.value = Some((id.to_owned(), Source::Cache));
        }
    }

    /// Takes in the answer to `query`; one to an older question counts for nothing. After a failure the last good id
    /// stays, then `fallback` is taken.
    pub fn answer(
        &mut self,
        name: &str,
        query: &str,
        answer: Result<String, String>,
        fallback: Option<&str>,
        now: Timestamp,
    ) -> Change {
        let Some(known) = self.known.get_mut(name).filter(|known| known.query == query) else {
            return Change::default();
        };
        let before = known.value.as_ref().map(|(id, _)| id.clone());
        let failed = known.problem.is_some();
        match answer {
            Ok(id) if !id.is_empty() => {
                known.value = Some((id, Source::Lookup));
                known.problem = None;
            }
            answer => {
                let why = answer.err().unwrap_or_else(|| "the provider named none".to_owned());
                let since = known.problem.as_ref().map_or(now, |(since, _)| *since);
                known.problem = Some((since, why));
                if known.value.is_none()
                    && let Some(id) = fallback.filter(|id| !id.is_empty())
                {
                    known.value = Some((id.to_owned(), Source::Fallback));
                }
            }
        }
        let after = known.value.as_ref().map(|(id, _)| id.clone());
        Change { value: before != after, health: failed != known.problem.is_some() }
    }

    pub fn get(&self, name: &str) -> Option<(&str, Source)> {
        let (id, source) = self.known.get(name)?.value.as_ref()?;
        Some((id, *source))
    }

    /// The ids of several names, in the order of the names; `None` unless all are known, or if there are none.
    pub fn ids(&self, names: &BTreeSet<String>) -> Option<Vec<String>> {
        let ids: Option<Vec<String>> = names.iter().map(|name| Some(self.get(name)?.0.to_owned())).collect();
        ids.filter(|ids| !ids.is_empty())
    }

    /// Why a group that uses these names cannot be made now.
    pub(super) fn block(&self, names: &BTreeSet<String>) -> Option<CreateBlock> {
        let name = names.iter().find(|name| self.get(name).is_none())?;
        let problem = self.known.get(name).and_then(|known| known.problem.as_ref());
        let (since, message) = match problem {
            Some((since, why)) => {
                (*since, format!("image {name} was never found and has no fallback: {why}; it is looked up again"))
            }
            None => (self.began, format!("image {name} is being looked up")),
        };
        Some(CreateBlock { kind: BlockKind::ImageUnresolved, message, since, until: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T0: Timestamp = Timestamp::EPOCH;

    fn asking(query: &str) -> Images {
        let mut images = Images::new(T0);
        images.ask(&[("web".to_owned(), query.to_owned())].into());
        images
    }

    fn fail(images: &mut Images, fallback: Option<&str>) -> Change {
        images.answer("web", "q", Err("no answer".to_owned()), fallback, T0)
    }

    fn is_held(images: &Images) -> bool {
        images.block(&["web".to_owned()].into()).is_some()
    }

    #[test]
    fn a_lookup_goes_before_the_cache_and_the_cache_before_the_fallback() {
        let mut images = asking("q");
        assert!(is_held(&images), "nobody knows yet");
        images.recall("web", "q", "cached");
        assert_eq!(images.get("web"), Some(("cached", Source::Cache)));
        assert_eq!(fail(&mut images, Some("fallback")), Change { value: false, health: true });
        assert_eq!(images.get("web"), Some(("cached", Source::Cache)));
        let change = images.answer("web", "q", Ok("fresh".to_owned()), Some("fallback"), T0);
        assert_eq!(
            (change, images.get("web")),
            (Change { value: true, health: true }, Some(("fresh", Source::Lookup)))
        );
        fail(&mut images, Some("fallback"));
        assert_eq!(images.get("web"), Some(("fresh", Source::Lookup)), "the last good one stays");
        let mut images = asking("q");
        fail(&mut images, Some("fallback"));
        assert_eq!(images.get("web"), Some(("fallback", Source::Fallback)));
        assert!(!is_held(&images));
    }

    #[test]
    fn an_empty_id_is_no_answer() {
        let mut images = asking("q");
        images.recall("web", "q", "");
        images.answer("web", "q", Ok(String::new()), Some(""), T0);
        assert_eq!(images.get("web"), None);
        let block = images.block(&["web".to_owned()].into()).unwrap();
        assert_eq!(block.kind, BlockKind::ImageUnresolved);
        assert!(block.message.contains("web") && block.message.contains("named none"), "{}", block.message);
        assert_eq!(images.ids(&["web".to_owned()].into()), None);
    }

    #[test]
    fn another_question_forgets_the_answer_to_the_old_one() {
        let mut images = asking("q");
        images.answer("web", "q", Ok("fresh".to_owned()), None, T0);
        images.ask(&[("web".to_owned(), "other".to_owned())].into());
        assert!(is_held(&images));
        images.recall("web", "q", "cached");
        assert_eq!(images.answer("web", "q", Ok("late".to_owned()), None, T0), Change::default());
        assert!(is_held(&images), "an answer that was under way is to the old question");
        images.ask(&BTreeMap::new());
        assert_eq!(images.get("web"), None);
    }
}
