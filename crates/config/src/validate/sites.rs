//! Every string of a config that is rendered some day, with its path.

use nstance_core::value::{Object, Value};

use crate::{
    merge::MergedGroup,
    model::{CertificateSpec, Config, FileSpec, Template, Userdata, UserdataSource},
    path::Path,
    render::Context,
    userdata,
};

/// A string that may be a template.
pub(super) struct Site {
    pub(super) path: Path,
    pub(super) context: Context,
    pub(super) source: String,
}

/// Those of the whole file, each once.
pub(super) fn of_file(config: &Config) -> Vec<Site> {
    let mut sites = of_defaults(config);
    for (name, template) in &config.templates {
        sites.extend(of_template(name, template));
    }
    for certificate in config.certificates.named.values() {
        push_certificate(&mut sites, certificate);
    }
    let ca = Path::of(&["certificates", "ca"]);
    let spec = &config.certificates.ca;
    sites.extend(spec.cn.iter().map(|cn| Site { path: ca.key("cn"), context: Context::Ca, source: cn.clone() }));
    for (key, list) in spec.names.lists() {
        push_list(&mut sites, list, &ca.key(key), Context::Ca);
    }
    for group in config.groups.values() {
        push_object(&mut sites, &group.args, &group.path.key("args"), Context::Args);
    }
    only_templates(sites)
}

pub(super) fn of_defaults(config: &Config) -> Vec<Site> {
    let mut sites = Vec::new();
    let path = Path::of(&["defaults"]);
    push_object(&mut sites, &config.defaults.args, &path.key("args"), Context::Args);
    push_userdata(&mut sites, config.defaults.userdata.as_ref(), &path);
    only_templates(sites)
}

pub(super) fn of_template(name: &str, template: &Template) -> Vec<Site> {
    let mut sites = Vec::new();
    let path = Path::of(&["templates", name]);
    push_object(&mut sites, &template.args, &path.key("args"), Context::Args);
    push_userdata(&mut sites, template.userdata.as_ref(), &path);
    for (name, file) in &template.files {
        push_file(&mut sites, file, &path.key("files").key(name));
    }
    only_templates(sites)
}

/// Those of the certificates that a template's files use.
pub(super) fn of_certificates(config: &Config, template: &Template) -> Vec<Site> {
    let mut sites = Vec::new();
    for file in template.files.values() {
        if let FileSpec::Certificate { template, .. } = file
            && let Some(certificate) = config.certificates.named.get(template)
        {
            push_certificate(&mut sites, certificate);
        }
    }
    only_templates(sites)
}

/// Those of one merged group; paths begin at the group: `args`, `userdata`, `files` and `certificates`.
pub(super) fn of_group(group: &MergedGroup) -> Vec<Site> {
    let mut sites = Vec::new();
    push_object(&mut sites, &group.args, &Path::of(&["args"]), Context::Args);
    push_userdata(&mut sites, group.userdata.as_ref(), &Path::root());
    for (name, file) in &group.files {
        push_file(&mut sites, file, &Path::of(&["files", name]));
    }
    for certificate in group.certificates.values() {
        push_certificate(&mut sites, certificate);
    }
    only_templates(sites)
}

fn only_templates(mut sites: Vec<Site>) -> Vec<Site> {
    sites.retain(|site| site.source.contains("{{"));
    sites
}

fn push_file(sites: &mut Vec<Site>, file: &FileSpec, path: &Path) {
    let path = path.key("template");
    match file {
        FileSpec::Env { template } => sites.extend(template.iter().map(|(key, source)| Site {
            path: path.key(key),
            context: Context::File,
            source: source.clone(),
        })),
        FileSpec::Json { template } => push_value(sites, template, &path, Context::File),
        FileSpec::String { template } => sites.push(Site { path, context: Context::File, source: template.clone() }),
        FileSpec::Certificate { .. } | FileSpec::Secret { .. } | FileSpec::Storage { .. } => {}
    }
}

fn push_certificate(sites: &mut Vec<Site>, certificate: &CertificateSpec) {
    let path = Path::of(&["certificates", &certificate.name]);
    sites.push(Site { path: path.key("cn"), context: Context::Certificate, source: certificate.cn.clone() });
    for (key, list) in certificate.names.lists() {
        push_list(sites, list, &path.key(key), Context::Certificate);
    }
}

fn push_list(sites: &mut Vec<Site>, list: &[String], path: &Path, context: Context) {
    let site = |(i, source): (usize, &String)| Site { path: path.index(i), context, source: source.clone() };
    sites.extend(list.iter().enumerate().map(site));
}

fn push_userdata(sites: &mut Vec<Site>, userdata: Option<&Userdata>, path: &Path) {
    let Some(userdata) = userdata.filter(|it| it.source == UserdataSource::Inline) else { return };
    // What does not decode was reported with its value.
    let Ok(source) = userdata::decode(userdata.encoding, userdata.content.as_bytes()) else { return };
    sites.push(Site { path: path.key("userdata").key("content"), context: Context::Userdata, source });
}

fn push_object(sites: &mut Vec<Site>, object: &Object, path: &Path, context: Context) {
    for (key, value) in object.iter() {
        push_value(sites, value, &path.key(key), context);
    }
}

fn push_value(sites: &mut Vec<Site>, value: &Value, path: &Path, context: Context) {
    match value {
        Value::String(source) => sites.push(Site { path: path.clone(), context, source: source.clone() }),
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                push_value(sites, item, &path.index(i), context);
            }
        }
        Value::Object(object) => push_object(sites, object, path, context),
        Value::Null | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {}
    }
}
