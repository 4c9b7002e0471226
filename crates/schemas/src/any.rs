//! Every kind with any options and args.

use std::net::IpAddr;

use nstance_core::{
    ports::schema::{ArgsContext, KindFacts, ProviderSchema, SchemaProblem},
    value::Object,
};

use crate::{aws::Aws, dev, gcp::Gcp, proxmox::Proxmox};

/// The kinds of [`ALL`](crate::ALL), each of which takes any options and args: for tests that are about something else.
pub static ANY: &[&dyn ProviderSchema] =
    &[&Any(&Aws), &Any(&Gcp), &Any(&Proxmox), &Any(&dev::PROCESS), &Any(&dev::TMUX), &Any(&dev::FAKE)];

struct Any(&'static dyn ProviderSchema);

impl ProviderSchema for Any {
    fn kind(&self) -> &'static str {
        self.0.kind()
    }

    fn aliases(&self) -> &'static [&'static str] {
        self.0.aliases()
    }

    fn facts(&self) -> KindFacts {
        self.0.facts()
    }

    fn check_options(&self, _: &Object) -> Vec<SchemaProblem> {
        Vec::new()
    }

    fn check_args(&self, _: &Object, _: ArgsContext) -> Vec<SchemaProblem> {
        Vec::new()
    }

    fn check_load_balancer(&self, load_balancer: &Object) -> Vec<SchemaProblem> {
        self.0.check_load_balancer(load_balancer)
    }

    fn check_leader_network(&self, ip: Option<IpAddr>, interface_id: Option<&str>) -> Vec<SchemaProblem> {
        self.0.check_leader_network(ip, interface_id)
    }
}
