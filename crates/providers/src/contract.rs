//! The provider contract as a suite: every adapter passes it, or is not one.
//!
//! A [`Subject`] is an adapter under test and what a test may do behind its back. Each case gets a fresh subject, so
//! cases do not see each other's VMs. Cases act as a server would: what failed without landing, or was ambiguous, is
//! asked again; what is unknown is looked at again. So the same cases hold behind a bad network.
//!
//! A hook that a subject cannot offer answers `false`, and the case that needs it ends there.

mod address;
mod balancers;
mod capabilities;
mod creation;
mod removal;
mod reservation;
mod sight;

use std::{collections::BTreeMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::{FutureExt as _, future::LocalBoxFuture};
use nstance_core::{
    ids::{Epoch, InstanceId},
    instance::Seen,
    ports::{
        clock::Clock,
        provider::{
            Bootstrap, CreateMode, DeleteHow, Described, Ended, ErrorClass, Landed, LeaderNetwork, Listing,
            LoadBalancer, Need, Needs, Owner, Provider, ProviderError, Reservation, ReserveSpec, Scope, Tags, Userdata,
            Vm, VmRef, VmSpec,
        },
    },
    term::{Guard, Permit},
    value::Object,
};

pub use self::{address::*, balancers::*, capabilities::*, creation::*, removal::*, reservation::*, sight::*};

/// Secrets that go into every create, and must come out nowhere.
pub const NONCE: &str = "the-nonce-is-a-secret";
pub const USERDATA: &str = "the-userdata-is-a-secret";

/// An adapter under test.
#[async_trait]
pub trait Subject: Send + Sync {
    fn provider(&self) -> Arc<dyn Provider>;
    fn owner(&self) -> Owner;
    fn clock(&self) -> Arc<dyn Clock>;
    /// The same cloud for another owner.
    fn provider_of(&self, owner: Owner) -> Arc<dyn Provider>;

    /// The same cloud from another machine, where an address can move.
    fn other_machine(&self) -> Option<Arc<dyn Provider>> {
        None
    }

    /// The same cloud and owner, from a process that has just started and remembers nothing.
    fn restarted(&self) -> Arc<dyn Provider> {
        self.provider_of(self.owner())
    }

    /// What a VM of this cloud needs besides: its args, a subnet and a type that exist.
    fn adjust(&self, spec: VmSpec) -> VmSpec {
        spec
    }

    /// Two that exist, and have no members.
    fn load_balancers(&self) -> [LoadBalancer; 2] {
        ["web", "api"].map(|key| LoadBalancer { key: key.parse().expect("a key"), spec: Object::new() })
    }

    /// An address that no machine holds.
    fn leader_network(&self) -> LeaderNetwork {
        LeaderNetwork { ip: std::net::IpAddr::from([10, 0, 0, 9]), interface_id: Some("eni-1".to_owned()) }
    }

    /// Places that a process has for its reservations, where their number is limited.
    fn n_places(&self) -> Option<usize> {
        None
    }

    /// Needs that cannot be met, and the one that [`Provider::check`] must name.
    fn bad_need(&self) -> Option<(Needs, Need)> {
        None
    }

    /// Ends the VM behind the adapter's back.
    async fn kill(&self, instance: InstanceId);
    /// Removes every trace of the VM behind the adapter's back.
    async fn purge(&self, instance: InstanceId);

    /// The next create lands, and its answer is lost.
    fn lose_create_answer(&self) -> bool {
        false
    }

    /// Creates are refused so, until `None`.
    fn refuse_creates(&self, _class: Option<ErrorClass>) -> bool {
        false
    }

    /// Creates are refused so, and about that, until [`Subject::refuse_creates`] says otherwise.
    fn refuse_creates_about(&self, _class: ErrorClass, _scope: Scope) -> bool {
        false
    }

    /// The next create lands; its answer is of this class and says that it may have landed.
    fn land_and_refuse(&self, _class: ErrorClass) -> bool {
        false
    }

    /// Answers about this VM lack our tags.
    fn hide_tags(&self, _instance: InstanceId, _hidden: bool) -> bool {
        false
    }

    /// Our tags on this VM are malformed.
    fn spoil_tags(&self, _instance: InstanceId, _spoilt: bool) -> bool {
        false
    }

    /// The right to see this VM is taken away: listings omit it without a word.
    fn forbid(&self, _instance: InstanceId, _forbidden: bool) -> bool {
        false
    }

    /// The cloud ends this VM by itself, and says why.
    fn end(&self, _instance: InstanceId, _ended: &Ended) -> bool {
        false
    }

    /// Deletes are answered at once, and VMs end later.
    fn delay_deletes(&self) -> bool {
        false
    }

    /// Registrations at load balancers take a while until the member is in.
    fn delay_registrations(&self) -> bool {
        false
    }

    /// Reads about this VM fail so, until `None`.
    fn fail_reads(&self, _instance: InstanceId, _class: Option<ErrorClass>) -> bool {
        false
    }

    /// A part of the cloud, this VM's, does not answer.
    fn silence(&self, _vm: &Vm, _silent: bool) -> bool {
        false
    }

    /// A page of listings does not answer.
    fn fail_page(&self, _page: Option<usize>) -> bool {
        false
    }

    /// A VM without any of our tags, that happens to have this provider id.
    fn add_untagged(&self, _provider_id: &str) -> bool {
        false
    }

    /// The next registration at a load balancer reaches only a part of its target groups.
    fn register_in_part(&self) -> bool {
        false
    }
}

pub type Case = (&'static str, for<'a> fn(&'a dyn Subject) -> LocalBoxFuture<'a, ()>);

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), |subject| Box::pin($name(subject)))),*]
    };
}

pub const CASES: &[Case] = cases![
    capabilities_are_sane,
    a_need_that_cannot_be_met_is_reported,
    create_then_describe_then_list,
    create_twice_is_one,
    a_timed_out_create_yields_one_vm,
    a_refusal_that_may_have_landed_yields_one_vm,
    tags_are_there_from_the_first_moment,
    failed_create_leaves_nothing,
    cancel_mid_create_is_recoverable,
    error_classes_are_right,
    a_refusal_says_what_it_is_about,
    an_unknown_arg_is_an_error,
    twenty_parallel_creates_spread_and_all_succeed,
    no_secret_in_errors,
    no_id_is_reserved_twice,
    two_leaders_do_not_share_a_reservation,
    a_dropped_reservation_frees_its_places,
    throttled_or_forbidden_is_unknown,
    tags_missing_once_is_unknown,
    malformed_tags_are_foreign,
    an_acl_change_is_not_a_mass_death,
    a_whole_batch_is_described,
    a_purged_vm_is_absent,
    a_dead_vm_is_seen_dead,
    died_in_pending_says_why,
    list_is_complete_or_says_not,
    an_unanswering_node_loses_no_vm,
    foreign_vms_are_invisible,
    delete_is_idempotent,
    delete_refuses_a_stranger,
    an_answered_delete_stays_open_until_seen,
    clean_leaves_nothing,
    lb_round_trip,
    partial_registration_is_not_in,
    initial_is_not_in,
    a_member_without_our_record_is_taken_out,
    leader_address_moves,
    address_is_taken_from_a_dead_holder,
    release_is_harmless_if_not_ours,
    self_id_is_known_or_an_error,
];

/// Runs every case on a subject of its own, then fails with the names of those that failed.
pub async fn run(make: impl AsyncFn() -> Box<dyn Subject>) {
    let mut failed = Vec::new();
    for (name, case) in CASES {
        let subject = make().await;
        if AssertUnwindSafe(case(&*subject)).catch_unwind().await.is_err() {
            failed.push(*name);
        }
    }
    assert!(failed.is_empty(), "these clauses of the provider contract do not hold: {}", failed.join(", "));
}

/// How often a server would ask again before it gave up hope. A faulty subject fails one call in a few.
const TRIES: usize = 60;
/// Between two tries. On a paused clock this costs nothing.
const PAUSE: Duration = Duration::from_millis(20);

/// A permit of a term that nobody contests.
pub fn permit(subject: &dyn Subject) -> Permit {
    Guard::unfenced(Epoch(3), subject.clock()).permit().expect("an unfenced guard is open")
}

/// The nth instance of a case.
pub fn instance(n: u8) -> InstanceId {
    InstanceId::new("knc".parse().expect("a kind"), [n; 16])
}

pub fn spec(owner: &Owner, n: u8) -> VmSpec {
    VmSpec {
        instance: instance(n),
        tags: Tags {
            cluster: owner.cluster.clone(),
            shard: owner.shard.clone(),
            instance: instance(n),
            tenant: "default".parse().expect("a tenant"),
            group: "web".parse().expect("a group"),
            on_demand: n.is_multiple_of(2),
            epoch: Epoch(2),
            template: "knc".into(),
            infra_hash: "0123456789abcdef".into(),
        },
        instance_type: Some("small".into()),
        subnet: "subnet-a".into(),
        args: Object::new(),
        userdata: Some(Userdata(USERDATA.into())),
        bootstrap: Bootstrap {
            ca_bundle_pem: "a public certificate".into(),
            nonce_jwt: NONCE.into(),
            registration_addr: "127.0.0.1:8992".into(),
            agent_addr: "127.0.0.1:8994".into(),
        },
        reserved_id: None,
    }
}

pub fn by_name(n: u8) -> VmRef {
    VmRef { instance: instance(n), provider_id: None }
}

/// Whether a server would ask again: the VM may be there, or it is a matter of time.
fn is_passing(error: &ProviderError) -> bool {
    error.landed == Landed::Maybe || matches!(error.class, ErrorClass::Unavailable | ErrorClass::Throttled)
}

/// Asks for the nth VM until it is there.
async fn create(subject: &dyn Subject, n: u8) -> Vm {
    let provider = subject.provider();
    let (spec, _places) = reserved(&provider, spec_of(subject, n)).await;
    create_as(subject, &provider, &spec).await.expect("the VM is made")
}

fn spec_of(subject: &dyn Subject, n: u8) -> VmSpec {
    subject.adjust(spec(&subject.owner(), n))
}

fn reserve_spec(spec: &VmSpec) -> ReserveSpec {
    ReserveSpec {
        instance: spec.instance,
        tags: spec.tags.clone(),
        instance_type: spec.instance_type.clone(),
        subnet: spec.subnet.clone(),
        args: spec.args.clone(),
    }
}

/// The spec with its reserved id, and the places to be held until its create has ended.
async fn reserved(provider: &Arc<dyn Provider>, spec: VmSpec) -> (VmSpec, Reservation) {
    for _ in 0..TRIES {
        match provider.reserve(&reserve_spec(&spec)).await {
            Ok(reservation) => return (VmSpec { reserved_id: reservation.id.clone(), ..spec }, reservation),
            Err(error) => assert!(is_passing(&error), "{error}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("nothing was reserved");
}

async fn create_as(subject: &dyn Subject, provider: &Arc<dyn Provider>, spec: &VmSpec) -> Result<Vm, ProviderError> {
    let named = VmRef { instance: spec.instance, provider_id: spec.reserved_id.clone() };
    for _ in 0..TRIES {
        // Where asking twice makes two, or is refused, one looks before one asks.
        if provider.capabilities().create == CreateMode::RecordFirst
            && let Described::Vm(vm) = look_by(provider, &named).await
        {
            return Ok(*vm);
        }
        match provider.create(permit(subject), spec).await {
            Err(error) if is_passing(&error) => tokio::time::sleep(PAUSE).await,
            answer => return answer,
        }
    }
    panic!("no create was answered");
}

/// Looks until the answer is more than "unknown".
async fn look(subject: &dyn Subject, vm: &VmRef) -> Described {
    look_by(&subject.provider(), vm).await
}

async fn look_by(provider: &Arc<dyn Provider>, vm: &VmRef) -> Described {
    for _ in 0..TRIES {
        let mut described = provider.describe(std::slice::from_ref(vm)).await;
        assert_eq!(described.len(), 1, "one answer for one ref");
        match described.remove(0) {
            Described::Unknown(error) => assert_ne!(error.class, ErrorClass::NotFound, "that is no unknown"),
            known => return known,
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("no look was answered");
}

async fn seen(subject: &dyn Subject, vm: &VmRef) -> Option<Seen> {
    match look(subject, vm).await {
        Described::Vm(vm) => Some(vm.seen),
        _ => None,
    }
}

/// Lists until the listing is complete.
async fn list(subject: &dyn Subject) -> BTreeMap<InstanceId, Vm> {
    list_by(&subject.provider()).await
}

async fn list_by(provider: &Arc<dyn Provider>) -> BTreeMap<InstanceId, Vm> {
    for _ in 0..TRIES {
        if let Ok(Listing { vms, missing: None }) = provider.list().await {
            let n = vms.len();
            let by_instance: BTreeMap<InstanceId, Vm> = vms.into_iter().map(|vm| (vm.vm.instance, vm)).collect();
            assert_eq!(by_instance.len(), n, "no instance has two VMs");
            return by_instance;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("no listing was complete");
}

async fn delete(subject: &dyn Subject, vm: &VmRef, how: DeleteHow) {
    let provider = subject.provider();
    retry(async || provider.delete(permit(subject), vm, how).await).await;
}

/// Repeats an idempotent effect until it is answered.
async fn retry(effect: impl AsyncFn() -> Result<(), ProviderError>) {
    for _ in 0..TRIES {
        match effect().await {
            Err(error) if is_passing(&error) => tokio::time::sleep(PAUSE).await,
            answer => return answer.expect("the effect is accepted"),
        }
    }
    panic!("no effect was answered");
}

/// Waits for what the provider does in its own time.
async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    for _ in 0..500 {
        if holds().await {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
    panic!("not in time: {what}");
}

/// Waits for the visibility delay to be over, where there is one.
async fn settle(subject: &dyn Subject) {
    tokio::time::sleep(subject.provider().capabilities().visibility_delay).await;
}
