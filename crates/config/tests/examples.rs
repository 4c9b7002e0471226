//! The configs of the documentation: they parse, render in full, and hash as documented.

use nstance_config::{Checks, Config, load};

const AWS: &str = include_str!("../../../examples/config-aws.jsonc");
const TMUX: &str = include_str!("../../../examples/config-tmux.jsonc");

fn config(text: &str) -> Config {
    let loaded = load("example", text.as_bytes(), &Checks::offline_any());
    assert!(loaded.report.problems.is_empty(), "{}", loaded.report.text());
    loaded.config.unwrap()
}

#[test]
fn every_example_in_the_documents_parses() {
    assert_eq!(config(AWS).groups.len(), 3);
    assert_eq!(config(TMUX).groups.len(), 1);
}

#[test]
fn the_documented_hashes_come_out() {
    let group = config(TMUX).group(&group_ref("default", "test"), None).unwrap();
    assert_eq!(group.infra_hash(), "sha256:904571ba3668fe7f61ffdc517d79c4f028d260b385ea83cdb78ea0cd59c6fd64");
    assert_eq!(group.runtime_hash(None), "sha256:0da6650b277dfd398f7719e98bc23c3550682b1cba5d810f6ad40a0e9cbb4924");
}

fn group_ref(tenant: &str, group: &str) -> nstance_core::ids::GroupRef {
    nstance_core::ids::GroupRef::new(tenant.parse().unwrap(), group.parse().unwrap())
}
