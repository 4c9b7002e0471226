//! What can be said of a change without asking for it. Servers know no rehearsal of their own, so this is what everybody
//! may know: whether names are names, whether the version is the one that was expected, and which templates are in use.

use nstance_core::ids::{GroupKey, SubnetPool};
use nstance_proto::{
    refusal::DOMAIN,
    rpc,
    v1::{GroupStatus, Problem, Problems},
};
use prost::Message as _;
use tonic::{Code, Status};

/// A refusal in the form of the server's own.
fn refusal(code: Code, reason: &str, message: String, problems: Vec<Problem>) -> Status {
    let any = |name: &str, value: Vec<u8>| prost_types::Any { type_url: format!("type.googleapis.com/{name}"), value };
    let info = rpc::ErrorInfo { reason: reason.into(), domain: DOMAIN.into(), metadata: Default::default() };
    let mut details = vec![any("google.rpc.ErrorInfo", info.encode_to_vec())];
    if !problems.is_empty() {
        details.push(any("nstance.v1.Problems", Problems { problems }.encode_to_vec()));
    }
    let status = rpc::Status { code: code as i32, message: message.clone(), details };
    Status::with_details(code, message, status.encode_to_vec().into())
}

/// Names of a group that is to be, or of what one of its instances is to have. What is empty was not said.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Names<'a> {
    pub(crate) group: &'a str,
    pub(crate) template: &'a str,
    pub(crate) subnet_pool: &'a str,
}

impl Names<'_> {
    /// All that is wrong with them.
    pub(crate) fn check(&self) -> Result<(), Status> {
        let mut problems = Vec::new();
        let mut bad = |path: &str, message: String| {
            let (severity, code) = ("error".to_owned(), "bad-value".to_owned());
            problems.push(Problem { severity, code, path: path.into(), message, ..Problem::default() });
        };
        if let Err(error) = self.group.parse::<GroupKey>() {
            bad("group", error.to_string());
        }
        if !self.template.is_empty() && !is_template_name(self.template) {
            let message = format!(
                "`{}` is no valid template name: 1 to 32 of A-Z a-z 0-9 _ -, beginning with a letter or digit",
                self.template.escape_debug()
            );
            bad("template", message);
        }
        if let Some(error) =
            Some(self.subnet_pool).filter(|it| !it.is_empty()).and_then(|it| it.parse::<SubnetPool>().err())
        {
            bad("subnet_pool", error.to_string());
        }
        if problems.is_empty() {
            return Ok(());
        }
        let told: Vec<String> = problems.iter().map(|it| format!("{}: {}", it.path, it.message)).collect();
        Err(refusal(Code::InvalidArgument, "BAD_REQUEST", told.join("; "), problems))
    }
}

/// As the config has it.
fn is_template_name(name: &str) -> bool {
    name.len() <= 32
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|it| it.is_ascii_alphanumeric() || matches!(it, b'_' | b'-'))
}

/// Whether a group has the version that was expected, if one was. One that is not there has `none`.
pub(crate) fn check_etag(key: &str, group: Option<&GroupStatus>, expected: &str) -> Result<(), Status> {
    let found = group.map(|it| it.etag.as_str()).filter(|it| !it.is_empty()).unwrap_or("none");
    if expected.is_empty() || expected == found {
        return Ok(());
    }
    let message = format!("group {key} is at {found}, not {expected}; read it again");
    Err(refusal(Code::Aborted, "ETAG_MISMATCH", message, Vec::new()))
}

/// A group that is not there yet needs a template.
pub(crate) fn check_new(template: &str) -> Result<(), Status> {
    if !template.is_empty() {
        return Ok(());
    }
    let message = "a group needs a template".to_owned();
    let problem = Problem {
        severity: "error".to_owned(),
        code: "missing".to_owned(),
        path: "template".to_owned(),
        message: message.clone(),
        ..Problem::default()
    };
    Err(refusal(Code::InvalidArgument, "BAD_REQUEST", format!("template: {message}"), vec![problem]))
}

/// Whether a group of the shard has this template, which proves that it is there. Nothing proves that it is not: shards do
/// not tell their templates.
pub(crate) fn is_in_use(template: &str, groups: &[GroupStatus]) -> bool {
    groups.iter().any(|it| it.template == template)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nstance_client::ShardError;

    #[test]
    fn names_that_cannot_be_are_told_all_at_once() {
        let names = Names { group: "a_b", template: "-x", subnet_pool: "Q" };
        let error = ShardError::from_status("dev-1", &names.check().unwrap_err());
        let paths: Vec<&str> = error.problems.iter().map(|it| it.path.as_str()).collect();
        assert_eq!((paths, error.reason.as_str()), (vec!["group", "template", "subnet_pool"], "BAD_REQUEST"));
        assert!(Names { group: "web", template: "Tst_1", subnet_pool: "one" }.check().is_ok());
        assert!(Names { group: "web", ..Names::default() }.check().is_ok(), "what is not said stays as it is");
    }

    #[test]
    fn another_version_than_expected_is_a_mismatch() {
        let group = GroupStatus { etag: "3-77".into(), ..GroupStatus::default() };
        assert!(check_etag("web", Some(&group), "").is_ok());
        assert!(check_etag("web", Some(&group), "3-77").is_ok());
        let error = ShardError::from_status("dev-1", &check_etag("web", Some(&group), "2-5").unwrap_err());
        assert_eq!((error.code, error.reason.as_str()), (Code::Aborted, "ETAG_MISMATCH"));
        assert!(check_etag("web", None, "none").is_ok());
        assert!(check_etag("web", None, "3-77").is_err());
    }
}
