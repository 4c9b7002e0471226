//! `images`, `certificates` and `load_balancers`: named things that templates refer to.

use std::{collections::BTreeMap, time::Duration};

use nstance_core::{ids::LbKey, ports::provider::LoadBalancer, value::Object};

use super::{Checks, FILE_NAME_GRAMMAR, is_file_name, is_image_name, provider};
use crate::{
    duration,
    jsonc::{self, Json},
    model::{
        CaSpec, CertificateKind, CertificateNames, CertificateSpec, Certificates, ImageFilter, ImageOrder, ImageSort,
        ImageSpec, ProviderKind,
    },
    problems::Code,
    raw::{At, Fields},
};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

pub(super) fn read_images(at: &At<'_>, kind: Option<ProviderKind>, checks: &Checks<'_>) -> BTreeMap<String, ImageSpec> {
    let mut images = BTreeMap::new();
    for (key, value) in at.entries() {
        if !is_image_name(key.text()) {
            let message = format!("`{}` is no valid image name", key.text());
            key.bad(message, "use 1 to 64 of A-Z a-z 0-9 _ -, beginning with a letter or _");
        }
        if let Some(image) = read_image(&value, kind, checks) {
            images.insert(key.text().to_owned(), image);
        }
    }
    images
}

fn read_image(at: &At<'_>, kind: Option<ProviderKind>, checks: &Checks<'_>) -> Option<ImageSpec> {
    let fields = at.fields()?;
    let provider_at = fields.need("provider");
    let provider = provider_at.as_ref().and_then(|at| read_own_provider(at, kind, checks));
    if let (Some(at), Some(provider)) = (&provider_at, provider)
        && let Some(help) = provider.facts().images_instead
    {
        at.bad(format!("provider {provider} does not look images up"), help);
    }
    let filters_at = fields.need("filters");
    let filters: Vec<ImageFilter> =
        filters_at.as_ref().map(|at| at.list()).unwrap_or_default().iter().filter_map(read_filter).collect();
    if let Some(at) = filters_at.filter(|at| matches!(&at.node.json, Json::Array(items) if items.is_empty())) {
        at.bad("at least one filter is needed", "add one: { \"name\": \"name\", \"values\": [\"debian-13-*\"] }");
    }
    let owners = fields.strings("owners");
    let sort = fields.get("sort").and_then(|at| at.one_of(ImageSort::ALL, &[])).unwrap_or(ImageSort::CreationDate);
    let order = fields.get("order").and_then(|at| at.one_of(ImageOrder::ALL, &[])).unwrap_or(ImageOrder::Desc);
    let fallback = fields.text("fallback");
    fields.finish();
    // A faulty image still exists; its problem keeps the config from being used.
    Some(ImageSpec { provider: provider.or(kind)?, filters, owners, sort, order, fallback })
}

/// A `provider` that may only repeat the shard's.
fn read_own_provider(at: &At<'_>, kind: Option<ProviderKind>, checks: &Checks<'_>) -> Option<ProviderKind> {
    let provider = provider::read_kind(at, checks)?;
    if let Some(kind) = kind.filter(|kind| *kind != provider) {
        let help = format!("write `{kind}`");
        at.report(Code::Conflict, format!("the provider of this shard is {kind}, not {provider}"), Some(help));
        return None;
    }
    Some(provider)
}

fn read_filter(at: &At<'_>) -> Option<ImageFilter> {
    let fields = at.fields()?;
    let name = fields.need("name").and_then(|at| at.text()).map(str::to_owned);
    let values_at = fields.need("values");
    let values = values_at.as_ref().map(|at| at.strings()).unwrap_or_default();
    if let Some(at) = values_at.filter(|at| matches!(&at.node.json, Json::Array(items) if items.is_empty())) {
        at.bad("a filter needs at least one value", "");
    }
    fields.finish();
    Some(ImageFilter { name: name?, values })
}

pub(super) fn read_certificates(at: Option<&At<'_>>, kind: Option<ProviderKind>) -> Certificates {
    let mut certificates = Certificates {
        named: BTreeMap::new(),
        agent_ttl: DAY,
        operator_ttl: DAY,
        ca: CaSpec { cn: None, names: CertificateNames::default(), ttl: 3650 * DAY },
    };
    let least = if kind.is_some_and(ProviderKind::is_dev) { Duration::from_secs(5) } else { Duration::from_secs(600) };
    for (key, value) in at.map(|at| at.entries()).unwrap_or_default() {
        match key.text() {
            "agent" => certificates.agent_ttl = read_own_ttl(&value, least),
            "operator" => certificates.operator_ttl = read_own_ttl(&value, least),
            "ca" => certificates.ca = read_ca(&value),
            name if !is_file_name(name) => {
                key.bad(format!("`{name}` is no valid certificate name"), FILE_NAME_GRAMMAR);
            }
            name => {
                if let Some(certificate) = read_certificate(name, &value, least) {
                    certificates.named.insert(name.to_owned(), certificate);
                }
            }
        }
    }
    certificates
}

fn read_own_ttl(at: &At<'_>, least: Duration) -> Duration {
    let Some(fields) = at.fields() else { return DAY };
    let ttl = read_ttl(&fields, DAY, least);
    fields.finish();
    ttl
}

/// A life: a duration, or (for it is written so elsewhere) an integer of hours.
fn read_ttl(fields: &Fields<'_>, default: Duration, least: Duration) -> Duration {
    let Some(at) = fields.get("ttl") else { return default };
    let ttl = match at.node.json {
        Json::Int(_) => at.int(1..=87_600).map(|hours| hours * HOUR),
        _ => at.duration(),
    };
    let Some(ttl) = ttl else { return default };
    if ttl < least {
        at.bad("this ttl is too short", format!("use {} or more", duration::format(least)));
        return default;
    }
    ttl
}

fn read_certificate(name: &str, at: &At<'_>, least: Duration) -> Option<CertificateSpec> {
    let fields = at.fields()?;
    let kind = fields.need("kind").and_then(|at| at.one_of(CertificateKind::ALL, &[("both", "peer")]));
    let cn = fields.need("cn").and_then(|at| at.text()).map(str::to_owned);
    let mut names = CertificateNames::default();
    for (key, list) in names.lists_mut() {
        *list = fields.strings(key);
    }
    let ttl = read_ttl(&fields, 365 * DAY, least);
    fields.finish();
    Some(CertificateSpec { name: name.to_owned(), kind: kind?, cn: cn?, names, ttl })
}

fn read_ca(at: &At<'_>) -> CaSpec {
    let mut ca = CaSpec { cn: None, names: CertificateNames::default(), ttl: 3650 * DAY };
    let Some(fields) = at.fields() else { return ca };
    let _ = fields.get("kind"); // ignored, for files that name it
    ca.cn = fields.text("cn");
    for (key, list) in ca.names.lists_mut() {
        if !matches!(key, "dns" | "ip" | "uri") {
            *list = fields.strings(key);
        }
    }
    ca.ttl = read_ttl(&fields, ca.ttl, 30 * DAY);
    fields.finish();
    ca
}

pub(super) fn read_load_balancers(
    at: &At<'_>,
    kind: Option<ProviderKind>,
    checks: &Checks<'_>,
) -> BTreeMap<LbKey, LoadBalancer> {
    let mut balancers = BTreeMap::new();
    for (key, value) in at.entries() {
        let name = key.parsed::<LbKey>();
        if let (Some(spec), Some(key)) = (read_load_balancer(&value, kind, checks), name) {
            balancers.insert(key.clone(), LoadBalancer { key, spec });
        }
    }
    balancers
}

/// What it says beside its `provider`.
fn read_load_balancer(at: &At<'_>, kind: Option<ProviderKind>, checks: &Checks<'_>) -> Option<Object> {
    const OWN: &str = "provider";
    let kind = kind?; // without a provider nothing can be said about its load balancers
    let fields = at.fields()?;
    if let Some(at) = fields.get(OWN) {
        read_own_provider(&at, Some(kind), checks);
    }
    if let Some(help) = kind.facts().load_balancers_instead {
        at.bad(format!("provider {kind} has no load balancers"), help);
        return None;
    }
    for (key, what) in kind.schema().load_balancer_keys() {
        at.problems.note_asked(|| format!("{}.{key}", at.path), || [what]);
    }
    let Json::Object(entries) = &at.node.json else { return None };
    let is_spec = |entry: &&jsonc::Entry| entry.key != OWN && !matches!(entry.value.json, Json::Null | Json::Broken);
    let spec: Object = jsonc::to_object(&entries.iter().filter(is_spec).cloned().collect::<Vec<_>>());
    provider::report(at, kind.schema().check_load_balancer(&spec), &[OWN]);
    Some(spec)
}
