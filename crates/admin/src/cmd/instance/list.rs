//! `instance list`.

use clap::{Args, ValueEnum};
use nstance_client::ShardError;
use nstance_proto::v1::{InstanceStatusResponse, ListInstancesRequest};
use serde_json::json;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    report, view,
    words::{self, age},
};

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    /// Only of this group
    #[arg(long)]
    group: Option<String>,
    /// Only in this state; repeatable
    #[arg(long, value_enum, value_delimiter = ',')]
    state: Vec<State>,
    /// Only those that no group counts
    #[arg(long)]
    on_demand: bool,
    /// Deleted ones too, as long as they are remembered
    #[arg(long)]
    deleted: bool,
    /// Order of the rows
    #[arg(long, value_enum, default_value_t = Sort::Group)]
    sort: Sort,
    #[command(flatten)]
    shards: ShardArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum State {
    Pending,
    Failed,
    Provisioning,
    Running,
    Draining,
    Deleting,
    Deleted,
}

impl State {
    fn is(self, status: &str) -> bool {
        self.to_possible_value().is_some_and(|it| it.get_name() == status)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sort {
    Group,
    Id,
    State,
    Age,
}

pub(super) async fn run(context: &Context, args: ListArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let request = ListInstancesRequest {
        group: args.group.clone().unwrap_or_default(),
        include_deleted: args.deleted || args.state.contains(&State::Deleted),
        on_demand: args.on_demand.then_some(true),
        ..ListInstancesRequest::default()
    };
    let request = &request;
    let answers = shards.each(|mut client| async move { client.instances(request.clone()).await }).await;
    let all = answers.ok.iter().flat_map(|(shard, instances)| instances.iter().map(move |it| (shard.as_str(), it)));
    let wanted =
        |it: &InstanceStatusResponse| args.state.is_empty() || args.state.iter().any(|state| state.is(&it.status));
    let mut rows: Vec<(&str, &InstanceStatusResponse)> = all.filter(|(_, it)| wanted(it)).collect();
    let created = |it: &InstanceStatusResponse| view::time(it.created_at.as_ref());
    rows.sort_by(|(left_shard, left), (right_shard, right)| {
        let by_id = left.instance_id.cmp(&right.instance_id);
        match args.sort {
            Sort::Group => (&left.group, left_shard).cmp(&(&right.group, right_shard)).then(by_id),
            Sort::Id => by_id,
            Sort::State => left.status.cmp(&right.status).then(by_id),
            Sort::Age => created(left).cmp(&created(right)).then(by_id),
        }
    });
    context.output.show(&shown(&rows, &answers.errors));
    Ok(report::outcome(context, &answers))
}

pub(super) fn shown(rows: &[(&str, &InstanceStatusResponse)], errors: &[ShardError]) -> Shown {
    let mut table = Table::new(&[
        "ID",
        "GROUP",
        "SHARD",
        "STATE",
        "HEALTH",
        "TYPE",
        "PROVIDER ID",
        ">AGE",
        "+ADDRESS",
        "+SUBNET",
        "+ON DEMAND",
        "+PROVIDER STATE",
    ]);
    let now = words::now();
    for (shard, it) in rows {
        table.row([
            it.instance_id.clone(),
            it.group.clone(),
            (*shard).to_owned(),
            it.status.clone(),
            it.health.clone(),
            it.instance_type.clone(),
            it.provider_instance_id.clone(),
            age(it.created_at.as_ref(), now),
            it.private_ipv4.clone(),
            it.subnet.clone(),
            if it.on_demand { "yes" } else { "no" }.to_owned(),
            it.provider_state.clone(),
        ]);
    }
    Shown {
        document: json!({
            "instances": rows.iter().map(|(shard, it)| view::instance(shard, it)).collect::<Vec<_>>(),
            "errors": report::error_documents(errors),
        }),
        table,
        names: rows.iter().map(|(_, it)| it.instance_id.clone()).collect(),
    }
}
