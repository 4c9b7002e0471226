//! Which names and addresses of a machine may stand in its files and certificates.
//!
//! Agents choose keys, never names: a machine that was broken into must not get a certificate for another's. What the
//! provider says is believed; what an agent says, only where its template allows it, and never what is somebody else's.

use std::net::IpAddr;

use nstance_core::instance::Addresses;

use crate::service::register::is_host;

/// How far an agent's word goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trust {
    /// Only the provider is believed.
    Provider,
    /// The agent is, within what can be its own.
    Agent,
    /// The agent is, also when all machines share one loopback: development.
    AgentAnywhere,
}

/// What is believed, and what was not.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Judged {
    pub(super) addresses: Addresses,
    /// For people, one sentence each.
    pub(super) mismatches: Vec<String>,
}

/// Judges what provider and agent say. `is_taken`: an address of a server, or of another instance that lives.
pub(super) fn judge(
    trust: Trust,
    provider: &Addresses,
    agent: &Addresses,
    is_taken: impl Fn(IpAddr) -> bool,
) -> Judged {
    let mut judged = Judged::default();
    let mut one = |what: &str,
                   provider: &Option<String>,
                   agent: &Option<String>,
                   fault: &dyn Fn(&str) -> Option<&'static str>| {
        let Some(said) = agent.as_deref().filter(|it| !it.is_empty()) else { return provider.clone() };
        let differs = provider.as_deref() != Some(said);
        match (trust, provider) {
            (Trust::Provider, Some(seen)) if differs => {
                judged.mismatches.push(format!("{what}: the agent says `{said}`, the provider `{seen}`"));
                provider.clone()
            }
            (Trust::Provider, _) => provider.clone(),
            (Trust::Agent | Trust::AgentAnywhere, _) => match differs.then(|| fault(said)).flatten() {
                Some(why) => {
                    judged.mismatches.push(format!("{what}: `{said}` of the agent is refused, {why}"));
                    provider.clone()
                }
                None => Some(said.to_owned()),
            },
        }
    };
    let anywhere = trust == Trust::AgentAnywhere;
    let ip = |v4: bool| {
        let is_taken = &is_taken;
        move |said: &str| -> Option<&'static str> {
            match said.parse::<IpAddr>() {
                Ok(ip) if ip.is_ipv4() == v4 => (!anywhere).then(|| address_fault(ip, is_taken)).flatten(),
                _ => Some("it is no such address"),
            }
        }
    };
    let ip4 = one("IP4", &provider.ip4, &agent.ip4, &ip(true));
    let ip6 = one("IP6", &provider.ip6, &agent.ip6, &ip(false));
    let hostname = one("hostname", &provider.hostname, &agent.hostname, &host_fault);
    let fqdn = one("FQDN", &provider.fqdn, &agent.fqdn, &host_fault);
    judged.addresses = Addresses { ip4, ip6, hostname, fqdn };
    judged
}

fn address_fault(ip: IpAddr, is_taken: &dyn Fn(IpAddr) -> bool) -> Option<&'static str> {
    let ip = ip.to_canonical();
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || link_local {
        return Some("it is nobody's own");
    }
    is_taken(ip).then_some("it is a server's or another instance's")
}

fn host_fault(said: &str) -> Option<&'static str> {
    let said = said.to_ascii_lowercase();
    if !is_host(&said) || said.parse::<IpAddr>().is_ok() {
        return Some("it is no host name");
    }
    let reserved = said == "localhost"
        || said.starts_with("localhost.")
        || said.ends_with(".localhost")
        || said.starts_with("kubernetes")
        || said == "nstance-server";
    reserved.then_some("it is a name of others")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(ip4: &str, hostname: &str) -> Addresses {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Addresses { ip4: some(ip4), hostname: some(hostname), ..Addresses::default() }
    }

    fn nobodys(_: IpAddr) -> bool {
        false
    }

    #[test]
    fn the_providers_word_counts_and_a_lying_agent_is_told_of() {
        let judged = judge(Trust::Provider, &says("10.0.0.1", ""), &says("10.0.0.9", "db"), nobodys);
        assert_eq!(judged.addresses, says("10.0.0.1", ""), "what the provider does not say stays empty");
        assert_eq!(judged.mismatches, ["IP4: the agent says `10.0.0.9`, the provider `10.0.0.1`"]);
        assert_eq!(judge(Trust::Provider, &says("10.0.0.1", ""), &says("10.0.0.1", ""), nobodys).mismatches.len(), 0);
    }

    #[test]
    fn a_trusted_agent_is_believed_before_its_provider() {
        let judged = judge(Trust::Agent, &says("10.0.0.1", "vm-1"), &says("10.0.0.9", ""), nobodys);
        assert_eq!(judged, Judged { addresses: says("10.0.0.9", "vm-1"), mismatches: vec![] });
    }

    #[test]
    fn no_agent_is_believed_about_what_is_not_its_own() {
        let taken = |ip: IpAddr| ip == "10.0.0.7".parse::<IpAddr>().unwrap();
        let nobodys_own =
            ["127.0.0.1", "169.254.1.1", "224.0.0.1", "0.0.0.0", "255.255.255.255", "10.0.0.7", "::1", "x"];
        for ip in nobodys_own {
            let judged = judge(Trust::Agent, &says("10.0.0.1", ""), &says(ip, ""), taken);
            assert_eq!((judged.addresses, judged.mismatches.len()), (says("10.0.0.1", ""), 1), "{ip}");
        }
        for ip in ["fe80::1", "::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.7", "10.0.0.9"] {
            let agent = Addresses { ip6: Some(ip.to_owned()), ..Addresses::default() };
            let judged = judge(Trust::Agent, &Addresses::default(), &agent, taken);
            assert_eq!((judged.addresses.ip6, judged.mismatches.len()), (None, 1), "{ip}");
        }
        for trust in [Trust::Agent, Trust::AgentAnywhere] {
            let names =
                ["localhost", "LOCALHOST", "a.localhost", "kubernetes", "kubernetes.default.svc", "nstance-server"];
            for name in names.into_iter().chain(["-a", "a b", "10.1.1.1", "a..b"]) {
                let judged = judge(trust, &says("", "vm-1"), &says("", name), nobodys);
                assert_eq!((judged.addresses, judged.mismatches.len()), (says("", "vm-1"), 1), "{name}");
            }
        }
    }

    #[test]
    fn development_machines_share_their_loopback() {
        let judged = judge(Trust::AgentAnywhere, &says("", ""), &says("127.0.0.1", "laptop"), |_| true);
        assert_eq!(judged, Judged { addresses: says("127.0.0.1", "laptop"), mismatches: vec![] });
    }
}
