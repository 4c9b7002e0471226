//! What a test tells the fake cloud to do wrong, and what it can read afterwards.

use std::time::Duration;

use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId},
    ports::provider::{Ended, ErrorClass, ProviderError, VmSpec},
    time::{Mono, Timestamp},
};

/// The operations of the provider port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    Check,
    Reserve,
    Create,
    Delete,
    Describe,
    List,
    Probe,
    Clean,
    SubnetFree,
    InstanceType,
    ResolveImage,
    LbRegister,
    LbDeregister,
    LbMembers,
    NetHolder,
    NetAssign,
    NetRelease,
}

impl Op {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Reserve => "reserve",
            Self::Create => "create",
            Self::Delete => "delete",
            Self::Describe => "describe",
            Self::List => "list",
            Self::Probe => "probe",
            Self::Clean => "clean",
            Self::SubnetFree => "subnet_free",
            Self::InstanceType => "instance_type",
            Self::ResolveImage => "resolve_image",
            Self::LbRegister => "lb_register",
            Self::LbDeregister => "lb_deregister",
            Self::LbMembers => "lb_members",
            Self::NetHolder => "net_holder",
            Self::NetAssign => "net_assign",
            Self::NetRelease => "net_release",
        }
    }

    /// Whether it changes the cloud.
    pub fn is_effect(self) -> bool {
        matches!(
            self,
            Self::Create
                | Self::Delete
                | Self::Clean
                | Self::LbRegister
                | Self::LbDeregister
                | Self::NetAssign
                | Self::NetRelease
        )
    }

    pub(super) fn scripted(self, class: ErrorClass) -> ProviderError {
        self.error(class, format!("scripted: {}", class.as_str()))
    }

    pub(super) fn scripted_with(self, error: &ProviderError) -> ProviderError {
        ProviderError { op: self.as_str(), ..error.clone() }
    }

    pub(crate) fn error(self, class: ErrorClass, message: impl Into<String>) -> ProviderError {
        ProviderError::new(self.as_str(), class, message)
    }
}

/// Which calls a rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum When {
    Always,
    /// The nth call of this operation since the cloud began, counted from 1.
    Call(u64),
    Instance(InstanceId),
    Group(GroupRef),
    Subnet(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Refused, nothing happened.
    Refuse(ErrorClass),
    /// It happened all the same, and the answer says otherwise. On `lb_register`: at the first target group only.
    LandThenFail(ErrorClass),
    /// As `Refuse`, with this error (scope, `landed`, code, text and all); its `op` is replaced by that of the call.
    RefuseWith(ProviderError),
    /// As `LandThenFail`, with this error.
    LandThenFailWith(ProviderError),
    /// The answer comes without tags. On `list`, `describe` and `delete` only; not on other operations.
    HideTags,
    /// On `delete` only: answered at once, and the VM goes on as it was for this long.
    LandLater(Duration),
    /// It takes this much longer.
    Delay(Duration),
    /// It happened, and no answer ever comes.
    LandThenHang,
    /// Nothing happens and no answer comes.
    Hang,
}

/// One scripted fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub op: Op,
    pub when: When,
    /// How many matching calls it is good for.
    pub times: u32,
    pub outcome: Outcome,
}

impl Rule {
    /// Good for every matching call.
    pub fn always(op: Op, when: When, outcome: Outcome) -> Self {
        Self { op, when, times: u32::MAX, outcome }
    }

    pub fn once(op: Op, when: When, outcome: Outcome) -> Self {
        Self { op, when, times: 1, outcome }
    }

    /// Uses it once.
    pub(super) fn apply(&mut self) -> Outcome {
        if self.times != u32::MAX {
            self.times -= 1;
        }
        self.outcome.clone()
    }
}

/// VMs that the cloud ends by itself, and says why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptedEnd {
    pub of: EndOf,
    /// Counted from the VM's creation. Before the boot time is over, the VM never runs.
    pub after: Duration,
    /// How many VMs it is good for.
    pub times: u32,
    pub ended: Ended,
}

/// Which of the VMs that are made from now on a [`ScriptedEnd`] is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndOf {
    Instance(InstanceId),
    /// Every VM of this subnet and type.
    Choice {
        subnet: String,
        instance_type: Option<String>,
    },
}

impl ScriptedEnd {
    pub(super) fn fits(&self, spec: &VmSpec) -> bool {
        0 < self.times
            && match &self.of {
                EndOf::Instance(instance) => *instance == spec.instance,
                EndOf::Choice { subnet, instance_type } => {
                    *subnet == spec.subnet && *instance_type == spec.instance_type
                }
            }
    }

    /// Uses it once.
    pub(super) fn apply(&mut self) -> (Duration, Ended) {
        if self.times != u32::MAX {
            self.times -= 1;
        }
        (self.after, self.ended.clone())
    }
}

/// One call, as the cloud's own log has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub op: Op,
    /// Among the calls of its operation, from 1.
    pub n: u64,
    pub instance: Option<InstanceId>,
    pub group: Option<GroupRef>,
    pub subnet: Option<String>,
    /// Of the permit; reads have none.
    pub epoch: Option<Epoch>,
    pub at: Timestamp,
    pub mono: Mono,
    /// Whether it changed the cloud.
    pub landed: bool,
    /// `None` while it runs, and for ever if it was cancelled.
    pub answer: Option<Result<(), ErrorClass>>,
}

/// What a call is about, for matching rules and for the log.
#[derive(Debug, Clone, Default)]
pub(super) struct About {
    pub(super) instance: Option<InstanceId>,
    pub(super) group: Option<GroupRef>,
    pub(super) subnet: Option<String>,
    pub(super) epoch: Option<Epoch>,
}

impl When {
    pub(super) fn matches(&self, n: u64, about: &About) -> bool {
        match self {
            Self::Always => true,
            Self::Call(it) => *it == n,
            Self::Instance(it) => about.instance.as_ref() == Some(it),
            Self::Group(it) => about.group.as_ref() == Some(it),
            Self::Subnet(it) => about.subnet.as_ref() == Some(it),
        }
    }
}
