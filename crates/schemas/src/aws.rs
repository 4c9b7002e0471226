//! Amazon EC2: args are the whole request of RunInstances, key for key.

use std::net::IpAddr;

use nstance_core::{
    ports::{
        provider::CreatePace,
        schema::{ArgsContext, KindFacts, ProviderSchema, SchemaFault, SchemaProblem},
    },
    value::{Object, Value},
};

use crate::shape::{Managed, Member, Shape, Stage, TextFault, check, is_template, keys, shown};

#[rustfmt::skip]
pub mod table;

pub struct Aws;

static OPTIONS: &[Member] = &[
    Member::new("eni_device_index", &Shape::Integer { min: 1, max: i64::MAX }),
    Member::new("instance_id", &Shape::Text),
];

static LOAD_BALANCER: &[Member] =
    &[Member::new("target_group_arns", &Shape::List(&Shape::Grammar(arn_fault))).required()];

static MANAGED: &[Managed] = &[
    ("InstanceType", "use `instance_type`"),
    ("SubnetId", "use `subnet_pool`"),
    ("UserData", "use `userdata`"),
    ("MinCount", "use `size` of the group"),
    ("MaxCount", "use `size` of the group"),
    ("ClientToken", "remove it"),
    ("DryRun", "remove it"),
    ("Operator", "remove it"),
];

/// Keys of a network interface whose value only one instance can have.
const ONE_INSTANCE_ONLY: [&str; 4] = ["NetworkInterfaceId", "PrivateIpAddress", "PrivateIpAddresses", "Ipv6Addresses"];

impl ProviderSchema for Aws {
    fn kind(&self) -> &'static str {
        "aws"
    }

    fn facts(&self) -> KindFacts {
        KindFacts {
            is_dev: false,
            needs_userdata: true,
            needs_instance_type: true,
            trusts_agent_addresses: false,
            images_instead: None,
            load_balancers_instead: None,
            // The default quota of RunInstances is a bucket of 5 requests, refilled by 2 in a second.
            create_pace: CreatePace { burst: 5, refill: std::time::Duration::from_millis(500) },
            min_registration_timeout: None,
        }
    }

    fn check_options(&self, options: &Object) -> Vec<SchemaProblem> {
        check(options, OPTIONS, &[], Stage::Settings)
    }

    fn check_args(&self, args: &Object, context: ArgsContext) -> Vec<SchemaProblem> {
        check_request(args, context, Stage::Template)
    }

    fn check_rendered_args(&self, args: &Object, context: ArgsContext) -> Vec<SchemaProblem> {
        let mut problems = check_request(args, context, Stage::Rendered);
        match args.get("ImageId") {
            None => problems.push(SchemaProblem::new(&[], SchemaFault::Missing { key: "ImageId" })),
            Some(Value::String(id)) if id.is_empty() => problems.push(bad(&["ImageId"], "this must not be empty")),
            Some(_) => {}
        }
        problems
    }

    fn check_load_balancer(&self, load_balancer: &Object) -> Vec<SchemaProblem> {
        let mut problems = check(load_balancer, LOAD_BALANCER, &[], Stage::Settings);
        if matches!(load_balancer.get("target_group_arns"), Some(Value::Array(arns)) if arns.is_empty()) {
            problems.push(bad(&["target_group_arns"], "at least one target group is needed"));
        }
        problems
    }

    fn load_balancer_keys(&self) -> Vec<(String, String)> {
        keys(LOAD_BALANCER)
    }

    fn check_leader_network(&self, _: Option<IpAddr>, interface_id: Option<&str>) -> Vec<SchemaProblem> {
        match interface_id {
            None => vec![SchemaProblem::new(&[], SchemaFault::Missing { key: "interface_id" })],
            Some(_) => Vec::new(),
        }
    }
}

fn bad(path: &[&str], message: impl Into<String>) -> SchemaProblem {
    SchemaProblem::new(path, SchemaFault::BadValue { message: message.into() })
}

fn arn_fault(text: &str) -> TextFault {
    let is_arn = text.starts_with("arn:") && 5 < text.split(':').count();
    let help = "write arn:aws:elasticloadbalancing:…:targetgroup/…";
    (!is_arn).then(|| (format!("{} is no ARN", shown(text)), help))
}

/// All checks but for required args.
fn check_request(args: &Object, context: ArgsContext, stage: Stage) -> Vec<SchemaProblem> {
    let mut problems = check(args, table::RUN_INSTANCES, MANAGED, stage);
    check_tags(args, &mut problems);
    check_interfaces(args, &mut problems);
    check_spot(args, &mut problems);
    if context.size.is_some_and(|size| 1 < size) {
        problems.extend(single_instance_keys(args).into_iter().map(|path| {
            let path: Vec<&str> = path.iter().map(String::as_str).collect();
            let message = format!("`{}` suits one instance only", path.last().copied().unwrap_or_default());
            SchemaProblem::new(&path, SchemaFault::Conflict { message })
                .with_help("set `size` to 1, or make a group for each")
        }));
    }
    problems
}

/// The objects in the list `key`, each with its index in words.
fn objects<'a>(object: &'a Object, key: &str) -> Vec<(String, &'a Object)> {
    match object.get(key) {
        Some(Value::Array(items)) => {
            let numbered = items.iter().enumerate();
            numbered.filter_map(|(i, item)| Some((i.to_string(), item.as_object()?))).collect()
        }
        _ => Vec::new(),
    }
}

/// Tags are merged with ours by the type of what they are for.
fn check_tags(args: &Object, problems: &mut Vec<SchemaProblem>) {
    for (i, specification) in objects(args, "TagSpecifications") {
        if specification.get("ResourceType").is_none() {
            problems.push(SchemaProblem::new(&["TagSpecifications", &i], SchemaFault::Missing { key: "ResourceType" }));
        }
        for (j, tag) in objects(specification, "Tags") {
            let Some(key) = tag.get("Key").and_then(Value::as_str) else {
                if tag.get("Key").is_none() {
                    let path = ["TagSpecifications", &i, "Tags", &j];
                    problems.push(SchemaProblem::new(&path, SchemaFault::Missing { key: "Key" }));
                }
                continue;
            };
            if key.starts_with("nstance") {
                let message = format!("tags named `nstance…` are nstance's own, as {} is", shown(key));
                let path = ["TagSpecifications", &i, "Tags", &j, "Key"];
                problems.push(bad(&path, message).with_help("choose another name"));
            }
        }
    }
}

fn check_interfaces(args: &Object, problems: &mut Vec<SchemaProblem>) {
    let interfaces = objects(args, "NetworkInterfaces");
    for (i, interface) in &interfaces {
        if interface.get("SubnetId").is_some() {
            let what = SchemaFault::ManagedKey { instead: "use `subnet_pool`" };
            problems.push(SchemaProblem::new(&["NetworkInterfaces", i, "SubnetId"], what));
        }
    }
    if args.get("NetworkInterfaces").is_some() {
        for key in ["SecurityGroupIds", "SecurityGroups"] {
            if args.get(key).is_some() {
                let message = format!("`{key}` and `NetworkInterfaces` exclude each other");
                let problem = SchemaProblem::new(&[key], SchemaFault::Conflict { message });
                problems.push(problem.with_help("name the groups in `NetworkInterfaces`: \"Groups\""));
            }
        }
    }
}

/// EC2 starts a persistent or stopped spot instance again by itself, without a new nonce.
fn check_spot(args: &Object, problems: &mut Vec<SchemaProblem>) {
    let field = |key: &str, inner: &str| args.get(key).and_then(Value::as_object).and_then(|it| it.get(inner));
    let options = field("InstanceMarketOptions", "SpotOptions").and_then(Value::as_object);
    let is_spot = field("InstanceMarketOptions", "MarketType").and_then(Value::as_str) == Some("spot");
    if !is_spot && options.is_none() {
        return;
    }
    for (key, allowed) in [("SpotInstanceType", "one-time"), ("InstanceInterruptionBehavior", "terminate")] {
        let Some(value) = options.and_then(|it| it.get(key)).and_then(Value::as_str) else { continue };
        if value != allowed && !is_template(value) {
            let path = ["InstanceMarketOptions", "SpotOptions", key];
            let problem = bad(&path, format!("{} is refused: nstance replaces spot instances by itself", shown(value)));
            problems.push(problem.with_help(format!("write `{allowed}`, or remove it")));
        }
    }
    if matches!(field("HibernationOptions", "Configured"), Some(Value::Bool(true))) {
        let message = "a spot instance that may hibernate is not terminated on interruption".to_owned();
        let problem = SchemaProblem::new(&["HibernationOptions", "Configured"], SchemaFault::Conflict { message });
        problems.push(problem.with_help("remove it, or `InstanceMarketOptions`"));
    }
}

/// Paths of what two instances cannot both have.
fn single_instance_keys(args: &Object) -> Vec<Vec<String>> {
    let top = ["PrivateIpAddress", "Ipv6Addresses"].into_iter().filter(|key| args.get(key).is_some());
    let mut paths: Vec<Vec<String>> = top.map(|key| vec![key.to_owned()]).collect();
    for list in ["NetworkInterfaces", "SecondaryInterfaces"] {
        for (i, interface) in objects(args, list) {
            let keys = ONE_INSTANCE_ONLY.into_iter().filter(|key| interface.get(key).is_some());
            paths.extend(keys.map(|key| vec![list.to_owned(), i.clone(), key.to_owned()]));
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{faults, list, nested, object, texts};

    fn written(entries: &[(&str, Value)]) -> Vec<String> {
        faults(Aws.check_args(&object(entries), ArgsContext { size: Some(2) }))
    }

    fn rendered(entries: &[(&str, Value)]) -> Vec<String> {
        faults(Aws.check_rendered_args(&object(entries), ArgsContext { size: Some(2) }))
    }

    #[test]
    fn a_realistic_request_is_accepted() {
        let ebs = nested(&[("VolumeSize", Value::from("{{ .Vars.Size }}")), ("VolumeType", Value::from("gp3"))]);
        let device = nested(&[("DeviceName", Value::from("/dev/xvda")), ("Ebs", ebs)]);
        let tag = nested(&[("Key", Value::from("Name")), ("Value", Value::from("mine"))]);
        let tags = nested(&[("ResourceType", Value::from("instance")), ("Tags", list(&[tag]))]);
        let spot = nested(&[
            ("MaxPrice", Value::from("0.1")),
            ("SpotInstanceType", Value::from("one-time")),
            ("InstanceInterruptionBehavior", Value::from("terminate")),
        ]);
        let market = nested(&[("MarketType", Value::from("spot")), ("SpotOptions", spot)]);
        let args = [
            ("ImageId", Value::from("{{ .Image.debian }}")),
            ("SecurityGroupIds", texts(&["sg-1"])),
            ("MetadataOptions", nested(&[("HttpTokens", Value::from("required"))])),
            ("IamInstanceProfile", nested(&[("Name", Value::from("agent"))])),
            ("BlockDeviceMappings", list(&[device])),
            ("TagSpecifications", list(&[tags])),
            ("InstanceMarketOptions", market),
            ("EbsOptimized", Value::from("true")),
        ];
        assert_eq!(written(&args), [""; 0]);
    }

    #[test]
    fn nested_keys_types_and_enums_are_checked() {
        let ebs = nested(&[
            ("VolumeSize", Value::from("big")),
            ("VolumeType", Value::from("gp9")),
            ("Iops", Value::from("3000")),
            ("VolumSize", Value::Int(1)),
        ]);
        let found = rendered(&[
            ("ImageId", Value::from("ami-1")),
            ("Imageid", Value::from("ami-1")),
            ("BlockDeviceMappings", list(&[nested(&[("Ebs", ebs)])])),
            ("MetadataOptions", nested(&[("HttpTokens", Value::from("requird"))])),
            ("SecurityGroupIds", Value::from("sg-1")),
            ("Monitoring", nested(&[])),
        ]);
        assert!(found[0].starts_with("Imageid: unknown of BlockDeviceMappings, ImageId, Ipv6"), "{found:?}");
        assert!(!found[0].contains("InstanceType") && !found[0].contains("DryRun"), "managed keys are not suggested");
        let at = "BlockDeviceMappings.0.Ebs";
        assert_eq!(found[1], format!("{at}.VolumeSize: expected a whole number"));
        assert!(found[2].starts_with(&format!("{at}.VolumeType: `gp9` is not known here (use one of: ")), "{found:?}");
        assert!(found[3].starts_with(&format!("{at}.VolumSize: unknown of DeleteOnTermination")), "{found:?}");
        let rest = [
            "MetadataOptions.HttpTokens: `requird` is not known here (use one of: optional, required)",
            "SecurityGroupIds: expected a list",
            "Monitoring: missing Enabled",
        ];
        assert_eq!(found[4..], rest);
    }

    #[test]
    fn managed_keys_are_refused_and_deprecated_keys_are_warned_of() {
        let interface = nested(&[("DeviceIndex", Value::Int(0)), ("SubnetId", Value::from("subnet-1"))]);
        let found = written(&[
            ("InstanceType", Value::from("t3.small")),
            ("MinCount", Value::Int(1)),
            ("ElasticInferenceAccelerators", list(&[])),
            ("SecurityGroupIds", texts(&["sg-1"])),
            ("NetworkInterfaces", list(&[interface])),
        ]);
        assert_eq!(
            found,
            [
                "InstanceType: managed: use `instance_type`",
                "MinCount: managed: use `size` of the group",
                "ElasticInferenceAccelerators: deprecated: `ElasticInferenceAccelerators` is deprecated by the provider",
                "NetworkInterfaces.0.SubnetId: managed: use `subnet_pool`",
                "SecurityGroupIds: conflict: `SecurityGroupIds` and `NetworkInterfaces` exclude each other \
                 (name the groups in `NetworkInterfaces`: \"Groups\")",
            ]
        );
        for (key, _) in MANAGED {
            assert!(table::RUN_INSTANCES.iter().any(|it| it.name == *key), "{key} is a key of the request");
        }
    }

    #[test]
    fn our_tags_are_reserved_and_name_is_not() {
        let tag = |key: &str| nested(&[("Key", Value::from(key)), ("Value", Value::from("x"))]);
        let tags = list(&[tag("Name"), tag("nstance:shard"), nested(&[("Value", Value::from("x"))])]);
        let found = written(&[("TagSpecifications", list(&[nested(&[("Tags", tags)])]))]);
        assert_eq!(
            found,
            [
                "TagSpecifications.0: missing ResourceType",
                "TagSpecifications.0.Tags.1.Key: tags named `nstance…` are nstance's own, as `nstance:shard` is \
                 (choose another name)",
                "TagSpecifications.0.Tags.2: missing Key",
            ]
        );
    }

    #[test]
    fn only_spot_instances_that_end_for_good_are_taken() {
        let options = nested(&[
            ("SpotInstanceType", Value::from("persistent")),
            ("InstanceInterruptionBehavior", Value::from("stop")),
        ]);
        let found = written(&[
            ("InstanceMarketOptions", nested(&[("MarketType", Value::from("spot")), ("SpotOptions", options)])),
            ("HibernationOptions", nested(&[("Configured", Value::Bool(true))])),
        ]);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("InstanceMarketOptions.SpotOptions.SpotInstanceType: `persistent` is refused"));
    }

    #[test]
    fn an_address_suits_a_group_of_one() {
        let args = object(&[
            ("ImageId", Value::from("ami-1")),
            ("PrivateIpAddress", Value::from("10.0.0.1")),
            ("NetworkInterfaces", list(&[nested(&[("NetworkInterfaceId", Value::from("eni-1"))])])),
        ]);
        let check = |size| Aws.check_rendered_args(&args, ArgsContext { size }).len();
        assert_eq!((check(None), check(Some(0)), check(Some(1)), check(Some(2))), (0, 0, 0, 2));
    }

    #[test]
    fn an_image_is_needed_once_everything_is_rendered() {
        assert_eq!(written(&[]), [""; 0]);
        assert_eq!(rendered(&[]), [": missing ImageId"]);
        assert_eq!(rendered(&[("ImageId", Value::from(""))]), ["ImageId: this must not be empty"]);
    }

    #[test]
    fn options_and_load_balancers_are_checked() {
        let options = |index| faults(Aws.check_options(&object(&[("eni_device_index", index)])));
        assert_eq!(options(Value::Int(1)), [""; 0]);
        assert_eq!(options(Value::Int(0)), ["eni_device_index: 0 is out of range (use 1 or more)"]);
        assert_eq!(options(Value::from("1")), ["eni_device_index: expected a whole number"], "nothing renders options");
        let balancer = |entries: &[(&str, Value)]| faults(Aws.check_load_balancer(&object(entries)));
        let arn = "arn:aws:elasticloadbalancing:r:1:targetgroup/www/1";
        assert_eq!(balancer(&[("target_group_arns", texts(&[arn]))]), [""; 0]);
        assert_eq!(balancer(&[]), [": missing target_group_arns"]);
        assert_eq!(
            balancer(&[("target_group_arns", list(&[]))]),
            ["target_group_arns: at least one target group is needed"]
        );
        assert_eq!(balancer(&[("target_group_arns", texts(&[arn, "www"]))]).len(), 1);
        assert_eq!(Aws.check_leader_network(None, None).len(), 1);
        assert_eq!(Aws.check_leader_network(None, Some("eni-1")).len(), 0);
    }

    #[test]
    fn wire_names_are_those_of_the_query() {
        let wire = |name: &str| table::RUN_INSTANCES.iter().find(|it| it.name == name).map(|it| it.wire);
        assert_eq!(wire("BlockDeviceMappings"), Some("BlockDeviceMapping"));
        assert_eq!(wire("ImageId"), Some("ImageId"));
        let Shape::Struct(interface) = &table::INSTANCE_NETWORK_INTERFACE_SPECIFICATION else { panic!() };
        let wire = |name: &str| interface.iter().find(|it| it.name == name).map(|it| it.wire);
        assert_eq!(wire("Groups"), Some("SecurityGroupId"));
        assert_eq!(wire("PrivateIpAddress"), Some("PrivateIpAddress"));
        assert_eq!(wire("Ipv6Addresses"), Some("Ipv6Addresses"));
    }
}
