//! Evaluation of a template.
//!
//! gotmpl can evaluate too, but to it a missing key is either an error on the spot or a nil that prints as
//! `<no value>`. Ours is a third thing, which may flow into `default` and a few others and is an error anywhere else,
//! with its full path. So the tree is gotmpl's and the walk is ours, with a budget for steps, depth and output.

use std::rc::Rc;

use gotmpl::{
    Value,
    parse::{BranchNode, CommandNode, Expr, ListNode, Node, Number, PipeNode, SmolStr},
};

use super::{
    data::{Absent, Context, absent},
    fault::{Fault, RenderErrorKind},
    funcs::{self, MAX_TEXT},
    program::{Program, function_of},
};
use crate::problems::nearest;

/// Actions and expressions of one rendering; far more than any real template, and less than a second.
const MAX_STEPS: usize = 1_000_000;

/// Nested blocks and templates; one that calls itself ends here.
const MAX_DEPTH: usize = 100;

/// A value on its way through the template.
#[derive(Clone)]
enum Got {
    /// With its path from the root, if it has one.
    Value(Value, Option<Rc<str>>),
    Missing(Rc<Missing>),
}

struct Missing {
    /// `.Vars.NodeLabel`
    path: String,
    nearest: Option<String>,
}

impl Got {
    fn plain(value: Value) -> Self {
        Self::Value(value, None)
    }

    fn is_true(&self) -> bool {
        match self {
            Self::Value(value, _) => value.is_truthy(),
            Self::Missing(_) => false,
        }
    }
}

/// How a walk of a list ended.
enum Flow {
    Next,
    Break,
    Continue,
}

/// Renders `program`; the first fault ends it.
pub(super) fn render(program: &Program, data: &Value, context: Context) -> Result<String, Fault> {
    let mut eval = Eval::new(program, data, context);
    eval.run(data)?;
    Ok(eval.out)
}

/// Renders `program` to find every missing key at once: each reads as an empty string, and is returned.
pub(super) fn probe(program: &Program, data: &Value, context: Context) -> (Result<String, Fault>, Vec<Fault>) {
    let mut eval = Eval::new(program, data, context);
    eval.missing = Some(Vec::new());
    let result = eval.run(data);
    let missing = eval.missing.take().unwrap_or_default();
    (result.map(|()| eval.out), missing)
}

struct Eval<'a> {
    program: &'a Program,
    context: Context,
    vars: Vec<(SmolStr, Got)>,
    out: String,
    n_steps: usize,
    depth: usize,
    line: usize,
    /// While probing: the missing keys so far.
    missing: Option<Vec<Fault>>,
}

impl<'a> Eval<'a> {
    fn new(program: &'a Program, data: &Value, context: Context) -> Self {
        let root = Got::Value(data.clone(), Some("".into()));
        Self {
            program,
            context,
            vars: vec![("$".into(), root)],
            out: String::new(),
            n_steps: 0,
            depth: 0,
            line: 1,
            missing: None,
        }
    }

    fn run(&mut self, data: &Value) -> Result<(), Fault> {
        let program = self.program;
        self.list(&program.tree, &Got::Value(data.clone(), Some("".into()))).map(|_| ())
    }

    fn limit(&self, message: String) -> Fault {
        Fault::new(RenderErrorKind::Limit, self.line, message)
    }

    fn step(&mut self, n_steps: usize) -> Result<(), Fault> {
        self.n_steps += n_steps;
        if MAX_STEPS < self.n_steps {
            return Err(self.limit(format!("the template takes more than {MAX_STEPS} steps")));
        }
        Ok(())
    }

    fn write(&mut self, text: &str) -> Result<(), Fault> {
        if MAX_TEXT < self.out.len() + text.len() {
            return Err(self.limit(format!("the output is longer than {MAX_TEXT} bytes")));
        }
        self.out.push_str(text);
        Ok(())
    }

    /// A missing value where one is needed.
    fn fault_of(&self, missing: &Missing) -> Fault {
        let mut message = format!("{}: no such key", missing.path);
        if let Some(near) = &missing.nearest {
            message.push_str(&format!(", did you mean {near}?"));
        }
        let mut fault = Fault::new(RenderErrorKind::MissingKey, self.line, message);
        fault.key = Some(missing.path.clone());
        fault.nearest.clone_from(&missing.nearest);
        fault
    }

    /// The value itself, where nothing else will do.
    fn demand(&mut self, got: Got) -> Result<Value, Fault> {
        let missing = match got {
            Got::Value(value, _) => return Ok(value),
            Got::Missing(missing) => missing,
        };
        let fault = self.fault_of(&missing);
        let Some(found) = &mut self.missing else { return Err(fault) };
        if !found.iter().any(|it| it.key == fault.key) {
            found.push(fault);
        }
        Ok(Value::String("".into()))
    }

    fn list(&mut self, list: &ListNode, dot: &Got) -> Result<Flow, Fault> {
        if MAX_DEPTH <= self.depth {
            return Err(self.limit(format!("the template is nested deeper than {MAX_DEPTH}")));
        }
        self.depth += 1;
        let n_vars = self.vars.len();
        let mut flow = Flow::Next;
        for node in &list.nodes {
            flow = self.node(node, dot)?;
            if !matches!(flow, Flow::Next) {
                break;
            }
        }
        self.vars.truncate(n_vars);
        self.depth -= 1;
        Ok(flow)
    }

    fn node(&mut self, node: &Node, dot: &Got) -> Result<Flow, Fault> {
        self.step(1)?;
        match node {
            Node::Text(text) => self.write(&text.text)?,
            Node::Action(action) => {
                self.line = action.pos.line;
                let got = self.pipe(&action.pipe, dot)?;
                if action.pipe.decl.is_empty() {
                    let value = self.demand(got)?;
                    self.print(&value)?;
                }
            }
            Node::If(branch) | Node::With(branch) => {
                return self.branch(branch, dot, matches!(node, Node::With(_)));
            }
            Node::Range(branch) => return self.range(branch, dot),
            Node::Template(template) => {
                self.line = template.pos.line;
                let given = match &template.pipe {
                    Some(pipe) => {
                        let got = self.pipe(pipe, dot)?;
                        match got {
                            Got::Missing(_) => Got::plain(self.demand(got)?),
                            given => given,
                        }
                    }
                    None => Got::plain(Value::Nil),
                };
                let program = self.program;
                let Some(body) = program.defines.get(&template.name) else {
                    return Err(Fault::failed(
                        self.line,
                        format!("template {:?} is not defined", template.name.as_str()),
                    ));
                };
                // A named template sees what it is given and nothing of its caller.
                let outer = std::mem::replace(&mut self.vars, vec![("$".into(), given.clone())]);
                self.list(body, &given)?;
                self.vars = outer;
            }
            Node::List(inner) => return self.list(inner, dot),
            Node::Define(_) => {}
            Node::Break(_) => return Ok(Flow::Break),
            Node::Continue(_) => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn print(&mut self, value: &Value) -> Result<(), Fault> {
        match value {
            Value::String(text) => self.write(text),
            Value::Nil => Err(Fault::failed(self.line, "there is no value to print")),
            other => {
                let text =
                    funcs::builtin("print", std::slice::from_ref(other)).map_err(|it| Fault::failed(self.line, it))?;
                self.write(&text)
            }
        }
    }

    fn branch(&mut self, branch: &BranchNode, dot: &Got, with: bool) -> Result<Flow, Fault> {
        self.line = branch.pos.line;
        let n_vars = self.vars.len();
        let got = self.pipe_value(&branch.pipe, dot)?;
        // A missing value may be the condition, and so may the variable that holds it: it lives no longer than this.
        if let [name] = branch.pipe.decl.as_slice() {
            self.bind(name, got.clone(), branch.pipe.is_assign);
        }
        let flow = if got.is_true() {
            self.list(&branch.body, if with { &got } else { dot })?
        } else {
            match &branch.else_body {
                Some(other) => self.list(other, dot)?,
                None => Flow::Next,
            }
        };
        self.vars.truncate(n_vars);
        Ok(flow)
    }

    fn range(&mut self, branch: &BranchNode, dot: &Got) -> Result<Flow, Fault> {
        self.line = branch.pos.line;
        let got = self.pipe_value(&branch.pipe, dot)?;
        let path = match &got {
            Got::Value(_, path) => path.clone(),
            Got::Missing(_) => None,
        };
        let value = self.demand(got)?;
        let n_vars = self.vars.len();
        let mut n_rounds = 0;
        // Rounds are made one by one: `range 1000000000` is stopped by its steps, not by memory.
        for i in 0.. {
            let Some((key, item)) = self.round(&value, i, path.as_deref())? else { break };
            n_rounds += 1;
            self.step(1)?;
            let names: &[SmolStr] = &branch.pipe.decl;
            match names {
                [] => {}
                [name] => self.bind(name, item.clone(), branch.pipe.is_assign),
                [first, second, ..] => {
                    if matches!(value, Value::Int(_) | Value::Uint(_)) {
                        return Err(Fault::failed(self.line, "a number is ranged over with one variable only"));
                    }
                    self.bind(first, Got::plain(key), branch.pipe.is_assign);
                    self.bind(second, item.clone(), branch.pipe.is_assign);
                }
            }
            let flow = self.list(&branch.body, &item)?;
            self.vars.truncate(n_vars);
            if matches!(flow, Flow::Break) {
                break;
            }
        }
        match &branch.else_body {
            Some(other) if n_rounds == 0 => self.list(other, dot),
            _ => Ok(Flow::Next),
        }
    }

    /// Key and item of round `i`, if there is one.
    fn round(&self, value: &Value, i: usize, path: Option<&str>) -> Result<Option<(Value, Got)>, Fault> {
        let index = Value::Int(i64::try_from(i).unwrap_or(i64::MAX));
        Ok(match value {
            Value::List(items) => items.get(i).map(|item| (index, Got::plain(item.clone()))),
            Value::Map(entries) => entries.iter().nth(i).map(|(key, item)| {
                let path = path.map(|path| join(path, key).into());
                (Value::String(key.clone()), Got::Value(item.clone(), path))
            }),
            Value::Int(n) => (i64::try_from(i).is_ok_and(|i| i < *n)).then(|| (index.clone(), Got::plain(index))),
            // While probing, a missing list reads as an empty string.
            Value::String(text) if text.is_empty() && self.missing.is_some() => None,
            other => return Err(Fault::failed(self.line, format!("range cannot go over {}", funcs::a(other)))),
        })
    }

    fn bind(&mut self, name: &SmolStr, got: Got, assign: bool) {
        match self.vars.iter_mut().rev().find(|(it, _)| assign && it == name) {
            Some((_, old)) => *old = got,
            None => self.vars.push((name.clone(), got)),
        }
    }

    fn pipe(&mut self, pipe: &PipeNode, dot: &Got) -> Result<Got, Fault> {
        let got = self.pipe_value(pipe, dot)?;
        let [name] = pipe.decl.as_slice() else { return Ok(got) };
        // A variable that might be missing would move the fault away from its cause.
        let got = match got {
            Got::Missing(_) => Got::plain(self.demand(got)?),
            got => got,
        };
        self.bind(name, got.clone(), pipe.is_assign);
        Ok(got)
    }

    fn pipe_value(&mut self, pipe: &PipeNode, dot: &Got) -> Result<Got, Fault> {
        let mut piped = None;
        for command in &pipe.commands {
            piped = Some(self.command(command, dot, piped)?);
        }
        piped.ok_or_else(|| Fault::failed(self.line, "an empty action"))
    }

    fn command(&mut self, command: &CommandNode, dot: &Got, piped: Option<Got>) -> Result<Got, Fault> {
        self.step(1)?;
        self.line = command.pos.line.max(1);
        let Some(first) = command.args.first() else { return Err(Fault::failed(self.line, "an empty command")) };
        let Some(name) = function_of(command) else {
            if piped.is_some() || 1 < command.args.len() {
                return Err(Fault::failed(self.line, "a value is given an argument, but is no function"));
            }
            if matches!(first, Expr::Nil(_)) {
                return Err(Fault::failed(self.line, "nil is no command"));
            }
            return self.expr(first, dot);
        };
        let got = match name {
            "and" | "or" => self.short_circuit(name, &command.args[1..], dot, piped)?,
            _ => {
                let mut args = Vec::with_capacity(command.args.len());
                for arg in &command.args[1..] {
                    args.push(self.expr(arg, dot)?);
                }
                args.extend(piped);
                self.call(name, args)?
            }
        };
        match first {
            Expr::Chain(_, _, fields) => self.fields(got, fields),
            _ => Ok(got),
        }
    }

    /// `and` and `or` evaluate no further than they must, as in Go.
    fn short_circuit(&mut self, name: &str, args: &[Expr], dot: &Got, piped: Option<Got>) -> Result<Got, Fault> {
        let stop = name == "or";
        let mut last = None;
        for arg in args {
            let got = self.expr(arg, dot)?;
            if got.is_true() == stop {
                return Ok(got);
            }
            last = Some(got);
        }
        piped.or(last).ok_or_else(|| Fault::failed(self.line, format!("{name} takes at least 1 argument")))
    }

    fn call(&mut self, name: &str, args: Vec<Got>) -> Result<Got, Fault> {
        let failed = |eval: &Self, message: String| {
            let kind =
                if message.contains("is longer than") { RenderErrorKind::Limit } else { RenderErrorKind::Failed };
            Fault::new(kind, eval.line, message)
        };
        match (name, args.as_slice()) {
            ("default", [fallback, value]) => {
                let empty = match value {
                    Got::Missing(_) | Got::Value(Value::Nil, _) => true,
                    Got::Value(value, _) => value.as_str() == Some(""),
                };
                return Ok(if empty { fallback.clone() } else { value.clone() });
            }
            ("required", [message, value]) => {
                let given = match value {
                    Got::Missing(_) | Got::Value(Value::Nil, _) => None,
                    Got::Value(it, _) if it.as_str() == Some("") => None,
                    given => Some(given.clone()),
                };
                let message = self.demand(message.clone())?;
                let message = message.as_str().unwrap_or("a value is required").to_owned();
                return given.ok_or_else(|| failed(self, message));
            }
            ("hasKey", [map, key]) => {
                let key = self.demand(key.clone())?;
                let Some(key) = key.as_str() else {
                    return Err(failed(self, "hasKey: the key must be a string".to_owned()));
                };
                return match map {
                    Got::Missing(_) => Ok(Got::plain(Value::Bool(false))),
                    Got::Value(Value::Map(entries), _) => Ok(Got::plain(Value::Bool(entries.contains_key(key)))),
                    Got::Value(other, _) => {
                        Err(failed(self, format!("hasKey: expected a map, found {}", funcs::a(other))))
                    }
                };
            }
            ("not", [value]) => return Ok(Got::plain(Value::Bool(!value.is_true()))),
            ("default" | "required" | "hasKey", _) => {
                return Err(failed(self, format!("{name} takes 2 arguments, not {}", args.len())));
            }
            ("not", _) => return Err(failed(self, format!("not takes 1 argument, not {}", args.len()))),
            ("index", _) => return self.index(args),
            _ => {}
        }
        let mut values = Vec::with_capacity(args.len());
        for arg in args {
            values.push(self.demand(arg)?);
        }
        let value = funcs::call(name, &values).map_err(|message| failed(self, message))?;
        // Long texts cost what they weigh, or a loop over one would be cheap in steps and dear in time.
        const BYTES_PER_STEP: usize = 256;
        self.step(value.len().unwrap_or(0) / BYTES_PER_STEP)?;
        Ok(Got::plain(value))
    }

    /// `index .Vars "a"` is `.Vars.a`; lists and strings go by number.
    fn index(&mut self, args: Vec<Got>) -> Result<Got, Fault> {
        let mut args = args.into_iter();
        let Some(mut got) = args.next() else { return Err(Fault::failed(self.line, "index takes a value and a key")) };
        for key in args {
            let key = self.demand(key)?;
            got = match (&got, key.as_str()) {
                (Got::Missing(_), _) => got,
                (Got::Value(Value::Map(_), _), Some(key)) => self.field(&got, key)?,
                (Got::Value(value, _), _) => {
                    let item = value.index(&key).map_err(|it| Fault::failed(self.line, format!("index: {it}")))?;
                    Got::plain(item)
                }
            };
        }
        Ok(got)
    }

    fn fields(&mut self, got: Got, fields: &[SmolStr]) -> Result<Got, Fault> {
        fields.iter().try_fold(got, |got, field| self.field(&got, field))
    }

    fn field(&mut self, got: &Got, name: &str) -> Result<Got, Fault> {
        let (value, path) = match got {
            Got::Missing(missing) => return Ok(Got::Missing(missing.clone())),
            Got::Value(value, path) => (value, path.as_deref()),
        };
        let Value::Map(entries) = value else {
            let message = format!("there is no field {name} in {}", funcs::a(value));
            return Err(Fault::failed(self.line, message));
        };
        if let Some(found) = entries.get(name) {
            return Ok(Got::Value(found.clone(), path.map(|path| join(path, name).into())));
        }
        let known = entries.keys().map(|key| &**key);
        match absent(self.context, path.unwrap_or("Vars"), name, known.clone(), self.line) {
            Absent::Fault(fault) => Err(fault),
            Absent::Unset => Ok(Got::Missing(Rc::new(Missing {
                path: format!(".{}", join(path.unwrap_or_default(), name)),
                nearest: nearest(name, known).map(str::to_owned),
            }))),
        }
    }

    fn expr(&mut self, expr: &Expr, dot: &Got) -> Result<Got, Fault> {
        self.step(1)?;
        match expr {
            Expr::Dot(_) => Ok(dot.clone()),
            Expr::Field(_, fields) => self.fields(dot.clone(), fields),
            Expr::Variable(_, name, fields) => {
                let got = self.vars.iter().rev().find(|(it, _)| it == name).map(|(_, got)| got.clone());
                let got = got.ok_or_else(|| Fault::failed(self.line, format!("variable {name} is not defined")))?;
                self.fields(got, fields)
            }
            Expr::String(_, text) => Ok(Got::plain(Value::String(text.clone()))),
            Expr::Number(_, Number::Int(it)) => Ok(Got::plain(Value::Int(*it))),
            Expr::Number(_, Number::Float(it)) => Ok(Got::plain(Value::Float(*it))),
            Expr::Number(_, Number::Uint(it)) => {
                Err(Fault::failed(self.line, format!("{it} does not fit into an integer")))
            }
            Expr::Bool(_, it) => Ok(Got::plain(Value::Bool(*it))),
            Expr::Nil(_) => Ok(Got::plain(Value::Nil)),
            Expr::Pipe(_, pipe) => self.pipe(pipe, dot),
            Expr::Identifier(_, name) => self.call(name, Vec::new()),
            Expr::Chain(_, inner, fields) => {
                let got = self.expr(inner, dot)?;
                self.fields(got, fields)
            }
        }
    }
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") }
}
