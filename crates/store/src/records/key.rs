//! Where every object lives. Tenants and ids contain no dots, so keys split unambiguously.

use nstance_core::{
    ids::{InstanceId, OperatorId, ServerId, Shard, Tenant},
    time::Timestamp,
};

/// Keys are plain text; the alias marks what a function wants.
pub type Key = String;

pub fn ca_crt_key() -> Key {
    "cluster/ca.crt".to_owned()
}

/// Where a shard's config may be, in the order in which it is looked for.
pub fn config_keys(shard: &Shard) -> [Key; 2] {
    [format!("config/{shard}.jsonc"), format!("shard/{shard}/config.jsonc")]
}

/// `None` is the cluster's lease.
pub fn lease_key(shard: Option<&Shard>) -> Key {
    match shard {
        Some(shard) => format!("shard/{shard}/leader.json"),
        None => "cluster/leader.json".to_owned(),
    }
}

pub fn groups_key(shard: &Shard) -> Key {
    format!("shard/{shard}/groups.jsonc")
}

pub fn instance_prefix(shard: &Shard) -> Key {
    format!("shard/{shard}/instance/")
}

pub fn instance_key(shard: &Shard, tenant: &Tenant, instance: &InstanceId) -> Key {
    format!("shard/{shard}/instance/{tenant}.{}.json", instance.storage_key())
}

/// The shard, tenant and instance a key names; `None` if it is no instance key.
pub fn parse_instance_key(key: &str) -> Option<(Shard, Tenant, InstanceId)> {
    let (shard, name) = key.strip_prefix("shard/")?.split_once("/instance/")?;
    let (tenant, id) = name.strip_suffix(".json")?.split_once('.')?;
    Some((shard.parse().ok()?, tenant.parse().ok()?, InstanceId::from_storage_key(id).ok()?))
}

pub fn operator_prefix(tenant: &Tenant) -> Key {
    format!("cluster/operator/{tenant}.")
}

pub fn operator_key(tenant: &Tenant, operator: &OperatorId) -> Key {
    format!("cluster/operator/{tenant}.{operator}.json")
}

pub fn parse_operator_key(key: &str) -> Option<(Tenant, OperatorId)> {
    let (tenant, id) = key.strip_prefix("cluster/operator/")?.strip_suffix(".json")?.split_once('.')?;
    Some((tenant.parse().ok()?, id.parse().ok()?))
}

pub fn nonce_key(jti: &str) -> Key {
    format!("cluster/nonce/{jti}.json")
}

/// The name of one certificate log entry. `tenant` is `None` for certificates of servers.
fn certlog_name(tenant: Option<&Tenant>, at: Timestamp, subject: &str) -> String {
    // RFC 3339 in UTC, digits only: yyyymmddhhmmssmmm.
    let stamp: String = at.to_string().chars().filter(char::is_ascii_digit).collect();
    format!("{}.{stamp}.{subject}.json", tenant.map_or("_system", Tenant::as_str))
}

/// Entries of certificates that a shard issued.
pub fn certlog_key(shard: &Shard, tenant: Option<&Tenant>, at: Timestamp, subject: &str) -> Key {
    format!("shard/{shard}/certlog/{}", certlog_name(tenant, at, subject))
}

/// Entries of CAs and of certificates that the admin tool issued.
pub fn cluster_certlog_key(tenant: Option<&Tenant>, at: Timestamp, subject: &str) -> Key {
    format!("cluster/certlog/{}", certlog_name(tenant, at, subject))
}

/// A throw-away object of the store's qualification.
pub fn probe_key(shard: &Shard, server: &ServerId, random: &str) -> Key {
    format!("shard/{shard}/.probe/{server}.{random}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_read_back_and_foreign_ones_do_not() {
        let shard: Shard = "us-west-2a".parse().unwrap();
        let tenant: Tenant = "default".parse().unwrap();
        let id: InstanceId = "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap();
        let key = instance_key(&shard, &tenant, &id);
        assert_eq!(key, "shard/us-west-2a/instance/default.01970a1c-e31e-7422-9cd5-e9651d11cc97-knc.json");
        assert!(key.starts_with(&instance_prefix(&shard)));
        assert_eq!(parse_instance_key(&key), Some((shard, tenant.clone(), id)));
        for bad in ["", "shard/a/instance/x.json", "shard/a/instance/default.zzz.json", "shard/a/groups.jsonc"] {
            assert_eq!(parse_instance_key(bad), None, "{bad}");
        }
        let operator = OperatorId::new([7; 16]);
        assert_eq!(parse_operator_key(&operator_key(&tenant, &operator)), Some((tenant, operator)));
        assert_eq!(parse_operator_key("cluster/operator/default.json"), None);
    }

    #[test]
    fn certlog_names_sort_by_time() {
        let shard: Shard = "a".parse().unwrap();
        let key = certlog_key(&shard, None, Timestamp::from_millis(1_700_000_000_007), "server-1");
        assert_eq!(key, "shard/a/certlog/_system.20231114221320007.server-1.json");
    }
}
