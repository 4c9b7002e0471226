//! The last stage: every static group is merged and rendered.
use crate::{jsonc::Node, merge::MergedGroup, model::Config, problems::{Problem, Problems}};

pub(super) fn check_groups(_problems: &Problems, _tree: &Node, config: &Config) {
    for group in config.groups.keys() {
        let _ = config.merge(group, None);
    }
}

impl Config {
    pub(crate) fn check_merged(&self, _group: &MergedGroup) -> Result<(), Vec<Problem>> {
        Ok(())
    }
}
