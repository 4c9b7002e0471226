//! A minimal Kubernetes API server for development and tests.
