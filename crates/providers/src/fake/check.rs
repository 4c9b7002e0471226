//! What the config needs and this cloud does not have.

use nstance_core::ports::provider::{CheckProblem, CheckSeverity, ErrorClass, Need, Needs};

use super::{FakeProvider, abilities::find_image, cloud::Cloud, script::Op};

impl FakeProvider {
    /// Nothing is missed that the options do not describe: no table of types, every type exists.
    pub(super) fn unmet(&self, cloud: &Cloud, needs: &Needs) -> Vec<CheckProblem> {
        let options = &self.shared.options;
        let mut problems = Vec::new();
        let mut report = |need, severity, message: String| {
            problems.push(CheckProblem { need, severity, error: Op::Check.error(ErrorClass::Invalid, message) });
        };
        for subnet in &needs.subnets {
            if options.strict_subnets && !options.subnet_capacity.contains_key(subnet) {
                let message = format!("there is no subnet {subnet}; name one that exists");
                report(Need::Subnet(subnet.clone()), CheckSeverity::Error, message);
            }
        }
        for name in &needs.instance_types {
            if !options.instance_types.is_empty() && !options.instance_types.contains_key(name) {
                let message = format!("there is no instance type {name}; name one that exists");
                report(Need::InstanceType(name.clone()), CheckSeverity::Error, message);
            }
        }
        let has_images = !options.images.is_empty() || !cloud.images.is_empty();
        for (name, query) in &needs.images {
            if has_images && find_image(options, cloud, query).is_none() {
                let message = format!("no image fits {name}; publish one or change its filters");
                report(Need::Image(name.clone()), CheckSeverity::Error, message);
            }
        }
        for lb in &needs.load_balancers {
            if options.load_balancers.as_ref().is_some_and(|known| !known.contains(&lb.key)) {
                let message = format!("there is no load balancer {}; make it or remove it from the config", lb.key);
                report(Need::LoadBalancer(lb.key.clone()), CheckSeverity::Error, message);
            } else if needs.drain_timeout.is_some_and(|timeout| timeout < options.lb_drain_time) {
                let message = format!("load balancer {} drains for longer than the drain timeout", lb.key);
                report(Need::LoadBalancer(lb.key.clone()), CheckSeverity::Warning, message);
            }
        }
        if needs.leader_network.is_some() && self.self_id.is_none() {
            let message = "we are on no machine of this cloud, so no address can be moved to us".to_owned();
            report(Need::LeaderNetwork, CheckSeverity::Error, message);
        }
        problems
    }
}
