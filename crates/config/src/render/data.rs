//! What templates see, and where they see it.

use std::{collections::BTreeMap, sync::Arc};

use gotmpl::Value;

use super::fault::{Fault, RenderErrorKind};
use crate::problems::nearest;

/// The place a template is rendered for; each knows other things.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Context {
    Userdata,
    Args,
    File,
    Certificate,
    /// The subject of a CA, which is made before there is any instance.
    Ca,
}

/// Everything that templates may refer to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderData {
    pub cluster_id: String,
    /// The CA bundle in PEM.
    pub ca_cert: String,
    pub shard: String,
    pub registration_addr: String,
    pub agent_addr: String,
    pub operator_addr: String,
    pub provider_kind: String,
    pub region: String,
    pub zone: String,
    pub instance: InstanceData,
    pub vars: BTreeMap<String, String>,
    /// Resolved images by name. One that is not resolved must be left out: it is then an error and never empty.
    pub images: BTreeMap<String, String>,
    /// Userdata only.
    pub nonce: String,
}

/// The instance that is rendered for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InstanceData {
    pub id: String,
    pub kind: String,
    pub arch: String,
    pub instance_type: String,
    pub group: String,
    pub tenant: String,
    pub on_demand: bool,
    pub subnet_id: String,
    pub subnet_pool: String,
    /// These four are empty while unknown; files and certificates only.
    pub hostname: String,
    pub fqdn: String,
    pub ip4: String,
    pub ip6: String,
}

fn map<'a>(entries: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    Value::Map(Arc::new(entries.into_iter().map(|(key, value)| (Arc::from(key), value)).collect()))
}

fn text(text: &str) -> Value {
    Value::String(Arc::from(text))
}

fn strings(entries: &BTreeMap<String, String>) -> Value {
    map(entries.iter().map(|(key, value)| (key.as_str(), text(value))))
}

impl RenderData {
    /// The data as a template of this context sees it.
    pub(super) fn tree(&self, context: Context) -> Value {
        let mut cluster = vec![("ID", text(&self.cluster_id))];
        if context == Context::Ca {
            return map([("Cluster", map(cluster)), ("Vars", strings(&self.vars))]);
        }
        cluster.push(("CACert", text(&self.ca_cert)));
        if let Some(fqdn) = self.vars.get("ClusterFQDN") {
            cluster.push(("FQDN", text(fqdn)));
        }
        let it = &self.instance;
        let mut instance = vec![
            ("ID", text(&it.id)),
            ("Kind", text(&it.kind)),
            ("Arch", text(&it.arch)),
            ("Type", text(&it.instance_type)),
            ("Group", text(&it.group)),
            ("Tenant", text(&it.tenant)),
            ("OnDemand", Value::Bool(it.on_demand)),
            ("Subnet", map([("ID", text(&it.subnet_id)), ("Pool", text(&it.subnet_pool))])),
        ];
        let late = matches!(context, Context::File | Context::Certificate);
        if late {
            instance.extend([
                ("Hostname", text(&it.hostname)),
                ("FQDN", text(&it.fqdn)),
                ("IP4", text(&it.ip4)),
                ("IP6", text(&it.ip6)),
            ]);
        }
        let server = map([
            ("Shard", text(&self.shard)),
            ("RegistrationAddr", text(&self.registration_addr)),
            ("AgentAddr", text(&self.agent_addr)),
            ("OperatorAddr", text(&self.operator_addr)),
        ]);
        let provider =
            map([("Kind", text(&self.provider_kind)), ("Region", text(&self.region)), ("Zone", text(&self.zone))]);
        let mut root = vec![
            ("Cluster", map(cluster)),
            ("Server", server),
            ("Provider", provider),
            ("Instance", map(instance)),
            ("Vars", strings(&self.vars)),
            ("Image", strings(&self.images)),
        ];
        if late {
            root.push(("ClusterID", text(&self.cluster_id)));
        }
        if context == Context::Userdata {
            root.push(("Nonce", text(&self.nonce)));
        }
        map(root)
    }
}

/// What is known of a key that is not in the data.
pub(super) enum Absent {
    /// The key is one that people set, and it is not set: it may flow into `default` and the like.
    Unset,
    /// There is no such field, or not here.
    Fault(Fault),
}

/// Judges a key that `parent` (a path such as `Instance`, empty for the root) does not have in this context.
pub(super) fn absent<'a>(
    context: Context,
    parent: &str,
    key: &str,
    known: impl IntoIterator<Item = &'a str>,
    line: usize,
) -> Absent {
    if matches!(parent, "Vars" | "Image") || (parent == "Cluster" && key == "FQDN" && context != Context::Ca) {
        return Absent::Unset;
    }
    let full = if parent.is_empty() { format!(".{key}") } else { format!(".{parent}.{key}") };
    let fault = |message: String| Fault::new(RenderErrorKind::UnknownField, line, message);
    let why = match full.as_str() {
        _ if context == Context::Ca && is_field(&full) => {
            Some("a CA is made before there is any instance: only .Cluster.ID and .Vars of defaults are known here")
        }
        ".Nonce" => Some("it registers an instance once, so it is known in userdata only"),
        ".Instance.Hostname" | ".Instance.FQDN" | ".Instance.IP4" | ".Instance.IP6" => {
            Some("it is known only once the instance runs: use it in files and certificates")
        }
        ".ClusterID" => Some("it is known in files and certificates only: write .Cluster.ID"),
        _ => None,
    };
    Absent::Fault(match why {
        Some(why) => fault(format!("{full} cannot be used here")).with_help(why),
        None => {
            let known: Vec<&str> = known.into_iter().collect();
            let mut fault = fault(format!("{full}: no such field"));
            fault.help = match nearest(key, known.iter().copied()) {
                Some(near) => Some(format!("did you mean {near}?")),
                None => Some(format!("fields: {}", known.join(", "))),
            };
            fault
        }
    })
}

/// Fields that exist somewhere besides `.Cluster.ID` and `.Vars`.
fn is_field(full: &str) -> bool {
    [".Server", ".Provider", ".Instance", ".Image", ".Nonce", ".ClusterID", ".Cluster.CACert", ".Cluster.FQDN"]
        .into_iter()
        .any(|it| full == it)
}

/// Fields of each fixed part, for the check that runs without data.
pub(super) fn fields_of(context: Context, parent: &str) -> Option<Vec<String>> {
    let Value::Map(root) = RenderData::default().tree(context) else { return None };
    let mut fields = root;
    for step in parent.split('.').filter(|it| !it.is_empty()) {
        let Some(Value::Map(inner)) = fields.get(step) else { return None };
        fields = Arc::clone(inner);
    }
    Some(fields.keys().map(|key| key.to_string()).collect())
}
