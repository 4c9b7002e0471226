//! Stand-ins for Cluster API controllers, kubelets and garbage collection.
