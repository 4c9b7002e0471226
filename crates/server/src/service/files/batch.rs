//! Making a batch: what differs is found, certificates are signed and logged together, then everything is sent.
//!
//! Contents are not kept: they are rendered once to be compared and once more to be sent, one file at a time. No
//! certificate leaves before the one log entry that names all of its batch is durable.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use nstance_config::{
    model::{CertificateKind, FileSpec},
    render::{RenderData, RenderedCertificate, render_certificate, render_file},
};
use nstance_core::{
    ids::InstanceId,
    instance::{Addresses, Instance, Phase},
};
use nstance_identity::{
    issue::{FileProfile, FileUsage, Issued},
    keys::PublicKey,
    renew::renew_at,
    subject::{San, Subject},
};
use nstance_rt::chain::Chain;
use nstance_store::records::certlog::CertlogRecord;
use ring::digest::{SHA256, digest};

use super::{
    addresses::{Judged, Trust, judge},
    decide::{Known, Order, Print, Reported, Verdict, Wanted},
    delivery::Delivery,
    sources::Source,
};
use crate::{
    events::{Reason, Tell},
    exec::request::render_data,
    service::register::logged,
    term::Term,
};

/// Certificates of one batch: what one entry of the log has room for. More of them go with the next.
const MAX_SIGNED: usize = 64;

/// A certificate is not made anew sooner than this, also when its CA is about to end.
const LEAST_LIFE: Duration = Duration::from_secs(60);

/// How long the log is tried for. The rest of a batch waits for it.
const LOG: Duration = Duration::from_secs(5);

/// What a batch is made from, as it was when it was decided on.
pub(super) struct Look {
    pub(super) instance: Instance,
    pub(super) wanted: Wanted,
    pub(super) order: Order,
    pub(super) report: Option<Arc<Reported>>,
    pub(super) keys: BTreeMap<String, PublicKey>,
}

/// A batch before it is sent.
pub(super) struct Batch {
    pub(super) files: Vec<Prepared>,
    /// Files that could not be made, and why.
    pub(super) failures: Vec<(String, String)>,
    data: RenderData,
}

pub(super) struct Prepared {
    pub(super) name: String,
    signed: Option<(Issued, Known)>,
}

pub(super) fn sha256(bytes: &[u8]) -> Print {
    let mut print = [0; 32];
    print.copy_from_slice(digest(&SHA256, bytes).as_ref());
    print
}

/// Finds out what is to be sent, and signs what of it is a certificate.
pub(super) async fn make(term: &Arc<Term>, delivery: &Delivery, look: &Look) -> Batch {
    let data = data(term, delivery, look);
    let held: BTreeSet<String> = look.keys.keys().cloned().collect();
    let (mut files, mut failures, mut drafts) = (Vec::new(), Vec::new(), Vec::new());
    for (name, spec) in &look.wanted.merged.files {
        if !Wanted::is_ready(spec, &held) {
            continue;
        }
        let verdict = delivery.lock().memory.verdict(&look.order, &look.wanted, name, term.now());
        if verdict == Verdict::Leave {
            continue;
        }
        let (print, draft) = match print(term, look, name, spec, &data).await {
            Ok(found) => found,
            Err(why) => {
                failures.push((name.clone(), why));
                continue;
            }
        };
        let report = look.report.as_deref();
        let differs = || delivery.lock().memory.differs(&look.wanted, name, print, report, term.now());
        let sends = verdict == Verdict::Send || differs();
        match draft {
            _ if !sends => {}
            None => files.push(Prepared { name: name.clone(), signed: None }),
            Some(draft) if drafts.len() < MAX_SIGNED => drafts.push((name.clone(), print, draft)),
            // Not complete without it: otherwise the agent would be told that it has it.
            Some(_) => delivery.lock().memory.postponed(name),
        }
    }
    match sign(term, &look.instance, drafts).await {
        Ok(signed) => files.extend(signed),
        Err(failed) => failures.extend(failed),
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Batch { files, failures, data }
}

impl Batch {
    /// The content of a file, and what is remembered of it once it is sent.
    pub(super) async fn content(&self, term: &Term, look: &Look, file: &Prepared) -> Result<(Vec<u8>, Known), String> {
        if let Some((issued, known)) = &file.signed {
            return Ok((issued.chain_pem.clone().into_bytes(), *known));
        }
        let spec = look.wanted.merged.files.get(&file.name).ok_or("it left the template")?;
        let content = content(term, look, &file.name, spec, &self.data).await?;
        let print = sha256(&content);
        Ok((content, Known { print, renew_at: None }))
    }
}

/// A certificate whose names are settled, and the key it is for.
struct Draft {
    rendered: RenderedCertificate,
    profile: FileProfile,
    key: PublicKey,
}

async fn print(
    term: &Term,
    look: &Look,
    name: &str,
    spec: &FileSpec,
    data: &RenderData,
) -> Result<(Print, Option<Draft>), String> {
    let FileSpec::Certificate { template, key } = spec else {
        return Ok((sha256(&content(term, look, name, spec, data).await?), None));
    };
    let certificate = look.wanted.merged.certificates.get(template);
    let certificate = certificate.ok_or_else(|| format!("certificate `{template}` does not exist"))?;
    let key = *look.keys.get(key).ok_or_else(|| format!("key `{key}` is not here yet"))?;
    let rendered = render_certificate(certificate, data).map_err(|error| format!("{}", Chain(&error)))?;
    let profile = profile(&rendered)?;
    let made_of = format!("{rendered:?} {} {}", key.fingerprint(), term.shared.authority.fingerprint());
    Ok((sha256(made_of.as_bytes()), Some(Draft { rendered, profile, key })))
}

fn profile(it: &RenderedCertificate) -> Result<FileProfile, String> {
    let in_words = |error: nstance_identity::subject::SanError| format!("certificate {}: {error}", it.name);
    let mut sans = Vec::new();
    for name in &it.dns {
        sans.push(San::dns(name).map_err(in_words)?);
    }
    sans.extend(it.ip.iter().copied().map(San::ip));
    for uri in &it.uri {
        sans.push(San::uri(uri).map_err(in_words)?);
    }
    Ok(FileProfile {
        subject: Subject {
            common_name: it.cn.clone(),
            organization: it.organization.clone(),
            organizational_unit: Vec::new(),
            country: it.country.clone(),
            province: it.province.clone(),
            locality: it.locality.clone(),
            street: it.street.clone(),
            postal_code: it.postal_code.clone(),
        },
        sans,
        usage: match it.kind {
            CertificateKind::Client => FileUsage::Client,
            CertificateKind::Server => FileUsage::Server,
            CertificateKind::Peer => FileUsage::Peer,
        },
    })
}

async fn content(term: &Term, look: &Look, name: &str, spec: &FileSpec, data: &RenderData) -> Result<Vec<u8>, String> {
    let source = match spec {
        FileSpec::Secret { source } => Source::Secret(source.clone()),
        FileSpec::Storage { source } => Source::Object(source.clone()),
        _ => return render_file(&look.wanted.merged, name, data).map_err(|error| format!("{}", Chain(&error))),
    };
    let max_age = term.applied().config.server.secrets.cache_ttl;
    term.files.sources.read(&term.shared, &source, max_age).await.map(|content| content.to_vec())
}

/// Signs all, and logs them in one entry before anybody sees one of them.
async fn sign(
    term: &Arc<Term>,
    instance: &Instance,
    drafts: Vec<(String, Print, Draft)>,
) -> Result<Vec<Prepared>, Vec<(String, String)>> {
    if drafts.is_empty() {
        return Ok(Vec::new());
    }
    let (now, wall) = (term.now(), term.shared.clock.now());
    let names: Vec<String> = drafts.iter().map(|(name, ..)| name.clone()).collect();
    let all_failed = |why: String| names.iter().map(|name| (name.clone(), why.clone())).collect();
    let (mut signed, mut entries) = (Vec::new(), Vec::new());
    for (name, print, draft) in drafts {
        let ttl = draft.rendered.ttl;
        let issued = term.shared.authority.issue_file(&draft.profile, &draft.key, wall, ttl);
        let issued = issued.map_err(|error| all_failed(error.to_string()))?;
        let entry = logged("file", &issued);
        entries.push(nstance_store::records::certlog::LoggedCertificate { name: name.clone(), ..entry });
        let due = renew_at(None, issued.not_before, issued.not_after, term.shared.entropy.as_ref());
        let due = now.plus(due.since(wall)).max(now.plus(LEAST_LIFE.min(ttl / 2)));
        signed.push(Prepared { name, signed: Some((issued, Known { print, renew_at: Some(due) })) });
    }
    let serials: Vec<_> = entries.iter().map(|it| it.serial.clone()).collect();
    let record = CertlogRecord {
        cluster: term.shared.cluster.clone(),
        shard: Some(term.shared.shard.clone()),
        tenant: Some(instance.group.tenant.clone()),
        subject_id: instance.id.to_string(),
        issued_at: wall,
        certificates: entries,
    };
    let records = term.shared.records.within(LOG);
    if let Err(error) = records.write_certlog(&term.guard, &record).await {
        term.judge(&error);
        return Err(all_failed(format!("the certificate log was not written: {}", Chain(&error))));
    }
    let message = format!("{} certificates issued for files", serials.len());
    let told = Tell::instance(Reason::CertificateIssued, &instance.group, instance.id, message);
    term.tell(told.detail("serials", serials.join(",")));
    Ok(signed)
}

/// What the files of this instance see.
fn data(term: &Arc<Term>, delivery: &Delivery, look: &Look) -> RenderData {
    let (instance, merged) = (&look.instance, &look.wanted.merged);
    let mut data = render_data(term, instance, merged);
    let applied = term.applied();
    {
        // What its own VM was made from is in already; others go by what they stand for now.
        let state = term.world.lock();
        for name in applied.config.images.keys() {
            let id = state.images.ids(&[name.clone()].into()).and_then(|ids| ids.into_iter().next());
            if let (Some(id), false) = (id, data.images.contains_key(name)) {
                data.images.insert(name.clone(), id);
            }
        }
    }
    let trust = match (merged.trust_agent_addresses, applied.config.server.provider.kind.is_dev()) {
        (false, _) => Trust::Provider,
        (true, false) => Trust::Agent,
        (true, true) => Trust::AgentAnywhere,
    };
    let provider = {
        let state = term.world.lock();
        state.entries.get(&instance.id).map(|entry| entry.provider_addresses()).unwrap_or_default()
    };
    let judged = judge(trust, &provider, &agents_word(look), |ip| is_taken(term, instance, ip));
    tell_mismatches(term, delivery, instance, &judged);
    let Addresses { ip4, ip6, hostname, fqdn } = judged.addresses;
    data.instance.ip4 = ip4.unwrap_or_default();
    data.instance.ip6 = ip6.unwrap_or_default();
    data.instance.hostname = hostname.unwrap_or_default();
    data.instance.fqdn = fqdn.unwrap_or_default();
    data
}

/// Where the agent says it is: in its last report, else at its registration.
fn agents_word(look: &Look) -> Addresses {
    let first = look.instance.registration.as_ref().map(|it| it.addresses.clone()).unwrap_or_default();
    let last = look.report.as_ref().map(|it| it.addresses.clone()).unwrap_or_default();
    Addresses {
        ip4: last.ip4.or(first.ip4),
        ip6: last.ip6.or(first.ip6),
        hostname: last.hostname.or(first.hostname),
        fqdn: last.fqdn.or(first.fqdn),
    }
}

fn tell_mismatches(term: &Arc<Term>, delivery: &Delivery, instance: &Instance, judged: &Judged) {
    if delivery.lock().mismatches(&judged.mismatches, term.now()) {
        let message = judged.mismatches.join("; ");
        term.tell(Tell::instance(Reason::AddressMismatch, &instance.group, instance.id, message));
    }
}

/// Whether an address is a server's, or of another instance that lives: by its provider's word, or by its own if it
/// came first. Only asked about what provider and agent disagree on.
fn is_taken(term: &Term, ours: &Instance, ip: IpAddr) -> bool {
    let advertised = &term.advertised;
    let advertised = [&advertised.registration, &advertised.operator, &advertised.agent];
    let is_server = is_servers(ip, &term.shared.authority.own_certificate().sans, advertised);
    let network = term.applied().config.server.leader_network.as_ref().is_some_and(|it| it.ip == ip);
    let came_first = |it: &Instance| match (&it.registration, &ours.registration) {
        (Some(theirs), Some(ours)) => theirs.at < ours.at,
        (theirs, _) => theirs.is_some(),
    };
    let has = |addresses: &Addresses| {
        [&addresses.ip4, &addresses.ip6].into_iter().flatten().any(|address| is_ip(address, ip))
    };
    let is_others = |id: &InstanceId, entry: &crate::world::Entry| {
        let it = entry.instance();
        *id != ours.id
            && !matches!(it.phase(), Phase::Deleted | Phase::Failed)
            && (has(&entry.provider_addresses())
                || it.registration.as_ref().is_some_and(|told| came_first(it) && has(&told.addresses)))
    };
    is_server || network || term.world.lock().entries.iter().any(|(id, entry)| is_others(id, entry))
}

/// Whether an address is a server's: told to its clients, or in the certificate it shows. There stands every address by
/// which it may be dialled, be it bound, floating or named in the config for all servers.
fn is_servers(ip: IpAddr, shown: &[String], advertised: [&String; 3]) -> bool {
    let host = |address: &str| is_ip(address.rsplit_once(':').map_or(address, |it| it.0).trim_matches(['[', ']']), ip);
    shown.iter().filter_map(|name| name.strip_prefix("IP:")).any(|address| is_ip(address, ip))
        || advertised.into_iter().any(|address| host(address))
}

fn is_ip(text: &str, ip: IpAddr) -> bool {
    text.parse::<IpAddr>().is_ok_and(|it| it.to_canonical() == ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_address_of_a_server_is_left_for_a_machine() {
        let shown = ["DNS:localhost", "IP:10.0.0.5", "IP:fd00::5", "URI:spiffe://10.0.0.7"].map(str::to_owned);
        let advertised = ["10.0.0.6:8992", "[fd00::6]:8993", "leader.example:8994"].map(str::to_owned);
        let [registration, operator, agent] = &advertised;
        let is_servers = |ip: &str| is_servers(ip.parse().unwrap(), &shown, [registration, operator, agent]);
        for ip in ["10.0.0.5", "fd00::5", "10.0.0.6", "fd00::6"] {
            assert!(is_servers(ip), "{ip}");
        }
        for ip in ["10.0.0.7", "10.0.0.50", "fd00::7"] {
            assert!(!is_servers(ip), "{ip}");
        }
    }
}
