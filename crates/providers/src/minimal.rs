//! A provider without any optional ability: what is left when only the mandatory operations of another one are used.
//!
//! It is for tests of what the rest of the system does without load balancers, a leader's address, images, reservations
//! and so on.

use std::sync::Arc;

use async_trait::async_trait;
use nstance_core::{
    ports::provider::{
        Capabilities, CheckProblem, DeleteHow, Described, Listing, Needs, Provider, ProviderError, Vm, VmRef, VmSpec,
    },
    term::Permit,
};

/// Forwards the operations that the port has no default for, and nothing else.
pub struct MinimalProvider(pub Arc<dyn Provider>);

#[async_trait]
impl Provider for MinimalProvider {
    fn kind(&self) -> &'static str {
        self.0.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn check(&self, needs: &Needs) -> Vec<CheckProblem> {
        self.0.check(needs).await
    }

    async fn create(&self, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError> {
        self.0.create(permit, spec).await
    }

    async fn delete(&self, permit: Permit, vm: &VmRef, how: DeleteHow) -> Result<(), ProviderError> {
        self.0.delete(permit, vm, how).await
    }

    async fn describe(&self, vms: &[VmRef]) -> Vec<Described> {
        self.0.describe(vms).await
    }

    async fn list(&self) -> Result<Listing, ProviderError> {
        self.0.list().await
    }

    async fn probe(&self) -> Result<(), ProviderError> {
        self.0.probe().await
    }

    fn k8s_provider_id(&self, vm: &VmRef) -> String {
        self.0.k8s_provider_id(vm)
    }
}
