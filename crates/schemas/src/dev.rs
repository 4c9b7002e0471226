//! The kinds for development: `process`, `tmux` and `fake`.

use std::{collections::BTreeMap, net::IpAddr};

use nstance_core::{
    ports::{
        provider::CreatePace,
        schema::{ArgsContext, KindFacts, ProviderSchema, SchemaFault, SchemaProblem},
    },
    value::{Object, Value},
};

use crate::shape::{COUNT, Member, Shape, Stage, TextFault, check, refuse_all, shown};

/// A kind that takes options and nothing else.
pub(crate) struct Dev {
    kind: &'static str,
    aliases: &'static [&'static str],
    options: &'static [Member],
    images_instead: Option<&'static str>,
    leader_address: LeaderAddress,
}

/// Which address of the leader a kind can move.
#[derive(Clone, Copy)]
enum LeaderAddress {
    Any,
    Loopback,
    None,
}

const IMAGES_INSTEAD: &str = "only aws and fake look images up";

static CAPACITIES: Shape = Shape::Map { expected: "an object of subnet to number of places", of: &COUNT };

pub(crate) static PROCESS: Dev = Dev {
    kind: "process",
    aliases: &[],
    options: &[
        Member::new("agent_binary", &Shape::Text),
        Member::new("work_dir", &Shape::Text),
        Member::new("node_dir", &Shape::Text),
        Member::new("create_delay", &Shape::Duration),
        Member::new("boot_delay", &Shape::Duration),
        Member::new("subnet_capacity", &CAPACITIES),
        Member::new("metrics_interval", &Shape::Duration),
    ],
    images_instead: Some(IMAGES_INSTEAD),
    leader_address: LeaderAddress::Loopback,
};

pub(crate) static TMUX: Dev = Dev {
    kind: "tmux",
    aliases: &[],
    options: &[
        Member::new("agent_binary", &Shape::Text),
        Member::new("work_dir", &Shape::Text),
        Member::new("node_dir", &Shape::Text),
        Member::new("create_delay", &Shape::Duration),
        Member::new("boot_delay", &Shape::Duration),
        Member::new("subnet_capacity", &CAPACITIES),
        Member::new("metrics_interval", &Shape::Duration),
        Member::new("session", &Shape::Grammar(session_fault)),
    ],
    images_instead: Some(IMAGES_INSTEAD),
    leader_address: LeaderAddress::None,
};

pub(crate) static FAKE: Dev = Dev {
    kind: "fake",
    aliases: &["mock"],
    options: &[
        Member::new("idempotent_create", &Shape::Bool),
        Member::new("reserve", &Shape::Bool),
        Member::new("latency", &Shape::Duration),
        Member::new("create_latency", &Shape::Duration),
        Member::new("boot_time", &Shape::Duration),
        Member::new("stop_time", &Shape::Duration),
        Member::new("delete_time", &Shape::Duration),
        Member::new("visibility_delay", &Shape::Duration),
        Member::new("listing_delay", &Shape::Duration),
        Member::new("page_size", &COUNT),
        Member::new("subnet_capacity", &CAPACITIES),
        Member::new("hosts", &COUNT),
        Member::new("throttle_rate", &COUNT),
        Member::new("lb_drain_time", &Shape::Duration),
        Member::new("address_move_time", &Shape::Duration),
        Member::new("journal", &Shape::Text),
        Member::new("create_burst", &COUNT),
        Member::new("create_refill", &Shape::Duration),
        Member::new("lb_warmup", &Shape::Duration),
        Member::new("places", &COUNT),
    ],
    images_instead: None,
    leader_address: LeaderAddress::Any,
};

/// tmux takes `:` and `.` in a target for the marks before a window and a pane.
fn session_fault(text: &str) -> TextFault {
    text.contains([':', '.'])
        .then(|| (format!("{} is no name for a tmux session", shown(text)), "leave out `:` and `.`"))
}

impl ProviderSchema for Dev {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn aliases(&self) -> &'static [&'static str] {
        self.aliases
    }

    fn facts(&self) -> KindFacts {
        KindFacts {
            is_dev: true,
            needs_userdata: false,
            needs_instance_type: false,
            trusts_agent_addresses: true,
            images_instead: self.images_instead,
            load_balancers_instead: None,
            create_pace: CreatePace::default(),
            min_registration_timeout: None,
        }
    }

    fn check_options(&self, options: &Object) -> Vec<SchemaProblem> {
        check(options, self.options, &[], Stage::Settings)
    }

    fn check_args(&self, args: &Object, _: ArgsContext) -> Vec<SchemaProblem> {
        refuse_all(args)
    }

    fn check_load_balancer(&self, load_balancer: &Object) -> Vec<SchemaProblem> {
        refuse_all(load_balancer)
    }

    fn check_leader_network(&self, ip: Option<IpAddr>, interface_id: Option<&str>) -> Vec<SchemaProblem> {
        match self.leader_address {
            LeaderAddress::None => vec![no_leader_network(self.kind)],
            _ if interface_id.is_some() => vec![needless_interface()],
            // In the development environment the address is one of the loopback network, local to all.
            LeaderAddress::Loopback if ip.is_some_and(|ip| !ip.is_loopback()) => {
                let message = format!("provider {} moves loopback addresses only", self.kind);
                let help = "write an address of the loopback network, such as 127.0.1.1";
                vec![SchemaProblem::new(&[], SchemaFault::Conflict { message }).with_help(help)]
            }
            LeaderAddress::Loopback | LeaderAddress::Any => Vec::new(),
        }
    }
}

/// The answer of a kind that cannot move an address to any `leader_network`.
pub(crate) fn no_leader_network(kind: &str) -> SchemaProblem {
    let message = format!("provider {kind} cannot move an address");
    let help = "remove `leader_network`, and advertise the host of an external virtual IP";
    SchemaProblem::new(&[], SchemaFault::Conflict { message }).with_help(help)
}

/// The answer of a kind that has no network interfaces to an `interface_id`.
pub(crate) fn needless_interface() -> SchemaProblem {
    let message = "`interface_id` is for aws only".to_owned();
    SchemaProblem::new(&["interface_id"], SchemaFault::Conflict { message }).with_help("remove it")
}

/// Reads the option `subnet_capacity`, which was checked.
pub fn capacities(options: &Object) -> BTreeMap<String, u64> {
    let Some(map) = options.get("subnet_capacity").and_then(Value::as_object) else { return BTreeMap::new() };
    let place = |(subnet, value): (&str, &Value)| match value {
        Value::Int(n) => Some((subnet.to_owned(), u64::try_from(*n).ok()?)),
        _ => None,
    };
    map.iter().filter_map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{faults, nested, object};

    #[test]
    fn any_arg_of_a_development_provider_is_an_error() {
        for kind in [&PROCESS, &TMUX, &FAKE] {
            let args = object(&[("ImageId", Value::from("x"))]);
            assert_eq!(faults(kind.check_args(&args, ArgsContext::default())), ["ImageId: unknown of "]);
        }
    }

    #[test]
    fn every_fault_in_the_options_is_told_with_its_path() {
        let options = object(&[
            ("work_dirr", Value::from("x")),
            ("work_dir", Value::from("")),
            ("create_delay", Value::from("1 hour")),
            ("boot_delay", Value::Int(5)),
            ("metrics_interval", Value::from("1s")),
            ("node_dir", Value::Null),
            ("subnet_capacity", nested(&[("a", Value::Int(3)), ("b", Value::from("many")), ("c", Value::Int(-1))])),
        ]);
        let problems = PROCESS.check_options(&options);
        let paths: Vec<String> = problems.iter().map(|it| it.path.join(".")).collect();
        let expected =
            ["work_dirr", "work_dir", "create_delay", "boot_delay", "subnet_capacity.b", "subnet_capacity.c"];
        assert_eq!(paths, expected);
        let SchemaFault::UnknownKey { known } = &problems[0].what else { panic!("{problems:?}") };
        assert!(known.contains(&"work_dir"), "so that a suggestion can be made");
    }

    #[test]
    fn tmux_takes_what_process_takes_and_a_session() {
        for option in PROCESS.options {
            assert!(TMUX.options.iter().any(|it| it.name == option.name), "{}", option.name);
        }
        let session = |name: &str| object(&[("session", Value::from(name))]);
        assert_eq!(faults(TMUX.check_options(&session("nstance-dev-agents"))), [""; 0]);
        assert_eq!(TMUX.check_options(&session("a:b")).len(), 1);
        assert_eq!(PROCESS.check_options(&session("a")).len(), 1);
    }

    #[test]
    fn each_kind_moves_the_addresses_that_it_can() {
        let (loopback, other) = ("127.0.1.1".parse().ok(), "10.0.0.1".parse().ok());
        assert_eq!(faults(FAKE.check_leader_network(other, None)), [""; 0]);
        assert_eq!(faults(PROCESS.check_leader_network(loopback, None)), [""; 0]);
        assert_eq!(
            faults(PROCESS.check_leader_network(other, None)),
            [": conflict: provider process moves loopback addresses only \
              (write an address of the loopback network, such as 127.0.1.1)"]
        );
        assert_eq!(PROCESS.check_leader_network(loopback, Some("eni-1")).len(), 1);
        assert_eq!(TMUX.check_leader_network(loopback, None).len(), 1);
    }
}
