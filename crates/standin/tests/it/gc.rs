//! Garbage collection. Where a controller manager runs, these stories hold by its doing.

crate::stories!(
    what_an_object_owned_goes_with_it,
    orphaned_objects_stay_and_foreground_deletion_takes_them_first,
    a_terminating_namespace_is_emptied,
);

mod story {
    use kube::api::PropagationPolicy;
    use nstance_standin::kinds::Kind;
    use serde_json::{Value, json};

    use crate::site::{Site, until};

    async fn add_child(site: &Site, name: &str, owner: &Value) {
        let reference = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": true,
        });
        site.create(Kind::ConfigMap, name, json!({ "metadata": { "ownerReferences": [reference] } })).await;
    }

    async fn until_gone(site: &Site, name: &str) {
        until(&format!("{name} is gone"), async || !site.has(Kind::ConfigMap, name).await).await;
    }

    pub(super) async fn what_an_object_owned_goes_with_it(site: &Site) {
        site.start(site.options());
        let owner = site.create(Kind::ConfigMap, "owner", json!({})).await;
        add_child(site, "child", &owner).await;
        let child = site.get(Kind::ConfigMap, "child").await.unwrap();
        add_child(site, "grandchild", &child).await;
        site.create(Kind::ConfigMap, "other", json!({})).await;
        site.delete(Kind::ConfigMap, "owner").await;
        until_gone(site, "grandchild").await;
        assert!(!site.has(Kind::ConfigMap, "child").await);
        assert!(site.has(Kind::ConfigMap, "other").await);
    }

    pub(super) async fn orphaned_objects_stay_and_foreground_deletion_takes_them_first(site: &Site) {
        site.start(site.options());
        let owner = site.create(Kind::ConfigMap, "owner", json!({})).await;
        add_child(site, "child", &owner).await;
        site.delete_as(Kind::ConfigMap, "owner", PropagationPolicy::Orphan).await;
        until_gone(site, "owner").await;
        assert!(site.field(Kind::ConfigMap, "child", "/metadata/ownerReferences").await.is_null());
        let child = site.get(Kind::ConfigMap, "child").await.unwrap();
        add_child(site, "grandchild", &child).await;
        site.delete_as(Kind::ConfigMap, "child", PropagationPolicy::Foreground).await;
        until_gone(site, "child").await;
        assert!(!site.has(Kind::ConfigMap, "grandchild").await);
    }

    pub(super) async fn a_terminating_namespace_is_emptied(site: &Site) {
        site.start(site.options());
        site.create(Kind::ConfigMap, "held", json!({})).await;
        site.create(Kind::Secret, "held", json!({})).await;
        site.delete(Kind::Namespace, &site.namespace).await;
        until("the namespace is gone", async || !site.has(Kind::Namespace, &site.namespace).await).await;
        assert!(!site.has(Kind::ConfigMap, "held").await && !site.has(Kind::Secret, "held").await);
    }
}
