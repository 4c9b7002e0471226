//! The request of EC2's RunInstances: names, types, enums.
//!
//! Made by generate/aws.py from botocore's model of EC2 (Apache-2.0); do not edit. A name is what people write in
//! `args`, a wire name what the query says. The EC2 protocol writes lists flat: `Name.1`, `Name.2`.

use crate::shape::{Member, Shape};

pub const API_VERSION: &str = "2016-11-15";

/// Version of botocore.
pub const MADE_FROM: &str = "1.44.3";

static INTEGER: Shape = Shape::Integer { min: -2_147_483_648, max: 2_147_483_647 };

/// Every key of the request.
pub static RUN_INSTANCES: &[Member] = &[
    Member::wire("BlockDeviceMappings", "BlockDeviceMapping", &BLOCK_DEVICE_MAPPING_REQUEST_LIST),
    Member::new("ImageId", &Shape::String),
    Member::new("InstanceType", &Shape::String),
    Member::new("Ipv6AddressCount", &INTEGER),
    Member::wire("Ipv6Addresses", "Ipv6Address", &INSTANCE_IPV6_ADDRESS_LIST),
    Member::new("KernelId", &Shape::String),
    Member::new("KeyName", &Shape::String),
    Member::new("MaxCount", &INTEGER),
    Member::new("MinCount", &INTEGER),
    Member::new("Monitoring", &RUN_INSTANCES_MONITORING_ENABLED),
    Member::new("Placement", &PLACEMENT),
    Member::new("RamdiskId", &Shape::String),
    Member::wire("SecurityGroupIds", "SecurityGroupId", &SECURITY_GROUP_ID_STRING_LIST),
    Member::wire("SecurityGroups", "SecurityGroup", &SECURITY_GROUP_STRING_LIST),
    Member::new("SubnetId", &Shape::String),
    Member::new("UserData", &Shape::String),
    Member::new("ElasticGpuSpecification", &ELASTIC_GPU_SPECIFICATIONS).deprecated(),
    Member::wire("ElasticInferenceAccelerators", "ElasticInferenceAccelerator", &ELASTIC_INFERENCE_ACCELERATORS).deprecated(),
    Member::wire("TagSpecifications", "TagSpecification", &TAG_SPECIFICATION_LIST),
    Member::new("LaunchTemplate", &LAUNCH_TEMPLATE_SPECIFICATION),
    Member::new("InstanceMarketOptions", &INSTANCE_MARKET_OPTIONS_REQUEST),
    Member::new("CreditSpecification", &CREDIT_SPECIFICATION_REQUEST),
    Member::new("CpuOptions", &CPU_OPTIONS_REQUEST),
    Member::new("CapacityReservationSpecification", &CAPACITY_RESERVATION_SPECIFICATION),
    Member::new("HibernationOptions", &HIBERNATION_OPTIONS_REQUEST),
    Member::wire("LicenseSpecifications", "LicenseSpecification", &LICENSE_SPECIFICATION_LIST_REQUEST),
    Member::new("MetadataOptions", &INSTANCE_METADATA_OPTIONS_REQUEST),
    Member::new("EnclaveOptions", &ENCLAVE_OPTIONS_REQUEST),
    Member::new("PrivateDnsNameOptions", &PRIVATE_DNS_NAME_OPTIONS_REQUEST),
    Member::new("MaintenanceOptions", &INSTANCE_MAINTENANCE_OPTIONS_REQUEST),
    Member::new("DisableApiStop", &Shape::Bool),
    Member::new("EnablePrimaryIpv6", &Shape::Bool),
    Member::new("NetworkPerformanceOptions", &INSTANCE_NETWORK_PERFORMANCE_OPTIONS_REQUEST),
    Member::new("Operator", &OPERATOR_REQUEST),
    Member::wire("SecondaryInterfaces", "SecondaryInterface", &INSTANCE_SECONDARY_INTERFACE_SPECIFICATION_LIST_REQUEST),
    Member::new("DryRun", &Shape::Bool),
    Member::new("DisableApiTermination", &Shape::Bool),
    Member::new("InstanceInitiatedShutdownBehavior", &SHUTDOWN_BEHAVIOR),
    Member::new("PrivateIpAddress", &Shape::String),
    Member::new("ClientToken", &Shape::String),
    Member::new("AdditionalInfo", &Shape::String),
    Member::wire("NetworkInterfaces", "NetworkInterface", &INSTANCE_NETWORK_INTERFACE_SPECIFICATION_LIST),
    Member::new("IamInstanceProfile", &IAM_INSTANCE_PROFILE_SPECIFICATION),
    Member::new("EbsOptimized", &Shape::Bool),
];

pub static AMD_SEV_SNP_SPECIFICATION: Shape = Shape::Enum(&["enabled", "disabled"]);

pub static BLOCK_DEVICE_MAPPING: Shape = Shape::Struct(&[
    Member::new("Ebs", &EBS_BLOCK_DEVICE),
    Member::new("NoDevice", &Shape::String),
    Member::new("DeviceName", &Shape::String),
    Member::new("VirtualName", &Shape::String),
]);

pub static BLOCK_DEVICE_MAPPING_REQUEST_LIST: Shape = Shape::List(&BLOCK_DEVICE_MAPPING);

pub static CAPACITY_RESERVATION_PREFERENCE: Shape = Shape::Enum(&["capacity-reservations-only", "open", "none"]);

pub static CAPACITY_RESERVATION_SPECIFICATION: Shape = Shape::Struct(&[
    Member::new("CapacityReservationPreference", &CAPACITY_RESERVATION_PREFERENCE),
    Member::new("CapacityReservationTarget", &CAPACITY_RESERVATION_TARGET),
]);

pub static CAPACITY_RESERVATION_TARGET: Shape = Shape::Struct(&[
    Member::new("CapacityReservationId", &Shape::String),
    Member::new("CapacityReservationResourceGroupArn", &Shape::String),
]);

pub static CONNECTION_TRACKING_SPECIFICATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("TcpEstablishedTimeout", &INTEGER),
    Member::new("UdpStreamTimeout", &INTEGER),
    Member::new("UdpTimeout", &INTEGER),
]);

pub static CPU_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("CoreCount", &INTEGER),
    Member::new("ThreadsPerCore", &INTEGER),
    Member::new("AmdSevSnp", &AMD_SEV_SNP_SPECIFICATION),
    Member::new("NestedVirtualization", &NESTED_VIRTUALIZATION_SPECIFICATION),
]);

pub static CREDIT_SPECIFICATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("CpuCredits", &Shape::String).required(),
]);

pub static EBS_BLOCK_DEVICE: Shape = Shape::Struct(&[
    Member::new("DeleteOnTermination", &Shape::Bool),
    Member::new("Iops", &INTEGER),
    Member::new("SnapshotId", &Shape::String),
    Member::new("VolumeSize", &INTEGER),
    Member::new("VolumeType", &VOLUME_TYPE),
    Member::new("KmsKeyId", &Shape::String),
    Member::new("Throughput", &INTEGER),
    Member::new("OutpostArn", &Shape::String),
    Member::new("AvailabilityZone", &Shape::String),
    Member::new("Encrypted", &Shape::Bool),
    Member::new("VolumeInitializationRate", &INTEGER),
    Member::new("AvailabilityZoneId", &Shape::String),
    Member::new("EbsCardIndex", &INTEGER),
]);

pub static ELASTIC_GPU_SPECIFICATION: Shape = Shape::Struct(&[
    Member::new("Type", &Shape::String).required(),
]);

pub static ELASTIC_GPU_SPECIFICATIONS: Shape = Shape::List(&ELASTIC_GPU_SPECIFICATION);

pub static ELASTIC_INFERENCE_ACCELERATOR: Shape = Shape::Struct(&[
    Member::new("Type", &Shape::String).required(),
    Member::new("Count", &Shape::Integer { min: 1, max: 2_147_483_647 }),
]);

pub static ELASTIC_INFERENCE_ACCELERATORS: Shape = Shape::List(&ELASTIC_INFERENCE_ACCELERATOR);

pub static ENA_SRD_SPECIFICATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("EnaSrdEnabled", &Shape::Bool),
    Member::new("EnaSrdUdpSpecification", &ENA_SRD_UDP_SPECIFICATION_REQUEST),
]);

pub static ENA_SRD_UDP_SPECIFICATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("EnaSrdUdpEnabled", &Shape::Bool),
]);

pub static ENCLAVE_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("Enabled", &Shape::Bool),
]);

pub static HIBERNATION_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("Configured", &Shape::Bool),
]);

pub static HOSTNAME_TYPE: Shape = Shape::Enum(&["ip-name", "resource-name"]);

pub static HTTP_TOKENS_STATE: Shape = Shape::Enum(&["optional", "required"]);

pub static IAM_INSTANCE_PROFILE_SPECIFICATION: Shape = Shape::Struct(&[
    Member::new("Arn", &Shape::String),
    Member::new("Name", &Shape::String),
]);

pub static INSTANCE_AUTO_RECOVERY_STATE: Shape = Shape::Enum(&["disabled", "default"]);

pub static INSTANCE_BANDWIDTH_WEIGHTING: Shape = Shape::Enum(&["default", "vpc-1", "ebs-1"]);

pub static INSTANCE_INTERRUPTION_BEHAVIOR: Shape = Shape::Enum(&["hibernate", "stop", "terminate"]);

pub static INSTANCE_IPV6_ADDRESS: Shape = Shape::Struct(&[
    Member::new("Ipv6Address", &Shape::String),
    Member::new("IsPrimaryIpv6", &Shape::Bool),
]);

pub static INSTANCE_IPV6_ADDRESS_LIST: Shape = Shape::List(&INSTANCE_IPV6_ADDRESS);

pub static INSTANCE_MAINTENANCE_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("AutoRecovery", &INSTANCE_AUTO_RECOVERY_STATE),
]);

pub static INSTANCE_MARKET_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("MarketType", &MARKET_TYPE),
    Member::new("SpotOptions", &SPOT_MARKET_OPTIONS),
]);

pub static INSTANCE_METADATA_ENDPOINT_STATE: Shape = Shape::Enum(&["disabled", "enabled"]);

pub static INSTANCE_METADATA_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("HttpTokens", &HTTP_TOKENS_STATE),
    Member::new("HttpPutResponseHopLimit", &INTEGER),
    Member::new("HttpEndpoint", &INSTANCE_METADATA_ENDPOINT_STATE),
    Member::new("HttpProtocolIpv6", &INSTANCE_METADATA_PROTOCOL_STATE),
    Member::new("InstanceMetadataTags", &INSTANCE_METADATA_TAGS_STATE),
]);

pub static INSTANCE_METADATA_PROTOCOL_STATE: Shape = Shape::Enum(&["disabled", "enabled"]);

pub static INSTANCE_METADATA_TAGS_STATE: Shape = Shape::Enum(&["disabled", "enabled"]);

pub static INSTANCE_NETWORK_INTERFACE_SPECIFICATION: Shape = Shape::Struct(&[
    Member::new("AssociatePublicIpAddress", &Shape::Bool),
    Member::new("DeleteOnTermination", &Shape::Bool),
    Member::new("Description", &Shape::String),
    Member::new("DeviceIndex", &INTEGER),
    Member::wire("Groups", "SecurityGroupId", &SECURITY_GROUP_ID_STRING_LIST),
    Member::new("Ipv6AddressCount", &INTEGER),
    Member::new("Ipv6Addresses", &INSTANCE_IPV6_ADDRESS_LIST),
    Member::new("NetworkInterfaceId", &Shape::String),
    Member::new("PrivateIpAddress", &Shape::String),
    Member::new("PrivateIpAddresses", &PRIVATE_IP_ADDRESS_SPECIFICATION_LIST),
    Member::new("SecondaryPrivateIpAddressCount", &INTEGER),
    Member::new("SubnetId", &Shape::String),
    Member::new("AssociateCarrierIpAddress", &Shape::Bool),
    Member::new("InterfaceType", &Shape::String),
    Member::new("NetworkCardIndex", &INTEGER),
    Member::wire("Ipv4Prefixes", "Ipv4Prefix", &IPV4_PREFIX_LIST),
    Member::new("Ipv4PrefixCount", &INTEGER),
    Member::wire("Ipv6Prefixes", "Ipv6Prefix", &IPV6_PREFIX_LIST),
    Member::new("Ipv6PrefixCount", &INTEGER),
    Member::new("PrimaryIpv6", &Shape::Bool),
    Member::new("EnaSrdSpecification", &ENA_SRD_SPECIFICATION_REQUEST),
    Member::new("ConnectionTrackingSpecification", &CONNECTION_TRACKING_SPECIFICATION_REQUEST),
    Member::new("EnaQueueCount", &INTEGER),
]);

pub static INSTANCE_NETWORK_INTERFACE_SPECIFICATION_LIST: Shape = Shape::List(&INSTANCE_NETWORK_INTERFACE_SPECIFICATION);

pub static INSTANCE_NETWORK_PERFORMANCE_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("BandwidthWeighting", &INSTANCE_BANDWIDTH_WEIGHTING),
]);

pub static INSTANCE_SECONDARY_INTERFACE_PRIVATE_IP_ADDRESS_LIST_REQUEST: Shape = Shape::List(&INSTANCE_SECONDARY_INTERFACE_PRIVATE_IP_ADDRESS_REQUEST);

pub static INSTANCE_SECONDARY_INTERFACE_PRIVATE_IP_ADDRESS_REQUEST: Shape = Shape::Struct(&[
    Member::new("PrivateIpAddress", &Shape::String).required(),
]);

pub static INSTANCE_SECONDARY_INTERFACE_SPECIFICATION_LIST_REQUEST: Shape = Shape::List(&INSTANCE_SECONDARY_INTERFACE_SPECIFICATION_REQUEST);

pub static INSTANCE_SECONDARY_INTERFACE_SPECIFICATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("DeleteOnTermination", &Shape::Bool),
    Member::new("DeviceIndex", &INTEGER),
    Member::wire("PrivateIpAddresses", "PrivateIpAddress", &INSTANCE_SECONDARY_INTERFACE_PRIVATE_IP_ADDRESS_LIST_REQUEST),
    Member::new("PrivateIpAddressCount", &INTEGER),
    Member::new("SecondarySubnetId", &Shape::String),
    Member::new("InterfaceType", &SECONDARY_INTERFACE_TYPE),
    Member::new("NetworkCardIndex", &INTEGER),
]);

pub static IPV4_PREFIX_LIST: Shape = Shape::List(&IPV4_PREFIX_SPECIFICATION_REQUEST);

pub static IPV4_PREFIX_SPECIFICATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("Ipv4Prefix", &Shape::String),
]);

pub static IPV6_PREFIX_LIST: Shape = Shape::List(&IPV6_PREFIX_SPECIFICATION_REQUEST);

pub static IPV6_PREFIX_SPECIFICATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("Ipv6Prefix", &Shape::String),
]);

pub static LAUNCH_TEMPLATE_SPECIFICATION: Shape = Shape::Struct(&[
    Member::new("LaunchTemplateId", &Shape::String),
    Member::new("LaunchTemplateName", &Shape::String),
    Member::new("Version", &Shape::String),
]);

pub static LICENSE_CONFIGURATION_REQUEST: Shape = Shape::Struct(&[
    Member::new("LicenseConfigurationArn", &Shape::String),
]);

pub static LICENSE_SPECIFICATION_LIST_REQUEST: Shape = Shape::List(&LICENSE_CONFIGURATION_REQUEST);

pub static MARKET_TYPE: Shape = Shape::Enum(&["spot", "capacity-block", "interruptible-capacity-reservation", "on-demand"]);

pub static METRIC_CATEGORY_ID_LIST: Shape = Shape::List(&Shape::String);

pub static NESTED_VIRTUALIZATION_SPECIFICATION: Shape = Shape::Enum(&["enabled", "disabled"]);

pub static OPERATOR_REQUEST: Shape = Shape::Struct(&[
    Member::new("Principal", &Shape::String),
]);

pub static PLACEMENT: Shape = Shape::Struct(&[
    Member::new("AvailabilityZoneId", &Shape::String),
    Member::new("Affinity", &Shape::String),
    Member::new("GroupName", &Shape::String),
    Member::new("PartitionNumber", &INTEGER),
    Member::new("HostId", &Shape::String),
    Member::new("Tenancy", &TENANCY),
    Member::new("SpreadDomain", &Shape::String),
    Member::new("HostResourceGroupArn", &Shape::String),
    Member::new("GroupId", &Shape::String),
    Member::new("AvailabilityZone", &Shape::String),
]);

pub static PRIVATE_DNS_NAME_OPTIONS_REQUEST: Shape = Shape::Struct(&[
    Member::new("HostnameType", &HOSTNAME_TYPE),
    Member::new("EnableResourceNameDnsARecord", &Shape::Bool),
    Member::new("EnableResourceNameDnsAAAARecord", &Shape::Bool),
]);

pub static PRIVATE_IP_ADDRESS_SPECIFICATION: Shape = Shape::Struct(&[
    Member::new("Primary", &Shape::Bool),
    Member::new("PrivateIpAddress", &Shape::String),
]);

pub static PRIVATE_IP_ADDRESS_SPECIFICATION_LIST: Shape = Shape::List(&PRIVATE_IP_ADDRESS_SPECIFICATION);

pub static RUN_INSTANCES_MONITORING_ENABLED: Shape = Shape::Struct(&[
    Member::wire("MetricCategoryIds", "MetricCategoryId", &METRIC_CATEGORY_ID_LIST),
    Member::new("Enabled", &Shape::Bool).required(),
]);

pub static SECONDARY_INTERFACE_TYPE: Shape = Shape::Enum(&["secondary"]);

pub static SECURITY_GROUP_ID_STRING_LIST: Shape = Shape::List(&Shape::String);

pub static SECURITY_GROUP_STRING_LIST: Shape = Shape::List(&Shape::String);

pub static SHUTDOWN_BEHAVIOR: Shape = Shape::Enum(&["stop", "terminate"]);

pub static SPOT_INSTANCE_TYPE: Shape = Shape::Enum(&["one-time", "persistent"]);

pub static SPOT_MARKET_OPTIONS: Shape = Shape::Struct(&[
    Member::new("MaxPrice", &Shape::String),
    Member::new("SpotInstanceType", &SPOT_INSTANCE_TYPE),
    Member::new("BlockDurationMinutes", &INTEGER),
    Member::new("ValidUntil", &Shape::Timestamp),
    Member::new("InstanceInterruptionBehavior", &INSTANCE_INTERRUPTION_BEHAVIOR),
]);

pub static TAG: Shape = Shape::Struct(&[
    Member::new("Key", &Shape::String),
    Member::new("Value", &Shape::String),
]);

pub static TAG_LIST: Shape = Shape::List(&TAG);

pub static TAG_SPECIFICATION: Shape = Shape::Struct(&[
    Member::new("ResourceType", &Shape::String),
    Member::wire("Tags", "Tag", &TAG_LIST),
]);

pub static TAG_SPECIFICATION_LIST: Shape = Shape::List(&TAG_SPECIFICATION);

pub static TENANCY: Shape = Shape::Enum(&["default", "dedicated", "host"]);

pub static VOLUME_TYPE: Shape = Shape::Enum(&["standard", "io1", "io2", "gp2", "sc1", "st1", "gp3"]);
