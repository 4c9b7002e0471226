//! The size of an instance as Kubernetes writes it: resource names and quantities, both texts.

use std::collections::BTreeMap;

use nstance_core::ports::provider::InstanceType;

/// Suffixes of powers of 1024, from the first.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// What is known of a size. A zero means that the provider did not tell, and is left out: a scheduler that reads it
/// would take it for a machine that holds nothing.
pub fn quantities(size: &InstanceType) -> BTreeMap<String, String> {
    let count = |n: u32| (0 < n).then(|| n.to_string());
    let bytes = |n: u64| (0 < n).then(|| binary(n));
    let all = [
        ("cpu", count(size.cpu)),
        ("memory", bytes(size.memory_bytes)),
        ("ephemeral-storage", size.ephemeral_storage_bytes.and_then(bytes)),
        ("nvidia.com/gpu", count(size.gpus)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// The canonical form: a whole number with the largest suffix of a power of 1024 that leaves it whole.
fn binary(bytes: u64) -> String {
    let (mut number, mut suffix) = (bytes, "");
    for next in BINARY {
        if number == 0 || !number.is_multiple_of(1024) {
            break;
        }
        (number, suffix) = (number / 1024, next);
    }
    format!("{number}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(cpu: u32, memory_bytes: u64, ephemeral_storage_bytes: Option<u64>, gpus: u32) -> InstanceType {
        InstanceType { arch: None, cpu, memory_bytes, ephemeral_storage_bytes, gpus }
    }

    fn shown(size: &InstanceType) -> String {
        let quantities = quantities(size);
        quantities.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_size_has_the_names_and_the_canonical_quantities_of_kubernetes() {
        let whole = size(4, 8 << 30, Some(20 << 30), 1);
        assert_eq!(shown(&whole), "cpu=4 ephemeral-storage=20Gi memory=8Gi nvidia.com/gpu=1");
    }

    #[test]
    fn what_is_not_known_and_a_gpu_that_is_not_there_are_left_out() {
        assert_eq!(shown(&size(2, 1 << 30, None, 0)), "cpu=2 memory=1Gi");
        assert_eq!(shown(&size(0, 0, Some(0), 0)), "");
    }

    #[test]
    fn bytes_take_the_largest_suffix_that_leaves_them_whole() {
        let cases: [(u64, &str); 7] = [
            (1, "1"),
            (1000, "1000"),
            (1024, "1Ki"),
            (1536 << 20, "1536Mi"),
            (1024 << 30, "1Ti"),
            (16_384_000_000, "15625Mi"),
            (u64::MAX, "18446744073709551615"),
        ];
        for (bytes, text) in cases {
            assert_eq!(binary(bytes), text);
        }
        assert_eq!(binary(1 << 60), "1Ei");
    }
}
