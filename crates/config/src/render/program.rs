//! A template that was read, and what can be said about it without any data.
//!
//! The parser is gotmpl's; what it lets pass and Go does not is caught here, so that a fault shows when the config is
//! loaded and not when the first instance is made.

use std::collections::{BTreeMap, BTreeSet};

use gotmpl::parse::{BranchNode, CommandNode, Expr, ListNode, Node, Parser, PipeNode, SmolStr};

use super::{
    data::{Absent, Context, absent, fields_of},
    fault::Fault,
    funcs, scan,
};
use crate::problems::suggest;

pub(crate) struct Program {
    pub(super) tree: ListNode,
    pub(super) defines: BTreeMap<SmolStr, ListNode>,
}

impl Program {
    pub(crate) fn parse(source: &str) -> Result<Self, Fault> {
        let source = scan::scan(source)?;
        let parsed = Parser::new(&source, "{{", "}}").and_then(Parser::parse);
        let (tree, list) = parsed.map_err(|error| match error {
            gotmpl::TemplateError::Parse { line, message, .. } | gotmpl::TemplateError::Lex { line, message, .. } => {
                Fault::syntax(line, message)
            }
            other => Fault::syntax(0, other.to_string()),
        })?;
        let mut defines: BTreeMap<SmolStr, ListNode> = BTreeMap::new();
        for define in list {
            if defines.insert(define.name.clone(), define.body).is_some() {
                let message = format!("template {:?} is defined twice", define.name.as_str());
                return Err(Fault::syntax(define.pos.line, message));
            }
        }
        let program = Self { tree, defines };
        let mut walk = Walk { program: &program, names: NamesOnly, faults: Vec::new(), vars: Vec::new() };
        walk.whole();
        match walk.faults.into_iter().next() {
            Some(fault) => Err(fault),
            None => Ok(program),
        }
    }

    /// Fields that cannot exist in this context, on whatever branch they stand.
    pub(crate) fn check_fields(&self, context: Context) -> Vec<Fault> {
        let names = FieldsOf { context, faults: Vec::new() };
        let mut walk = Walk { program: self, names, faults: Vec::new(), vars: Vec::new() };
        walk.whole();
        walk.names.faults
    }

    /// Keys below `.Vars`, `.Image` and the like that are used where a missing one would be an error.
    pub(crate) fn needed_keys(&self) -> Vec<NeededKey> {
        let mut walk = Walk { program: self, names: Needs::default(), faults: Vec::new(), vars: Vec::new() };
        walk.whole();
        walk.names.keys
    }

    /// Every path that may be read, on whatever branch: what a named template or a round of `range` is given counts as
    /// read where it is given.
    pub(super) fn read_paths(&self) -> BTreeSet<String> {
        let mut walk = Walk { program: self, names: Reads::default(), faults: Vec::new(), vars: Vec::new() };
        walk.whole();
        walk.names.paths
    }
}

/// A key that a template cannot do without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NeededKey {
    /// `Vars` or `Image`.
    pub(crate) parent: &'static str,
    pub(crate) key: String,
}

/// Where a value comes from, as far as it can be told without data: `Some("Instance.Subnet")`, or unknown.
type Origin = Option<String>;

/// What a walk is for.
trait Visit {
    /// A field path from the root was met. `guarded`: a missing value may flow on from here.
    fn path(&mut self, path: &str, guarded: bool, line: usize);
    /// A value of this path is taken as a whole, without a name: `.`, `$` or a variable.
    fn whole(&mut self, _path: &str) {}
    /// The body of an `if` or `with` follows, whose condition named these paths; false when it ends.
    fn enter(&mut self, _paths: &[String]) {}
    fn leave(&mut self, _n_paths: usize) {}
}

struct NamesOnly;

impl Visit for NamesOnly {
    fn path(&mut self, _: &str, _: bool, _: usize) {}
}

struct FieldsOf {
    context: Context,
    faults: Vec<Fault>,
}

impl Visit for FieldsOf {
    fn path(&mut self, path: &str, _: bool, line: usize) {
        let mut parent = String::new();
        for step in path.split('.') {
            let Some(known) = fields_of(self.context, &parent) else { return };
            if !known.iter().any(|it| it == step) {
                if let Absent::Fault(fault) =
                    absent(self.context, &parent, step, known.iter().map(String::as_str), line)
                    && !self.faults.contains(&fault)
                {
                    self.faults.push(fault);
                }
                return;
            }
            if !parent.is_empty() {
                parent.push('.');
            }
            parent.push_str(step);
        }
    }
}

#[derive(Default)]
struct Needs {
    keys: Vec<NeededKey>,
    /// Paths that an enclosing condition has asked for: below it they are there.
    asked: Vec<String>,
}

impl Visit for Needs {
    fn path(&mut self, path: &str, guarded: bool, _: usize) {
        if guarded || self.asked.iter().any(|it| it == path) {
            return;
        }
        let (parent, key) = match path.split_once('.') {
            Some(("Vars", key)) => ("Vars", key),
            Some(("Image", key)) => ("Image", key),
            Some(("Cluster", "FQDN")) => ("Vars", "ClusterFQDN"),
            _ => return,
        };
        let key = NeededKey { parent, key: key.split('.').next().unwrap_or(key).to_owned() };
        if !self.keys.contains(&key) {
            self.keys.push(key);
        }
    }

    fn enter(&mut self, paths: &[String]) {
        self.asked.extend_from_slice(paths);
    }

    fn leave(&mut self, n_paths: usize) {
        self.asked.truncate(self.asked.len() - n_paths);
    }
}

#[derive(Default)]
struct Reads {
    paths: BTreeSet<String>,
}

impl Visit for Reads {
    fn path(&mut self, path: &str, _: bool, _: usize) {
        self.paths.insert(path.to_owned());
    }

    fn whole(&mut self, path: &str) {
        self.paths.insert(path.to_owned());
    }
}

struct Walk<'a, V> {
    program: &'a Program,
    names: V,
    faults: Vec<Fault>,
    /// Variables in scope with the origin of their value.
    vars: Vec<(SmolStr, Origin)>,
}

impl<V: Visit> Walk<'_, V> {
    fn whole(&mut self) {
        let program = self.program;
        self.vars = vec![("$".into(), Some(String::new()))];
        self.list(&program.tree, &Some(String::new()));
        for body in program.defines.values() {
            // What a named template is given is known only where it is called.
            self.vars = vec![("$".into(), None)];
            self.list(body, &None);
        }
    }

    fn fault(&mut self, line: usize, message: String, help: Option<String>) {
        let mut fault = Fault::syntax(line, message);
        fault.help = help;
        self.faults.push(fault);
    }

    fn list(&mut self, list: &ListNode, dot: &Origin) {
        for node in &list.nodes {
            match node {
                Node::Action(action) => {
                    self.pipe(&action.pipe, dot, false);
                }
                Node::If(branch) => {
                    self.branch(branch, dot, |_, _| dot.clone());
                }
                Node::With(branch) => self.branch(branch, dot, |_, origin| origin),
                Node::Range(branch) => self.range(branch, dot),
                Node::Template(template) => {
                    if !self.program.defines.contains_key(&template.name) {
                        let known = self.program.defines.keys().map(SmolStr::as_str);
                        let help = suggest(&template.name, "defined", known);
                        self.fault(
                            template.pos.line,
                            format!("template {:?} is not defined", template.name.as_str()),
                            help,
                        );
                    }
                    if let Some(pipe) = &template.pipe {
                        self.pipe(pipe, dot, false);
                    }
                }
                Node::List(inner) => self.list(inner, dot),
                Node::Text(_) | Node::Define(_) | Node::Break(_) | Node::Continue(_) => {}
            }
        }
    }

    fn branch(&mut self, branch: &BranchNode, dot: &Origin, body_dot: impl Fn(&Self, Origin) -> Origin) {
        let n_vars = self.vars.len();
        let origin = self.pipe(&branch.pipe, dot, true);
        let mut asked = Vec::new();
        paths_in(&branch.pipe, dot, &mut asked);
        self.names.enter(&asked);
        let body_dot = body_dot(self, origin);
        let n_inner = self.vars.len();
        self.list(&branch.body, &body_dot);
        self.vars.truncate(n_inner);
        self.names.leave(asked.len());
        if let Some(other) = &branch.else_body {
            self.list(other, dot);
        }
        self.vars.truncate(n_vars);
    }

    fn range(&mut self, branch: &BranchNode, dot: &Origin) {
        let n_vars = self.vars.len();
        // A range declares its variables for each round, with values nobody knows here.
        let bare = PipeNode { decl: Vec::new(), ..branch.pipe.clone() };
        self.pipe(&bare, dot, false);
        for name in &branch.pipe.decl {
            if branch.pipe.is_assign {
                self.assign(name, None, branch.pos.line);
            } else {
                self.vars.push((name.clone(), None));
            }
        }
        let n_inner = self.vars.len();
        self.list(&branch.body, &None);
        self.vars.truncate(n_inner);
        if let Some(other) = &branch.else_body {
            self.list(other, dot);
        }
        self.vars.truncate(n_vars);
    }

    fn assign(&mut self, name: &SmolStr, origin: Origin, line: usize) {
        match self.vars.iter_mut().rev().find(|(it, _)| it == name) {
            // A variable that is set on one branch only has two origins.
            Some((_, old)) => *old = if *old == origin { origin } else { None },
            None => self.fault(line, format!("variable {name} is not defined"), Some(format!("write {name} := …"))),
        }
    }

    fn pipe(&mut self, pipe: &PipeNode, dot: &Origin, condition: bool) -> Origin {
        let n_commands = pipe.commands.len();
        let mut origin = None;
        for (i, command) in pipe.commands.iter().enumerate() {
            // The value flows into the next command, or into the condition.
            let guarded = match pipe.commands.get(i + 1) {
                Some(next) => function_of(next).is_some_and(funcs::takes_missing),
                None => condition,
            };
            if 0 < i && function_of(command).is_none() {
                self.fault(
                    command.pos.line,
                    "a value cannot be piped into something that is no function".to_owned(),
                    None,
                );
            }
            origin = self.command(command, dot, guarded);
        }
        let origin = if n_commands == 1 { origin } else { None };
        for name in &pipe.decl {
            if pipe.is_assign {
                self.assign(name, origin.clone(), pipe.pos.line);
            } else {
                self.vars.push((name.clone(), origin.clone()));
            }
        }
        origin
    }

    fn command(&mut self, command: &CommandNode, dot: &Origin, guarded: bool) -> Origin {
        let Some(name) = function_of(command) else {
            if 1 < command.args.len() {
                self.fault(command.pos.line, "a value is followed by another".to_owned(), None);
            }
            return command.args.first().and_then(|first| self.expr(first, dot, guarded));
        };
        self.function(name, command.pos.line);
        // `index .Vars "k"` is `.Vars.k`, and what it does not find flows on like it.
        if name == "index"
            && let [_, container, Expr::String(_, key)] = command.args.as_slice()
            && let Some(path) = origin_of(container, dot, &self.vars)
        {
            let path = join(&path, key);
            self.names.path(&path, guarded, command.pos.line);
            return Some(path);
        }
        // `and` and `or` hand a missing value on; the others that take one end it.
        let guards = match name {
            "and" | "or" => guarded,
            other => funcs::takes_missing(other),
        };
        let n_args = command.args.len().saturating_sub(1);
        for (i, arg) in command.args[1..].iter().enumerate() {
            // A missing argument of `or` is passed over while another follows.
            let followed = name == "or" && i + 1 < n_args;
            self.expr(arg, dot, guards || followed);
        }
        None
    }

    fn function(&mut self, name: &str, line: usize) {
        if name == "call" {
            self.fault(line, "`call` is not available: there are no function values".to_owned(), None);
        } else if !funcs::is_known(name) {
            let help = suggest(name, "functions", funcs::NAMES.iter().copied());
            self.fault(line, format!("function `{name}` does not exist"), help);
        }
    }

    fn expr(&mut self, expr: &Expr, dot: &Origin, guarded: bool) -> Origin {
        let line = expr.pos().line;
        match expr {
            Expr::Pipe(_, pipe) => self.pipe(pipe, dot, guarded),
            Expr::Chain(_, inner, fields) => {
                let origin = self.expr(inner, dot, true);
                let path = origin.map(|it| fields.iter().fold(it, |path, field| join(&path, field)))?;
                self.names.path(&path, guarded, line);
                Some(path)
            }
            Expr::Identifier(_, name) => {
                self.function(name, line);
                None
            }
            Expr::Variable(_, name, _) if !self.vars.iter().any(|(it, _)| it == name) => {
                self.fault(line, format!("variable {name} is not defined"), None);
                None
            }
            Expr::Dot(_) | Expr::Field(..) | Expr::Variable(..) => {
                let origin = origin_of(expr, dot, &self.vars);
                let named =
                    matches!(expr, Expr::Field(..)) || matches!(expr, Expr::Variable(_, _, it) if !it.is_empty());
                match &origin {
                    Some(path) if named => self.names.path(path, guarded, line),
                    Some(path) => self.names.whole(path),
                    None => {}
                }
                origin
            }
            Expr::String(..) | Expr::Number(..) | Expr::Bool(..) | Expr::Nil(_) => None,
        }
    }
}

/// The function a command calls, if it calls one.
pub(super) fn function_of(command: &CommandNode) -> Option<&str> {
    match command.args.first()? {
        Expr::Identifier(_, name) => Some(name),
        Expr::Chain(_, inner, _) => match inner.as_ref() {
            Expr::Identifier(_, name) => Some(name),
            _ => None,
        },
        _ => None,
    }
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") }
}

fn origin_of(expr: &Expr, dot: &Origin, vars: &[(SmolStr, Origin)]) -> Origin {
    let (base, fields): (&Origin, &[SmolStr]) = match expr {
        Expr::Dot(_) => (dot, &[]),
        Expr::Field(_, fields) => (dot, fields),
        Expr::Variable(_, name, fields) => (&vars.iter().rev().find(|(it, _)| it == name)?.1, fields),
        _ => return None,
    };
    base.as_ref().map(|base| fields.iter().fold(base.clone(), |path, field| join(&path, field)))
}

/// Every field path that a condition names, however deep.
fn paths_in(pipe: &PipeNode, dot: &Origin, out: &mut Vec<String>) {
    for command in &pipe.commands {
        // `hasKey .Vars "x"` and `index .Vars "x"` ask for `.Vars.x`.
        if matches!(function_of(command), Some("hasKey" | "index"))
            && let [_, container, Expr::String(_, key)] = command.args.as_slice()
            && let Some(path) = origin_of(container, dot, &[("$".into(), Some(String::new()))])
        {
            out.push(join(&path, key));
        }
        for arg in &command.args {
            match arg {
                Expr::Pipe(_, inner) => paths_in(inner, dot, out),
                Expr::Field(..) | Expr::Variable(..) => {
                    out.extend(origin_of(arg, dot, &[("$".into(), Some(String::new()))]));
                }
                _ => {}
            }
        }
    }
}
