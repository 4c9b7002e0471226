//! `files` of a template.

use std::collections::BTreeMap;

use super::{FILE_NAME_GRAMMAR, is_file_name, is_var_name, templates::Known};
use crate::{
    jsonc::Json,
    model::FileSpec,
    problems::{Code, suggest},
    raw::{At, Fields, string_map},
};

/// Files of one template; the agent takes no more than this twice over.
const MAX_FILES: usize = 256;

#[derive(Clone, Copy)]
enum FileKind {
    Certificate,
    Secret,
    Storage,
    Env,
    Json,
    String,
}

const KINDS: &[(&str, FileKind)] = &[
    ("certificate", FileKind::Certificate),
    ("secret", FileKind::Secret),
    ("storage", FileKind::Storage),
    ("env", FileKind::Env),
    ("json", FileKind::Json),
    ("string", FileKind::String),
];

pub(super) fn read_files(at: &At<'_>, known: &Known<'_>) -> BTreeMap<String, FileSpec> {
    let entries = at.entries();
    if MAX_FILES < entries.len() {
        let message = format!("{} files are more than the {MAX_FILES} a template may have", entries.len());
        at.report(Code::Limit, message, None);
    }
    let mut files = BTreeMap::new();
    for (key, value) in entries {
        let name = key.text();
        if name == "errors" {
            key.bad("the file name `errors` is reserved", "the agent keeps its messages there");
        } else if !is_file_name(name) {
            key.bad(format!("`{name}` is no valid file name"), FILE_NAME_GRAMMAR);
        }
        if let Some(file) = read_file(name, &value, known) {
            files.insert(name.to_owned(), file);
        }
    }
    files
}

fn read_file(name: &str, at: &At<'_>, known: &Known<'_>) -> Option<FileSpec> {
    let fields = at.fields()?;
    let kind_at = fields.need("kind");
    let kind = kind_at.and_then(|at| at.one_of(KINDS, &[("text", "string"), ("cert", "certificate")]));
    let Some(kind) = kind else {
        fields.give_up();
        return None;
    };
    let file = match kind {
        FileKind::Certificate => read_certificate_file(name, &fields, known),
        FileKind::Secret => fields.need("source").and_then(|at| read_secret(&at)),
        FileKind::Storage => fields.need("source").and_then(|at| read_storage(&at)),
        FileKind::Env => fields.need("template").map(|at| FileSpec::Env {
            template: string_map(&at, is_var_name, "use letters, digits and _, beginning with a letter or _"),
        }),
        FileKind::Json => fields.need("template").and_then(|at| {
            if !matches!(at.node.json, Json::Object(_) | Json::Array(_)) {
                at.report(Code::WrongType, "expected an object or a list", None);
                return None;
            }
            Some(FileSpec::Json { template: at.node.to_value() })
        }),
        FileKind::String => fields
            .need("template")
            .and_then(|at| at.string())
            .map(|text| FileSpec::String { template: text.to_owned() }),
    };
    fields.finish();
    file
}

fn read_certificate_file(name: &str, fields: &Fields<'_>, known: &Known<'_>) -> Option<FileSpec> {
    let template = fields.need("template").and_then(|at| read_certificate_ref(&at, known));
    // `server.crt` is for the key `server`; a name without extension is its own key.
    let default = name.rsplit_once('.').map_or(name, |(stem, _)| if stem.is_empty() { name } else { stem });
    let key = match fields.get("key") {
        Some(at) => read_key(&at, default)?,
        None => key_name(default).to_owned(),
    };
    Some(FileSpec::Certificate { template: template?, key })
}

/// The name of a key pair, without the extensions that its two files have. Agents know it by no other name: with one of
/// them left, the key would be asked for again and again.
fn key_name(mut name: &str) -> &str {
    while let Some(stem) = [".pub", ".key"].iter().find_map(|it| name.strip_suffix(it)).filter(|it| !it.is_empty()) {
        name = stem;
    }
    name
}

fn read_certificate_ref(at: &At<'_>, known: &Known<'_>) -> Option<String> {
    let name = at.string()?;
    if matches!(name, "agent" | "operator" | "ca") {
        at.report(
            Code::BadReference,
            format!("certificate `{name}` is reserved for nstance itself"),
            Some("define a certificate of another name".to_owned()),
        );
        return None;
    }
    let written = known.certificate_names.is_some_and(|at| at.node.get(name).is_some());
    if !known.certificates.contains_key(name) && !written {
        let help = suggest(name, "certificates", known.certificates.keys().map(String::as_str));
        at.report(Code::BadReference, format!("certificate {} does not exist", at.show(name)), help);
        return None;
    }
    Some(name.to_owned())
}

fn read_key(at: &At<'_>, default: &str) -> Option<String> {
    let fields = at.fields()?;
    let source = fields.get("source");
    let from = fields.get("from"); // the old spelling of `source`
    if source.is_some() && from.is_some() {
        super::conflict(&fields, "from", "`from` is the old spelling of `source`", "write `source` only");
    }
    match source.or(from) {
        Some(source) => {
            source.one_of(&[("agent", ())], &[]);
        }
        None => fields.missing("source"),
    }
    let name_at = fields.get("name");
    let name = name_at.as_ref().map_or(Some(default), |at| at.text());
    fields.finish();
    let name = name?;
    let name = key_name(name);
    if !is_file_name(name) {
        name_at.as_ref().unwrap_or(at).bad(format!("`{name}` is no valid key name"), FILE_NAME_GRAMMAR);
        return None;
    }
    Some(name.to_owned())
}

fn read_secret(at: &At<'_>) -> Option<FileSpec> {
    let name = at.text()?;
    if name == "ca.key" || name.starts_with("ca-") || name.starts_with("registration-nonce.") {
        at.bad(format!("secret `{name}` never leaves the server"), "");
        return None;
    }
    if !is_file_name(name) {
        at.bad(format!("{} is no valid secret name", at.show(name)), FILE_NAME_GRAMMAR);
        return None;
    }
    Some(FileSpec::Secret { source: name.to_owned() })
}

fn read_storage(at: &At<'_>) -> Option<FileSpec> {
    let key = at.text()?;
    let own = ["config/", "cluster/", "shard/"].into_iter().find(|prefix| key.starts_with(prefix));
    if let Some(own) = own {
        at.bad(
            format!("objects below `{own}` are nstance's own"),
            "put files for instances elsewhere, e.g. below files/",
        );
        return None;
    }
    if key.starts_with('/') || key.split('/').any(|part| part == ".." || part == ".") || key.contains('\0') {
        at.bad(format!("{} is no valid object key", at.show(key)), "leave out a leading `/` and `..`");
        return None;
    }
    Some(FileSpec::Storage { source: key.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_known_by_the_name_that_agents_give_them() {
        for (written, name) in [
            ("kubelet", "kubelet"),
            ("kubelet.server.pub", "kubelet.server"),
            ("etcd.key", "etcd"),
            ("x.pub.pub", "x"),
            ("x.key.pub", "x"),
            ("keys", "keys"),
            (".key", ".key"),
        ] {
            assert_eq!(key_name(written), name);
        }
    }
}
