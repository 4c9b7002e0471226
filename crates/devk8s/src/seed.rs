//! What is stored at start: the namespaces that every cluster has, and the definitions that were asked for.

use serde_json::{Value, json};

use crate::{
    error::ApiError,
    object::{self, Key, set_metadata},
    store::Store,
    write::{Part, WriteOptions, create, replace},
};

const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

pub(crate) fn seed(store: &Store, definitions: Vec<Value>) -> Result<(), ApiError> {
    let options = WriteOptions::default();
    let namespaces = store.registry.find("", "v1", "namespaces");
    for (name, served) in NAMESPACES.iter().flat_map(|name| namespaces.as_ref().map(|it| (name, it))) {
        let namespace = json!({ "metadata": { "name": name } });
        match store.transact(|txn| create(txn, served, "", namespace, &options)) {
            Err(error) if error.reason != "AlreadyExists" => return Err(error),
            _ => {}
        }
    }
    let Some(served) = store.registry.find("apiextensions.k8s.io", "v1", "customresourcedefinitions") else {
        return Ok(());
    };
    for mut definition in definitions {
        let key = Key::new("", object::name(&definition));
        let present = store.transact(|txn| txn.get(&served.resource, &key));
        if let Some(present) = present {
            let version = json!(object::version_text(&present));
            set_metadata(&mut definition, "resourceVersion", Some(version));
            store.transact(|txn| replace(txn, &served, &key, Part::Main, definition, &options))?;
        } else {
            store.transact(|txn| create(txn, &served, "", definition, &options))?;
        }
    }
    Ok(())
}
