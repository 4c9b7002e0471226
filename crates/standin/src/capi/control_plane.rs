//! What `Cluster.spec.controlPlaneRef` names. Its kind is known only at run time: the version comes from the label that
//! the contract puts on its CRD.

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    core::GroupVersionKind,
};

use super::view::ControlPlane;
use crate::{
    execute::{RequestError, request},
    object::Object,
};

/// CRD label of the contract that is followed; its value is a version of the provider's own.
const CONTRACT: &str = "cluster.x-k8s.io/v1beta2";

/// `None`: there is no such object or no such kind.
pub(crate) async fn read(client: &Client, cluster: &Object) -> Result<Option<ControlPlane>, RequestError> {
    let field = |name: &str| cluster.text(&format!("/spec/controlPlaneRef/{name}")).to_owned();
    let (group, kind, name) = (field("apiGroup"), field("kind"), field("name"));
    let plural = format!("{}s", kind.to_lowercase());
    let definitions = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition"),
        "customresourcedefinitions",
    );
    let definitions: Api<DynamicObject> = Api::all_with(client.clone(), &definitions);
    let Some(definition) = request(definitions.get_opt(&format!("{plural}.{group}"))).await? else { return Ok(None) };
    let definition = Object::of(definition);
    // Several versions are joined by `_`, the newest last.
    let version = definition.label(CONTRACT).unwrap_or("v1beta1").rsplit('_').next().unwrap_or("v1beta1").to_owned();
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(&group, &version, &kind), &plural);
    let objects: Api<DynamicObject> = Api::namespaced_with(client.clone(), cluster.namespace(), &resource);
    let found = request(objects.get_opt(&name)).await?.map(Object::of);
    Ok(found.map(|it| ControlPlane {
        is_initialized: it.flag("/status/initialization/controlPlaneInitialized"),
        is_externally_managed: it.flag("/status/externalManagedControlPlane"),
        is_deleting: it.is_deleting(),
    }))
}
