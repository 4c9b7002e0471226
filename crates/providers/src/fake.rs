//! A cloud in memory, for tests and simulations: deterministic from its options, its script, a seed and a clock.
//!
//! It is an adapter like the others, with rules instead of recorded expectations, and can be told to be slow, late,
//! full, throttled, wrong or silent. It keeps a log of all calls, so that a test can ask afterwards whether anything
//! was made twice or done under an old epoch. Several servers and shards share one cloud by [`FakeProvider::with_self`]
//! and [`FakeProvider::with_owner`].
//!
//! A call takes its latency, and its effect lands half-way: cancelled before that it never happened, after that it did.

mod abilities;
mod check;
mod cloud;
pub mod journal;
mod options;
mod reserve;
mod script;

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use nstance_core::{
    ids::{InstanceId, LbKey},
    instance::Seen,
    ports::{
        clock::{Clock, Entropy},
        provider::{
            Balancers, Capabilities, CheckProblem, CheckSeverity, CreateMode, DeleteHow, Described, Ended, ErrorClass,
            Images, InstanceType, LbMemberState, LeaderAddress, Listing, Need, Needs, Owner, Provider, ProviderError,
            Reservation, ReserveSpec, SubnetFree, Tags, Vm, VmRef, VmSpec, VmTags,
        },
    },
    term::Permit,
    time::{Mono, Timestamp},
};

use self::{
    cloud::{Begun, Cloud},
    reserve::Allocator,
    script::About,
};
pub use self::{
    cloud::{FakeVm, ShownTags},
    options::{FakeOptions, OptionsError},
    script::{Call, EndOf, Op, Outcome, Rule, ScriptedEnd, When},
};

#[derive(Clone)]
pub struct FakeProvider {
    shared: Arc<Shared>,
    owner: Owner,
    self_id: Option<String>,
    /// What the process that we stand for has reserved.
    allocator: Arc<Allocator>,
}

struct Shared {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    options: FakeOptions,
    cloud: Mutex<Cloud>,
}

/// The moment an effect lands.
struct Moment {
    now: Mono,
    at: Timestamp,
    /// The script wants the effect done in part only, where it has parts.
    partial: bool,
    /// The script wants an answer without tags.
    without_tags: bool,
    /// The script wants the effect to begin this much later.
    later: Duration,
}

impl FakeProvider {
    pub fn new(owner: Owner, clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>, options: FakeOptions) -> Self {
        let (self_id, allocator) = (options.self_id.clone(), Arc::new(Allocator::new(&options)));
        let shared = Arc::new(Shared { clock, entropy, options, cloud: Mutex::default() });
        Self { shared, owner, self_id, allocator }
    }

    /// The same cloud, seen from another machine.
    pub fn with_self(&self, self_id: impl Into<String>) -> Self {
        Self { self_id: Some(self_id.into()), ..self.restarted() }
    }

    /// The same cloud, for another owner.
    pub fn with_owner(&self, owner: Owner) -> Self {
        Self { owner, ..self.restarted() }
    }

    /// The same cloud, seen from a process that has just started: it knows nothing of what others have reserved.
    pub fn restarted(&self) -> Self {
        Self { allocator: Arc::new(Allocator::new(&self.shared.options)), ..self.clone() }
    }

    fn cloud(&self) -> MutexGuard<'_, Cloud> {
        self.shared.cloud.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Mono {
        self.shared.clock.monotonic()
    }

    // What a test does to the cloud behind our back.

    /// Adds a fault. Rules are tried in the order they were added.
    pub fn script(&self, rule: Rule) {
        self.cloud().rules.push(rule);
    }

    /// Has VMs that are made from now on ended by the cloud.
    pub fn script_end(&self, end: ScriptedEnd) {
        self.cloud().ends.push(end);
    }

    pub fn clear_script(&self) {
        let mut cloud = self.cloud();
        cloud.rules.clear();
        cloud.ends.clear();
    }

    /// While on, nothing answers and nothing lands.
    pub fn outage(&self, on: bool) {
        self.cloud().outage = on;
    }

    /// The page of a listing that does not answer, from 0.
    pub fn fail_page(&self, page: Option<usize>) {
        self.cloud().failing_page = page;
    }

    /// Ends every VM of that instance at once, whoever owns it. Says whether there was one.
    pub fn kill(&self, instance: InstanceId) -> bool {
        self.change(instance, |_, vm, now| vm.goes(now, [(Duration::ZERO, Seen::Gone)]))
    }

    /// Ends every VM of that instance after a while, by the cloud's own decision, and says why from then on.
    pub fn end(&self, instance: InstanceId, after: Duration, ended: &Ended) -> bool {
        self.change(instance, |_, vm, now| {
            let as_it_was = vm.seen_at(now).unwrap_or(Seen::Pending);
            vm.goes(now, [(Duration::ZERO, as_it_was), (after, Seen::Gone)]);
            vm.ended = Some(ended.clone());
        })
    }

    /// Stops the VM, as a person at the console would.
    pub fn stop(&self, instance: InstanceId) -> bool {
        self.change(instance, |options, vm, now| {
            vm.goes(now, [(Duration::ZERO, Seen::Stopping), (options.stop_time, Seen::Stopped)]);
        })
    }

    /// Shows the VM as `seen` from now on.
    pub fn show(&self, instance: InstanceId, seen: Seen) -> bool {
        self.change(instance, |_, vm, now| vm.goes(now, [(Duration::ZERO, seen)]))
    }

    /// Takes a spot VM back after `notice`. Its agent would learn of it by [`FakeProvider::notice_of`].
    pub fn reclaim(&self, instance: InstanceId, notice: Duration) -> bool {
        let deadline = self.shared.clock.now().plus(notice);
        self.change(instance, |_, vm, now| {
            vm.notice = Some(deadline);
            vm.goes(now, [(notice, Seen::Gone)]);
        })
    }

    pub fn notice_of(&self, instance: InstanceId) -> Option<Timestamp> {
        self.cloud().vms.values().find(|vm| vm.instance == Some(instance)).and_then(|vm| vm.notice)
    }

    /// Termination protection.
    pub fn protect(&self, instance: InstanceId, on: bool) -> bool {
        self.change(instance, |_, vm, _| vm.protected = on)
    }

    /// Removes every trace of the instance's VMs: from now on they are "not found".
    pub fn purge(&self, instance: InstanceId) {
        self.cloud().vms.retain(|_, vm| vm.instance != Some(instance));
    }

    /// A host that is down: its VMs are `HostDown` and cannot be deleted.
    pub fn host_down(&self, host: &str, down: bool) {
        toggle(&mut self.cloud().hosts_down, host, down);
    }

    /// A host that does not answer: nothing is known of its VMs.
    pub fn host_silent(&self, host: &str, silent: bool) {
        toggle(&mut self.cloud().hosts_silent, host, silent);
    }

    /// A VM that was not made through us: of another owner, or without any tags.
    pub fn add_foreign(&self, provider_id: &str, instance: Option<InstanceId>, tags: Option<Tags>) {
        let (now, at) = (self.now(), self.shared.clock.now());
        self.cloud().add_stranger(provider_id, instance, tags, now, at);
    }

    /// Takes the tags of the instance's VMs away, all but those that say whose they are.
    pub fn spoil_tags(&self, instance: InstanceId) -> bool {
        self.change(instance, |_, vm, _| vm.tags = None)
    }

    /// What answers about the instance's VMs say of their tags from now on. One answer alone loses them by
    /// [`Outcome::HideTags`].
    pub fn show_tags(&self, instance: InstanceId, shown: ShownTags) -> bool {
        self.change(instance, |_, vm, _| vm.shown_tags = shown)
    }

    /// Takes our right to see the instance's VMs away, or gives it back: meanwhile listings omit them without a word,
    /// and questions about them are refused.
    pub fn forbid(&self, instance: InstanceId, on: bool) -> bool {
        self.change(instance, |_, vm, _| vm.forbidden = on)
    }

    /// From now on a registered member is in after this long, whatever the options say.
    pub fn set_lb_warmup(&self, warmup: Duration) {
        self.cloud().lb_warmup = Some(warmup);
    }

    /// A member that fails its health checks is not in; also one that is registered later.
    pub fn set_lb_health(&self, lb: &LbKey, instance: InstanceId, is_healthy: bool) {
        self.cloud().set_lb_health(lb, instance, is_healthy);
    }

    /// Puts an instance into a load balancer, as a person at the console would.
    pub fn put_in_balancer(&self, lb: &LbKey, instance: InstanceId) {
        let (vm, now) = (VmRef { instance, provider_id: None }, self.now());
        self.cloud().register(&self.shared.options, lb, &vm, usize::MAX, now);
    }

    /// Publishes an image, newer than all there are.
    pub fn publish_image(&self, name: &str, id: &str) {
        self.cloud().images.push((name.to_owned(), id.to_owned()));
    }

    /// Withdraws every image of that name that was published.
    pub fn withdraw_image(&self, name: &str) {
        self.cloud().images.retain(|(it, _)| it != name);
    }

    fn change(&self, instance: InstanceId, change: impl Fn(&FakeOptions, &mut FakeVm, Mono)) -> bool {
        let now = self.now();
        let mut changed = false;
        for vm in self.cloud().vms.values_mut().filter(|vm| vm.instance == Some(instance)) {
            change(&self.shared.options, vm, now);
            changed = true;
        }
        changed
    }

    // What a test reads afterwards.

    /// Every call that ever began, in that order.
    pub fn calls(&self) -> Vec<Call> {
        self.cloud().calls.clone()
    }

    /// Every VM that was not cleaned away, strangers and gone ones included, by provider id.
    pub fn vms(&self) -> Vec<FakeVm> {
        self.cloud().vms.values().cloned().collect()
    }

    /// Instances that have a VM which is not gone, each as often as it has one.
    pub fn standing(&self) -> Vec<InstanceId> {
        let now = self.now();
        let stands = |vm: &&FakeVm| vm.seen_at(now).is_some_and(|seen| seen != Seen::Gone);
        self.cloud().vms.values().filter(stands).filter_map(|vm| vm.instance).collect()
    }

    /// Every VM that is known by an instance id, with what it is now.
    pub fn states(&self) -> Vec<(InstanceId, Seen)> {
        let now = self.now();
        self.cloud().vms.values().filter_map(|vm| Some((vm.instance?, vm.seen_at(now)?))).collect()
    }

    pub fn vm_of(&self, instance: InstanceId) -> Option<FakeVm> {
        self.cloud().vms.values().find(|vm| vm.instance == Some(instance)).cloned()
    }

    pub fn members(&self, lb: &LbKey) -> BTreeMap<InstanceId, LbMemberState> {
        self.cloud().members(lb, self.now()).into_iter().map(|member| (member.vm.instance, member.state)).collect()
    }

    /// Free local places of this process, where their number is limited.
    pub fn free_places(&self) -> Option<usize> {
        self.allocator.free_places()
    }

    pub fn n_calls(&self) -> usize {
        self.cloud().calls.len()
    }

    pub fn address_holder(&self, ip: IpAddr) -> Option<String> {
        self.cloud().addresses.get(&ip).cloned()
    }

    // How a call goes.

    async fn half_latency(&self, op: Op) {
        let (options, entropy) = (&self.shared.options, &*self.shared.entropy);
        let mut latency = options.latency_of(op);
        if !options.jitter.is_zero() {
            latency += nstance_rt::entropy::jitter(entropy, options.jitter);
        }
        if !latency.is_zero() {
            tokio::time::sleep(latency / 2).await;
        }
    }

    async fn call<T>(
        &self,
        op: Op,
        about: About,
        effect: impl FnOnce(&mut Cloud, Moment) -> Result<T, ProviderError>,
    ) -> Result<T, ProviderError> {
        let (at, now) = (self.shared.clock.now(), self.now());
        let Begun { call, outcome, refused } = self.cloud().begin(&self.shared.options, op, &about, at, now);
        self.half_latency(op).await;
        let answer = match (refused, &outcome) {
            (Some(refused), _) => Err(refused),
            (None, Some(Outcome::Refuse(class))) => Err(op.scripted(*class)),
            (None, Some(Outcome::RefuseWith(error))) => Err(op.scripted_with(error)),
            (None, Some(Outcome::Hang)) => std::future::pending().await,
            (None, outcome) => {
                if let Some(Outcome::Delay(delay)) = outcome {
                    tokio::time::sleep(*delay).await;
                }
                let moment = Moment {
                    now: self.now(),
                    at: self.shared.clock.now(),
                    partial: matches!(outcome, Some(Outcome::LandThenFail(_) | Outcome::LandThenFailWith(_))),
                    without_tags: matches!(outcome, Some(Outcome::HideTags)),
                    later: if let Some(Outcome::LandLater(later)) = outcome { *later } else { Duration::ZERO },
                };
                let done = {
                    let mut cloud = self.cloud();
                    let done = match cloud.catch_up(&self.shared.options, moment.now) {
                        Ok(()) => effect(&mut cloud, moment),
                        Err(error) => Err(op.error(ErrorClass::Unavailable, format!("read the journal: {error}"))),
                    };
                    cloud.calls[call].landed = op.is_effect() && done.is_ok();
                    done
                };
                match outcome {
                    Some(Outcome::LandThenFail(class)) => Err(op.scripted(*class)),
                    Some(Outcome::LandThenFailWith(error)) => Err(op.scripted_with(error)),
                    Some(Outcome::LandThenHang) => std::future::pending().await,
                    _ => done,
                }
            }
        };
        self.half_latency(op).await;
        self.cloud().calls[call].answer = Some(answer.as_ref().map(|_| ()).map_err(|error| error.class));
        answer
    }

    fn about(permit: &Permit, vm: &VmRef) -> About {
        About { instance: Some(vm.instance), epoch: Some(permit.epoch()), ..About::default() }
    }
}

fn toggle(set: &mut std::collections::BTreeSet<String>, key: &str, on: bool) {
    if on {
        set.insert(key.to_owned());
    } else {
        set.remove(key);
    }
}

#[async_trait]
impl Provider for FakeProvider {
    fn kind(&self) -> &'static str {
        "fake"
    }

    fn capabilities(&self) -> Capabilities {
        let options = &self.shared.options;
        Capabilities {
            create: if options.idempotent_create { CreateMode::Idempotent } else { CreateMode::RecordFirst },
            visibility_delay: options.visibility_delay,
            create_pace: options.create_pace,
            deadlines: options.deadlines,
            describe_batch: options.describe_batch,
        }
    }

    fn balancers(&self) -> Option<&dyn Balancers> {
        Some(self)
    }

    fn leader_address(&self) -> Option<&dyn LeaderAddress> {
        Some(self)
    }

    fn images(&self) -> Option<&dyn Images> {
        Some(self)
    }

    async fn check(&self, needs: &Needs) -> Vec<CheckProblem> {
        let checked = self.call(Op::Check, About::default(), |cloud, _| Ok(self.unmet(cloud, needs))).await;
        checked
            .unwrap_or_else(|error| vec![CheckProblem { need: Need::Account, severity: CheckSeverity::Error, error }])
    }

    async fn reserve(&self, spec: &ReserveSpec) -> Result<Reservation, ProviderError> {
        self.choose_id(spec).await
    }

    fn restore(&self, reserved: &[String]) {
        self.allocator.restore(reserved);
    }

    async fn create(&self, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError> {
        let about = About {
            instance: Some(spec.instance),
            group: Some(spec.tags.group_ref()),
            subnet: Some(spec.subnet.clone()),
            epoch: Some(permit.epoch()),
        };
        let (options, asked) = (&self.shared.options, self.now());
        self.call(Op::Create, about, |cloud, moment| {
            let made = cloud.create(options, &self.owner, spec, moment.now, moment.at)?;
            cloud.note_made(spec, &made, asked)?;
            Ok(made)
        })
        .await
    }

    async fn delete(&self, permit: Permit, vm: &VmRef, _how: DeleteHow) -> Result<(), ProviderError> {
        let options = &self.shared.options;
        let about = Self::about(&permit, vm);
        self.call(Op::Delete, about, |cloud, moment| cloud.delete(options, &self.owner, vm, &moment)).await
    }

    async fn describe(&self, vms: &[VmRef]) -> Vec<Described> {
        let options = &self.shared.options;
        let failed = |error: ProviderError| match error.class {
            ErrorClass::NotFound => Described::NotFound,
            _ => Described::Unknown(error),
        };
        let look = |cloud: &mut Cloud, moment: Moment| {
            let one = |vm: &VmRef| {
                let known = cloud.meant_mut(&self.owner, vm).map(|it| (it.tags.clone(), it.subnet.clone()));
                let (tags, subnet) = known.unwrap_or_default();
                let group = tags.map(|tags| tags.group_ref());
                let about = About { instance: Some(vm.instance), group, subnet, epoch: None };
                let outcome = cloud.script_one(Op::Describe, &about);
                match &outcome {
                    Some(Outcome::Refuse(class) | Outcome::LandThenFail(class)) => {
                        return failed(Op::Describe.scripted(*class));
                    }
                    Some(Outcome::RefuseWith(error) | Outcome::LandThenFailWith(error)) => {
                        return failed(Op::Describe.scripted_with(error));
                    }
                    _ => {}
                }
                let without_tags = moment.without_tags || outcome == Some(Outcome::HideTags);
                match cloud.describe(options, &self.owner, vm, moment.now, without_tags) {
                    Ok(Some(vm)) => Described::Vm(Box::new(vm)),
                    Ok(None) => Described::NotFound,
                    Err(error) => Described::Unknown(error),
                }
            };
            Ok(vms.iter().map(one).collect())
        };
        match self.call(Op::Describe, About::default(), look).await {
            Ok(described) => described,
            Err(error) => vms.iter().map(|_| failed(error.clone())).collect(),
        }
    }

    async fn list(&self) -> Result<Listing, ProviderError> {
        let (options, owner) = (&self.shared.options, &self.owner);
        let look = |cloud: &mut Cloud, moment: Moment| {
            let (mut vms, silent) = cloud.list(owner, moment.now.minus(options.listing_delay));
            for vm in &mut vms {
                if moment.without_tags || cloud.lists_without_tags(vm) {
                    vm.tags = VmTags::Absent;
                }
            }
            Ok((vms, silent, cloud.failing_page))
        };
        let (mut vms, silent, failing_page) = self.call(Op::List, About::default(), look).await?;
        let page_size = options.page_size.max(1);
        for _ in 1..vms.len().div_ceil(page_size) {
            self.half_latency(Op::List).await;
            self.half_latency(Op::List).await;
        }
        let mut missing = silent;
        if let Some(page) = failing_page
            && page < vms.len().div_ceil(page_size).max(1)
        {
            // With a page its cursor is lost, and so are the pages behind it.
            vms.truncate(page * page_size);
            missing = Some(format!("page {page}"));
        }
        Ok(Listing { vms, missing })
    }

    async fn probe(&self) -> Result<(), ProviderError> {
        self.call(Op::Probe, About::default(), |_, _| Ok(())).await
    }

    async fn clean(&self, permit: Permit, vm: &VmRef) -> Result<(), ProviderError> {
        let about = Self::about(&permit, vm);
        self.call(Op::Clean, about, |cloud, moment| {
            cloud.clean(&self.owner, vm, moment.now);
            Ok(())
        })
        .await
    }

    async fn subnet_free(&self, subnet: &str) -> Result<SubnetFree, ProviderError> {
        let limit = self.shared.options.subnet_capacity.get(subnet).copied();
        let about = About { subnet: Some(subnet.to_owned()), ..About::default() };
        self.call(Op::SubnetFree, about, |cloud, moment| {
            Ok(limit.map_or(SubnetFree::Unlimited, |limit| {
                SubnetFree::Free(limit.saturating_sub(cloud.n_in_subnet(subnet, moment.now)))
            }))
        })
        .await
    }

    async fn instance_type(&self, name: &str) -> Result<Option<InstanceType>, ProviderError> {
        let known = self.shared.options.instance_types.get(name).cloned();
        self.call(Op::InstanceType, About::default(), |_, _| Ok(known)).await
    }

    fn k8s_provider_id(&self, vm: &VmRef) -> String {
        format!("fake:///{}", vm.provider_id.clone().unwrap_or_else(|| vm.instance.to_string()))
    }
}
