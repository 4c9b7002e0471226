//! The sizes of development VMs. They are processes of this machine and share all of it, so a size is a claim that
//! Kubernetes schedules by, and nothing enforces it.
//!
//! An instance type is free text. One of the form `cpu:2,memory:4096,disk:20,gpu:1` (memory in MiB, disk in GiB, any part
//! of it) says what it is; what it leaves out, and any other text, is 2 CPUs, 4 GiB of memory, a disk of 20 GiB and no
//! GPU.

use nstance_core::ports::provider::InstanceType;

const CPU: u32 = 2;
const MEMORY_MIB: u64 = 4096;
const DISK_GIB: u64 = 20;

pub(super) fn of(instance_type: &str) -> InstanceType {
    let (mut cpu, mut memory, mut disk, mut gpus) = (CPU, MEMORY_MIB, DISK_GIB, 0);
    for (key, number) in instance_type.split(',').filter_map(|part| part.split_once(':')) {
        let Ok(number) = number.trim().parse::<u32>() else { continue };
        match key.trim() {
            "cpu" => cpu = number.max(1),
            "memory" => memory = u64::from(number.max(1)),
            "disk" => disk = u64::from(number.max(1)),
            "gpu" => gpus = number,
            _ => {}
        }
    }
    InstanceType {
        arch: Some(arch().to_owned()),
        cpu,
        memory_bytes: memory << 20,
        ephemeral_storage_bytes: Some(disk << 30),
        gpus,
    }
}

/// This machine's, in the words of Kubernetes.
pub(super) fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use nstance_schemas::quantities;

    use super::*;

    fn shown(instance_type: &str) -> String {
        let quantities = quantities(&of(instance_type));
        quantities.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_type_that_says_its_size_has_it_and_any_other_is_small() {
        let small = "cpu=2 ephemeral-storage=20Gi memory=4Gi";
        for text in ["", "small", "t3.micro", "cpu:many", ":", "cores:4"] {
            assert_eq!(shown(text), small, "{text}");
        }
        assert_eq!(
            shown("cpu:8,memory:16384,disk:100,gpu:2"),
            "cpu=8 ephemeral-storage=100Gi memory=16Gi nvidia.com/gpu=2"
        );
        assert_eq!(shown("memory:1536, cpu:1"), "cpu=1 ephemeral-storage=20Gi memory=1536Mi");
        assert_eq!(shown("cpu:0,memory:0"), "cpu=1 ephemeral-storage=20Gi memory=1Mi", "there is no empty machine");
    }
}
