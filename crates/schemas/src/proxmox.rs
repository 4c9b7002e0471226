//! Proxmox VE.

use std::{net::IpAddr, time::Duration};

use nstance_core::{
    ports::{
        provider::CreatePace,
        schema::{ArgsContext, GroupContext, KindFacts, ProviderSchema, SchemaFault, SchemaProblem},
    },
    value::{Object, Value},
};

use crate::{
    dev::no_leader_network,
    shape::{Member, Shape, Stage, TextFault, check, is_made_of, is_template, shown},
};

pub(crate) struct Proxmox;

/// Numbers that Proxmox VE takes for a VM.
static VMID: Shape = Shape::Integer { min: 100, max: 999_999_999 };

static OPTIONS: &[Member] = &[
    Member::new("insecure_tls", &Shape::Bool),
    Member::new("ca_file", &Shape::Text),
    Member::new("cloud_init_iso_storage", &Shape::Text),
    Member::new("clone_parallel", &Shape::Integer { min: 1, max: 8 }),
    Member::new("vmid_min", &VMID),
    Member::new("vmid_max", &VMID),
    Member::new("shutdown_wait", &Shape::Duration),
];

const VMID_MIN: i64 = 10_000;

const VMID_MAX: i64 = 999_999_999;

static ARGS: &[Member] = &[
    Member::new("StoragePool", &Shape::Text),
    Member::new("TemplateVMID", &VMID),
    Member::new("TemplateName", &Shape::Text),
    Member::new("LinkedClone", &Shape::Bool),
    Member::new("Bridge", &Shape::Grammar(bridge_fault)),
    Member::new("VLANTag", &Shape::Integer { min: 1, max: 4094 }),
    Member::new("Cores", &Shape::Integer { min: 1, max: 8192 }),
    Member::new("Memory", &Shape::Integer { min: 16, max: i64::MAX }),
    Member::new("DiskSize", &Shape::Grammar(disk_size_fault)),
    Member::new("DiskDevice", &Shape::Grammar(disk_device_fault)),
    Member::new("CpuType", &Shape::Text),
    Member::new("StartOnBoot", &Shape::Bool),
    Member::new("Pool", &Shape::Text),
    Member::new("Firewall", &Shape::Bool),
];

impl ProviderSchema for Proxmox {
    fn kind(&self) -> &'static str {
        "proxmox"
    }

    fn facts(&self) -> KindFacts {
        KindFacts {
            is_dev: false,
            needs_userdata: true,
            needs_instance_type: false,
            trusts_agent_addresses: true,
            images_instead: Some("only aws and fake look images up"),
            load_balancers_instead: Some("remove this one"),
            create_pace: CreatePace::default(),
            // A full clone copies whole disks.
            min_registration_timeout: Some(Duration::from_secs(600)),
        }
    }

    fn check_options(&self, options: &Object) -> Vec<SchemaProblem> {
        let mut problems = check(options, OPTIONS, &[], Stage::Settings);
        let number = |key: &str, default| match options.get(key) {
            Some(Value::Int(number)) => *number,
            _ => default,
        };
        let (min, max) = (number("vmid_min", VMID_MIN), number("vmid_max", VMID_MAX));
        if max < min {
            let key = if options.get("vmid_max").is_some() { "vmid_max" } else { "vmid_min" };
            let message = format!("vmid_min {min} is more than vmid_max {max}");
            problems.push(SchemaProblem::new(&[key], SchemaFault::Conflict { message }).with_help("swap them"));
        }
        problems
    }

    fn check_args(&self, args: &Object, _: ArgsContext) -> Vec<SchemaProblem> {
        check_machine(args, Stage::Template)
    }

    fn check_rendered_args(&self, args: &Object, _: ArgsContext) -> Vec<SchemaProblem> {
        let mut problems = check_machine(args, Stage::Rendered);
        let is_linked = match args.get("LinkedClone") {
            Some(Value::Bool(it)) => *it,
            other => other.and_then(Value::as_str) == Some("true"),
        };
        if !is_linked && args.get("StoragePool").is_none() {
            let missing = SchemaProblem::new(&[], SchemaFault::Missing { key: "StoragePool" });
            problems.push(missing.with_help("add \"StoragePool\" to args, or \"LinkedClone\": true"));
        }
        if args.get("TemplateVMID").is_none() && args.get("TemplateName").is_none() {
            let missing = SchemaProblem::new(&[], SchemaFault::Missing { key: "TemplateName" });
            problems.push(missing.with_help("add \"TemplateName\" or \"TemplateVMID\" to args"));
        }
        problems
    }

    fn check_instance_type(&self, instance_type: &str) -> Option<String> {
        instance_type_fault(instance_type)
    }

    fn check_subnet(&self, subnet: &str) -> Option<String> {
        let (bridge, vlan) = bridge_and_vlan(subnet);
        let fits = bridge_fault(bridge).is_none() && vlan.is_none_or(|it| vlan_of(it).is_some());
        (!fits).then(|| format!("{} is no bridge: write vmbr0, or vmbr0.100 for its VLAN 100", shown(subnet)))
    }

    fn check_load_balancer(&self, _: &Object) -> Vec<SchemaProblem> {
        Vec::new()
    }

    fn check_leader_network(&self, _: Option<IpAddr>, _: Option<&str>) -> Vec<SchemaProblem> {
        vec![no_leader_network("proxmox")]
    }

    fn check_group(&self, group: GroupContext<'_>) -> Vec<SchemaProblem> {
        let mut problems = Vec::new();
        let own_bridge = group.args.get("Bridge").and_then(Value::as_str).filter(|it| !is_template(it));
        let own_vlan = match group.args.get("VLANTag") {
            Some(Value::Int(number)) => Some(*number),
            other => other.and_then(Value::as_str).and_then(|it| it.parse().ok()),
        };
        for subnet in group.subnets {
            let (bridge, vlan) = bridge_and_vlan(subnet);
            let differs = [
                ("Bridge", own_bridge.is_some_and(|own| own != bridge)),
                ("VLANTag", own_vlan.zip(vlan.and_then(vlan_of)).is_some_and(|(own, vlan)| own != vlan)),
            ];
            for (key, _) in differs.into_iter().filter(|(_, differs)| *differs) {
                let message = format!("arg `{key}` differs from subnet `{subnet}` and replaces it");
                let problem = SchemaProblem::new(&["args", key], SchemaFault::Warning { message });
                problems.push(problem.with_help("remove it, and let the subnet decide"));
            }
        }
        problems
    }
}

/// All checks but for required args.
fn check_machine(args: &Object, stage: Stage) -> Vec<SchemaProblem> {
    let mut problems = check(args, ARGS, &[], stage);
    if args.get("TemplateVMID").is_some() && args.get("TemplateName").is_some() {
        let message = "`TemplateVMID` and `TemplateName` exclude each other".to_owned();
        let problem = SchemaProblem::new(&["TemplateVMID"], SchemaFault::Conflict { message });
        problems.push(problem.with_help("keep one of them"));
    }
    problems
}

/// `vmbr0.100` as a bridge and its VLAN.
fn bridge_and_vlan(subnet: &str) -> (&str, Option<&str>) {
    subnet.split_once('.').map_or((subnet, None), |(bridge, vlan)| (bridge, Some(vlan)))
}

fn vlan_of(text: &str) -> Option<i64> {
    text.parse().ok().filter(|vlan| (1..=4094).contains(vlan))
}

/// A name of a network interface, as Linux takes it.
fn bridge_fault(text: &str) -> TextFault {
    let is_name = is_made_of(text, 15, |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        && text.starts_with(|c: char| c.is_ascii_alphabetic());
    (!is_name).then(|| (format!("{} is no name of a bridge", shown(text)), "such as vmbr0"))
}

fn disk_size_fault(text: &str) -> TextFault {
    let number = text.strip_suffix(['K', 'M', 'G', 'T']);
    let is_size = number.is_some_and(|it| it.parse::<u32>().is_ok_and(|size| 0 < size) && !it.starts_with('+'));
    (!is_size).then(|| (format!("{} is no size of a disk", shown(text)), "write a whole number with M, G or T: 50G"))
}

fn disk_device_fault(text: &str) -> TextFault {
    let number = ["scsi", "virtio", "sata", "ide"].into_iter().find_map(|bus| text.strip_prefix(bus));
    let is_device = number.is_some_and(|it| is_made_of(it, 2, |byte| byte.is_ascii_digit()));
    (!is_device).then(|| (format!("{} is no disk", shown(text)), "write scsi0, virtio0, sata0 or ide0"))
}

/// `cpu:4,memory:8192,disk:50`, any part of it.
fn instance_type_fault(text: &str) -> Option<String> {
    const FORM: &str = "write any of cpu, memory (MB) and disk (GB): cpu:4,memory:8192,disk:50";
    let mut seen = Vec::new();
    for part in text.split(',') {
        let Some((key, number)) = part.split_once(':') else {
            return Some(format!("{} is no instance type of proxmox; {FORM}", shown(text)));
        };
        if !["cpu", "memory", "disk"].contains(&key) {
            return Some(format!("{} is no part of an instance type of proxmox; {FORM}", shown(key)));
        }
        if seen.contains(&key) {
            return Some(format!("`{key}` occurs twice in this instance type"));
        }
        seen.push(key);
        if !is_made_of(number, 9, |byte| byte.is_ascii_digit()) || number.parse() == Ok(0) {
            return Some(format!("`{key}` of this instance type is no whole number above 0"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{faults, object};

    fn rendered(entries: &[(&str, Value)]) -> Vec<String> {
        faults(Proxmox.check_rendered_args(&object(entries), ArgsContext::default()))
    }

    #[test]
    fn every_documented_arg_is_accepted() {
        let args = [
            ("StoragePool", Value::from("local-lvm")),
            ("TemplateName", Value::from("debian-13")),
            ("LinkedClone", Value::Bool(false)),
            ("Bridge", Value::from("vmbr0")),
            ("VLANTag", Value::from("100")),
            ("Cores", Value::Int(4)),
            ("Memory", Value::Int(8192)),
            ("DiskSize", Value::from("50G")),
            ("DiskDevice", Value::from("scsi0")),
            ("CpuType", Value::from("host")),
            ("StartOnBoot", Value::Bool(false)),
            ("Pool", Value::from("p")),
            ("Firewall", Value::Bool(true)),
        ];
        assert_eq!(rendered(&args), [""; 0]);
    }

    #[test]
    fn a_machine_has_one_template_and_a_place_for_its_disks() {
        let name = ("TemplateName", Value::from("t"));
        let number = ("TemplateVMID", Value::Int(9000));
        let pool = ("StoragePool", Value::from("p"));
        let linked = ("LinkedClone", Value::Bool(true));
        assert_eq!(rendered(&[number.clone(), pool.clone()]), [""; 0]);
        assert_eq!(rendered(&[number.clone(), linked]), [""; 0]);
        assert_eq!(
            rendered(&[]),
            [
                ": missing StoragePool (add \"StoragePool\" to args, or \"LinkedClone\": true)",
                ": missing TemplateName (add \"TemplateName\" or \"TemplateVMID\" to args)",
            ]
        );
        assert_eq!(
            rendered(&[name, number, pool]),
            ["TemplateVMID: conflict: `TemplateVMID` and `TemplateName` exclude each other (keep one of them)"]
        );
    }

    #[test]
    fn grammars_of_args_are_checked() {
        let with = |key: &str, value: &str| {
            rendered(&[
                ("TemplateName", Value::from("t")),
                ("StoragePool", Value::from("p")),
                (key, Value::from(value)),
            ])
            .len()
        };
        for (key, good, bad) in [
            ("DiskSize", ["50G", "1T", "512M"], ["50", "G", "+5G"]),
            ("DiskDevice", ["scsi0", "virtio15", "ide2"], ["scsi", "nvme0", "sda"]),
            ("Bridge", ["vmbr0", "vnet_1", "br-lan"], ["vmbr0.100", "0br", "a-name-that-is-too-long"]),
            ("VLANTag", ["1", "100", "4094"], ["0", "4095", "x"]),
        ] {
            assert_eq!(good.map(|it| with(key, it)), [0; 3], "{key}");
            assert_eq!(bad.map(|it| with(key, it)), [1; 3], "{key}");
        }
    }

    #[test]
    fn instance_types_and_subnets_have_a_grammar() {
        for good in ["cpu:4,memory:8192,disk:50", "memory:512", "disk:10,cpu:1"] {
            assert_eq!(Proxmox.check_instance_type(good), None);
        }
        for bad in ["", "large", "cpu:0", "cpu:4,cpu:5", "cpu:4,", "cores:4", "cpu:four", "cpu:4 "] {
            assert!(Proxmox.check_instance_type(bad).is_some(), "{bad}");
        }
        for good in ["vmbr0", "vmbr0.100"] {
            assert_eq!(Proxmox.check_subnet(good), None);
        }
        for bad in ["", "vmbr0.", "vmbr0.0", "vmbr0.x", "subnet 1", "vmbr0.1.2"] {
            assert!(Proxmox.check_subnet(bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn args_that_differ_from_the_subnet_are_warned_of() {
        let args = object(&[("Bridge", Value::from("vmbr1")), ("VLANTag", Value::Int(5))]);
        let check = |subnet: &str| {
            let subnets = [subnet.to_owned()];
            Proxmox.check_group(GroupContext { args: &args, subnets: &subnets, load_balancers: &[] })
        };
        assert_eq!(check("vmbr1.5"), []);
        assert_eq!(check("vmbr1"), []);
        let differs = check("vmbr0.6");
        assert_eq!(differs.len(), 2);
        assert!(differs.iter().all(|it| !it.is_error()));
    }

    #[test]
    fn options_are_checked_against_each_other() {
        let found = faults(Proxmox.check_options(&object(&[
            ("clone_parallel", Value::Int(9)),
            ("vmid_max", Value::Int(500)),
            ("insecure", Value::Bool(true)),
        ])));
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[2], "vmid_max: conflict: vmid_min 10000 is more than vmid_max 500 (swap them)");
    }
}
