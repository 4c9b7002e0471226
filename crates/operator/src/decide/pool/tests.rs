use super::*;

#[test]
fn label_values_are_made_as_cluster_api_makes_them() {
    assert_eq!(format_label_value("web-1"), "web-1");
    assert_eq!(format_label_value(""), "");
    // 32-bit FNV of Go: New32 multiplies first, New32a (used here) xors first.
    assert_eq!(fnv32("a"), 0xe40c_292c);
    assert_eq!(fnv32("foobar"), 0xbf9c_f968);
    let long = "a".repeat(64);
    let hashed = format_label_value(&long);
    assert!(hashed.starts_with("hash_") && hashed.ends_with("_z") && hashed.len() == "hash_".len() + 6 + 2, "{hashed}");
    assert_eq!(format_label_value("a".repeat(63).as_str()).len(), 63);
}

#[test]
fn long_names_of_shard_groups_fit_and_stay_different() {
    assert_eq!(shard_group_name("web", "a"), "web--a");
    let (group, a, b) = ("g".repeat(32), "s".repeat(31) + "a", "s".repeat(31) + "b");
    let (one, other) = (shard_group_name(&group, &a), shard_group_name(&group, &b));
    assert!(one.len() <= 63 && other.len() <= 63);
    assert_ne!(one, other);
}

#[test]
fn two_ids_that_end_alike_are_noticed() {
    let ids = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    assert_eq!(same_last_segment(&ids(&["proxmox://a/100", "proxmox://b/101"])), None);
    let same = ids(&["proxmox://a/100", "proxmox://b/100"]);
    assert_eq!(same_last_segment(&same), Some(("proxmox://a/100", "proxmox://b/100")));
}
