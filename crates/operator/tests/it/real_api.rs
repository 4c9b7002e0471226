//! What only a real Kubernetes API server can tell. These tests run where `KUBEBUILDER_ASSETS` names its programs.

mod setup;

mod crds;

mod roles;

mod stories;
