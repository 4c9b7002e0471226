//! What each provider kind accepts in a config: options, args, instance types, subnets, load balancers.
//!
//! Pure, and all kinds are in every build. Server and admin tool validate with this list, so both give the same report
//! for the same bytes, whichever providers a build can run.

pub mod shape;

pub mod duration;

mod quantity;

pub mod aws;

mod any;

mod dev;

mod gcp;

mod proxmox;

use nstance_core::ports::schema::ProviderSchema;

pub use any::ANY;
pub use dev::capacities;
pub use quantity::quantities;

/// Every provider kind, in the order in which messages name them.
pub static ALL: &[&dyn ProviderSchema] =
    &[&aws::Aws, &gcp::Gcp, &proxmox::Proxmox, &dev::PROCESS, &dev::TMUX, &dev::FAKE];

/// The schema of a kind by its own name; aliases are not answered.
pub fn find(kind: &str) -> Option<&'static dyn ProviderSchema> {
    ALL.iter().copied().find(|schema| schema.kind() == kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_or_alias_of_a_kind_occurs_twice() {
        let mut names: Vec<&str> = ALL.iter().flat_map(|it| it.aliases().iter().copied().chain([it.kind()])).collect();
        names.sort_unstable();
        let n_names = names.len();
        names.dedup();
        assert_eq!(names.len(), n_names);
    }
}

#[cfg(test)]
pub(crate) mod testing;
