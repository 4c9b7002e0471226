//! Rendering: Go `text/template` over the strings of userdata, args, files and certificates.
//!
//! Only string values are rendered, after the merge, never keys, and a result stays a string. A missing key is an
//! error that names its full path; `<no value>` cannot come out.

mod data;
mod eval;
mod fault;
mod funcs;
mod images;
mod program;
mod sample;
mod scan;
mod unhashed;

use std::{cell::OnceCell, collections::BTreeMap, net::IpAddr, time::Duration};

use nstance_core::value::{Object, Value};

pub use self::{
    data::{Context, InstanceData, RenderData},
    fault::RenderErrorKind,
    unhashed::Unhashed,
};
pub(crate) use self::{fault::Fault, images::images_of, program::Program, sample::sample_data, unhashed::unhashed_of};
use crate::{
    hash::hash_bytes,
    merge::MergedGroup,
    model::{CaSpec, CertificateKind, CertificateNames, CertificateSpec, Config, FileSpec, UserdataSource},
    path::Path,
    problems::write_json_string,
    userdata,
    validate::is_dns_name,
};

/// Largest rendered file.
pub const MAX_FILE: usize = 1024 * 1024;

/// A template that could not be rendered, or whose text is not what its place needs. Only a changed config mends it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("render {path}: {message}")]
pub struct RenderError {
    pub kind: RenderErrorKind,
    pub(crate) path: Path,
    pub message: String,
    pub help: Option<String>,
}

impl RenderError {
    /// What was rendered: `userdata.content`, `args.ImageId`, `files["node.env"].template.NODE_LABELS` …
    pub fn place(&self) -> String {
        self.path.to_string()
    }

    fn at(place: &Path, fault: Fault) -> Self {
        let message = match fault.line {
            0 | 1 => fault.message,
            line => format!("line {line}: {}", fault.message),
        };
        Self { kind: fault.kind, path: place.clone(), message, help: fault.help }
    }

    fn invalid(place: &Path, message: String) -> Self {
        Self::at(place, Fault::new(RenderErrorKind::Invalid, 0, message))
    }
}

/// Renders one text.
pub fn render_text(source: &str, context: Context, data: &RenderData) -> Result<String, RenderError> {
    Renderer::new(context, data).text(source, &Path::root())
}

/// Renders the userdata of a group that carries it inline; `None` if it has none.
pub fn render_userdata(group: &MergedGroup, data: &RenderData) -> Result<Option<String>, RenderError> {
    let Some(userdata) = &group.userdata else { return Ok(None) };
    match userdata.source {
        UserdataSource::Inline => render_fetched_userdata(group, data, userdata.content.as_bytes()),
        UserdataSource::Url => {
            let message = format!("{} has not been fetched", userdata.content);
            Err(RenderError::invalid(&Path::of(&["userdata", "content"]), message))
        }
    }
}

/// Renders userdata whose bytes were fetched. They are held against `sha256` first, if the config has one.
pub fn render_fetched_userdata(
    group: &MergedGroup,
    data: &RenderData,
    bytes: &[u8],
) -> Result<Option<String>, RenderError> {
    let Some(userdata) = &group.userdata else { return Ok(None) };
    let place = Path::of(&["userdata", "content"]);
    if let Some(sha256) = &userdata.sha256 {
        let found = hash_bytes(bytes);
        if found.strip_prefix("sha256:") != Some(sha256) {
            return Err(RenderError::invalid(
                &place,
                format!("fetched bytes are {found}, the config asks for {sha256}"),
            ));
        }
    }
    let text = userdata::decode(userdata.encoding, bytes)
        .map_err(|error| RenderError::invalid(&place, format!("userdata is not {}: {error}", userdata.encoding)))?;
    Renderer::new(Context::Userdata, data).text(&text, &place).map(Some)
}

/// Renders every string in the args of a group.
pub fn render_args(group: &MergedGroup, data: &RenderData) -> Result<Object, RenderError> {
    Renderer::new(Context::Args, data).object(&group.args, &Path::of(&["args"]))
}

/// Renders a file of kind `env`, `json` or `string`; the others are made elsewhere and are an error here.
pub fn render_file(group: &MergedGroup, name: &str, data: &RenderData) -> Result<Vec<u8>, RenderError> {
    let place = Path::of(&["files", name, "template"]);
    let renderer = Renderer::new(Context::File, data);
    let text = match group.files.get(name) {
        None => return Err(RenderError::invalid(&place, format!("the template has no file `{name}`"))),
        Some(FileSpec::Env { template }) => render_env(&renderer, template, &place)?,
        Some(FileSpec::Json { template }) => {
            let value = renderer.value(template, &place)?;
            let mut out = String::new();
            write_pretty(&mut out, &value, 0);
            out.push('\n');
            out
        }
        Some(FileSpec::String { template }) => renderer.text(template, &place)?,
        Some(other) => {
            return Err(RenderError::invalid(&place, format!("a file of kind {} has no text to render", other.kind())));
        }
    };
    if MAX_FILE < text.len() {
        let fault = Fault::new(RenderErrorKind::Limit, 0, format!("the file is larger than {MAX_FILE} bytes"));
        return Err(RenderError::at(&place, fault));
    }
    Ok(text.into_bytes())
}

/// A certificate whose names are settled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedCertificate {
    pub name: String,
    pub kind: CertificateKind,
    pub cn: String,
    pub organization: Vec<String>,
    pub dns: Vec<String>,
    pub ip: Vec<IpAddr>,
    pub uri: Vec<String>,
    pub country: Vec<String>,
    pub province: Vec<String>,
    pub locality: Vec<String>,
    pub street: Vec<String>,
    pub postal_code: Vec<String>,
    pub ttl: Duration,
}

/// Renders a certificate. Entries that come out empty are dropped; one that is no valid name is an error, and then
/// nothing may be issued.
pub fn render_certificate(spec: &CertificateSpec, data: &RenderData) -> Result<RenderedCertificate, RenderError> {
    let place = Path::of(&["certificates", &spec.name]);
    let renderer = Renderer::new(Context::Certificate, data);
    let cn = renderer.text(&spec.cn, &place.key("cn"))?;
    if cn.trim().is_empty() {
        return Err(RenderError::invalid(
            &place.key("cn"),
            format!("certificate {}: cn renders to nothing", spec.name),
        ));
    }
    check_text(&spec.name, "cn", &cn, &place.key("cn"))?;
    let names = render_names(&spec.name, &spec.names, &renderer, &place)?;
    Ok(RenderedCertificate {
        name: spec.name.clone(),
        kind: spec.kind,
        cn,
        organization: names.organization,
        dns: names.dns,
        ip: names.ip.iter().filter_map(|ip| ip.parse().ok()).collect(),
        uri: names.uri,
        country: names.country,
        province: names.province,
        locality: names.locality,
        street: names.street,
        postal_code: names.postal_code,
        ttl: spec.ttl,
    })
}

/// Renders the subject of a CA that is about to be made.
pub fn render_ca(config: &Config) -> Result<CaSpec, RenderError> {
    let data = RenderData {
        cluster_id: config.server.cluster_id.to_string(),
        vars: config.defaults.vars.clone(),
        ..RenderData::default()
    };
    let place = Path::of(&["certificates", "ca"]);
    let renderer = Renderer::new(Context::Ca, &data);
    let spec = &config.certificates.ca;
    let cn = spec.cn.as_ref().map(|cn| renderer.text(cn, &place.key("cn"))).transpose()?;
    let names = render_names("ca", &spec.names, &renderer, &place)?;
    Ok(CaSpec { cn: cn.filter(|cn| !cn.trim().is_empty()), names, ttl: spec.ttl })
}

fn render_names(
    certificate: &str,
    names: &CertificateNames,
    renderer: &Renderer,
    place: &Path,
) -> Result<CertificateNames, RenderError> {
    let mut rendered = CertificateNames::default();
    for ((key, list), (_, out)) in names.lists().into_iter().zip(rendered.lists_mut()) {
        for (i, entry) in list.iter().enumerate() {
            let place = place.key(key).index(i);
            let text = renderer.text(entry, &place)?;
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            check_text(certificate, &format!("{key}[{i}]"), text, &place)?;
            check_name(certificate, key, i, text, &place)?;
            out.push(text.to_owned());
        }
    }
    Ok(rendered)
}

fn check_text(certificate: &str, entry: &str, text: &str, place: &Path) -> Result<(), RenderError> {
    if text.chars().any(char::is_control) {
        let message = format!("certificate {certificate}, {entry}: {text:?} holds control characters");
        return Err(RenderError::invalid(place, message));
    }
    Ok(())
}

fn check_name(certificate: &str, key: &str, i: usize, text: &str, place: &Path) -> Result<(), RenderError> {
    let (valid, what) = match key {
        "dns" => (is_dns_name(text.strip_prefix("*.").unwrap_or(text)), "a DNS name"),
        "ip" => (text.parse::<IpAddr>().is_ok(), "an IP address"),
        "uri" => (is_uri(text), "a URI"),
        _ => (true, ""),
    };
    if valid {
        return Ok(());
    }
    Err(RenderError::invalid(place, format!("certificate {certificate}, {key}[{i}]: {text:?} is not {what}")))
}

fn is_uri(text: &str) -> bool {
    let Some((scheme, rest)) = text.split_once(':') else { return false };
    scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
        && !rest.is_empty()
        && rest.bytes().all(|byte| byte.is_ascii_graphic())
}

fn render_env(renderer: &Renderer, template: &BTreeMap<String, String>, place: &Path) -> Result<String, RenderError> {
    let mut out = String::new();
    for (key, source) in template {
        let place = place.key(key);
        let value = renderer.text(source, &place)?;
        if value.contains(['\n', '\0']) {
            let message = format!("{key} renders to a value with a line break or NUL, which an env file cannot hold");
            return Err(RenderError::invalid(&place, message));
        }
        out.push_str(key);
        out.push('=');
        out.push_str(&quote_env(&value));
        out.push('\n');
    }
    Ok(out)
}

/// Double quotes where a shell or systemd would read something else into a value.
fn quote_env(value: &str) -> String {
    if !value.contains(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '#' | '$' | '\\' | '`')) {
        return value.to_owned();
    }
    let mut out = String::from("\"");
    for c in value.chars() {
        if matches!(c, '"' | '\\' | '$' | '`') {
            out.push('\\');
        }
        out.push(c);
    }
    out.push('"');
    out
}

/// JSON with an indent of two, in the order of the config.
fn write_pretty(out: &mut String, value: &Value, depth: usize) {
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.push_str(&"  ".repeat(depth));
    };
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(it) => out.push_str(if *it { "true" } else { "false" }),
        Value::Int(it) => out.push_str(&it.to_string()),
        Value::Float(it) => out.push_str(&format!("{it:?}")), // keeps the point of 1.0
        Value::String(it) => write_json_string(out, it),
        Value::Array(items) if items.is_empty() => out.push_str("[]"),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { "," });
                line(out, depth + 1);
                write_pretty(out, item, depth + 1);
            }
            line(out, depth);
            out.push(']');
        }
        Value::Object(object) if object.is_empty() => out.push_str("{}"),
        Value::Object(object) => {
            out.push('{');
            for (i, (key, item)) in object.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { "," });
                line(out, depth + 1);
                write_json_string(out, key);
                out.push_str(": ");
                write_pretty(out, item, depth + 1);
            }
            line(out, depth);
            out.push('}');
        }
    }
}

/// One set of data for many texts.
pub(crate) struct Renderer<'a> {
    context: Context,
    data: &'a RenderData,
    /// Made for the first text that is a template: many configs have none here.
    tree: OnceCell<gotmpl::Value>,
}

impl<'a> Renderer<'a> {
    pub(crate) fn new(context: Context, data: &'a RenderData) -> Self {
        Self { context, data, tree: OnceCell::new() }
    }

    fn tree(&self) -> &gotmpl::Value {
        self.tree.get_or_init(|| self.data.tree(self.context))
    }

    fn text(&self, source: &str, place: &Path) -> Result<String, RenderError> {
        if !source.contains("{{") {
            return Ok(source.to_owned());
        }
        let program = Program::parse(source).map_err(|fault| RenderError::at(place, fault))?;
        eval::render(&program, self.tree(), self.context).map_err(|fault| RenderError::at(place, fault))
    }

    /// Renders for the sake of its faults: every missing key, then whatever else ended it.
    pub(crate) fn probe(&self, program: &Program) -> Vec<Fault> {
        let (result, mut faults) = eval::probe(program, self.tree(), self.context);
        faults.extend(result.err());
        faults
    }

    fn value(&self, value: &Value, place: &Path) -> Result<Value, RenderError> {
        Ok(match value {
            Value::String(text) => Value::String(self.text(text, place)?),
            Value::Array(items) => {
                let items = items.iter().enumerate().map(|(i, item)| self.value(item, &place.index(i)));
                Value::Array(items.collect::<Result<_, _>>()?)
            }
            Value::Object(object) => Value::Object(self.object(object, place)?),
            other => other.clone(),
        })
    }

    fn object(&self, object: &Object, place: &Path) -> Result<Object, RenderError> {
        object.iter().map(|(key, value)| Ok((key.to_owned(), self.value(value, &place.key(key))?))).collect()
    }
}

#[cfg(test)]
mod tests;
