//! Creating, changing and deleting objects, by the rules that clients rely on.

use http::StatusCode;
use serde_json::{Value, json};

use crate::{
    error::ApiError,
    object::{self, Key, finalizers, generation, is_deleting, set_field, set_metadata, text, uid},
    patch::{
        PatchKind,
        apply::{Applier, apply, disown_changed},
        patch,
    },
    resources::{DEFINITIONS, Resource, Served},
    store::{Txn, differs_in_spec},
};

/// Finalizer of a definition whose objects are not gone yet.
const DEFINITION_CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";

/// What every write says about itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct WriteOptions {
    pub(crate) dry_run: bool,
    pub(crate) manager: String,
    pub(crate) force: bool,
}

/// Which part of an object a write may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All but the status, for kinds with that subresource.
    Main,
    Status,
    /// `spec.finalizers` of a namespace.
    Finalize,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct DeleteOptions {
    pub(crate) dry_run: bool,
    pub(crate) grace_seconds: Option<i64>,
    pub(crate) uid: Option<String>,
    pub(crate) version: Option<String>,
    /// `Background`, `Foreground` or `Orphan`.
    pub(crate) propagation: Option<String>,
}

/// What became of an object.
#[derive(Debug)]
pub(crate) enum Deleted {
    /// It is gone; its last state.
    Gone(Value),
    /// It waits for finalizers or for the end of its grace period.
    Waiting(Value),
}

impl Deleted {
    pub(crate) fn into_object(self) -> Value {
        match self {
            Self::Gone(object) | Self::Waiting(object) => object,
        }
    }
}

/// Creates an object from the body of a request.
pub(crate) fn create(
    txn: &mut Txn<'_>,
    served: &Served,
    namespace: &str,
    mut object: Value,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    let resource = &*served.resource;
    check_type(served, &mut object)?;
    if object::name(&object).is_empty() {
        let prefix = text(&object, "/metadata/generateName").to_owned();
        if prefix.is_empty() {
            return Err(ApiError::invalid(resource, "", "metadata.name", "name or generateName is required"));
        }
        let name = format!("{prefix}{}", object::name_suffix(&txn.store.entropy));
        set_metadata(&mut object, "name", Some(json!(name)));
    }
    let name = object::name(&object).to_owned();
    check_name(resource, &name)?;
    check_namespace(&object, namespace)?;
    if !object::version_text(&object).is_empty() {
        return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
    }
    let key = Key::new(namespace, name.clone());
    if txn.current(resource, &key).is_some() {
        return Err(ApiError::already_exists(resource, &name));
    }
    check_parents(txn, resource, &key)?;
    set_metadata(&mut object, "namespace", resource.namespaced.then(|| json!(namespace)));
    for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "managedFields"] {
        set_metadata(&mut object, field, None);
    }
    // A node registers itself with its status; everything else gets it afterwards.
    if resource.has_status && resource.id != "nodes" {
        set_field(&mut object, "status", None);
    }
    encode_string_data(resource, &mut object);
    fill_in(resource, &mut object);
    insert(txn, resource, &key, object, options)
}

/// Stores a new object under a new identity.
fn insert(
    txn: &mut Txn<'_>,
    resource: &Resource,
    key: &Key,
    mut object: Value,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    set_metadata(&mut object, "uid", Some(json!(object::new_uid(&txn.store.entropy))));
    set_metadata(&mut object, "creationTimestamp", Some(object::now(&*txn.store.clock)));
    set_metadata(&mut object, "generation", resource.counts_generations().then(|| json!(1)));
    if options.dry_run {
        return Ok(object);
    }
    txn.put(resource, key, object).map(|it| (*it).clone())
}

/// What a real API server fills in for a few kinds because their clients depend on it.
fn fill_in(resource: &Resource, object: &mut Value) {
    match resource.id.as_str() {
        "namespaces" => {
            let name = object::name(object).to_owned();
            if object.pointer("/spec/finalizers").is_none() {
                set_field(object, "spec", Some(json!({ "finalizers": ["kubernetes"] })));
            }
            set_field(object, "status", Some(json!({ "phase": "Active" })));
            let labels = object::metadata_mut(object).entry("labels").or_insert_with(|| json!({}));
            object::fields_mut(labels).insert("kubernetes.io/metadata.name".to_owned(), json!(name));
        }
        "pods" => set_field(object, "status", Some(json!({ "phase": "Pending" }))),
        _ => {}
    }
}

/// `stringData` of a secret is a convenience for writing: it becomes `data`.
fn encode_string_data(resource: &Resource, object: &mut Value) {
    if resource.id != "secrets" {
        return;
    }
    let Some(Value::Object(texts)) = object::fields_mut(object).shift_remove("stringData") else { return };
    let data = object::fields_mut(object::fields_mut(object).entry("data").or_insert_with(|| json!({})));
    for (name, value) in texts {
        let encoded = data_encoding::BASE64.encode(value.as_str().unwrap_or_default().as_bytes());
        data.insert(name, json!(encoded));
    }
}

fn check_type(served: &Served, object: &mut Value) -> Result<(), ApiError> {
    let (api_version, kind) = (served.api_version(), &served.resource.kind);
    for (field, wanted) in [("apiVersion", &api_version), ("kind", kind)] {
        match text(object, &format!("/{field}")) {
            "" => set_field(object, field, Some(json!(wanted))),
            it if it == wanted => {}
            it => {
                let message = format!("the {field} in the data ({it}) does not match the expected {field} ({wanted})");
                return Err(ApiError::bad_request(message));
            }
        }
    }
    Ok(())
}

fn check_name(resource: &Resource, name: &str) -> Result<(), ApiError> {
    let why = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must \
               start and end with an alphanumeric character";
    if object::is_name(name) { Ok(()) } else { Err(ApiError::invalid(resource, name, "metadata.name", why)) }
}

fn check_namespace(object: &Value, namespace: &str) -> Result<(), ApiError> {
    match object::namespace(object) {
        "" => Ok(()),
        it if it == namespace => Ok(()),
        _ => Err(ApiError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        )),
    }
}

/// The namespace, and the definition of the kind, must be there to stay.
fn check_parents(txn: &Txn<'_>, resource: &Resource, key: &Key) -> Result<(), ApiError> {
    if let Some(definitions) = txn.store.registry.by_id(DEFINITIONS)
        && txn.get(&definitions, &Key::new("", &resource.id)).is_some_and(|it| is_deleting(&it))
    {
        let why = "create not allowed while custom resource definition is terminating";
        return Err(ApiError::forbidden(resource, &key.name, why));
    }
    if !resource.namespaced {
        return Ok(());
    }
    let Some(namespaces) = txn.store.registry.by_id("namespaces") else { return Ok(()) };
    match txn.get(&namespaces, &Key::new("", &key.namespace)) {
        None => Err(ApiError::not_found(&namespaces, &key.namespace)),
        Some(namespace) if is_deleting(&namespace) => {
            let why =
                format!("unable to create new content in namespace {} because it is being terminated", key.namespace);
            let message = format!("namespace {} is being terminated", key.namespace);
            let error = ApiError::forbidden(resource, &key.name, &why);
            Err(error.because("NamespaceTerminating", &message, Some("metadata.namespace")))
        }
        Some(_) => Ok(()),
    }
}

/// Replaces an object by the body of a request.
pub(crate) fn replace(
    txn: &mut Txn<'_>,
    served: &Served,
    key: &Key,
    part: Part,
    mut object: Value,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    let resource = &*served.resource;
    check_type(served, &mut object)?;
    if object::name(&object) != key.name {
        let message = "the name of the object does not match the name on the URL";
        return Err(ApiError::bad_request(message));
    }
    check_namespace(&object, &key.namespace)?;
    let before = txn.current(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    // In a replacement the uid is a precondition, in a patch a change that is not allowed.
    let (wanted, found) = (uid(&object), uid(&before));
    if !wanted.is_empty() && wanted != found {
        return Err(ApiError::other_uid(resource, &key.name, wanted, found));
    }
    if object::version_text(&object).is_empty() && resource.needs_version() {
        let why = "Invalid value: 0x0: must be specified for an update";
        return Err(ApiError::invalid(resource, &key.name, "metadata.resourceVersion", why));
    }
    change(txn, resource, key, part, &before, object, Owner::Any, options)
}

/// Changes an object by a patch; an apply creates it where it is missing, which the flag in the answer says.
pub(crate) fn patch_object(
    txn: &mut Txn<'_>,
    served: &Served,
    key: &Key,
    part: Part,
    kind: PatchKind,
    body: Value,
    options: &WriteOptions,
) -> Result<(Value, StatusCode), ApiError> {
    let resource = &*served.resource;
    let before = txn.current(resource, key);
    if kind == PatchKind::Apply {
        return apply_object(txn, served, key, part, before.as_deref(), body, options);
    }
    let before = before.ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    let mut shown = (*before).clone();
    set_field(&mut shown, "apiVersion", Some(json!(served.api_version())));
    let mut object = patch(kind, &shown, body)?;
    check_type(served, &mut object)?;
    if object::name(&object) != key.name {
        return Err(ApiError::bad_request("the name of the object does not match the name on the URL"));
    }
    let object = change(txn, resource, key, part, &before, object, Owner::Any, options)?;
    Ok((object, StatusCode::OK))
}

fn apply_object(
    txn: &mut Txn<'_>,
    served: &Served,
    key: &Key,
    part: Part,
    before: Option<&Value>,
    mut config: Value,
    options: &WriteOptions,
) -> Result<(Value, StatusCode), ApiError> {
    let resource = &*served.resource;
    if options.manager.is_empty() {
        return Err(ApiError::bad_request("fieldManager is required for apply patch"));
    }
    if !config.is_object() {
        return Err(ApiError::bad_request("error decoding apply patch: it is not a JSON object"));
    }
    check_type(served, &mut config)?;
    // Here, unlike in an update, the URL alone may name the object.
    if !["", key.name.as_str()].contains(&object::name(&config)) {
        return Err(ApiError::bad_request("the name of the object does not match the name on the URL"));
    }
    check_namespace(&config, &key.namespace)?;
    let (wanted_uid, wanted_version) = (uid(&config).to_owned(), object::version_text(&config).to_owned());
    match part {
        Part::Status => {
            let status = config.get("status").cloned();
            config = json!({});
            set_field(&mut config, "status", status);
        }
        Part::Main | Part::Finalize if resource.has_status => set_field(&mut config, "status", None),
        Part::Main | Part::Finalize => {}
    }
    let applier = Applier {
        manager: options.manager.clone(),
        force: options.force,
        api_version: served.api_version(),
        subresource: if part == Part::Status { "status" } else { "" },
        now: object::now(&*txn.store.clock),
    };
    let Some(before) = before else {
        if !wanted_uid.is_empty() {
            let why = format!(
                "uid mismatch: the provided object specified uid {wanted_uid}, and no existing object was found"
            );
            return Err(ApiError::conflict(resource, &key.name, &why));
        }
        if part != Part::Main {
            return Err(ApiError::not_found(resource, &key.name));
        }
        if !wanted_version.is_empty() {
            return Err(ApiError::modified(resource, &key.name));
        }
        check_name(resource, &key.name)?;
        check_parents(txn, resource, key)?;
        let mut empty = json!({ "apiVersion": served.api_version(), "kind": resource.kind, "metadata": {} });
        set_metadata(&mut empty, "name", Some(json!(key.name)));
        set_metadata(&mut empty, "namespace", resource.namespaced.then(|| json!(key.namespace)));
        let mut object = apply(&empty, config, &applier)?;
        encode_string_data(resource, &mut object);
        fill_in(resource, &mut object);
        return Ok((insert(txn, resource, key, object, options)?, StatusCode::CREATED));
    };
    let mut object = apply(before, config, &applier)?;
    if !wanted_uid.is_empty() {
        set_metadata(&mut object, "uid", Some(json!(wanted_uid)));
    }
    if !wanted_version.is_empty() {
        set_metadata(&mut object, "resourceVersion", Some(json!(wanted_version)));
    }
    let object = change(txn, resource, key, part, before, object, Owner::Applier, options)?;
    Ok((object, StatusCode::OK))
}

/// Stores the next state of an existing object for a subresource of it.
pub(crate) fn change_main(
    txn: &mut Txn<'_>,
    resource: &Resource,
    key: &Key,
    before: &Value,
    object: Value,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    change(txn, resource, key, Part::Main, before, object, Owner::Any, options)
}

/// Who writes: an apply brings its own managed fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Any,
    Applier,
}

/// Stores the next state of an existing object: what only the server sets is taken from the old one.
#[expect(clippy::too_many_arguments, reason = "private; a struct would only repeat the callers' arguments")]
fn change(
    txn: &mut Txn<'_>,
    resource: &Resource,
    key: &Key,
    part: Part,
    before: &Value,
    object: Value,
    owner: Owner,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    let (wanted, found) = (uid(&object), uid(before));
    if !wanted.is_empty() && wanted != found {
        let why = format!("Invalid value: {wanted:?}: field is immutable");
        return Err(ApiError::invalid(resource, &key.name, "metadata.uid", &why));
    }
    let wanted = object::version_text(&object);
    if !wanted.is_empty() && wanted != object::version_text(before) {
        return Err(ApiError::modified(resource, &key.name));
    }
    let mut after = match part {
        Part::Main => object,
        Part::Status => with_field(before, &object, "status"),
        Part::Finalize => with_field(before, &object, "spec"),
    };
    if part == Part::Status && owner == Owner::Applier {
        let managed = object_field(&after, before, "managedFields");
        set_metadata(&mut after, "managedFields", managed);
    }
    const KEPT: [&str; 8] = [
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "generation",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ];
    for field in KEPT {
        set_metadata(&mut after, field, before["metadata"].get(field).cloned());
    }
    if part == Part::Main && resource.has_status {
        set_field(&mut after, "status", before.get("status").cloned());
    }
    set_field(&mut after, "apiVersion", before.get("apiVersion").cloned());
    encode_string_data(resource, &mut after);
    if owner == Owner::Any {
        disown_changed(before, &mut after);
    }
    if is_deleting(before) {
        let new = finalizers(&after).find(|it| !finalizers(before).any(|old| old == *it));
        if let Some(new) = new {
            let why = format!(
                "Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers \
                 []string{{{new:?}}}"
            );
            return Err(ApiError::invalid(resource, &key.name, "metadata.finalizers", &why));
        }
    }
    if after == *before {
        return Ok(after);
    }
    if resource.counts_generations() && differs_in_spec(before, &after) {
        set_metadata(&mut after, "generation", Some(json!(generation(before) + 1)));
    }
    if options.dry_run {
        return Ok(after);
    }
    if is_finished(&after) {
        finish(txn, resource, key, before.clone())?;
        return Ok(after);
    }
    txn.put(resource, key, after).map(|it| (*it).clone())
}

/// `before` with one field of `object`.
fn with_field(before: &Value, object: &Value, field: &str) -> Value {
    let mut after = before.clone();
    set_field(&mut after, field, object.get(field).cloned());
    if let Some(managed) = object.pointer("/metadata/managedFields") {
        set_metadata(&mut after, "managedFields", Some(managed.clone()));
    }
    after
}

fn object_field(after: &Value, before: &Value, field: &str) -> Option<Value> {
    after["metadata"].get(field).or_else(|| before["metadata"].get(field)).cloned()
}

/// Whether an object that is being deleted has nothing left to wait for.
fn is_finished(object: &Value) -> bool {
    let grace = object.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(0);
    let of_namespace = object.pointer("/spec/finalizers").and_then(Value::as_array);
    let is_namespace = object["kind"] == "Namespace" && object["apiVersion"] == "v1";
    is_deleting(object)
        && grace <= 0
        && finalizers(object).next().is_none()
        && !(is_namespace && of_namespace.is_some_and(|it| !it.is_empty()))
}

/// Removes an object for good, and the definition that waited for it. Watches see what was stored last.
fn finish(txn: &mut Txn<'_>, resource: &Resource, key: &Key, stored: Value) -> Result<(), ApiError> {
    txn.remove(resource, key, stored)?;
    if let Some(definitions) = txn.store.registry.by_id(DEFINITIONS) {
        let key = Key::new("", &resource.id);
        if let Some(definition) = txn.get(&definitions, &key) {
            finish_definition(txn, &definitions, &key, &definition)?;
        }
    }
    Ok(())
}

/// A definition that is being deleted goes when the last of its objects is gone.
fn finish_definition(txn: &mut Txn<'_>, definitions: &Resource, key: &Key, definition: &Value) -> Result<(), ApiError> {
    if !is_deleting(definition) || !txn.list(&key.name, None).is_empty() {
        return Ok(());
    }
    let mut after = definition.clone();
    let left: Vec<Value> = finalizers(definition).filter(|it| *it != DEFINITION_CLEANUP).map(|it| json!(it)).collect();
    set_metadata(&mut after, "finalizers", (!left.is_empty()).then_some(Value::Array(left)));
    if is_finished(&after) {
        txn.remove(definitions, key, after)?;
    } else if after != *definition {
        txn.put(definitions, key, after)?;
    }
    Ok(())
}

/// Deletes an object, or marks it for its finalizers.
pub(crate) fn delete(
    txn: &mut Txn<'_>,
    resource: &Resource,
    key: &Key,
    options: &DeleteOptions,
) -> Result<Deleted, ApiError> {
    let before = txn.current(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    if let Some(wanted) = options.uid.as_deref().filter(|it| *it != uid(&before)) {
        return Err(ApiError::other_uid(resource, &key.name, wanted, uid(&before)));
    }
    let found = object::version_text(&before);
    if let Some(wanted) = options.version.as_deref().filter(|it| *it != found) {
        let why = format!(
            "Precondition failed: ResourceVersion in precondition: {wanted}, ResourceVersion in object meta: {found}"
        );
        return Err(ApiError::conflict(resource, &key.name, &why));
    }
    let grace = if resource.id == "pods" { pod_grace(&before, options.grace_seconds) } else { 0 };
    let mut after = (*before).clone();
    let running = before.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64);
    if !is_deleting(&before) || running.is_some_and(|running| grace < running) {
        let end = txn.store.clock.now().plus(std::time::Duration::from_secs(u64::try_from(grace).unwrap_or(0)));
        set_metadata(&mut after, "deletionTimestamp", Some(json!(object::seconds(end))));
        set_metadata(&mut after, "deletionGracePeriodSeconds", Some(json!(grace)));
        // Marking for deletion counts as a change of what is wanted.
        if resource.counts_generations() && !is_deleting(&before) {
            set_metadata(&mut after, "generation", Some(json!(generation(&before) + 1)));
        }
    }
    match options.propagation.as_deref() {
        Some("Orphan") => object::add_finalizer(&mut after, "orphan"),
        Some("Foreground") => object::add_finalizer(&mut after, "foregroundDeletion"),
        _ => {}
    }
    if resource.id == "namespaces" {
        set_field(&mut after, "status", Some(json!({ "phase": "Terminating" })));
    }
    let is_definition = resource.id == DEFINITIONS;
    if is_definition && !txn.list(&key.name, None).is_empty() {
        object::add_finalizer(&mut after, DEFINITION_CLEANUP);
    }
    if is_finished(&after) {
        if !options.dry_run {
            finish(txn, resource, key, (*before).clone())?;
        }
        return Ok(Deleted::Gone(after));
    }
    if !options.dry_run && after != *before {
        if is_definition {
            mark_terminating(&mut after, &object::now(&*txn.store.clock));
        }
        after = (*txn.put(resource, key, after)?).clone();
        if is_definition {
            delete_defined(txn, key)?;
        }
    }
    Ok(Deleted::Waiting(after))
}

fn mark_terminating(definition: &mut Value, now: &Value) {
    let condition = json!({
        "type": "Terminating", "status": "True", "reason": "InstanceDeletionInProgress",
        "message": "CustomResource deletion is in progress", "lastTransitionTime": now,
    });
    let status = object::fields_mut(object::fields_mut(definition).entry("status").or_insert_with(|| json!({})));
    let conditions = status.entry("conditions").or_insert_with(|| json!([]));
    if let Some(conditions) = conditions.as_array_mut() {
        conditions.retain(|it| it["type"] != "Terminating");
        conditions.push(condition);
    }
}

/// Deletes all objects of a definition; those with finalizers stay until these are gone.
fn delete_defined(txn: &mut Txn<'_>, definition: &Key) -> Result<(), ApiError> {
    let Some(resource) = txn.store.registry.by_id(&definition.name) else { return Ok(()) };
    for object in txn.list(&resource.id, None) {
        let key = Key::new(object::namespace(&object), object::name(&object));
        delete(txn, &resource, &key, &DeleteOptions::default())?;
    }
    Ok(())
}

/// How long a pod may take to end. One that runs nowhere, or ran to its end, goes at once.
fn pod_grace(pod: &Value, asked: Option<i64>) -> i64 {
    let ended = ["Succeeded", "Failed"].contains(&text(pod, "/status/phase"));
    if text(pod, "/spec/nodeName").is_empty() || ended {
        return 0;
    }
    let own = || pod.pointer("/spec/terminationGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(30);
    asked.unwrap_or_else(own).max(0)
}
