//! What can go wrong with one template, before anybody knows where that template stands.

/// The kinds that callers treat differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RenderErrorKind {
    /// The template cannot be read.
    Syntax,
    /// It asks for a field that does not exist, or not here.
    UnknownField,
    /// It asks for a variable, image or other key that is not set.
    MissingKey,
    /// A function refused its arguments.
    Failed,
    /// It produces too much, or does not end.
    Limit,
    /// The text it produced is not what is needed in that place.
    Invalid,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: RenderErrorKind,
    /// 1-based line inside the template; 0 if unknown.
    pub(crate) line: usize,
    pub(crate) message: String,
    pub(crate) help: Option<String>,
    /// The missing key with its leading dot, for [`RenderErrorKind::MissingKey`].
    pub(crate) key: Option<String>,
    /// The nearest key there is.
    pub(crate) nearest: Option<String>,
}

impl Fault {
    pub(crate) fn new(kind: RenderErrorKind, line: usize, message: impl Into<String>) -> Self {
        Self { kind, line, message: message.into(), help: None, key: None, nearest: None }
    }

    pub(super) fn syntax(line: usize, message: String) -> Self {
        Self::new(RenderErrorKind::Syntax, line, message)
    }

    pub(super) fn failed(line: usize, message: impl Into<String>) -> Self {
        Self::new(RenderErrorKind::Failed, line, message)
    }

    pub(super) fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}
