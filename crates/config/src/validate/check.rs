//! The last stage: what a merged group comes to.
//!
//! Two passes. The first reads every template string of the file once, wherever it stands, so that a syntax fault in
//! `defaults` is told once and not for each group. The second merges every static group and renders it with sample
//! data, leaving out the strings that the first has refused. A group that comes over the API takes the second only.

use std::collections::BTreeSet;

use nstance_core::{
    ids::GroupRef,
    ports::schema::{ArgsContext, GroupContext, SchemaFault, SchemaProblem},
    value::{Object, Value},
};

use super::{
    provider::{value_path, without_misspelt},
    sites::{self, Site},
};
use crate::{
    jsonc::{Node, Pos},
    merge::{MergedGroup, merge_args},
    model::{Config, FileSpec, Template, UserdataSource},
    path::{Found, Path, Step, locate},
    problems::{Code, Problem, Problems, Severity, suggest},
    render::{
        Context, Fault, Program, RenderErrorKind, Renderer, render_args, render_certificate, render_file,
        render_userdata, sample_data,
    },
};

/// Rendered files of one instance together.
const MAX_FILES_BYTES: usize = 64 * 1024 * 1024;

pub(super) fn check_groups(problems: &Problems, tree: &Node, config: &Config) {
    // What earlier stages refused is missing from the config, and must not be blamed on those who use it.
    let broken_templates: BTreeSet<&str> = config
        .templates
        .iter()
        .filter(|(name, template)| is_broken(problems, name, template))
        .map(|(name, _)| name.as_str())
        .collect();
    let broken_groups: BTreeSet<&GroupRef> = config
        .groups
        .iter()
        .filter(|(group, written)| {
            !config.tenants.contains(&group.tenant) || problems.has_error_under(&written.path.to_string())
        })
        .map(|(group, _)| group)
        .collect();
    let refused = check_sites(problems, tree, config);
    let used: BTreeSet<&str> = config.groups.values().map(|group| group.template.as_str()).collect();
    for (name, template) in &config.templates {
        if broken_templates.contains(name.as_str()) {
            continue;
        }
        check_userdata(problems, tree, config, name, template);
        if !used.contains(name.as_str()) {
            check_unused(problems, tree, config, name, template);
        }
    }
    for (group, written) in &config.groups {
        if broken_templates.contains(written.template.as_str()) || broken_groups.contains(group) {
            continue;
        }
        let places = InFile { tree, group: written.path.clone(), template: &written.template };
        match config.merge(group, None) {
            Ok(merged) => check_merged(problems, config, &merged, &places, &refused),
            Err(list) => {
                for mut problem in list {
                    let (path, found) = places.resolve(&Path::of(&[&problem.path]));
                    problem.path = path.to_string();
                    (problem.line, problem.column) = (found.value.line, found.value.column);
                    problems.push(problem);
                }
            }
        }
    }
}

/// Whether a template, or a part it takes from elsewhere, has a fault of its own.
fn is_broken(problems: &Problems, name: &str, template: &Template) -> bool {
    let certificates = template.files.values().filter_map(|file| match file {
        FileSpec::Certificate { template, .. } => Some(Path::of(&["certificates", template])),
        _ => None,
    });
    let own = [Path::of(&["templates", name]), Path::of(&["defaults"])];
    own.into_iter().chain(certificates).any(|path| problems.has_error_under(&path.to_string()))
}

impl Config {
    /// Checks a merged group that did not come from the file; its problems name fields and have no place. Warnings do
    /// not stand in its way.
    pub(crate) fn check_merged(&self, group: &MergedGroup) -> Result<(), Vec<Problem>> {
        let problems = Problems::default();
        check_merged(&problems, self, group, &Nowhere, &BTreeSet::new());
        let mut list = problems.into_list();
        list.retain(|it| it.severity == Severity::Error);
        if list.is_empty() { Ok(()) } else { Err(list) }
    }
}

/// From a path inside a merged group to where that part was written.
trait Places {
    fn resolve(&self, path: &Path) -> (Path, Found);
    /// Where a var could be added, in words.
    fn layers(&self) -> String;
}

struct Nowhere;

impl Places for Nowhere {
    fn resolve(&self, path: &Path) -> (Path, Found) {
        (path.clone(), Found { n_steps: 0, value: Pos::NOWHERE, key: Pos::NOWHERE })
    }

    fn layers(&self) -> String {
        "vars of the group".to_owned()
    }
}

struct InFile<'a> {
    tree: &'a Node,
    group: Path,
    template: &'a str,
}

impl InFile<'_> {
    fn template(&self) -> Path {
        Path::of(&["templates", self.template])
    }

    /// The highest layer that holds `path`, or as much of it as any does.
    fn highest(&self, path: &Path) -> (Path, Found) {
        let layers = [self.group.clone(), self.template(), Path::of(&["defaults"])];
        let mut best: Option<(usize, Path, Found)> = None;
        for layer in layers {
            let found = locate(self.tree, &layer.join(path));
            let Some(n_below) = found.n_steps.checked_sub(layer.0.len()) else { continue };
            if best.as_ref().is_none_or(|(n_best, ..)| *n_best < n_below) {
                best = Some((n_below, layer.join(path), found));
            }
        }
        best.map_or_else(|| (self.group.join(path), locate(self.tree, &self.group)), |(_, path, found)| (path, found))
    }
}

impl Places for InFile<'_> {
    fn resolve(&self, path: &Path) -> (Path, Found) {
        match path.0.first() {
            Some(Step::Key(key)) if key == "certificates" => (path.clone(), locate(self.tree, path)),
            Some(Step::Key(key)) if key == "files" => {
                let path = self.template().join(path);
                let found = locate(self.tree, &path);
                (path, found)
            }
            Some(Step::Key(key)) if key == "userdata" => {
                let own = self.template().key("userdata");
                let written = locate(self.tree, &own).n_steps == own.0.len();
                spelled(
                    self.tree,
                    if written { self.template().join(path) } else { Path::of(&["defaults"]).join(path) },
                )
            }
            _ => self.highest(path),
        }
    }

    fn layers(&self) -> String {
        format!("vars of defaults, {} or {}", self.template(), self.group)
    }
}

/// The path of userdata as it was spelled: `content` has short forms.
fn spelled(tree: &Node, path: Path) -> (Path, Found) {
    let found = locate(tree, &path);
    if found.n_steps + 1 == path.0.len() && path.0.last() == Some(&Step::Key("content".to_owned())) {
        let mut short = path.clone();
        short.0.pop();
        let short = short.key("templateString");
        let there = locate(tree, &short);
        if there.n_steps == short.0.len() {
            return (short, there);
        }
    }
    (path, found)
}

/// Pass one. Returns the paths of strings that cannot be rendered.
fn check_sites(problems: &Problems, tree: &Node, config: &Config) -> BTreeSet<Path> {
    let mut refused = BTreeSet::new();
    for Site { path, context, source } in sites::of_file(config) {
        let faults = match Program::parse(&source) {
            Err(fault) => vec![fault],
            Ok(program) => {
                let mut faults = program.check_fields(context);
                let images = program.needed_keys().into_iter().filter(|it| it.parent == "Image");
                for image in images.filter(|it| !config.images.contains_key(&it.key)) {
                    let mut fault = Fault::new(RenderErrorKind::MissingKey, 0, String::new());
                    fault.key = Some(format!(".Image.{}", image.key));
                    faults.push(fault);
                }
                faults
            }
        };
        let (path, found) = spelled(tree, path);
        for fault in &faults {
            problems.push(fault_problem(config, fault, &path, found.value, "", ""));
        }
        if !faults.is_empty() {
            refused.insert(path);
        }
    }
    refused
}

fn check_userdata(problems: &Problems, tree: &Node, config: &Config, name: &str, template: &Template) {
    let none = template.userdata.is_none() && config.defaults.userdata.is_none();
    if none && config.server.provider.kind.facts().needs_userdata {
        let path = Path::of(&["templates", name]);
        let message = format!("template {name} has no userdata, so no agent would start on its instances");
        let problem = Problem::new(Code::NoUserdata, path.to_string(), locate(tree, &path).key, message);
        problems.push(problem.with_help("add `userdata` to the template or to `defaults`"));
    }
}

/// A template that only groups of the API may use: what they will set is not known yet.
fn check_unused(problems: &Problems, tree: &Node, config: &Config, name: &str, template: &Template) {
    let places = InFile { tree, group: Path::of(&["templates", name]), template: name };
    let args = merge_args(&merge_args(&Object::new(), &config.defaults.args), &template.args);
    let found = config.server.provider.kind.schema().check_args(&args, ArgsContext { size: None });
    report_args(problems, config, &args, found, &places);
    let all = sites::of_template(name, template)
        .into_iter()
        .chain(sites::of_certificates(config, template))
        .chain(sites::of_defaults(config));
    for site in all {
        let Ok(program) = Program::parse(&site.source) else { continue };
        for needed in program.needed_keys() {
            let known = config.defaults.vars.contains_key(&needed.key) || template.vars.contains_key(&needed.key);
            if needed.parent != "Vars" || known {
                continue;
            }
            let (path, found) = spelled(tree, site.path.clone());
            let key = &needed.key;
            let message = format!("template {name} renders .Vars.{key}, which neither it nor defaults define");
            let problem = Problem::new(Code::UndefinedVar, path.to_string(), found.value, message);
            problems.push(problem.with_help(format!(
                "every group made over the API has to set it, or write {}",
                or_default(&format!(".Vars.{key}"))
            )));
        }
    }
}

fn or_default(key: &str) -> String {
    format!("{{{{ {key} | default \"\" }}}}")
}

/// Pass two, for one group.
fn check_merged(
    problems: &Problems,
    config: &Config,
    group: &MergedGroup,
    places: &dyn Places,
    refused: &BTreeSet<Path>,
) {
    if group.instance_type.is_none() && config.server.provider.kind.facts().needs_instance_type {
        let (path, found) = places.resolve(&Path::of(&["instance_type"]));
        let message = format!("group {} has no instance type", group.group);
        let problem = Problem::new(Code::Missing, path.to_string(), found.value, message);
        problems.push(problem.with_help("set `instance_type` in the group or its template"));
    }
    check_types(problems, config, group, places);
    check_parts(problems, config, group, places);
    let data = sample_data(config, group);
    let renderers = [Context::Userdata, Context::Args, Context::File, Context::Certificate]
        .map(|context| (context, Renderer::new(context, &data)));
    let mut good = true;
    for site in sites::of_group(group) {
        let (path, found) = places.resolve(&site.path);
        if refused.contains(&path) {
            good = false;
            continue;
        }
        let faults = match (Program::parse(&site.source), renderers.iter().find(|(it, _)| *it == site.context)) {
            (Err(fault), _) => vec![fault],
            (Ok(program), Some((_, renderer))) => renderer.probe(&program),
            (Ok(_), None) => Vec::new(),
        };
        good &= faults.is_empty();
        for fault in faults {
            let name = group.group.to_string();
            problems.push(fault_problem(config, &fault, &path, found.value, &name, &places.layers()));
        }
    }
    let rendered = render_args(group, &data).ok().filter(|_| good);
    let (schema, size) = (config.server.provider.kind.schema(), ArgsContext { size: Some(group.size) });
    let found = match &rendered {
        Some(args) => schema.check_rendered_args(args, size),
        None => schema.check_args(&group.args, size),
    };
    report_args(problems, config, &group.args, found, places);
    if good {
        check_results(problems, group, &data, places);
    }
}

/// Everything renders; is it also what its place needs?
fn check_results(problems: &Problems, group: &MergedGroup, data: &crate::render::RenderData, places: &dyn Places) {
    let mut errors = Vec::new();
    if group.userdata.as_ref().is_some_and(|it| it.source == UserdataSource::Inline) {
        errors.extend(render_userdata(group, data).err());
    }
    let mut n_bytes = 0;
    for (name, file) in &group.files {
        if matches!(file, FileSpec::Env { .. } | FileSpec::Json { .. } | FileSpec::String { .. }) {
            match render_file(group, name, data) {
                Ok(bytes) => n_bytes += bytes.len(),
                Err(error) => errors.push(error),
            }
        }
    }
    if MAX_FILES_BYTES < n_bytes {
        let (path, found) = places.resolve(&Path::of(&["files"]));
        let message = format!("the files of group {} are {n_bytes} bytes, more than 64 MiB", group.group);
        problems.push(Problem::new(Code::Limit, path.to_string(), found.value, message));
    }
    for certificate in group.certificates.values() {
        errors.extend(render_certificate(certificate, data).err());
    }
    for error in errors {
        let (path, found) = places.resolve(&error.path);
        let code = if error.kind == RenderErrorKind::Limit { Code::Limit } else { Code::BadValue };
        let message = format!("for group {}: {}", group.group, error.message);
        let mut problem = Problem::new(code, path.to_string(), found.value, message);
        problem.help = error.help;
        problems.push(problem);
    }
}

fn check_types(problems: &Problems, config: &Config, group: &MergedGroup, places: &dyn Places) {
    let schema = config.server.provider.kind.schema();
    let fallbacks = group.instance_type_fallbacks.iter().enumerate();
    let fallbacks = fallbacks.map(|(i, it)| (Path::of(&["instance_type_fallbacks"]).index(i), it));
    let own = group.instance_type.iter().map(|it| (Path::of(&["instance_type"]), it));
    for (path, instance_type) in own.chain(fallbacks) {
        if let Some(message) = schema.check_instance_type(instance_type) {
            let (path, found) = places.resolve(&path);
            problems.push(Problem::new(Code::BadValue, path.to_string(), found.value, message));
        }
    }
}

/// Parts of the group against each other.
fn check_parts(problems: &Problems, config: &Config, group: &MergedGroup, places: &dyn Places) {
    let load_balancers: Vec<&Object> =
        group.load_balancers.iter().filter_map(|key| config.load_balancers.get(key)).map(|it| &it.spec).collect();
    let parts = GroupContext { args: &group.args, subnets: &group.subnets, load_balancers: &load_balancers };
    for SchemaProblem { path, what, help } in config.server.provider.kind.schema().check_group(parts) {
        let (code, message) = match what {
            SchemaFault::Conflict { message } => (Code::Conflict, message),
            SchemaFault::TwoBalancers { message } => (Code::TwoBalancers, message),
            SchemaFault::Warning { message } | SchemaFault::Deprecated { message } => (Code::ProviderWarning, message),
            SchemaFault::BadValue { message } => (Code::BadValue, message),
            SchemaFault::UnknownKey { .. }
            | SchemaFault::ManagedKey { .. }
            | SchemaFault::WrongType { .. }
            | SchemaFault::Missing { .. } => (Code::BadValue, "this does not suit the rest of the group".to_owned()),
        };
        let steps: Vec<&str> = path.iter().map(String::as_str).collect();
        let (path, found) = places.resolve(&Path::of(&steps));
        let mut problem =
            Problem::new(code, path.to_string(), found.value, format!("group {}: {message}", group.group));
        problem.help = help;
        problems.push(problem);
    }
}

/// Reports what a schema found in `args`, which may have been rendered since they were merged.
fn report_args(problems: &Problems, config: &Config, args: &Object, found: Vec<SchemaProblem>, places: &dyn Places) {
    let provider = config.server.provider.kind;
    let root = Value::Object(args.clone());
    for SchemaProblem { path, what, help: own_help } in without_misspelt(found) {
        let key = path.last().map_or("", String::as_str);
        let mut below = value_path(Path::of(&["args"]), &root, &path);
        let mut code = Code::ProviderArgs;
        let (message, help, at_key) = match what {
            SchemaFault::UnknownKey { known } => {
                (format!("provider {provider} has no arg `{key}`"), suggest(key, "known", known), true)
            }
            SchemaFault::ManagedKey { instead } => {
                (format!("arg `{key}` is set by nstance itself"), Some(instead.to_owned()), true)
            }
            SchemaFault::WrongType { expected } => (format!("expected {expected}"), None, false),
            SchemaFault::BadValue { message } => (message, None, false),
            SchemaFault::Missing { key } => {
                let place = if path.is_empty() { "args".to_owned() } else { format!("`{below}`") };
                let help = format!("add \"{key}\" to {place}");
                below = below.key(key);
                (format!("provider {provider} needs arg `{key}`"), Some(help), false)
            }
            SchemaFault::Conflict { message } => {
                code = Code::Conflict;
                (message, None, true)
            }
            SchemaFault::Deprecated { message } => {
                code = Code::DeprecatedArg;
                (message, None, true)
            }
            SchemaFault::Warning { message } | SchemaFault::TwoBalancers { message } => {
                code = Code::ProviderWarning;
                (message, None, true)
            }
        };
        let (path, found) = places.resolve(&below);
        let pos = if at_key { found.key } else { found.value };
        let mut problem = Problem::new(code, path.to_string(), pos, message);
        problem.help = own_help.or(help);
        problems.push(problem);
    }
}

/// A fault of a template as a problem of the config. `group` is empty where the fault is nobody's in particular.
fn fault_problem(config: &Config, fault: &Fault, path: &Path, pos: Pos, group: &str, layers: &str) -> Problem {
    let problem = |code, message: String| Problem::new(code, path.to_string(), pos, message);
    let key = fault.key.as_deref().unwrap_or_default();
    if let Some(image) = key.strip_prefix(".Image.") {
        let mut problem = problem(Code::BadReference, format!("image `{image}` does not exist"));
        problem.help = suggest(image, "images", config.images.keys().map(String::as_str))
            .or_else(|| Some("define it in `images`".to_owned()));
        return problem;
    }
    if fault.kind == RenderErrorKind::MissingKey {
        let (message, what) = match key {
            ".Cluster.FQDN" => {
                (format!("group {group} renders {key}, but no layer defines the var ClusterFQDN"), "ClusterFQDN")
            }
            _ => (format!("group {group} renders {key}, which no layer defines"), "it"),
        };
        let near = fault.nearest.as_ref().map(|it| format!("did you mean {it}? ")).unwrap_or_default();
        return problem(Code::MissingVar, message)
            .with_help(format!("{near}add {what} to {layers}, or write {}", or_default(key)));
    }
    let code = match fault.kind {
        RenderErrorKind::Syntax => Code::TemplateSyntax,
        RenderErrorKind::UnknownField => Code::UnknownField,
        RenderErrorKind::Limit => Code::Limit,
        RenderErrorKind::MissingKey | RenderErrorKind::Failed | RenderErrorKind::Invalid => Code::BadValue,
    };
    let place = if 1 < fault.line { format!("line {} of the template: ", fault.line) } else { String::new() };
    let mut problem = problem(code, format!("{place}{}", fault.message));
    problem.help.clone_from(&fault.help);
    problem
}
