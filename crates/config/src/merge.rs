//! Layers of a group, low to high: defaults → template → static group → API layer → on-demand request.
//!
//! The merge is pure: it reads every layer and writes a new value. A layer that was changed in place would change for
//! every other group that shares it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nstance_core::{
    ids::{GroupRef, Kind, LbKey, SubnetPool},
    value::{Object, Value},
};

use crate::{
    jsonc::Pos,
    model::{Arch, CertificateSpec, Config, FileSpec, StaticGroup, Template, Userdata},
    problems::{Code, Problem, suggest},
    render::{Unhashed, images_of, unhashed_of},
    validate::{MAX_SIZE, is_var_name},
};

/// Most variables of one merged group.
pub const MAX_VARS: usize = 256;

/// Most bytes of all names and values of them together.
pub const MAX_VARS_BYTES: usize = 32 * 1024;

/// What the API may set of a group: the override of a static group, or the whole of a dynamic one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GroupLayer {
    pub template: Option<String>,
    pub size: Option<u32>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<SubnetPool>,
    pub vars: Option<BTreeMap<String, String>>,
    pub drain_timeout: Option<Duration>,
    pub load_balancers: Option<Vec<LbKey>>,
    pub rollout_paused: Option<bool>,
}

/// What a request for one instance may set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OnDemandLayer {
    pub template: Option<String>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<SubnetPool>,
    pub vars: BTreeMap<String, String>,
}

/// A group with everything it inherits, not yet rendered.
#[derive(Debug, Clone, PartialEq)]
pub struct MergedGroup {
    pub group: GroupRef,
    pub template: String,
    pub kind: Kind,
    pub arch: Arch,
    pub instance_type: Option<String>,
    pub instance_type_fallbacks: Vec<String>,
    pub subnet_pool: SubnetPool,
    /// The pool's subnets in order of preference.
    pub subnets: Vec<String>,
    pub size: u32,
    pub drain_timeout: Duration,
    pub rollout_paused: bool,
    pub load_balancers: Vec<LbKey>,
    pub args: Object,
    pub vars: BTreeMap<String, String>,
    pub userdata: Option<Userdata>,
    /// Names of the images that it cannot be made without.
    pub images: BTreeSet<String>,
    pub files: BTreeMap<String, FileSpec>,
    /// Files whose content may be another under the same runtime hash.
    pub unhashed: BTreeMap<String, Unhashed>,
    /// Those that the files use.
    pub certificates: BTreeMap<String, CertificateSpec>,
    pub trust_agent_addresses: bool,
    /// Whether the group stands in the config file.
    pub is_static: bool,
}

impl Config {
    /// Merges a group and checks the result in full, sample rendering included.
    pub fn group(&self, group: &GroupRef, layer: Option<&GroupLayer>) -> Result<MergedGroup, Vec<Problem>> {
        let merged = self.merge(group, layer)?;
        self.check_merged(&merged)?;
        Ok(merged)
    }

    /// Merges a group for an instance asked for by name, and checks the result in full.
    pub fn on_demand(
        &self,
        group: &GroupRef,
        layer: Option<&GroupLayer>,
        request: &OnDemandLayer,
    ) -> Result<MergedGroup, Vec<Problem>> {
        let merged = self.merge_layers(group, Layers::of(self, group, layer).with(request))?;
        self.check_merged(&merged)?;
        Ok(merged)
    }

    /// Merges a group without rendering anything: cheap enough for every pass of the planner. References are checked.
    pub fn merge(&self, group: &GroupRef, layer: Option<&GroupLayer>) -> Result<MergedGroup, Vec<Problem>> {
        self.merge_layers(group, Layers::of(self, group, layer))
    }

    /// Like [`merge`](Self::merge), for an on-demand instance whose request was accepted before.
    pub fn merge_on_demand(
        &self,
        group: &GroupRef,
        layer: Option<&GroupLayer>,
        request: &OnDemandLayer,
    ) -> Result<MergedGroup, Vec<Problem>> {
        self.merge_layers(group, Layers::of(self, group, layer).with(request))
    }

    /// Like [`merge_on_demand`](Self::merge_on_demand), for one whose machine stands: its subnet is settled, whatever
    /// pools there are by now.
    pub fn merge_standing(
        &self,
        group: &GroupRef,
        layer: Option<&GroupLayer>,
        request: &OnDemandLayer,
    ) -> Result<MergedGroup, Vec<Problem>> {
        let layers = Layers { place: Place::Settled, ..Layers::of(self, group, layer).with(request) };
        self.merge_layers(group, layers)
    }

    fn merge_layers(&self, group: &GroupRef, layers: Layers<'_>) -> Result<MergedGroup, Vec<Problem>> {
        let mut problems = Vec::new();
        if !self.tenants.contains(&group.tenant) {
            let help = suggest(group.tenant.as_str(), "tenants", self.tenants.iter().map(|it| it.as_str()));
            let message = format!("tenant `{}` does not exist", group.tenant);
            problems.push(request_problem(Code::BadReference, "tenant", message, help));
        }
        if layers.fixed.is_none() && layers.layer.is_none() {
            let message = format!("group {group} does not exist");
            problems.push(request_problem(Code::BadReference, "group", message, None));
            return Err(problems);
        }
        let Some(template) = self.find_template(&layers, &mut problems) else { return Err(problems) };
        let merged = self.combine(group, &layers, template, &mut problems);
        match merged {
            Some(merged) if problems.is_empty() => Ok(merged),
            _ => Err(problems),
        }
    }

    fn find_template<'a>(
        &'a self,
        layers: &Layers<'a>,
        problems: &mut Vec<Problem>,
    ) -> Option<(&'a str, &'a Template)> {
        let Some(name) = layers.template() else {
            let message = "a group needs a template".to_owned();
            let help = suggest("", "templates", self.templates.keys().map(String::as_str));
            problems.push(request_problem(Code::Missing, "template", message, help));
            return None;
        };
        match self.templates.get_key_value(name) {
            Some((name, template)) => Some((name, template)),
            None => {
                let message = format!("template `{name}` does not exist");
                let help = suggest(name, "templates", self.templates.keys().map(String::as_str));
                problems.push(request_problem(Code::BadReference, "template", message, help));
                None
            }
        }
    }

    fn combine(
        &self,
        group: &GroupRef,
        layers: &Layers<'_>,
        (name, template): (&str, &Template),
        problems: &mut Vec<Problem>,
    ) -> Option<MergedGroup> {
        let Layers { fixed, layer, request, .. } = *layers;
        let subnet_pool = self.find_pool(layers, template, problems);
        let load_balancers = match (fixed, layer.and_then(|it| it.load_balancers.as_ref())) {
            (Some(fixed), _) => fixed.load_balancers.clone(),
            (None, keys) => keys.cloned().unwrap_or_default(),
        };
        for key in load_balancers.iter().filter(|key| !self.load_balancers.contains_key(*key)) {
            let message = format!("load balancer `{key}` does not exist");
            let help = suggest(key.as_str(), "load balancers", self.load_balancers.keys().map(LbKey::as_str));
            problems.push(request_problem(Code::BadReference, "load_balancers", message, help));
        }
        let size = layer.and_then(|it| it.size).or(fixed.and_then(|it| it.size)).unwrap_or(template.size);
        if MAX_SIZE < size {
            let help = Some(format!("use 0 to {MAX_SIZE}"));
            problems.push(request_problem(Code::BadValue, "size", format!("{size} is out of range"), help));
        }
        let vars = self.merge_vars(layers, template, problems);
        let args = [Some(&self.defaults.args), Some(&template.args), fixed.map(|it| &it.args)]
            .into_iter()
            .flatten()
            .fold(Object::new(), |below, above| merge_args(&below, above));
        let instance_type = request
            .and_then(|it| it.instance_type.as_ref())
            .or(layer.and_then(|it| it.instance_type.as_ref()))
            .or(fixed.and_then(|it| it.instance_type.as_ref()))
            .or(template.instance_type.as_ref());
        let (subnet_pool, subnets) = subnet_pool?;
        let userdata = template.userdata.as_ref().or(self.defaults.userdata.as_ref());
        Some(MergedGroup {
            group: group.clone(),
            template: name.to_owned(),
            kind: template.kind,
            arch: template.arch,
            instance_type: instance_type.filter(|it| !it.is_empty()).cloned(),
            instance_type_fallbacks: fixed
                .and_then(|it| it.instance_type_fallbacks.as_ref())
                .unwrap_or(&template.instance_type_fallbacks)
                .clone(),
            subnet_pool,
            subnets,
            size,
            drain_timeout: layer
                .and_then(|it| it.drain_timeout)
                .or(fixed.and_then(|it| it.drain_timeout))
                .unwrap_or(self.server.default_drain_timeout),
            rollout_paused: layer
                .and_then(|it| it.rollout_paused)
                .or(fixed.and_then(|it| it.rollout_paused))
                .unwrap_or(false),
            load_balancers,
            images: images_of(&args, userdata),
            args,
            vars,
            userdata: userdata.cloned(),
            unhashed: unhashed_of(&template.files),
            files: template.files.clone(),
            certificates: self.certificates_of(template),
            trust_agent_addresses: template.trust_agent_addresses,
            is_static: fixed.is_some(),
        })
    }

    fn find_pool(
        &self,
        layers: &Layers<'_>,
        template: &Template,
        problems: &mut Vec<Problem>,
    ) -> Option<(SubnetPool, Vec<String>)> {
        let Some(pool) = layers.pool().or(template.subnet_pool.as_ref()) else {
            let help = suggest("", "pools", self.server.subnet_pools.keys().map(SubnetPool::as_str));
            let message = "neither the group nor its template names a subnet pool".to_owned();
            problems.push(request_problem(Code::Missing, "subnet_pool", message, help));
            return None;
        };
        if layers.place == Place::Settled {
            let subnets = self.server.subnet_pools.get(pool).cloned().unwrap_or_default();
            return Some((pool.clone(), subnets));
        }
        let Some((pool, subnets)) = self.server.subnet_pools.get_key_value(pool) else {
            let help = suggest(pool.as_str(), "pools", self.server.subnet_pools.keys().map(SubnetPool::as_str));
            let message = format!("subnet pool `{pool}` does not exist");
            problems.push(request_problem(Code::BadReference, "subnet_pool", message, help));
            return None;
        };
        let over_the_api = layers.fixed.is_none() || layers.request.is_some();
        if over_the_api && !self.server.allows_dynamic(pool) {
            let allowed = self.server.dynamic_subnet_pools.iter().map(SubnetPool::as_str);
            let message = format!("subnet pool `{pool}` is not open to what is made over the API");
            let help = suggest("", "server.dynamic_subnet_pools", allowed);
            problems.push(request_problem(Code::BadValue, "subnet_pool", message, help));
        }
        Some((pool.clone(), subnets.clone()))
    }

    fn merge_vars(
        &self,
        layers: &Layers<'_>,
        template: &Template,
        problems: &mut Vec<Problem>,
    ) -> BTreeMap<String, String> {
        let sources = [
            Some(&self.defaults.vars),
            Some(&template.vars),
            layers.fixed.map(|it| &it.vars),
            layers.layer.and_then(|it| it.vars.as_ref()),
            layers.request.map(|it| &it.vars),
        ];
        let vars: BTreeMap<String, String> =
            sources.into_iter().flatten().flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
        for name in vars.keys().filter(|name| !is_var_name(name)) {
            let help = Some("use letters, digits and _, beginning with a letter or _".to_owned());
            let message = format!("`{name}` is no valid name of a var");
            problems.push(request_problem(Code::BadValue, "vars", message, help));
        }
        let n_bytes: usize = vars.iter().map(|(key, value)| key.len() + value.len()).sum();
        if MAX_VARS < vars.len() || MAX_VARS_BYTES < n_bytes {
            let message = format!("{} vars of {n_bytes} bytes are too many", vars.len());
            let help = Some(format!("a group may have {MAX_VARS} vars of {MAX_VARS_BYTES} bytes in all"));
            problems.push(request_problem(Code::Limit, "vars", message, help));
        }
        vars
    }

    fn certificates_of(&self, template: &Template) -> BTreeMap<String, CertificateSpec> {
        template
            .files
            .values()
            .filter_map(|file| match file {
                FileSpec::Certificate { template, .. } => self.certificates.named.get_key_value(template),
                _ => None,
            })
            .map(|(name, certificate)| (name.clone(), certificate.clone()))
            .collect()
    }
}

/// The layers above the template. A static group's template, pool and load balancers are the config file's alone, so
/// whatever an override still holds of them is passed over.
#[derive(Clone, Copy)]
struct Layers<'a> {
    fixed: Option<&'a StaticGroup>,
    layer: Option<&'a GroupLayer>,
    request: Option<&'a OnDemandLayer>,
    place: Place,
}

/// Whether a machine is still to be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Open,
    Settled,
}

impl<'a> Layers<'a> {
    fn of(config: &'a Config, group: &GroupRef, layer: Option<&'a GroupLayer>) -> Self {
        Self { fixed: config.groups.get(group), layer, request: None, place: Place::Open }
    }

    fn with(self, request: &'a OnDemandLayer) -> Self {
        Self { request: Some(request), ..self }
    }

    fn template(&self) -> Option<&'a str> {
        let own = match self.fixed {
            Some(fixed) => Some(&fixed.template),
            None => self.layer.and_then(|it| it.template.as_ref()),
        };
        self.request.and_then(|it| it.template.as_ref()).or(own).map(String::as_str).filter(|it| !it.is_empty())
    }

    fn pool(&self) -> Option<&'a SubnetPool> {
        let own = match self.fixed {
            Some(fixed) => fixed.subnet_pool.as_ref(),
            None => self.layer.and_then(|it| it.subnet_pool.as_ref()),
        };
        self.request.and_then(|it| it.subnet_pool.as_ref()).or(own)
    }
}

/// A problem without a place in a file; its path is a field of the request.
pub(crate) fn request_problem(code: Code, path: &str, message: String, help: Option<String>) -> Problem {
    let mut problem = Problem::new(code, path, Pos::NOWHERE, message);
    problem.help = help;
    problem
}

/// `above` over `below`: objects key by key, arrays and scalars replace, `null` removes, `{}` changes nothing.
pub fn merge_args(below: &Object, above: &Object) -> Object {
    let mut merged = below.clone();
    for (key, value) in above.iter() {
        match value {
            Value::Null => {
                merged.remove(key);
            }
            Value::Object(inner) => {
                let old = merged.get(key).and_then(Value::as_object).cloned();
                let new = merge_args(old.as_ref().unwrap_or(&Object::new()), inner);
                // An object that comes to nothing neither appears nor replaces: `{}` changes nothing.
                if old.is_some() || !new.is_empty() {
                    merged.insert(key, Value::Object(new));
                }
            }
            other => merged.insert(key, other.clone()),
        }
    }
    merged
}

#[cfg(test)]
pub(crate) mod tests;
