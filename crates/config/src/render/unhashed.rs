//! What a file holds that the runtime hash says nothing about: it is taken before anything is rendered or read.

use std::collections::BTreeMap;

use nstance_core::value::Value;

use super::Program;
use crate::model::FileSpec;

/// What an instance keeps for life, or the hash covers.
const SETTLED: [&str; 13] = [
    "Cluster",
    "ClusterID",
    "Vars",
    "Provider",
    "Server.Shard",
    "Instance.ID",
    "Instance.Kind",
    "Instance.Arch",
    "Instance.Type",
    "Instance.Group",
    "Instance.Tenant",
    "Instance.OnDemand",
    "Instance.Subnet.ID",
];

const PLACE: [&str; 4] = ["Instance.Hostname", "Instance.FQDN", "Instance.IP4", "Instance.IP6"];

/// Why the content of a file may be another under the same hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unhashed {
    /// It says where the machine is.
    pub place: bool,
    /// It comes from elsewhere, or says where the leader is or what an image stands for.
    pub other: bool,
}

/// The files whose content the hash does not vouch for. Certificates are not judged by their content at all.
pub(crate) fn unhashed_of(files: &BTreeMap<String, FileSpec>) -> BTreeMap<String, Unhashed> {
    let found = files.iter().map(|(name, spec)| {
        let mut found = Unhashed::default();
        match spec {
            FileSpec::Certificate { .. } => {}
            FileSpec::Secret { .. } | FileSpec::Storage { .. } => found.other = true,
            FileSpec::Env { template } => template.values().for_each(|text| in_text(text, &mut found)),
            FileSpec::Json { template } => in_value(template, &mut found),
            FileSpec::String { template } => in_text(template, &mut found),
        }
        (name.clone(), found)
    });
    found.filter(|(_, found)| *found != Unhashed::default()).collect()
}

fn in_value(value: &Value, found: &mut Unhashed) {
    match value {
        Value::String(text) => in_text(text, found),
        Value::Array(items) => items.iter().for_each(|item| in_value(item, found)),
        Value::Object(object) => object.iter().for_each(|(_, item)| in_value(item, found)),
        _ => {}
    }
}

fn in_text(text: &str, found: &mut Unhashed) {
    // What does not parse is refused when it is rendered, with its place.
    if text.contains("{{")
        && let Ok(program) = Program::parse(text)
    {
        for path in program.read_paths() {
            found.place |= PLACE.iter().any(|it| is_within(&path, it) || is_within(it, &path));
            found.other |= !SETTLED.iter().chain(&PLACE).any(|it| is_within(&path, it));
        }
    }
}

/// Whether a path leads to this place or to something in it.
fn is_within(path: &str, place: &str) -> bool {
    place.is_empty() || path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, place: bool, other: bool) {
        let mut found = Unhashed::default();
        in_text(text, &mut found);
        assert_eq!(found, Unhashed { place, other }, "{text}");
    }

    #[test]
    fn what_an_instance_keeps_for_life_or_the_hash_covers_is_vouched_for() {
        check("no template, .Server.AgentAddr", false, false);
        check("{{ .Instance.ID }} {{ .Cluster.CACert }} {{ .Vars.A }} {{ .Server.Shard }}", false, false);
        check("{{ index .Instance \"ID\" }}{{ range $k, $v := .Vars }}{{ $k }}={{ $v }}{{ end }}", false, false);
        check("{{ define \"t\" }}{{ .A }}{{ end }}{{ template \"t\" .Vars }}", false, false);
        check("{{ /* .Server.AgentAddr */ }}{{ print \".Server.AgentAddr\" }}", false, false);
    }

    #[test]
    fn what_another_leader_or_another_place_changes_is_found_however_it_is_named() {
        check("{{ .Server.AgentAddr }}", false, true);
        check("{{ .Image.debian }}", false, true);
        check("{{ .Instance.Subnet.Pool }}", false, true);
        check("{{ .Instance.IP4 }}", true, false);
        check("{{ if .Instance.FQDN }}a{{ else }}b{{ end }}", true, false);
        check("{{ index .Server \"AgentAddr\" }}", false, true);
        check("{{ index . \"Server\" \"AgentAddr\" }}", true, true);
        check("{{ $s := .Server }}{{ $s.AgentAddr }}", false, true);
        check("{{ with .Server }}{{ .AgentAddr }}{{ end }}", false, true);
        check("{{ with $ }}{{ .Server.AgentAddr }}{{ end }}", true, true);
        check("{{ (index . \"Server\").AgentAddr }}", false, true);
        check("{{ range .Image }}{{ . }}{{ end }}", false, true);
        check("{{ range 2 }}{{ $.Server.AgentAddr }}{{ end }}", false, true);
        check("{{ define \"t\" }}{{ .Server.AgentAddr }}{{ end }}{{ template \"t\" . }}", true, true);
        check("{{ block \"t\" .Instance }}{{ .IP4 }}{{ end }}", true, true);
        check("{{ .Vars.A | default .Server.AgentAddr | upper }}", false, true);
        check("{{ toJson . }}", true, true);
    }
}
