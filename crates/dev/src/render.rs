//! The config of a shard, made from an example: provider, ports, shard and paths become those of this environment.

use std::{fmt, path::Path, str::FromStr};

use anyhow::{Context, anyhow, bail};
use clap::ValueEnum;
use nstance_config::Config;
use nstance_core::ids::Shard;
use serde_json::{Map, Value, json};

use crate::{layout::Layout, ports::Ports, shape::shard};

/// What runs if nobody says otherwise.
const EXAMPLE: &str = include_str!("../../../examples/config-tmux.jsonc");
const EXAMPLE_NAME: &str = "the built-in example";

/// `test=3` or `default/test=3`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Size {
    tenant: Option<String>,
    group: String,
    size: u32,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || format!("{text:?} is not GROUP=N, as in test=3 or default/test=3");
        let (group, size) = text.split_once('=').ok_or_else(form)?;
        let size = size.parse().map_err(|_| form())?;
        let (tenant, group) = match group.split_once('/') {
            Some((tenant, group)) => (Some(tenant.to_owned()), group),
            None => (None, group),
        };
        if group.is_empty() { Err(form()) } else { Ok(Self { tenant, group: group.to_owned(), size }) }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tenant) = &self.tenant {
            write!(f, "{tenant}/")?;
        }
        write!(f, "{}={}", self.group, self.size)
    }
}

/// Checks a config as the server would. The report has a line for each problem.
pub(crate) fn check(name: &str, bytes: &[u8], shard: Option<&Shard>) -> anyhow::Result<Config> {
    let loaded = nstance_server::service::config::check(name, bytes, shard);
    loaded.config.ok_or_else(|| anyhow!("{name} is not a valid config:\n{}", loaded.report.text().trim_end()))
}

/// Where agents run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Provider {
    /// In the background
    Process,
    /// In windows of tmux
    Tmux,
}

impl Provider {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Tmux => "tmux",
        }
    }
}

/// How long a node may take to be drained where there is an operator: with less, nothing could ever hold it up.
const DRAIN_TIMEOUT: &str = "60s";

/// What a config is made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) ports: Ports,
    pub(crate) provider: Provider,
    pub(crate) has_operator: bool,
}

/// The text of `config/dev-N.jsonc`, ready to be stored.
pub(crate) fn render(file: Option<&Path>, made: Made<'_>, number: u16, sizes: &[Size]) -> anyhow::Result<String> {
    let (name, text) = match file {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
            (path.display().to_string(), text)
        }
        None => (EXAMPLE_NAME.to_owned(), EXAMPLE.to_owned()),
    };
    // The file as it was written, so that lines and columns are those the person sees.
    check(&name, text.as_bytes(), None)?;
    let mut config: Value = serde_json::from_str(&plain(&text)).with_context(|| format!("read {name} as JSON"))?;
    set_server(&mut config, made, number)?;
    set_node_labels(&mut config)?;
    for size in sizes {
        set_size(&mut config, size)?;
    }
    let text = format!(
        "// Written by nstance-dev from {name}. It is yours now: edit it, then run `nstance-dev refresh`.\n{config:#}\n"
    );
    check("the rendered config", text.as_bytes(), Some(&shard(number)))?;
    Ok(text)
}

fn object<'a>(value: &'a mut Value, key: &str) -> anyhow::Result<&'a mut Map<String, Value>> {
    let entries = value.as_object_mut().context("the config is no object")?;
    entries.entry(key).or_insert_with(|| json!({})).as_object_mut().with_context(|| format!("{key} is no object"))
}

fn set_server(config: &mut Value, made: Made<'_>, number: u16) -> anyhow::Result<()> {
    let Made { layout, ports, .. } = made;
    let server = object(config, "server")?;
    server.insert("shard".to_owned(), json!(shard(number).to_string()));
    for (section, host) in [("bind", "0.0.0.0"), ("advertise", "127.0.0.1")] {
        let addresses = server.entry(section).or_insert_with(|| json!({}));
        let addresses = addresses.as_object_mut().with_context(|| format!("server.{section} is no object"))?;
        for (index, name) in (0..).zip(crate::ports::SERVER) {
            let key = format!("{name}_addr");
            let written = addresses.get(&key).and_then(Value::as_str).and_then(|it| it.rsplit_once(':'));
            let host = written.map_or(host, |(host, _)| host);
            let port = if section == "bind" { ports.bound(number, index) } else { ports.told(number, index) };
            let address = format!("{host}:{port}");
            addresses.insert(key, json!(address));
        }
    }
    // Here things are killed on purpose; the brake of production would leave a group empty after a few of them.
    server.entry("safety").or_insert_with(|| json!({ "runaway_base": 100, "runaway_window": "1m" }));
    if made.has_operator {
        server.insert("default_drain_timeout".to_owned(), json!(DRAIN_TIMEOUT));
    }
    let provider = server.entry("provider").or_insert_with(|| json!({}));
    let provider = provider.as_object_mut().context("server.provider is no object")?;
    provider.insert("kind".to_owned(), json!(made.provider.name()));
    let options = provider.entry("options").or_insert_with(|| json!({}));
    let options = options.as_object_mut().context("server.provider.options is no object")?;
    if made.provider != Provider::Tmux {
        options.remove("session");
    }
    options.insert("work_dir".to_owned(), json!(layout.instances()));
    // Also without our own API server: `nstance-dev standin` registers these nodes with any.
    options.insert("node_dir".to_owned(), json!(layout.nodes()));
    Ok(())
}

/// A fake node has the labels that a kubelet would have been told: those of the variable `NodeLabels`. Configs that say it
/// in another way, or have no file of variables for their machines, are left as they are.
fn set_node_labels(config: &mut Value) -> anyhow::Result<()> {
    let templates = object(config, "templates")?;
    let files = templates.values_mut().filter_map(|it| it.pointer_mut("/files/instance.env/template"));
    let mut n_set = 0;
    for file in files.filter_map(Value::as_object_mut) {
        file.entry("NODE_LABELS").or_insert_with(|| json!("{{ .Vars.NodeLabels }}"));
        n_set += 1;
    }
    if 0 < n_set {
        let defaults = object(config, "defaults")?.entry("vars").or_insert_with(|| json!({}));
        let vars = defaults.as_object_mut().context("defaults.vars is no object")?;
        vars.entry("NodeLabels").or_insert_with(|| json!(""));
    }
    Ok(())
}

fn set_size(config: &mut Value, wanted: &Size) -> anyhow::Result<()> {
    let groups = object(config, "groups")?;
    let mut known = Vec::new();
    let mut n_set = 0;
    for (tenant, groups) in groups.iter_mut() {
        for (group, spec) in groups.as_object_mut().into_iter().flatten() {
            known.push(format!("{tenant}/{group}"));
            if wanted.tenant.as_ref().is_none_or(|it| it == tenant)
                && *group == wanted.group
                && let Some(spec) = spec.as_object_mut()
            {
                spec.insert("size".to_owned(), json!(wanted.size));
                n_set += 1;
            }
        }
    }
    match n_set {
        1 => Ok(()),
        0 => bail!("--size {wanted}: there is no such group; there is {}", known.join(", ")),
        _ => bail!("--size {wanted}: several tenants have this group; write TENANT/{wanted}"),
    }
}

/// JSON without comments and trailing commas. The text was checked before, so it need not be doubted here.
fn plain(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(first) = rest.chars().next() {
        let skipped = match first {
            '"' => {
                let end = string_end(rest);
                out.push_str(&rest[..end]);
                end
            }
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |at| at + 2),
            ']' | '}' => {
                let kept = out.trim_end();
                let kept = kept.strip_suffix(',').unwrap_or(kept).len();
                out.truncate(kept);
                out.push(first);
                1
            }
            _ => {
                out.push(first);
                first.len_utf8()
            }
        };
        rest = &rest[skipped..];
    }
    out
}

/// Where the string ends that `text` begins with.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;

    fn rendered(sizes: &[&str]) -> anyhow::Result<Config> {
        rendered_for(Shape::new(1, 1, false).unwrap(), 1, sizes)
    }

    fn rendered_for(shape: Shape, number: u16, sizes: &[&str]) -> anyhow::Result<Config> {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::make(dir.path()).unwrap();
        let sizes: Vec<Size> = sizes.iter().map(|it| it.parse().unwrap()).collect();
        let ports = Ports::at(4000, shape).unwrap();
        let made = Made { layout: &layout, ports, provider: Provider::Process, has_operator: false };
        let text = render(None, made, number, &sizes)?;
        let config = check("config", text.as_bytes(), Some(&shard(number)))?;
        let work_dir = config.server.provider.options.get("work_dir").and_then(|it| it.as_str().map(str::to_owned));
        assert_eq!(work_dir.as_deref(), layout.instances().to_str());
        Ok(config)
    }

    #[test]
    fn the_built_in_example_becomes_this_environments_config() {
        let config = rendered(&[]).unwrap();
        assert_eq!(config.server.provider.kind.as_str(), "process");
        assert_eq!(config.server.advertise.operator.to_string(), "127.0.0.1:4003");
        assert_eq!(config.server.bind.agent.port, 4004);
        assert_eq!(config.server.safety.runaway_base, 100);
        assert_eq!(config.groups.len(), 1);
        assert!(format!("{:?}", config.templates).contains("NODE_LABELS"));
    }

    #[test]
    fn with_links_a_config_tells_other_ports_than_it_binds() {
        let config = rendered_for(Shape::new(2, 2, false).unwrap(), 2, &[]).unwrap();
        let server = &config.server;
        assert_eq!(server.shard.to_string(), "dev-2");
        assert_eq!((server.bind.health.port, server.advertise.health.port), (4010, 4010));
        assert_eq!((server.bind.agent.port, server.advertise.agent.port), (5014, 4014));
    }

    #[test]
    fn sizes_are_set_by_group_and_a_wrong_one_names_the_right_ones() {
        assert!(rendered(&["test=7"]).is_ok());
        assert!(rendered(&["default/test=0"]).is_ok());
        let error = rendered(&["tset=7"]).unwrap_err().to_string();
        assert!(error.contains("there is default/test"), "{error}");
        for bad in ["test", "=3", "test=x", "test=-1"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }

    #[test]
    fn comments_and_trailing_commas_go_and_strings_stay() {
        let text = "{ // a \"comment\"\n \"url\": \"http://x/*y*/\\\"//\", /* b */ \"list\": [1, 2, ],\n}";
        let value: Value = serde_json::from_str(&plain(text)).unwrap();
        assert_eq!(value, json!({ "url": "http://x/*y*/\"//", "list": [1, 2] }));
    }
}
