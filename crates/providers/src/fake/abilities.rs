//! What not every provider has: load balancers, the leader's address, images.

use async_trait::async_trait;
use nstance_core::{
    ports::provider::{
        Balancers, ErrorClass, Image, ImageQuery, Images, LbMember, LeaderAddress, LeaderNetwork, LoadBalancer,
        ProviderError, VmRef,
    },
    term::Permit,
};

use super::{
    FakeProvider,
    cloud::Cloud,
    options::FakeOptions,
    script::{About, Op},
};

#[async_trait]
impl Balancers for FakeProvider {
    async fn lb_register(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        let options = &self.shared.options;
        self.call(Op::LbRegister, Self::about(&permit, vm), |cloud, moment| {
            cloud.register(options, &lb.key, vm, if moment.partial { 1 } else { usize::MAX }, moment.now);
            Ok(())
        })
        .await
    }

    async fn lb_deregister(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        let options = &self.shared.options;
        self.call(Op::LbDeregister, Self::about(&permit, vm), |cloud, moment| {
            cloud.deregister(options, &lb.key, vm, moment.now);
            Ok(())
        })
        .await
    }

    async fn lb_members(&self, lb: &LoadBalancer) -> Result<Vec<LbMember>, ProviderError> {
        self.call(Op::LbMembers, About::default(), |cloud, moment| Ok(cloud.members(&lb.key, moment.now))).await
    }
}

#[async_trait]
impl LeaderAddress for FakeProvider {
    async fn self_id(&self) -> Result<String, ProviderError> {
        let unknown = || ProviderError::new("self_id", ErrorClass::Invalid, "we are on no machine of this cloud");
        self.self_id.clone().ok_or_else(unknown)
    }

    async fn net_holder(&self, network: &LeaderNetwork) -> Result<Option<String>, ProviderError> {
        self.call(Op::NetHolder, About::default(), |cloud, _| Ok(cloud.addresses.get(&network.ip).cloned())).await
    }

    async fn net_assign(
        &self,
        permit: Permit,
        me: &str,
        network: &LeaderNetwork,
        _previous: Option<&str>,
    ) -> Result<(), ProviderError> {
        let about = About { epoch: Some(permit.epoch()), ..About::default() };
        let is_ours = self.cloud().addresses.get(&network.ip).is_some_and(|holder| holder == me);
        if !is_ours {
            tokio::time::sleep(self.shared.options.address_move_time).await;
        }
        self.call(Op::NetAssign, about, |cloud, _| {
            cloud.addresses.insert(network.ip, me.to_owned());
            Ok(())
        })
        .await
    }

    async fn net_release(&self, me: &str, network: &LeaderNetwork) -> Result<(), ProviderError> {
        self.call(Op::NetRelease, About::default(), |cloud, _| {
            if cloud.addresses.get(&network.ip).is_some_and(|holder| holder == me) {
                cloud.addresses.remove(&network.ip);
            }
            Ok(())
        })
        .await
    }
}

#[async_trait]
impl Images for FakeProvider {
    async fn resolve_image(&self, query: &ImageQuery) -> Result<Option<Image>, ProviderError> {
        let options = &self.shared.options;
        self.call(Op::ResolveImage, About::default(), |cloud, _| Ok(find_image(options, cloud, query))).await
    }
}

pub(super) fn find_image(options: &FakeOptions, cloud: &Cloud, query: &ImageQuery) -> Option<Image> {
    let names = query.filters.get("name");
    let fits = |name: &str| names.is_none_or(|names| names.iter().any(|pattern| glob(pattern, name)));
    let images = options.images.iter().chain(&cloud.images);
    let mut images: Vec<&(String, String)> = images.filter(|(name, _)| fits(name)).collect();
    if query.by_name {
        images.sort();
    }
    let (_, id) = if query.ascending { images.first() } else { images.last() }?;
    Some(Image { id: id.clone(), arch: options.image_archs.get(id).cloned() })
}

/// `*` stands for anything.
fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => text
            .strip_prefix(head)
            .is_some_and(|rest| (0..=rest.len()).any(|at| rest.is_char_boundary(at) && glob(tail, &rest[at..]))),
    }
}
