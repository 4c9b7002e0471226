//! Which cloud this is.

use std::{fs, path::Path};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cloud {
    Aws,
    Gcp,
    Azure,
}

impl Cloud {
    pub(crate) const ALL: [Self; 3] = [Self::Aws, Self::Gcp, Self::Azure];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::Gcp => "gcp",
            Self::Azure => "azure",
        }
    }
}

/// What Azure's machines carry, and Hyper-V elsewhere does not.
const AZURE_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

/// The clouds in the order in which to ask. The firmware's word comes first and costs no packet, but it is no proof:
/// the same vendors build laptops, so the others are asked when the likeliest does not answer.
pub(crate) fn order(dmi: &Path) -> Vec<Cloud> {
    let likely = by_firmware(dmi);
    let rest = Cloud::ALL.into_iter().filter(|cloud| Some(*cloud) != likely);
    likely.into_iter().chain(rest).collect()
}

fn by_firmware(dmi: &Path) -> Option<Cloud> {
    let read = |name: &str| fs::read_to_string(dmi.join(name)).unwrap_or_default().trim().to_owned();
    let (vendor, product) = (read("sys_vendor"), read("product_name"));
    if vendor == "Amazon EC2" || read("bios_vendor") == "Amazon EC2" {
        return Some(Cloud::Aws);
    }
    // Machines on Xen name Xen as their maker.
    if ["bios_version", "product_version"].iter().any(|name| read(name).to_lowercase().contains("amazon")) {
        return Some(Cloud::Aws);
    }
    if vendor == "Google" || product == "Google Compute Engine" {
        return Some(Cloud::Gcp);
    }
    if vendor == "Microsoft Corporation" || read("chassis_asset_tag") == AZURE_TAG {
        return Some(Cloud::Azure);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firmware_decides_who_is_asked_first() {
        for (name, text, first) in [
            ("sys_vendor", "Amazon EC2\n", Cloud::Aws),
            ("bios_vendor", "Amazon EC2\n", Cloud::Aws),
            ("bios_version", "4.11.amazon\n", Cloud::Aws),
            ("sys_vendor", "Google\n", Cloud::Gcp),
            ("product_name", "Google Compute Engine\n", Cloud::Gcp),
            ("sys_vendor", "Microsoft Corporation\n", Cloud::Azure),
            ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n", Cloud::Azure),
            ("sys_vendor", "QEMU\n", Cloud::Aws),
        ] {
            let dmi = tempfile::tempdir().unwrap();
            fs::write(dmi.path().join(name), text).unwrap();
            let order = order(dmi.path());
            assert_eq!(order[0], first, "{name}: {text}");
            assert_eq!(order.len(), 3);
        }
        assert_eq!(order(Path::new("/nowhere")), Cloud::ALL);
    }
}
