//! What dev-k8s has in common with a real API server. Each case runs on dev-k8s always, and on the API server whose
//! kubeconfig `NSTANCE_TEST_KUBECONFIG` names, else on one that is started where its programs are built.

mod apply;
mod crud;
mod definitions;
mod deletion;
mod lists;
mod output;
mod patches;
mod subresources;
mod watches;

use std::{panic::AssertUnwindSafe, pin::Pin};

use futures::{FutureExt as _, StreamExt as _};
use nstance_devk8s::real::RealApi;
use serde_json::{Value, json};

use crate::support::{Cluster, client, eventually, say};

const KUBECONFIG: &str = "NSTANCE_TEST_KUBECONFIG";

/// Our own kind: it has all that a definition can bring.
const WIDGETS: &str = "/apis/conformance.nstance.dev/v1";

fn widgets(namespace: &str) -> String {
    format!("{WIDGETS}/namespaces/{namespace}/widgets")
}

fn widget(name: &str, spec: &Value) -> Value {
    json!({ "apiVersion": "conformance.nstance.dev/v1", "kind": "Widget", "metadata": { "name": name }, "spec": spec })
}

fn config_map(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "key": "value" } })
}

fn config_maps(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/configmaps")
}

/// A definition with status, scale, columns and a list that is merged by key.
fn definition(group: &str, plural: &str, kind: &str) -> Value {
    let open = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let mut status = open.clone();
    status["properties"] = json!({
        "replicas": { "type": "integer" },
        "conditions": {
            "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object", "required": ["type"], "x-kubernetes-preserve-unknown-fields": true,
                "properties": { "type": { "type": "string" }, "status": { "type": "string" } },
            },
        },
    });
    let mut spec = open;
    spec["properties"] = json!({ "replicas": { "type": "integer" } });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": { "plural": plural, "singular": kind.to_lowercase(), "kind": kind, "listKind": format!("{kind}List") },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": { "openAPIV3Schema": { "type": "object", "properties": { "spec": spec, "status": status } } },
                "subresources": {
                    "status": {},
                    "scale": { "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas" },
                },
                "additionalPrinterColumns": [
                    { "name": "Replicas", "type": "integer", "jsonPath": ".spec.replicas" },
                    { "name": "Ready", "type": "string",
                      "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status" },
                    { "name": "Note", "type": "string", "jsonPath": ".spec.note", "priority": 1 },
                    { "name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp" },
                ],
            }],
        },
    })
}

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// Stores a definition and waits until its kind is served.
async fn define(cluster: &Cluster, definition: &Value) {
    let answer = cluster.post(DEFINITIONS, definition).await;
    assert!([201, 409].contains(&answer.code), "{}", answer.body);
    let (group, plural) = (&definition["spec"]["group"], &definition["spec"]["names"]["plural"]);
    let path = format!("/apis/{}/v1/{}", group.as_str().unwrap(), plural.as_str().unwrap());
    eventually("the kind is served", || async { (cluster.get(&path).await.code == 200).then_some(()) }).await;
}

async fn prepare(cluster: &Cluster) {
    define(cluster, &definition("conformance.nstance.dev", "widgets", "Widget")).await;
}

async fn real() -> Option<Cluster> {
    let text = match std::env::var_os(KUBECONFIG) {
        Some(path) => std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display())),
        None => RealApi::shared().await?.kubeconfig().unwrap(),
    };
    let cluster = Cluster { client: client(&text).await };
    prepare(&cluster).await;
    Some(cluster)
}

/// One case on the real API server, with its name.
type Case<'a> = (&'static str, Pin<Box<dyn Future<Output = ()> + 'a>>);

/// Runs cases side by side and fails with the names of those that failed.
async fn run_all(cases: Vec<Case<'_>>) {
    let runs = cases.into_iter().map(async |(name, case)| (name, AssertUnwindSafe(case).catch_unwind().await.is_ok()));
    let results: Vec<_> = futures::stream::iter(runs).buffer_unordered(8).collect().await;
    let failed: Vec<_> = results.iter().filter(|(_, ok)| !ok).map(|(name, _)| *name).collect();
    say(&format!("{} cases of the conformance suite ran on a real API server", results.len()));
    assert!(failed.is_empty(), "failed on a real API server: {failed:?}");
}

/// One test for each case on dev-k8s, and one test for all cases on the real API server.
macro_rules! suite {
    ($($module:ident { $($case:ident,)* })*) => {
        mod on_dev_k8s {
            $(mod $module {
                $(#[tokio::test]
                async fn $case() {
                    let dev = crate::support::Dev::start().await;
                    crate::conformance::prepare(&dev.cluster).await;
                    crate::conformance::$module::$case(&dev.cluster).await;
                })*
            })*
        }

        #[tokio::test]
        async fn on_a_real_api_server() {
            let Some(cluster) = real().await else {
                let text = "`make kubernetes-tools` builds one, or name one by";
                return say(&format!("NOT TESTED ON A REAL API SERVER: the conformance suite; {text} {KUBECONFIG}"));
            };
            run_all(vec![
                $($((concat!(stringify!($module), "::", stringify!($case)), Box::pin($module::$case(&cluster))),)*)*
            ])
            .await;
        }
    };
}

suite! {
    crud {
        an_object_is_created_once,
        names_are_generated_and_checked,
        the_server_sets_what_is_its_own,
        a_stale_or_foreign_update_conflicts,
        an_update_of_a_custom_kind_names_its_version,
        an_update_without_change_keeps_the_version,
        the_generation_counts_changes_of_the_spec,
        status_and_object_are_written_apart,
        a_dry_run_changes_nothing,
        a_missing_namespace_is_not_found,
        a_lease_is_won_by_one,
        secrets_take_string_data,
    }
    patches {
        a_json_patch_tests_before_it_changes,
        a_merge_patch_removes_by_null,
        a_strategic_patch_merges_conditions_by_type,
        a_strategic_patch_of_a_custom_kind_is_refused,
        a_patch_may_name_the_version_it_wants,
    }
    apply {
        an_apply_creates_and_then_changes,
        a_conflict_names_manager_and_field_and_force_takes_over,
        what_a_manager_gives_up_is_removed,
        two_managers_share_a_list_of_conditions,
        an_apply_for_a_uid_that_is_gone_conflicts,
        an_apply_without_manager_is_refused,
        an_apply_that_changes_nothing_keeps_the_version,
        managers_of_object_and_status_do_not_meet,
        an_apply_to_the_status_creates_nothing,
    }
    deletion {
        finalizers_hold_an_object,
        preconditions_are_checked,
        a_collection_is_deleted_by_label,
        a_bound_pod_goes_after_its_grace,
        a_namespace_ends_when_it_is_finalized,
        orphaning_leaves_a_finalizer,
        a_watch_sees_the_mark_and_the_end,
    }
    lists {
        labels_select,
        fields_select_and_unknown_ones_are_refused,
        pages_show_one_moment,
        a_version_from_the_future_is_refused,
        a_broken_continue_token_is_refused,
    }
    watches {
        a_watch_goes_on_from_a_list,
        a_watch_without_version_begins_with_what_is_there,
        objects_enter_and_leave_a_selection,
        a_watch_ends_after_its_timeout,
        bookmarks_come_at_the_end_if_wanted,
    }
    output {
        discovery_lists_groups_kinds_and_subresources,
        openapi_says_that_patches_can_be_validated,
        tables_have_the_columns_of_the_definition,
        nodes_and_pods_have_tables,
        events_have_a_table,
        a_watch_can_send_tables,
        metadata_can_be_read_alone,
        unacceptable_forms_are_refused,
        health_and_version_answer,
    }
    subresources {
        scale_reads_and_writes_replicas,
        a_stale_scale_conflicts,
        tokens_are_given_for_ten_minutes_at_least,
        a_budget_refuses_an_eviction,
        an_eviction_spares_a_namesake,
        a_pod_is_bound_once,
    }
    definitions {
        a_definition_is_served_and_established,
        a_definition_takes_its_objects_along,
    }
}
