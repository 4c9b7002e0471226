//! Paths into a config, and the way back from a path to its place in the file.

use std::fmt;

use crate::jsonc::{Json, Node, Pos};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Step {
    Key(String),
    Index(usize),
}

/// Steps from the root, written `templates.knc.files["node.env"].template`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Path(pub(crate) Vec<Step>);

impl Path {
    pub(crate) fn root() -> Self {
        Self::default()
    }

    /// A path of keys only.
    pub(crate) fn of(keys: &[&str]) -> Self {
        Self(keys.iter().map(|key| Step::Key((*key).to_owned())).collect())
    }

    pub(crate) fn key(&self, key: &str) -> Self {
        self.step(Step::Key(key.to_owned()))
    }

    pub(crate) fn index(&self, index: usize) -> Self {
        self.step(Step::Index(index))
    }

    fn step(&self, step: Step) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }

    pub(crate) fn join(&self, below: &Path) -> Self {
        Self(self.0.iter().chain(&below.0).cloned().collect())
    }

    pub(crate) fn is_under(&self, keys: &[&str]) -> bool {
        keys.len() <= self.0.len() && keys.iter().zip(&self.0).all(|(key, step)| *step == Step::Key((*key).to_owned()))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(key) if is_plain(key) => write!(f, "{}{key}", if i == 0 { "" } else { "." })?,
                Step::Key(key) => write!(f, "[{key:?}]")?,
            }
        }
        Ok(())
    }
}

fn is_plain(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// How far a path can be followed in a tree.
pub(crate) struct Found {
    pub(crate) n_steps: usize,
    /// Of the value the steps lead to.
    pub(crate) value: Pos,
    /// Of its key, if the last step was one.
    pub(crate) key: Pos,
}

/// Follows `path` as far as it goes.
pub(crate) fn locate(root: &Node, path: &Path) -> Found {
    let mut found = Found { n_steps: 0, value: root.pos, key: root.pos };
    let mut node = root;
    for step in &path.0 {
        let next = match (&node.json, step) {
            (Json::Object(entries), Step::Key(key)) => {
                entries.iter().find(|entry| entry.key == *key).map(|entry| (&entry.value, entry.key_pos))
            }
            (Json::Array(items), Step::Index(index)) => items.get(*index).map(|item| (item, item.pos)),
            _ => None,
        };
        let Some((value, key)) = next else { break };
        node = value;
        found = Found { n_steps: found.n_steps + 1, value: value.pos, key };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_written_with_quotes_only_where_needed() {
        let path = Path::of(&["templates", "knc", "files"]).key("node.env").key("template").index(3).key("");
        assert_eq!(path.to_string(), "templates.knc.files[\"node.env\"].template[3][\"\"]");
        assert_eq!(Path::of(&["groups", "control-plane"]).to_string(), "groups.control-plane");
    }
}
