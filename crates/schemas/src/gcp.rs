//! Google Compute Engine.

use std::net::IpAddr;

use nstance_core::{
    ports::{
        provider::CreatePace,
        schema::{ArgsContext, GroupContext, KindFacts, ProviderSchema, SchemaFault, SchemaProblem},
    },
    value::{Object, Value},
};

use crate::{
    dev::needless_interface,
    shape::{Managed, Member, Shape, Stage, TextFault, check, is_made_of, is_template, keys, shown},
};

pub(crate) struct Gcp;

static OPTIONS: &[Member] = &[Member::new("project_id", &Shape::Text), Member::new("network_project_id", &Shape::Text)];

static LOAD_BALANCER: &[Member] = &[
    Member::new("instance_group_name", &Shape::Text).required(),
    Member::new("backend_service_name", &Shape::Grammar(backend_service_fault)),
];

static STRINGS: Shape = Shape::Map { expected: "an object of strings", of: &Shape::String };

static TEXTS: Shape = Shape::List(&Shape::Text);

/// Sizes of a disk: 1 GB to 64 TB.
static DISK_SIZE: Shape = Shape::Integer { min: 1, max: 65_536 };

static SERVICE_ACCOUNT: Shape =
    Shape::Struct(&[Member::new("Email", &Shape::Text).required(), Member::new("Scopes", &TEXTS)]);

static BOOT_DISK: Shape = Shape::Struct(&[
    Member::new("SizeGb", &DISK_SIZE),
    Member::new("Type", &Shape::Text),
    Member::new("AutoDelete", &Shape::Bool),
    Member::new("KmsKeyName", &Shape::Text),
]);

static DISK: Shape = Shape::Struct(&[
    Member::new("SizeGb", &DISK_SIZE),
    Member::new("Type", &Shape::Text),
    Member::new("AutoDelete", &Shape::Bool),
    Member::new("KmsKeyName", &Shape::Text),
    Member::new("DeviceName", &Shape::Text),
    Member::new("Interface", &Shape::Enum(&["SCSI", "NVME"])),
    Member::new("SourceImage", &Shape::Text),
    Member::new("SourceSnapshot", &Shape::Text),
]);

static GUEST_ACCELERATOR: Shape = Shape::Struct(&[
    Member::new("AcceleratorType", &Shape::Text).required(),
    Member::new("AcceleratorCount", &Shape::Integer { min: 1, max: 64 }).required(),
]);

static SHIELDED: Shape = Shape::Struct(&[
    Member::new("EnableSecureBoot", &Shape::Bool),
    Member::new("EnableVtpm", &Shape::Bool),
    Member::new("EnableIntegrityMonitoring", &Shape::Bool),
]);

static CONFIDENTIAL: Shape = Shape::Struct(&[
    Member::new("EnableConfidentialCompute", &Shape::Bool),
    Member::new("ConfidentialInstanceType", &Shape::Enum(&["SEV", "SEV_SNP", "TDX"])),
]);

static ARGS: &[Member] = &[
    Member::new("SourceImage", &Shape::Text),
    Member::new("BootDisk", &BOOT_DISK),
    Member::new("Disks", &Shape::List(&DISK)),
    Member::new("Labels", &STRINGS),
    Member::new("NetworkTags", &Shape::List(&Shape::Grammar(network_tag_fault))),
    Member::new("ServiceAccount", &SERVICE_ACCOUNT),
    Member::new("ServiceAccounts", &Shape::List(&SERVICE_ACCOUNT)),
    Member::new("ExternalIp", &Shape::Bool),
    Member::new("NetworkTier", &Shape::Enum(&["PREMIUM", "STANDARD"])),
    Member::new("Ipv6", &Shape::Bool),
    Member::new("Preemptible", &Shape::Bool),
    // Not FLEX_START: it may wait longer than its nonce lives.
    Member::new("ProvisioningModel", &Shape::Enum(&["STANDARD", "SPOT", "RESERVATION_BOUND"])),
    Member::new("PreemptionNoticeDuration", &Shape::Duration),
    Member::new("InstanceTerminationAction", &Shape::Enum(&["DELETE", "STOP"])),
    Member::new("OnHostMaintenance", &Shape::Enum(&["MIGRATE", "TERMINATE"])),
    Member::new("AutomaticRestart", &Shape::Bool),
    Member::new("GuestAccelerators", &Shape::List(&GUEST_ACCELERATOR)),
    Member::new("MinCpuPlatform", &Shape::Text),
    Member::new("ShieldedInstanceConfig", &SHIELDED),
    Member::new("ConfidentialInstanceConfig", &CONFIDENTIAL),
    Member::new("ResourcePolicies", &TEXTS),
    Member::new("Metadata", &STRINGS),
    Member::new("UserdataKey", &Shape::Grammar(metadata_key_fault)),
    Member::new("DeletionProtection", &Shape::Bool),
    Member::new("Raw", &Shape::AnyObject),
];

/// Keys of the insert body that `Raw` may not replace.
static RAW_MANAGED: &[Managed] = &[
    ("name", "remove it"),
    ("machineType", "use `instance_type`"),
    ("zone", "use `server.provider.zone`"),
    ("networkInterfaces", "use `subnet_pool`, `ExternalIp`, `NetworkTier` and `Ipv6`"),
    ("labels", "use `Labels`"),
    ("metadata", "use `Metadata` and `userdata`"),
    ("deletionProtection", "remove it: nstance could not delete the instance"),
];

impl ProviderSchema for Gcp {
    fn kind(&self) -> &'static str {
        "gcp"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["google"]
    }

    fn facts(&self) -> KindFacts {
        KindFacts {
            is_dev: false,
            needs_userdata: true,
            needs_instance_type: true,
            trusts_agent_addresses: false,
            images_instead: Some("put the image family into args: \"SourceImage\""),
            load_balancers_instead: None,
            create_pace: CreatePace::default(),
            min_registration_timeout: None,
        }
    }

    fn check_options(&self, options: &Object) -> Vec<SchemaProblem> {
        check(options, OPTIONS, &[], Stage::Settings)
    }

    fn check_args(&self, args: &Object, _: ArgsContext) -> Vec<SchemaProblem> {
        check_instance(args, Stage::Template)
    }

    fn check_rendered_args(&self, args: &Object, _: ArgsContext) -> Vec<SchemaProblem> {
        let mut problems = check_instance(args, Stage::Rendered);
        if args.get("SourceImage").is_none() {
            problems.push(SchemaProblem::new(&[], SchemaFault::Missing { key: "SourceImage" }));
        }
        problems
    }

    fn check_load_balancer(&self, load_balancer: &Object) -> Vec<SchemaProblem> {
        check(load_balancer, LOAD_BALANCER, &[], Stage::Settings)
    }

    fn load_balancer_keys(&self) -> Vec<(String, String)> {
        keys(LOAD_BALANCER)
    }

    fn check_leader_network(&self, ip: Option<IpAddr>, interface_id: Option<&str>) -> Vec<SchemaProblem> {
        let mut problems: Vec<SchemaProblem> = interface_id.map(|_| needless_interface()).into_iter().collect();
        if ip.is_some_and(|ip| ip.is_ipv6()) {
            // It is an alias range of the machine's first interface.
            let message = "provider gcp moves IPv4 addresses only".to_owned();
            problems.push(SchemaProblem::new(&["ip"], SchemaFault::Conflict { message }));
        }
        problems
    }

    fn check_group(&self, group: GroupContext<'_>) -> Vec<SchemaProblem> {
        let mut problems = Vec::new();
        if group.load_balancers.is_empty() {
            return problems;
        }
        if group.subnets.len() != 1 {
            let message = "an instance group lies in one subnet, but this pool has several".to_owned();
            problems.push(
                SchemaProblem::new(&["subnet_pool"], SchemaFault::Conflict { message })
                    .with_help("use a pool of exactly one subnet for groups with load balancers"),
            );
        }
        if 1 < group.load_balancers.len() {
            let message = "it is not certain that an instance may be in two instance groups with a backend service";
            let what = SchemaFault::TwoBalancers { message: message.to_owned() };
            problems.push(SchemaProblem::new(&["load_balancers"], what).with_help("use one load balancer for a group"));
        }
        problems
    }
}

fn bad(path: &[&str], message: impl Into<String>) -> SchemaProblem {
    SchemaProblem::new(path, SchemaFault::BadValue { message: message.into() })
}

fn conflict(path: &[&str], message: impl Into<String>) -> SchemaProblem {
    SchemaProblem::new(path, SchemaFault::Conflict { message: message.into() })
}

/// All checks but for required args.
fn check_instance(args: &Object, stage: Stage) -> Vec<SchemaProblem> {
    let mut problems = check(args, ARGS, &[], stage);
    check_labels(args, stage, &mut problems);
    if args.get("ServiceAccount").is_some() && args.get("ServiceAccounts").is_some() {
        let problem = conflict(&["ServiceAccounts"], "`ServiceAccount` and `ServiceAccounts` exclude each other");
        problems.push(problem.with_help("keep one of them"));
    }
    let model = args.get("ProvisioningModel").and_then(Value::as_str);
    if args.get("PreemptionNoticeDuration").is_some() && !model.is_some_and(|it| it == "SPOT" || is_open(it, stage)) {
        let problem = conflict(&["PreemptionNoticeDuration"], "a preemption notice is for spot instances");
        problems.push(problem.with_help("add \"ProvisioningModel\": \"SPOT\", or remove it"));
    }
    let protection = args.get("DeletionProtection");
    if matches!(protection, Some(Value::Bool(true))) || protection.and_then(Value::as_str) == Some("true") {
        let problem = bad(&["DeletionProtection"], "nstance could not delete a protected instance");
        problems.push(problem.with_help("remove it"));
    }
    let metadata = args.get("Metadata").and_then(Value::as_object);
    if let Some(key) = args.get("UserdataKey").and_then(Value::as_str)
        && metadata.is_some_and(|it| it.get(key).is_some())
    {
        problems.push(SchemaProblem::new(&["Metadata", key], SchemaFault::ManagedKey { instead: "use `userdata`" }));
    }
    if let Some(raw) = args.get("Raw").and_then(Value::as_object) {
        for (key, instead) in RAW_MANAGED.iter().filter(|(key, _)| raw.get(key).is_some()) {
            problems.push(SchemaProblem::new(&["Raw", key], SchemaFault::ManagedKey { instead }));
        }
    }
    problems
}

/// Whether the text is known only after rendering.
fn is_open(text: &str, stage: Stage) -> bool {
    stage == Stage::Template && is_template(text)
}

fn check_labels(args: &Object, stage: Stage, problems: &mut Vec<SchemaProblem>) {
    let Some(labels) = args.get("Labels").and_then(Value::as_object) else { return };
    for (key, value) in labels.iter() {
        let path = ["Labels", key];
        if key.starts_with("nstance") {
            let message = format!("labels named `nstance…` are nstance's own, as {} is", shown(key));
            problems.push(bad(&path, message).with_help("choose another name"));
        } else if !key.starts_with(|c: char| c.is_ascii_lowercase()) || !is_made_of(key, 63, is_label_byte) {
            let help = "use 1 to 63 of a-z 0-9 _ -, beginning with a letter";
            problems.push(bad(&path, format!("{} is no name for a label", shown(key))).with_help(help));
        }
        let Some(value) = value.as_str() else { continue };
        if !value.is_empty() && !is_open(value, stage) && !is_made_of(value, 63, is_label_byte) {
            let message = format!("{} is no value for a label", shown(value));
            problems.push(bad(&path, message).with_help("use at most 63 of a-z 0-9 _ -"));
        }
    }
}

fn is_label_byte(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-')
}

fn network_tag_fault(text: &str) -> TextFault {
    let is_tag = is_made_of(text, 63, |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && !text.ends_with('-');
    let help = "use 1 to 63 of a-z 0-9 -, beginning with a letter and not ending with -";
    (!is_tag).then(|| (format!("{} is no network tag", shown(text)), help))
}

fn metadata_key_fault(text: &str) -> TextFault {
    let is_key = is_made_of(text, 128, |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    (!is_key).then(|| (format!("{} is no metadata key", shown(text)), "use 1 to 128 of A-Z a-z 0-9 _ -"))
}

fn backend_service_fault(text: &str) -> TextFault {
    let is_name = |it: &str| is_made_of(it, 63, |byte| is_label_byte(byte) && byte != b'_');
    let fits = match text.split('/').collect::<Vec<&str>>()[..] {
        [name] => is_name(name),
        ["regions", region, "backendServices", name] => is_name(region) && is_name(name),
        _ => false,
    };
    let help = "write the name of a global one, or regions/REGION/backendServices/NAME";
    (!fits).then(|| (format!("{} is no backend service", shown(text)), help))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{faults, list, nested, object, texts};

    fn written(entries: &[(&str, Value)]) -> Vec<String> {
        faults(Gcp.check_args(&object(entries), ArgsContext::default()))
    }

    fn rendered(entries: &[(&str, Value)]) -> Vec<String> {
        faults(Gcp.check_rendered_args(&object(entries), ArgsContext::default()))
    }

    #[test]
    fn every_documented_arg_is_accepted() {
        let account = nested(&[("Email", Value::from("a@b")), ("Scopes", texts(&["cloud-platform"]))]);
        let gpu = nested(&[("AcceleratorType", Value::from("nvidia-l4")), ("AcceleratorCount", Value::Int(1))]);
        let disk = nested(&[("SizeGb", Value::from("100")), ("Type", Value::from("pd-ssd"))]);
        let args = [
            ("SourceImage", Value::from("projects/debian-cloud/global/images/family/debian-13")),
            ("BootDisk", nested(&[("SizeGb", Value::Int(30)), ("AutoDelete", Value::Bool(true))])),
            ("Disks", list(&[disk])),
            ("Labels", nested(&[("team", Value::from("{{ .Vars.Team }}")), ("none", Value::from(""))])),
            ("NetworkTags", texts(&["web"])),
            ("ServiceAccount", account),
            ("ExternalIp", Value::Bool(false)),
            ("NetworkTier", Value::from("PREMIUM")),
            ("Ipv6", Value::Bool(false)),
            ("ProvisioningModel", Value::from("SPOT")),
            ("PreemptionNoticeDuration", Value::from("120s")),
            ("InstanceTerminationAction", Value::from("DELETE")),
            ("OnHostMaintenance", Value::from("TERMINATE")),
            ("AutomaticRestart", Value::Bool(false)),
            ("GuestAccelerators", list(&[gpu])),
            ("MinCpuPlatform", Value::from("Intel Ice Lake")),
            ("ShieldedInstanceConfig", nested(&[("EnableSecureBoot", Value::Bool(true))])),
            ("ConfidentialInstanceConfig", nested(&[("ConfidentialInstanceType", Value::from("SEV"))])),
            ("ResourcePolicies", texts(&["p"])),
            ("Metadata", nested(&[("enable-oslogin", Value::from("TRUE"))])),
            ("UserdataKey", Value::from("user-data")),
            ("DeletionProtection", Value::Bool(false)),
            ("Raw", nested(&[("description", Value::from("x"))])),
        ];
        assert_eq!(written(&args), [""; 0]);
    }

    #[test]
    fn faults_are_found_deep_inside() {
        let found = rendered(&[
            ("BootDisk", nested(&[("SizeGb", Value::Int(0)), ("Typ", Value::from("pd-ssd"))])),
            ("ProvisioningModel", Value::from("FLEX_START")),
            ("DeletionProtection", Value::Bool(true)),
            ("NetworkTags", texts(&["Web"])),
            ("ServiceAccount", nested(&[("Email", Value::from("a"))])),
            ("ServiceAccounts", list(&[])),
            ("PreemptionNoticeDuration", Value::from("2m")),
            ("Raw", nested(&[("machineType", Value::from("n1")), ("labels", nested(&[]))])),
        ]);
        assert_eq!(
            found,
            [
                "BootDisk.SizeGb: 0 is out of range (use 1 to 65536)",
                "BootDisk.Typ: unknown of SizeGb, Type, AutoDelete, KmsKeyName",
                "ProvisioningModel: `FLEX_START` is not known here (use one of: STANDARD, SPOT, RESERVATION_BOUND)",
                "NetworkTags.0: `Web` is no network tag \
                 (use 1 to 63 of a-z 0-9 -, beginning with a letter and not ending with -)",
                "ServiceAccounts: conflict: `ServiceAccount` and `ServiceAccounts` exclude each other (keep one of them)",
                "PreemptionNoticeDuration: conflict: a preemption notice is for spot instances \
                 (add \"ProvisioningModel\": \"SPOT\", or remove it)",
                "DeletionProtection: nstance could not delete a protected instance (remove it)",
                "Raw.machineType: managed: use `instance_type`",
                "Raw.labels: managed: use `Labels`",
                ": missing SourceImage",
            ]
        );
    }

    #[test]
    fn labels_follow_their_grammar_and_ours_are_reserved() {
        let labels = nested(&[
            ("Team", Value::from("a")),
            ("team", Value::from("A b")),
            ("nstance-shard", Value::from("x")),
            ("n", Value::from("{{ .Vars.N }}")),
        ]);
        assert_eq!(written(&[("Labels", labels.clone())]).len(), 3);
        assert_eq!(rendered(&[("SourceImage", Value::from("x")), ("Labels", labels)]).len(), 4);
    }

    #[test]
    fn userdata_has_its_place_in_the_metadata() {
        let metadata = nested(&[("startup-script", Value::from("x")), ("user-data", Value::from("y"))]);
        let found = written(&[("Metadata", metadata), ("UserdataKey", Value::from("user-data"))]);
        assert_eq!(found, ["Metadata.user-data: managed: use `userdata`"]);
    }

    #[test]
    fn a_balanced_group_needs_one_subnet() {
        let (none, subnets) = (Object::new(), ["a".to_owned(), "b".to_owned()]);
        let check = |subnets: &[String], n: usize| {
            let load_balancers = vec![&none; n];
            let group = GroupContext { args: &none, subnets, load_balancers: &load_balancers };
            faults(Gcp.check_group(group)).len()
        };
        assert_eq!((check(&subnets, 0), check(&subnets[..1], 1), check(&subnets, 1), check(&subnets, 2)), (0, 0, 1, 2));
    }

    #[test]
    fn load_balancers_and_leader_networks_are_checked() {
        let balancer = |entries: &[(&str, Value)]| faults(Gcp.check_load_balancer(&object(entries))).len();
        let group = ("instance_group_name", Value::from("www"));
        assert_eq!(balancer(std::slice::from_ref(&group)), 0);
        assert_eq!(balancer(&[]), 1);
        for (name, n_faults) in [
            ("www", 0),
            ("regions/europe-west1/backendServices/www", 0),
            ("projects/p/global/backendServices/www", 1),
            ("regions//backendServices/www", 1),
        ] {
            assert_eq!(balancer(&[group.clone(), ("backend_service_name", Value::from(name))]), n_faults, "{name}");
        }
        let leader = |ip: &str, interface| Gcp.check_leader_network(ip.parse().ok(), interface).len();
        assert_eq!((leader("10.0.0.1", None), leader("10.0.0.1", Some("x")), leader("fd00::1", None)), (0, 1, 1));
    }
}
