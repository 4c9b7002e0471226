//! `refresh`: the leaders take the configs as they lie in the store now, edited by hand or not.

use std::process::ExitCode;

use anyhow::Context;
use nstance_proto::v1::RefreshConfigResponse;

use crate::{api, cli::RefreshArgs, layout::Layout, records};

pub(crate) async fn run(layout: &Layout, args: &RefreshArgs) -> anyhow::Result<ExitCode> {
    let mut failed = false;
    for shard in records::shape(layout).shards() {
        let asked = async {
            let mut client = api::connect(layout, &shard).await?;
            client.refresh(args.confirm_removals).await.context("the config is not taken")
        };
        match asked.await {
            Ok(answer) => say!("{shard}: {}", told(&answer)),
            Err(error) => {
                // One shard that does not answer must not hide the others.
                say!("{shard}: {error:#}");
                failed = true;
            }
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn told(answer: &RefreshConfigResponse) -> String {
    if !answer.updated {
        return "unchanged".to_owned();
    }
    let mut said = vec!["in force".to_owned()];
    for (what, names) in [("changed", &answer.changed_groups), ("removed", &answer.removed_groups)] {
        if !names.is_empty() {
            said.push(format!("{what} {}", names.join(", ")));
        }
    }
    said.extend(answer.warnings.iter().map(|warning| format!("warning: {warning}")));
    said.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_told_in_one_line() {
        assert_eq!(told(&RefreshConfigResponse::default()), "unchanged");
        let answer = RefreshConfigResponse {
            updated: true,
            changed_groups: vec!["default/test".to_owned(), "acme/web".to_owned()],
            warnings: vec!["bind waits for a restart".to_owned()],
            ..RefreshConfigResponse::default()
        };
        assert_eq!(told(&answer), "in force; changed default/test, acme/web; warning: bind waits for a restart");
    }
}
