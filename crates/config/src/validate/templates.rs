//! `defaults`, `templates` and userdata.

use std::collections::BTreeMap;

use nstance_core::ids::{Kind, SubnetPool};

use super::{conflict, files, is_template_name, read_args, read_vars, server::read_pool_ref};
use crate::{
    model::{Arch, CertificateSpec, Defaults, ProviderKind, Template, Userdata, UserdataEncoding, UserdataSource},
    problems::Code,
    raw::{At, Fields},
};

/// Largest size of a group. More instances than this under one name are a typing error.
pub(crate) const MAX_SIZE: u32 = 10_000;

/// What templates may refer to.
pub(super) struct Known<'a> {
    pub(super) kind: Option<ProviderKind>,
    pub(super) pools: Option<&'a BTreeMap<SubnetPool, Vec<String>>>,
    pub(super) certificates: &'a BTreeMap<String, CertificateSpec>,
    /// The block as written: a certificate with a fault of its own still exists.
    pub(super) certificate_names: Option<&'a At<'a>>,
}

pub(super) fn read_defaults(at: &At<'_>) -> Defaults {
    let Some(fields) = at.fields() else { return Defaults::default() };
    let defaults = Defaults {
        args: fields.get("args").map(|at| read_args(&at)).unwrap_or_default(),
        vars: fields.get("vars").map(|at| read_vars(&at)).unwrap_or_default(),
        userdata: fields.get("userdata").and_then(|at| read_userdata(&at)),
    };
    fields.finish();
    defaults
}

pub(super) fn read_templates(at: &At<'_>, known: &Known<'_>) -> BTreeMap<String, Template> {
    let mut templates = BTreeMap::new();
    for (key, value) in at.entries() {
        if !is_template_name(key.text()) {
            let message = format!("`{}` is no valid template name", key.text());
            key.bad(message, "use 1 to 32 of A-Z a-z 0-9 _ -, beginning with a letter or digit");
        }
        if let Some(template) = read_template(&value, known) {
            templates.insert(key.text().to_owned(), template);
        }
    }
    templates
}

fn read_template(at: &At<'_>, known: &Known<'_>) -> Option<Template> {
    let fields = at.fields()?;
    let kind = fields.need("kind").and_then(|at| at.parsed::<Kind>());
    let arch = fields
        .need("arch")
        .and_then(|at| at.one_of(Arch::ALL, &[("x86_64", "amd64"), ("x64", "amd64"), ("aarch64", "arm64")]));
    let trusted = known.kind.is_some_and(|kind| kind.facts().trusts_agent_addresses);
    let template = Template {
        // Placeholders keep a half-read template known to its groups; the problem keeps the config from being used.
        kind: kind.unwrap_or_else(|| "xxx".parse().expect("three letters are a kind")),
        arch: arch.unwrap_or(Arch::Amd64),
        instance_type: fields.text("instance_type"),
        instance_type_fallbacks: fields.strings("instance_type_fallbacks"),
        subnet_pool: fields.get("subnet_pool").and_then(|at| read_pool_ref(&at, known.pools)),
        size: fields.int("size", 0..=MAX_SIZE, 1),
        args: fields.get("args").map(|at| read_args(&at)).unwrap_or_default(),
        vars: fields.get("vars").map(|at| read_vars(&at)).unwrap_or_default(),
        userdata: fields.get("userdata").and_then(|at| read_userdata(&at)),
        files: fields.get("files").map(|at| files::read_files(&at, known)).unwrap_or_default(),
        trust_agent_addresses: fields.get("trust_agent_addresses").and_then(|at| at.bool()).unwrap_or(trusted),
    };
    fields.finish();
    Some(template)
}

fn read_userdata(at: &At<'_>) -> Option<Userdata> {
    let fields = at.fields()?;
    let text_at = fields.get("templateString");
    let url_at = fields.get("templateUrl");
    let source_at = fields.get("source");
    let encoding_at = fields.get("encoding");
    let content_at = fields.get("content");
    let sha256_at = fields.get("sha256");
    let long = [&source_at, &encoding_at, &content_at].into_iter().any(Option::is_some);
    let n_forms = usize::from(text_at.is_some()) + usize::from(url_at.is_some()) + usize::from(long);
    let userdata = match (text_at, url_at) {
        _ if 1 < n_forms => {
            let help = "write `content` (with `source` and `encoding`), or `templateString`, or `templateUrl`";
            at.report(Code::Conflict, "userdata is given in more than one form", Some(help.to_owned()));
            None
        }
        (Some(text), _) => text.text().map(|it| (UserdataSource::Inline, UserdataEncoding::Plain, it, text.clone())),
        (None, Some(url)) => url.text().map(|it| (UserdataSource::Url, UserdataEncoding::Plain, it, url.clone())),
        (None, None) => read_long_form(&fields, source_at, encoding_at, content_at),
    };
    let userdata = userdata.map(|(source, encoding, content, content_at)| {
        let sha256 = sha256_at.as_ref().and_then(read_sha256);
        if source == UserdataSource::Url {
            check_url(&content_at, content, sha256.is_some());
        } else if fields.has("sha256") {
            conflict(
                &fields,
                "sha256",
                "`sha256` is for userdata that is fetched",
                "remove it, or set source to `url`",
            );
        }
        Userdata { source, encoding, content: content.to_owned(), sha256 }
    });
    fields.finish();
    userdata
}

type Parts<'a> = (UserdataSource, UserdataEncoding, &'a str, At<'a>);

fn read_long_form<'a>(
    fields: &Fields<'a>,
    source_at: Option<At<'a>>,
    encoding_at: Option<At<'a>>,
    content_at: Option<At<'a>>,
) -> Option<Parts<'a>> {
    let source = match source_at {
        Some(at) => at.one_of(UserdataSource::ALL, &[]),
        None => Some(UserdataSource::Inline),
    };
    let encoding = match &encoding_at {
        Some(at) => at.one_of(UserdataEncoding::ALL, &[]),
        None => Some(UserdataEncoding::Plain),
    };
    if let (Some(UserdataSource::Inline), Some(UserdataEncoding::Gzip)) = (source, encoding) {
        conflict(fields, "encoding", "inline userdata cannot be gzip, which is not text", "use `base64+gzip`");
        return None;
    }
    let Some(content_at) = content_at else {
        if !fields.has("content") {
            fields.missing("content");
        }
        return None;
    };
    let content = content_at.text()?;
    if source == Some(UserdataSource::Inline)
        && let Some(encoding) = encoding
        && let Err(error) = crate::userdata::decode(encoding, content.as_bytes())
    {
        content_at.bad(format!("userdata is not {encoding}: {error}"), "");
        return None;
    }
    Some((source?, encoding?, content, content_at))
}

fn read_sha256(at: &At<'_>) -> Option<String> {
    let text = at.string()?;
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        at.bad("a SHA-256 is 64 hex digits", "use the output of sha256sum");
        return None;
    }
    Some(text.to_ascii_lowercase())
}

fn check_url(at: &At<'_>, url: &str, pinned: bool) {
    let (secure, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
        (Some(rest), _) => (true, rest),
        (None, Some(rest)) => (false, rest),
        (None, None) => {
            at.bad(format!("{} is no https URL", at.show(url)), "write https://host/path");
            return;
        }
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let host = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let well_formed = !host.is_empty() && url.bytes().all(|byte| byte.is_ascii_graphic());
    if !well_formed {
        at.bad(format!("{} is no URL", at.show(url)), "write https://host/path");
        return;
    }
    let loopback = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if !secure && !pinned && !loopback {
        at.bad("userdata over http could be changed on its way", "use https, or add `sha256`");
    } else if !pinned {
        let help = "add `sha256`, so that a changed file is noticed before it runs on instances".to_owned();
        at.report(Code::UnpinnedUrl, "this URL is fetched without a checksum", Some(help));
    }
}
