//! Command line and environment.

use std::path::PathBuf;

use clap::{ArgAction, Parser};

use crate::control::context::Settings;

/// Nstance operator: brings Cluster API objects to the shards, and drains nodes before their VMs go.
#[derive(Debug, Clone, Parser)]
#[command(name = "nstance-operator", version)]
pub struct Args {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/nstance/operator/config.yaml")]
    pub config: PathBuf,

    /// Where /healthz and /readyz are served
    #[arg(long, value_name = "HOST:PORT", default_value = ":8081")]
    pub health_probe_bind_address: String,

    /// Where /metrics is served; 0 turns it off
    #[arg(long, value_name = "HOST:PORT", default_value = "0")]
    pub metrics_bind_address: String,

    /// Elect one of several operators by a Lease
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub leader_elect: bool,

    /// Do not serve the webhook
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub disable_webhooks: bool,

    /// The namespace of our objects, Cluster API's, Secrets and ConfigMaps [default: the pod's namespace, else `default`]
    #[arg(long, value_name = "NAME", env = "NSTANCE_NAMESPACE")]
    pub namespace: Option<String>,

    /// Act only on objects whose label cluster.x-k8s.io/watch-filter has this value
    #[arg(long, value_name = "VALUE", default_value = "")]
    pub watch_filter: String,

    /// Kubeconfig file [default: in-cluster]
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Port of the webhook
    #[arg(long, value_name = "PORT", default_value_t = 9443)]
    pub webhook_port: u16,

    /// Directory with tls.crt and tls.key for the webhook; empty: the operator makes its own
    #[arg(long, value_name = "DIR", default_value = "")]
    pub webhook_cert_dir: String,

    /// How many nodes are drained at once
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub drain_concurrency: usize,

    /// How many objects each controller looks at at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub concurrent_reconciles: usize,

    /// The API server's address in the kubeconfig Secret that the operator keeps for Cluster API
    #[arg(long, value_name = "URL", default_value = "https://kubernetes.default.svc:443")]
    pub capi_server: String,

    /// debug, info, warn, error, or a number: from 1 on debug
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub zap_log_level: String,

    /// json or console
    #[arg(long, value_name = "FORM", default_value = "json", value_parser = ["json", "console"])]
    pub zap_encoder: String,

    /// Text and debug level
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    pub zap_devel: bool,

    /// Accepted and ignored
    #[arg(long, value_name = "LEVEL", default_value = "", hide = true)]
    pub zap_stacktrace_level: String,

    /// Accepted and ignored
    #[arg(long, value_name = "FORM", default_value = "", hide = true)]
    pub zap_time_encoding: String,

    #[command(flatten)]
    pub names: EnvNames,
}

/// Names that only the environment sets.
#[derive(Debug, Clone, clap::Args)]
pub struct EnvNames {
    #[arg(long, env = "NSTANCE_CA_CONFIGMAP", default_value = "nstance-cluster-ca", hide = true)]
    pub ca_configmap: String,

    #[arg(long, env = "NSTANCE_CERT_SECRET", default_value = "nstance-operator-cert", hide = true)]
    pub cert_secret: String,

    #[arg(long, env = "NSTANCE_KEY_SECRET", default_value = "nstance-operator-key", hide = true)]
    pub key_secret: String,

    #[arg(long, env = "NSTANCE_NONCE_SECRET", default_value = "nstance-operator-nonce", hide = true)]
    pub nonce_secret: String,

    /// Set: the workload cluster is another one
    #[arg(long, env = "NSTANCE_CAPI_ENDPOINT", default_value = "", hide = true)]
    pub capi_endpoint: String,

    #[arg(long, env = "NSTANCE_CAPI_SERVICEACCOUNT", default_value = "nstance-capi-workload", hide = true)]
    pub capi_serviceaccount: String,

    /// Accepted: we always speak JSON
    #[arg(long, env = "NSTANCE_K8S_JSON", default_value = "", hide = true)]
    pub k8s_json: String,
}

const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

impl Args {
    /// The namespace that was given, else the pod's.
    pub fn namespace(&self) -> String {
        let given = self.namespace.clone().filter(|it| !it.is_empty());
        let own = || std::fs::read_to_string(NAMESPACE_FILE).ok().map(|it| it.trim().to_owned());
        given.or_else(own).filter(|it| !it.is_empty()).unwrap_or_else(|| "default".to_owned())
    }

    /// `debug`, `info`, `warn` or `error`. What is none of these means `info`.
    pub fn log_level(&self) -> &'static str {
        let given = self.zap_log_level.trim().to_ascii_lowercase();
        match given.as_str() {
            _ if self.zap_devel => "debug",
            "debug" => "debug",
            "warn" => "warn",
            "error" => "error",
            number if number.parse::<i32>().is_ok_and(|it| 0 < it) => "debug",
            _ => "info",
        }
    }

    pub fn is_text(&self) -> bool {
        self.zap_devel || self.zap_encoder == "console"
    }

    pub fn settings(&self, cluster_id: &str, tenant: &str) -> Settings {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Settings {
            namespace: self.namespace(),
            cluster_id: cluster_id.to_owned(),
            tenant: tenant.to_owned(),
            watch_filter: some(&self.watch_filter),
            capi_server: self.capi_server.clone(),
            capi_endpoint: some(&self.names.capi_endpoint),
            key_secret: self.names.key_secret.clone(),
            api_endpoint: endpoint(&self.names.capi_endpoint),
            capi_service_account: self.names.capi_serviceaccount.clone(),
            drain_concurrency: self.drain_concurrency.max(1),
            concurrent_reconciles: self.concurrent_reconciles.max(1),
        }
    }
}

/// Host and port of a URL, or of `host:port`.
pub fn endpoint(url: &str) -> Option<(String, i32)> {
    let (rest, port) = match url.split_once("://") {
        Some(("http", rest)) => (rest, 80),
        Some((_, rest)) => (rest, 443),
        None => (url, 443),
    };
    let authority = rest.split('/').next().filter(|it| !it.is_empty())?;
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, text)) if !text.ends_with(']') => (host, text.parse().ok()?),
        _ => (authority, port),
    };
    Some((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
}

/// An address to listen on. Without a host: all of them.
pub fn bind_address(text: &str) -> Option<String> {
    match text.trim() {
        "" | "0" => None,
        text => Some(text.strip_prefix(':').map_or_else(|| text.to_owned(), |port| format!("[::]:{port}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Args {
        Args::try_parse_from(std::iter::once("nstance-operator").chain(args.iter().copied())).unwrap()
    }

    #[test]
    fn flags_take_true_and_false_as_go_programs_do() {
        assert!(parse(&["--leader-elect"]).leader_elect);
        assert!(parse(&["--leader-elect=true"]).leader_elect);
        assert!(!parse(&["--leader-elect=false"]).leader_elect);
        assert!(!parse(&[]).leader_elect);
        assert!(Args::try_parse_from(["nstance-operator", "--leader-elect=perhaps"]).is_err());
    }

    #[test]
    fn log_levels_are_words_or_numbers() {
        assert_eq!(parse(&["--zap-log-level=debug"]).log_level(), "debug");
        assert_eq!(parse(&["--zap-log-level", "2"]).log_level(), "debug");
        assert_eq!(parse(&["--zap-log-level=Error"]).log_level(), "error");
        assert_eq!(parse(&["--zap-log-level=0"]).log_level(), "info");
        assert!(parse(&["--zap-devel"]).is_text());
        assert!(!parse(&["--zap-stacktrace-level=error", "--zap-time-encoding=iso8601"]).is_text());
    }

    #[test]
    fn an_endpoint_is_taken_from_a_url_or_an_address() {
        let at = |host: &str, port| Some((host.to_owned(), port));
        assert_eq!(endpoint("https://10.0.0.1:6443"), at("10.0.0.1", 6443));
        assert_eq!(endpoint("https://kubernetes.default.svc/"), at("kubernetes.default.svc", 443));
        assert_eq!(endpoint("http://[::1]:8080/x"), at("::1", 8080));
        assert_eq!(endpoint("api.example.com:6443"), at("api.example.com", 6443));
        assert_eq!(endpoint("https://[::1]"), at("::1", 443));
        assert_eq!(endpoint(""), None);
    }

    #[test]
    fn an_address_without_host_means_all_hosts_and_zero_means_none() {
        assert_eq!(bind_address(":8081").as_deref(), Some("[::]:8081"));
        assert_eq!(bind_address("127.0.0.1:8082").as_deref(), Some("127.0.0.1:8082"));
        assert_eq!(bind_address("0"), None);
    }
}
