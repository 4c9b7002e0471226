//! The cloud behind the fake provider: VMs with a timeline, and everything else it keeps in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    time::Duration,
};

use nstance_core::{
    ids::{ClusterId, InstanceId, LbKey, Shard},
    instance::Seen,
    ports::provider::{
        Ended, ErrorClass, LbMember, LbMemberState, Owner, ProviderError, Tags, Vm, VmRef, VmSpec, VmTags,
    },
    time::{Mono, Timestamp},
};

use super::{
    Moment,
    journal::{Journal, Line, Made},
    options::FakeOptions,
    script::{About, Call, Op, Outcome, Rule, ScriptedEnd, When},
};

/// What answers about a VM say of its tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShownTags {
    /// What they are.
    #[default]
    AsTheyAre,
    /// They are left out.
    Absent,
    /// They are malformed.
    Foreign,
}

/// A VM of the fake cloud, gone ones included until they are cleaned.
#[derive(Debug, Clone, PartialEq)]
pub struct FakeVm {
    pub provider_id: String,
    /// Its name; a stranger's may be none of ours.
    pub instance: Option<InstanceId>,
    /// As its tags say; `None` for an untagged stranger.
    pub owner: Option<(ClusterId, Shard)>,
    pub tags: Option<Tags>,
    /// The request that made it.
    pub spec: Option<VmSpec>,
    pub created: Mono,
    pub created_at: Timestamp,
    pub instance_type: Option<String>,
    pub subnet: Option<String>,
    pub host: Option<String>,
    pub ip4: Option<String>,
    pub spot: bool,
    /// Termination protection: a delete is refused.
    pub protected: bool,
    /// When it will be reclaimed, once that was announced.
    pub notice: Option<Timestamp>,
    pub shown_tags: ShownTags,
    /// Why the cloud ended it, or will.
    pub ended: Option<Ended>,
    /// We lack the right to see it: listings omit it without a word.
    pub forbidden: bool,
    /// What it is from which moment on; some of it may lie ahead.
    timeline: Vec<(Mono, Seen)>,
}

impl FakeVm {
    /// `None` before it was made.
    pub fn seen_at(&self, at: Mono) -> Option<Seen> {
        self.timeline.iter().rev().find(|(from, _)| *from <= at).map(|(_, seen)| *seen)
    }

    fn is_gone(&self, at: Mono) -> bool {
        self.seen_at(at) == Some(Seen::Gone)
    }

    fn is_owned_by(&self, owner: &Owner) -> bool {
        self.owner.as_ref().is_some_and(|(cluster, shard)| *cluster == owner.cluster && *shard == owner.shard)
    }

    pub(super) fn tags_in_answers(&self) -> VmTags {
        match self.shown_tags {
            ShownTags::AsTheyAre => self.tags.clone().map_or(VmTags::Absent, VmTags::Complete),
            ShownTags::Absent => VmTags::Absent,
            ShownTags::Foreign => VmTags::Foreign,
        }
    }

    /// From `now` on, forgets what was to come and lives through `steps` instead.
    pub(super) fn goes(&mut self, now: Mono, steps: impl IntoIterator<Item = (Duration, Seen)>) {
        if !self.is_gone(now) {
            self.ended = None;
        }
        self.timeline.retain(|(from, _)| *from <= now);
        self.timeline.extend(steps.into_iter().map(|(after, seen)| (now + after, seen)));
    }
}

#[derive(Debug, Default)]
pub(super) struct Cloud {
    pub(super) vms: BTreeMap<String, FakeVm>,
    /// Client tokens: who was made for which instance, gone or not.
    made: BTreeMap<InstanceId, String>,
    n_made: u64,
    pub(super) rules: Vec<Rule>,
    pub(super) ends: Vec<ScriptedEnd>,
    pub(super) calls: Vec<Call>,
    counts: BTreeMap<Op, u64>,
    pub(super) outage: bool,
    pub(super) hosts_down: BTreeSet<String>,
    pub(super) hosts_silent: BTreeSet<String>,
    pub(super) failing_page: Option<usize>,
    /// By key and provider id.
    balancers: BTreeMap<LbKey, BTreeMap<String, Member>>,
    /// In place of the options' one.
    pub(super) lb_warmup: Option<Duration>,
    /// Who fails the health checks of which load balancer, members or not.
    unhealthy: BTreeSet<(LbKey, InstanceId)>,
    pub(super) addresses: BTreeMap<IpAddr, String>,
    /// Name and id of what was published since the cloud began, oldest first.
    pub(super) images: Vec<(String, String)>,
    /// Throttling: tokens left, in thousandths, and when they were counted.
    bucket: Option<(u64, Mono)>,
    /// Creates: the time that the tokens left took to flow in, and when it was counted.
    create_bucket: Option<(Duration, Mono)>,
    /// Once it was opened.
    journal: Option<Journal>,
}

#[derive(Debug)]
struct Member {
    instance: InstanceId,
    /// One for each target group.
    targets: Vec<Target>,
    fails_health_checks: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Out,
    InFrom(Mono),
    DrainingUntil(Mono),
}

impl Member {
    /// `None`: it is out.
    fn state(&self, now: Mono) -> Option<LbMemberState> {
        let drains = |it: &Target| matches!(it, Target::DrainingUntil(until) if now < *until);
        let is_in = |it: &Target| matches!(it, Target::InFrom(from) if *from <= now);
        if self.targets.iter().any(drains) {
            Some(LbMemberState::Draining)
        } else if self.targets.iter().all(is_in) && !self.fails_health_checks {
            Some(LbMemberState::In)
        } else {
            let is_registered = self.targets.iter().any(|it| matches!(it, Target::InFrom(_)));
            is_registered.then_some(LbMemberState::Coming)
        }
    }
}

/// What the script says about a call that just began.
pub(super) struct Begun {
    pub(super) call: usize,
    pub(super) outcome: Option<Outcome>,
    pub(super) refused: Option<ProviderError>,
}

impl Cloud {
    pub(super) fn begin(&mut self, options: &FakeOptions, op: Op, about: &About, at: Timestamp, mono: Mono) -> Begun {
        let n = self.counts.entry(op).or_default();
        *n += 1;
        let n = *n;
        let About { instance, group, subnet, epoch } = about.clone();
        self.calls.push(Call { op, n, instance, group, subnet, epoch, at, mono, landed: false, answer: None });
        let outcome = self.script(op, n, about);
        let refused = if self.outage {
            Some(op.error(ErrorClass::Unavailable, "the cloud does not answer"))
        } else if !self.take_token(options, mono) || op == Op::Create && !self.take_create_token(options, mono) {
            let mut error = op.error(ErrorClass::Throttled, "rate limit exceeded");
            error.retry_after = Some(Duration::from_secs(1));
            Some(error)
        } else {
            None
        };
        Begun { call: self.calls.len() - 1, outcome, refused }
    }

    /// The first rule that fits, used once.
    pub(super) fn script(&mut self, op: Op, n: u64, about: &About) -> Option<Outcome> {
        let rule = self.rules.iter_mut().find(|rule| rule.op == op && 0 < rule.times && rule.when.matches(n, about))?;
        Some(rule.apply())
    }

    /// A rule about one VM of a call that is about many.
    pub(super) fn script_one(&mut self, op: Op, about: &About) -> Option<Outcome> {
        let rule = self.rules.iter_mut().find(|rule| {
            let of_one = matches!(rule.when, When::Instance(_) | When::Group(_) | When::Subnet(_));
            rule.op == op && of_one && 0 < rule.times && rule.when.matches(0, about)
        })?;
        Some(rule.apply())
    }

    /// Whether a listing leaves this VM's tags out.
    pub(super) fn lists_without_tags(&mut self, vm: &Vm) -> bool {
        if !self.rules.iter().any(|rule| rule.op == Op::List && rule.outcome == Outcome::HideTags) {
            return false;
        }
        let group = vm.tags.complete().map(Tags::group_ref);
        let about = About { instance: Some(vm.vm.instance), group, subnet: vm.subnet.clone(), epoch: None };
        self.script_one(Op::List, &about) == Some(Outcome::HideTags)
    }

    fn take_token(&mut self, options: &FakeOptions, now: Mono) -> bool {
        if options.throttle_rate == 0 {
            return true;
        }
        let full = options.throttle_rate.saturating_mul(1000);
        let (left, counted) = self.bucket.unwrap_or((full, now));
        let millis = u64::try_from(now.since(counted).as_millis()).unwrap_or(u64::MAX);
        let left = left.saturating_add(millis.saturating_mul(options.throttle_rate)).min(full);
        let granted = 1000 <= left;
        self.bucket = Some((if granted { left - 1000 } else { left }, now));
        granted
    }

    fn take_create_token(&mut self, options: &FakeOptions, now: Mono) -> bool {
        if !options.enforce_create_pace {
            return true;
        }
        let (token, full) = (options.create_pace.refill, options.create_pace.refill * options.create_pace.burst);
        let (left, counted) = self.create_bucket.unwrap_or((full, now));
        let left = (left + now.since(counted)).min(full);
        let granted = token <= left;
        self.create_bucket = Some((if granted { left - token } else { left }, now));
        granted
    }

    pub(super) fn create(
        &mut self,
        options: &FakeOptions,
        owner: &Owner,
        spec: &VmSpec,
        now: Mono,
        at: Timestamp,
    ) -> Result<Vm, ProviderError> {
        let refuse = |class, code: &str, message: String| Err(Op::Create.error(class, message).with_code(code));
        if let Some(key) = spec.args.keys().next() {
            return refuse(ErrorClass::Invalid, "UnknownParameter", format!("unknown parameter {key}"));
        }
        if options.idempotent_create
            && let Some(made) = self.made.get(&spec.instance)
        {
            return match self.vms.get(made) {
                Some(vm) if !vm.is_gone(now) && vm.spec.as_ref().is_some_and(|asked| asked != spec) => {
                    let message = format!("instance {} was asked for with other parameters", spec.instance);
                    refuse(ErrorClass::Ambiguous, "IdempotentParameterMismatch", message)
                }
                Some(vm) if !vm.is_gone(now) => Ok(view(vm, spec.instance, vm.seen_at(now).unwrap_or(Seen::Pending))),
                _ => {
                    let message = format!("instance {} existed and is gone", spec.instance);
                    refuse(ErrorClass::NotFound, "IdempotentInstanceTerminated", message)
                }
            };
        }
        if let Some(id) = &spec.reserved_id
            && let Some(there) = self.vms.get(id)
        {
            // Another's: a free id helps, so this is no fault of the request.
            let is_same = there.instance == Some(spec.instance);
            let class = if is_same { ErrorClass::Invalid } else { ErrorClass::Throttled };
            return refuse(class, "AlreadyExists", format!("{id} exists already"));
        }
        let standing = |subnet: &str| {
            let there = |vm: &&FakeVm| vm.subnet.as_deref() == Some(subnet) && !vm.is_gone(now);
            u64::try_from(self.vms.values().filter(there).count()).unwrap_or(u64::MAX)
        };
        if let Some(limit) = options.subnet_capacity.get(&spec.subnet)
            && *limit <= standing(&spec.subnet)
        {
            let message = format!("subnet {} has no free address", spec.subnet);
            return refuse(ErrorClass::Capacity, "InsufficientFreeAddressesInSubnet", message);
        }
        let host = match self.choose_host(options, now) {
            Ok(host) => host,
            Err(()) => return refuse(ErrorClass::Capacity, "InsufficientHostCapacity", "no host is up".to_owned()),
        };
        self.n_made += 1;
        let provider_id = spec.reserved_id.clone().unwrap_or_else(|| format!("fake-{:08}", self.n_made));
        let mut vm = FakeVm {
            provider_id: provider_id.clone(),
            instance: Some(spec.instance),
            owner: Some((owner.cluster.clone(), owner.shard.clone())),
            tags: Some(spec.tags.clone()),
            // Where there is a journal the request is in there.
            spec: options.journal.is_none().then(|| spec.clone()),
            created: now,
            created_at: at,
            instance_type: spec.instance_type.clone(),
            subnet: Some(spec.subnet.clone()),
            host,
            ip4: Some(address(self.n_made)),
            spot: false,
            protected: false,
            notice: None,
            shown_tags: ShownTags::default(),
            ended: None,
            forbidden: false,
            timeline: Vec::new(),
        };
        match self.ends.iter_mut().find(|end| end.fits(spec)).map(ScriptedEnd::apply) {
            None => vm.goes(now, [(Duration::ZERO, Seen::Pending), (options.boot_time, Seen::Running)]),
            Some((after, ended)) => {
                let runs = (options.boot_time < after).then_some((options.boot_time, Seen::Running));
                let steps = [Some((Duration::ZERO, Seen::Pending)), runs, Some((after, Seen::Gone))];
                vm.goes(now, steps.into_iter().flatten());
                vm.ended = Some(ended);
            }
        }
        let shown = view(&vm, spec.instance, vm.seen_at(now).unwrap_or(Seen::Pending));
        self.made.entry(spec.instance).or_insert_with(|| provider_id.clone());
        self.vms.insert(provider_id, vm);
        Ok(shown)
    }

    /// The host with the fewest VMs, then the first.
    fn choose_host(&self, options: &FakeOptions, now: Mono) -> Result<Option<String>, ()> {
        if options.hosts == 0 {
            return Ok(None);
        }
        let load =
            |host: &str| self.vms.values().filter(|vm| vm.host.as_deref() == Some(host) && !vm.is_gone(now)).count();
        (0..options.hosts)
            .map(|n| format!("host-{n}"))
            .filter(|host| !self.hosts_down.contains(host))
            .min_by_key(|host| load(host))
            .map(Some)
            .ok_or(())
    }

    pub(super) fn add_stranger(
        &mut self,
        provider_id: &str,
        instance: Option<InstanceId>,
        tags: Option<Tags>,
        now: Mono,
        at: Timestamp,
    ) {
        let mut vm = FakeVm {
            provider_id: provider_id.to_owned(),
            instance,
            owner: tags.as_ref().map(|tags| (tags.cluster.clone(), tags.shard.clone())),
            tags,
            spec: None,
            created: now,
            created_at: at,
            instance_type: None,
            subnet: None,
            host: None,
            ip4: None,
            spot: false,
            protected: false,
            notice: None,
            shown_tags: ShownTags::default(),
            ended: None,
            forbidden: false,
            timeline: Vec::new(),
        };
        vm.goes(now, [(Duration::ZERO, Seen::Running)]);
        self.vms.insert(provider_id.to_owned(), vm);
    }

    /// The VM a ref means, if it is the owner's: by its provider id and then only if it bears the name, else by name.
    fn meant(&self, owner: &Owner, vm: &VmRef) -> Option<&FakeVm> {
        let ours = |it: &&FakeVm| it.instance == Some(vm.instance) && it.is_owned_by(owner);
        match &vm.provider_id {
            Some(id) => self.vms.get(id).filter(ours),
            None => {
                let newest = |it: &&FakeVm| it.created;
                self.vms.values().filter(ours).max_by_key(newest)
            }
        }
    }

    pub(super) fn meant_mut(&mut self, owner: &Owner, vm: &VmRef) -> Option<&mut FakeVm> {
        let id = self.meant(owner, vm)?.provider_id.clone();
        self.vms.get_mut(&id)
    }

    pub(super) fn delete(
        &mut self,
        options: &FakeOptions,
        owner: &Owner,
        vm: &VmRef,
        moment: &Moment,
    ) -> Result<(), ProviderError> {
        let now = moment.now;
        let down = self.hosts_down.clone();
        let Some(vm) = self.meant_mut(owner, vm) else { return Ok(()) };
        match vm.tags_in_answers() {
            VmTags::Foreign => return Ok(()),
            VmTags::Complete(_) if !moment.without_tags => {}
            VmTags::Complete(_) | VmTags::Absent => return Err(tags_absent(Op::Delete)),
        }
        if vm.forbidden {
            return Err(Op::Delete.error(ErrorClass::Auth, "not authorised to delete this VM"));
        }
        if vm.is_gone(now) || vm.seen_at(now) == Some(Seen::Deleting) {
            return Ok(());
        }
        if vm.protected {
            let refused = Op::Delete.error(ErrorClass::Invalid, "the VM is protected");
            return Err(refused.with_code("OperationNotPermitted"));
        }
        if vm.host.as_ref().is_some_and(|host| down.contains(host)) {
            return Err(Op::Delete.error(ErrorClass::Unavailable, "the VM's host is down"));
        }
        let instance = vm.instance;
        let is_under_way = vm.timeline.iter().any(|(from, seen)| now < *from && *seen == Seen::Deleting);
        if is_under_way && !moment.later.is_zero() {
            return Ok(());
        }
        let as_it_was = vm.seen_at(now).unwrap_or(Seen::Pending);
        let begins = moment.later;
        let steps = [(Duration::ZERO, as_it_was), (begins, Seen::Deleting), (begins + options.delete_time, Seen::Gone)];
        vm.goes(now, steps.into_iter().skip(usize::from(begins.is_zero())));
        match (&mut self.journal, instance) {
            (Some(journal), Some(instance)) => journal.append(&[Line::Gone(instance.to_string())]).map_err(unwritten),
            _ => Ok(()),
        }
    }

    /// Takes in what other processes did to the cloud since the last call.
    pub(super) fn catch_up(&mut self, options: &FakeOptions, now: Mono) -> io::Result<()> {
        let Some(path) = &options.journal else { return Ok(()) };
        let journal = match &mut self.journal {
            Some(journal) => journal,
            none => none.insert(Journal::open(path)?),
        };
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        for line in journal.news()? {
            match line {
                Line::Made(made) if self.vms.contains_key(&made.provider_id) => {}
                Line::Made(made) => {
                    let tags = made.tags().map_err(invalid)?;
                    self.n_made += 1;
                    self.made.entry(tags.instance).or_insert_with(|| made.provider_id.clone());
                    self.vms.insert(made.provider_id.clone(), remembered(*made, tags, now));
                }
                Line::Gone(instance) => {
                    let instance: InstanceId = instance.parse().map_err(invalid)?;
                    let vm = self.made.get(&instance).and_then(|id| self.vms.get_mut(id));
                    if let Some(vm) = vm.filter(|vm| !vm.is_gone(now)) {
                        vm.goes(now, [(Duration::ZERO, Seen::Gone)]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes down a VM whose create call began at `asked`. One that was asked for again is written again.
    pub(super) fn note_made(&mut self, spec: &VmSpec, made: &Vm, asked: Mono) -> Result<(), ProviderError> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        let tags = &spec.tags;
        let made = Made {
            instance: spec.instance.to_string(),
            provider_id: made.vm.provider_id.clone().unwrap_or_default(),
            asked_nanos: u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX),
            created_at: made.created_at.map_or(0, Timestamp::as_millis),
            cluster: tags.cluster.to_string(),
            shard: tags.shard.to_string(),
            tenant: tags.tenant.to_string(),
            group: tags.group.to_string(),
            epoch: tags.epoch.0,
            on_demand: tags.on_demand,
            template: tags.template.clone(),
            infra_hash: tags.infra_hash.clone(),
            subnet: made.subnet.clone(),
            instance_type: made.instance_type.clone(),
            ip4: made.ip4.clone(),
            nonce: spec.bootstrap.nonce_jwt.clone(),
        };
        journal.note(Line::Made(Box::new(made))).map_err(unwritten)
    }

    /// `Err` if nothing is known of it, `None` if there is none.
    pub(super) fn describe(
        &self,
        options: &FakeOptions,
        owner: &Owner,
        vm: &VmRef,
        now: Mono,
        without_tags: bool,
    ) -> Result<Option<Vm>, ProviderError> {
        let instance = vm.instance;
        let Some(vm) = self.meant(owner, vm) else { return Ok(None) };
        if now < vm.created + options.visibility_delay {
            return Ok(None);
        }
        if vm.forbidden {
            return Err(Op::Describe.error(ErrorClass::Auth, "not authorised to see this VM"));
        }
        let vm = self.look(vm, instance, now)?;
        if without_tags || vm.tags == VmTags::Absent { Err(tags_absent(Op::Describe)) } else { Ok(Some(vm)) }
    }

    fn look(&self, vm: &FakeVm, instance: InstanceId, at: Mono) -> Result<Vm, ProviderError> {
        let on = |hosts: &BTreeSet<String>| vm.host.as_ref().is_some_and(|host| hosts.contains(host));
        if on(&self.hosts_silent) {
            return Err(Op::Describe.error(ErrorClass::Unavailable, "the VM's host does not answer"));
        }
        let seen = match vm.seen_at(at).unwrap_or(Seen::Pending) {
            Seen::Gone => Seen::Gone,
            _ if on(&self.hosts_down) => Seen::HostDown,
            seen => seen,
        };
        Ok(view(vm, instance, seen))
    }

    /// All of the owner's VMs that are not gone, as they were at `then`; and the hosts that did not answer.
    pub(super) fn list(&self, owner: &Owner, then: Mono) -> (Vec<Vm>, Option<String>) {
        let is_listed =
            |vm: &&FakeVm| vm.is_owned_by(owner) && vm.created <= then && !vm.is_gone(then) && !vm.forbidden;
        let listed = self.vms.values().filter(is_listed);
        let vms = listed.filter_map(|vm| self.look(vm, vm.instance?, then).ok()).collect();
        let silent: Vec<&str> = self.hosts_silent.iter().map(String::as_str).collect();
        (vms, (!silent.is_empty()).then(|| silent.join(", ")))
    }

    pub(super) fn n_in_subnet(&self, subnet: &str, now: Mono) -> u64 {
        let there = |vm: &&FakeVm| vm.subnet.as_deref() == Some(subnet) && !vm.is_gone(now);
        self.vms.values().filter(there).count().try_into().unwrap_or(u64::MAX)
    }

    /// Forgets a VM that is gone.
    pub(super) fn clean(&mut self, owner: &Owner, vm: &VmRef, now: Mono) {
        if let Some(vm) = self.meant(owner, vm)
            && vm.is_gone(now)
            && vm.tags_in_answers() != VmTags::Foreign
        {
            let id = vm.provider_id.clone();
            self.vms.remove(&id);
        }
    }

    /// At the first `n_targets` target groups of all `lb_targets`.
    pub(super) fn register(&mut self, options: &FakeOptions, lb: &LbKey, vm: &VmRef, n_targets: usize, now: Mono) {
        let instance = vm.instance;
        let id = vm.provider_id.clone().or_else(|| self.id_of(instance)).unwrap_or_else(|| format!("fake-{instance}"));
        let targets = || vec![Target::Out; options.lb_targets.max(1)];
        let fails_health_checks = self.unhealthy.contains(&(lb.clone(), instance));
        let blank = || Member { instance, targets: targets(), fails_health_checks };
        let is_in_from = now + self.lb_warmup.unwrap_or(options.lb_warmup);
        let member = self.balancers.entry(lb.clone()).or_default().entry(id).or_insert_with(blank);
        for target in member.targets.iter_mut().take(n_targets) {
            if !matches!(target, Target::InFrom(_)) {
                *target = Target::InFrom(is_in_from);
            }
        }
    }

    fn id_of(&self, instance: InstanceId) -> Option<String> {
        let named = self.vms.values().filter(|vm| vm.instance == Some(instance));
        named.max_by_key(|vm| vm.created).map(|vm| vm.provider_id.clone())
    }

    pub(super) fn deregister(&mut self, options: &FakeOptions, lb: &LbKey, vm: &VmRef, now: Mono) {
        let is_meant = |id: &String, member: &Member| match &vm.provider_id {
            Some(meant) => id == meant,
            None => member.instance == vm.instance,
        };
        let members = self.balancers.get_mut(lb).into_iter().flatten();
        for (_, member) in members.filter(|(id, member)| is_meant(id, member)) {
            for target in member.targets.iter_mut().filter(|it| matches!(it, Target::InFrom(_))) {
                *target = Target::DrainingUntil(now + options.lb_drain_time);
            }
        }
    }

    pub(super) fn members(&self, lb: &LbKey, now: Mono) -> Vec<LbMember> {
        let member = |(id, member): (&String, &Member)| {
            let vm = VmRef { instance: member.instance, provider_id: Some(id.clone()) };
            Some(LbMember { vm, state: member.state(now)? })
        };
        self.balancers.get(lb).into_iter().flatten().filter_map(member).collect()
    }

    pub(super) fn set_lb_health(&mut self, lb: &LbKey, instance: InstanceId, is_healthy: bool) {
        if is_healthy {
            self.unhealthy.remove(&(lb.clone(), instance));
        } else {
            self.unhealthy.insert((lb.clone(), instance));
        }
        let members = self.balancers.get_mut(lb).into_iter().flat_map(BTreeMap::values_mut);
        for member in members.filter(|it| it.instance == instance) {
            member.fails_health_checks = !is_healthy;
        }
    }

    /// The highest number that names a VM.
    pub(super) fn highest_number(&self) -> Option<u64> {
        self.vms.keys().filter_map(|id| id.parse().ok()).max()
    }
}

/// The answer says nothing of whose VM it is.
fn tags_absent(op: Op) -> ProviderError {
    op.error(ErrorClass::Unavailable, "the VM's tags are absent from the answer")
}

/// It may have landed all the same, and others do not know.
#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn unwritten(error: io::Error) -> ProviderError {
    ProviderError::new("journal", ErrorClass::Ambiguous, format!("write the journal: {error}"))
}

/// A VM of another process, up since it was made.
fn remembered(made: Made, tags: Tags, now: Mono) -> FakeVm {
    FakeVm {
        provider_id: made.provider_id,
        instance: Some(tags.instance),
        owner: Some((tags.cluster.clone(), tags.shard.clone())),
        tags: Some(tags),
        spec: None,
        created: now,
        created_at: Timestamp::from_millis(made.created_at),
        instance_type: made.instance_type,
        subnet: made.subnet,
        host: None,
        ip4: made.ip4,
        spot: false,
        protected: false,
        notice: None,
        shown_tags: ShownTags::default(),
        ended: None,
        forbidden: false,
        timeline: vec![(now, Seen::Running)],
    }
}

fn view(vm: &FakeVm, instance: InstanceId, seen: Seen) -> Vm {
    Vm {
        vm: VmRef { instance, provider_id: Some(vm.provider_id.clone()) },
        seen,
        ended: vm.ended.clone().filter(|_| seen == Seen::Gone),
        tags: vm.tags_in_answers(),
        created_at: Some(vm.created_at),
        ip4: vm.ip4.clone(),
        ip6: None,
        hostname: None,
        fqdn: None,
        instance_type: vm.instance_type.clone(),
        subnet: vm.subnet.clone(),
        host: vm.host.clone(),
        spot: Some(vm.spot),
    }
}

/// A private address for the nth VM.
fn address(n: u64) -> String {
    let [.., a, b, c] = n.to_be_bytes();
    format!("10.{a}.{b}.{c}")
}
