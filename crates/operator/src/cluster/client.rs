//! The Kubernetes API over kube-rs, with a deadline on every call and a look at leadership before every write.
//!
//! Two clients: one that repeats what an API server refuses for a moment, for lists and watches; and one that does not, for
//! all else: an eviction that a budget does not allow would otherwise hang for minutes.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use http::{Method, Request, header};
use k8s_openapi::jiff::Timestamp;
use kube::client::Body;
use nstance_rt::chain::Chain;
use serde_json::{Value, json};

use super::leadership::Leadership;
use crate::{
    api::names::manager,
    ports::{
        Apply, KubeError, KubeErrorKind, KubePort, ObjectRef, Propagation, ResourceKind, Right, Selector, Target, kinds,
    },
};

const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
const PAGE: u32 = 500;

const JSON: &str = "application/json";

#[derive(Clone)]
pub struct KubeClient {
    plain: kube::Client,
    watching: kube::Client,
    leadership: Arc<Leadership>,
    server: Arc<str>,
    /// The API server's CAs as PEM, if they were given.
    ca: Option<Arc<str>>,
}

/// A client could not be made of its configuration.
#[derive(Debug, thiserror::Error)]
#[error("make a client for the Kubernetes API at {server}")]
pub struct ClientError {
    server: String,
    #[source]
    source: kube::Error,
}

/// One request.
struct Call<'a> {
    verb: &'static str,
    object: String,
    method: Method,
    path: String,
    query: Vec<(&'static str, String)>,
    content_type: &'static str,
    body: Option<&'a Value>,
}

impl KubeClient {
    pub fn new(config: kube::Config, leadership: Arc<Leadership>) -> Result<Self, ClientError> {
        let server = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let ca = config.root_cert.as_ref().map(|certificates| {
            let blocks = certificates.iter().map(|der| pem(der));
            Arc::from(blocks.collect::<String>())
        });
        let failed = |source| ClientError { server: server.clone(), source };
        let watching = kube::Client::try_from(config.clone()).map_err(failed)?;
        let mut config = config;
        config.default_retry = false;
        let plain = kube::Client::try_from(config).map_err(failed)?;
        Ok(Self { plain, watching, leadership, server: server.into(), ca })
    }

    /// The same API, for writes that need no leadership: the election itself.
    #[must_use]
    pub fn with_leadership(&self, leadership: Arc<Leadership>) -> Self {
        Self { leadership, ..self.clone() }
    }

    /// For watches.
    pub fn watching(&self) -> kube::Client {
        self.watching.clone()
    }

    pub fn leadership(&self) -> Arc<Leadership> {
        self.leadership.clone()
    }

    /// The address of the API server.
    pub fn server(&self) -> &str {
        &self.server
    }

    pub fn ca(&self) -> Option<&str> {
        self.ca.as_deref()
    }

    /// The names of the resources that are served in a group and version; `None` if it is not served at all.
    pub async fn resources(&self, group: &str, version: &str) -> Result<Option<Vec<String>>, KubeError> {
        let (path, object) = (format!("/apis/{group}/{version}"), format!("resources of {group}/{version}"));
        let answer = self.send(&self.plain, CALL_TIMEOUT, Call::get("discover", object, path)).await;
        match answer {
            Ok(list) => {
                let names = list["resources"].as_array().into_iter().flatten();
                Ok(Some(names.filter_map(|it| it["name"].as_str().map(str::to_owned)).collect()))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn read(&self, call: Call<'_>) -> Result<Value, KubeError> {
        self.send(&self.plain, CALL_TIMEOUT, call).await
    }

    async fn write(&self, call: Call<'_>) -> Result<Value, KubeError> {
        if !self.leadership.is_leader() {
            return Err(KubeError {
                verb: call.verb,
                object: call.object,
                kind: KubeErrorKind::NotLeader,
                message: "not sent: this process does not lead".to_owned(),
                code: 0,
                causes: Vec::new(),
            });
        }
        let (verb, object) = (call.verb, call.object.clone());
        let answer = self.send(&self.plain, CALL_TIMEOUT, call).await;
        if answer.is_ok() {
            let lease_transitions = self.leadership.transitions();
            tracing::debug!(verb, %object, lease_transitions, "written");
        }
        answer
    }

    async fn send(&self, client: &kube::Client, limit: Duration, call: Call<'_>) -> Result<Value, KubeError> {
        let (verb, object) = (call.verb, call.object.clone());
        let failed = |kind, message: String| KubeError {
            verb,
            object: object.clone(),
            kind,
            message,
            code: 0,
            causes: Vec::new(),
        };
        let body = call.body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|error| failed(KubeErrorKind::Invalid, error.to_string()))?.unwrap_or_default();
        let request = Request::builder()
            .method(call.method)
            .uri(with_query(&call.path, &call.query))
            .header(header::ACCEPT, JSON)
            .header(header::CONTENT_TYPE, call.content_type)
            .body(Body::from(body))
            .map_err(|error| failed(KubeErrorKind::Invalid, error.to_string()))?;
        let exchange = async {
            let answer = client.send(request).await?;
            let (parts, body) = answer.into_parts();
            Ok::<_, kube::Error>((parts, body.collect_bytes().await?))
        };
        let answer = tokio::time::timeout(limit, exchange).await;
        let answer = answer
            .map_err(|_| failed(KubeErrorKind::Unavailable, format!("no answer within {} s", limit.as_secs())))?;
        let (parts, bytes) = answer.map_err(|error| failed(KubeErrorKind::Unavailable, Chain(&error).to_string()))?;
        let body: Option<Value> = serde_json::from_slice(&bytes).ok();
        if parts.status.is_success() {
            let not_json = || failed(KubeErrorKind::Unavailable, "the answer is not JSON".to_owned());
            return body.ok_or_else(not_json);
        }
        let text = || String::from_utf8_lossy(&bytes).chars().take(300).collect::<String>();
        let retry_after = parts.headers.get(header::RETRY_AFTER).and_then(|it| it.to_str().ok()?.parse().ok());
        Err(refusal(verb, &object, parts.status.as_u16(), retry_after, body.as_ref(), text))
    }
}

/// An answer that is no success.
fn refusal(
    verb: &'static str,
    object: &str,
    code: u16,
    retry_after: Option<u64>,
    status: Option<&Value>,
    text: impl Fn() -> String,
) -> KubeError {
    let status = status.unwrap_or(&Value::Null);
    let details = &status["details"];
    let retry_after = retry_after.or_else(|| details["retryAfterSeconds"].as_u64()).filter(|it| *it != 0);
    let word = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    let causes = details["causes"].as_array().into_iter().flatten();
    let kind = match code {
        404 => KubeErrorKind::NotFound,
        409 if status["reason"] == "AlreadyExists" => KubeErrorKind::AlreadyExists,
        409 => KubeErrorKind::Conflict,
        410 => KubeErrorKind::Gone,
        401 | 403 => KubeErrorKind::Forbidden,
        429 => KubeErrorKind::TooManyRequests { retry_after: retry_after.map(Duration::from_secs) },
        400 | 405..=408 | 411..=428 => KubeErrorKind::Invalid,
        _ => KubeErrorKind::Unavailable,
    };
    let message = match status["message"].as_str() {
        Some(message) if !message.is_empty() => message.to_owned(),
        _ => format!("{code} {}", text()),
    };
    let causes = causes.map(|it| (word(&it["reason"]), word(&it["message"]))).collect();
    KubeError { verb, object: object.to_owned(), kind, message, code, causes }
}

fn pem(der: &[u8]) -> String {
    let body = data_encoding::BASE64.encode(der);
    let lines = body.as_bytes().chunks(64).map(|line| format!("{}\n", String::from_utf8_lossy(line)));
    format!("-----BEGIN CERTIFICATE-----\n{}-----END CERTIFICATE-----\n", lines.collect::<String>())
}

impl<'a> Call<'a> {
    fn get(verb: &'static str, object: String, path: String) -> Self {
        Self { verb, object, method: Method::GET, path, query: Vec::new(), content_type: JSON, body: None }
    }

    fn of(verb: &'static str, object: &ObjectRef, method: Method) -> Self {
        let path = path(object.kind, &object.namespace, &object.name);
        Self { verb, object: object.to_string(), method, path, query: Vec::new(), content_type: JSON, body: None }
    }

    fn body(self, body: &'a Value) -> Self {
        Self { body: Some(body), ..self }
    }

    fn typed(self, content_type: &'static str) -> Self {
        Self { content_type, ..self }
    }

    fn by(mut self, manager: &'static str) -> Self {
        self.query.push(("fieldManager", manager.to_owned()));
        self
    }

    fn under(mut self, subresource: &str) -> Self {
        self.path = format!("{}/{subresource}", self.path);
        self
    }

    fn at(self, target: Target) -> Self {
        match target {
            Target::Main => self,
            Target::Status => self.under("status"),
        }
    }
}

/// The path of an object; of the whole collection if the name is empty.
fn path(kind: ResourceKind, namespace: &str, name: &str) -> String {
    let mut path = if kind.group.is_empty() {
        format!("/api/{}", kind.version)
    } else {
        format!("/apis/{}/{}", kind.group, kind.version)
    };
    if kind.namespaced && !namespace.is_empty() {
        path.push_str(&format!("/namespaces/{namespace}"));
    }
    path.push_str(&format!("/{}", kind.plural));
    if !name.is_empty() {
        path.push_str(&format!("/{name}"));
    }
    path
}

fn with_query(path: &str, query: &[(&'static str, String)]) -> String {
    let mut text = path.to_owned();
    for (n, (name, value)) in query.iter().enumerate() {
        text.push(if n == 0 { '?' } else { '&' });
        text.push_str(name);
        text.push('=');
        for byte in value.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => text.push(char::from(byte)),
                _ => text.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    text
}

/// The body with the fields that every object needs.
fn complete(object: &ObjectRef, body: &Value) -> Value {
    let mut body = body.clone();
    if body["apiVersion"].is_null() {
        body["apiVersion"] = json!(object.kind.api_version());
    }
    if body["kind"].is_null() {
        body["kind"] = json!(object.kind.kind);
    }
    if body["metadata"]["name"].is_null() {
        body["metadata"]["name"] = json!(object.name);
    }
    if !object.namespace.is_empty() && body["metadata"]["namespace"].is_null() {
        body["metadata"]["namespace"] = json!(object.namespace);
    }
    body
}

/// Whether a refused delete or eviction means that the object which was meant does not exist any more.
fn is_another(error: &KubeError) -> bool {
    error.is_conflict() && error.message.to_ascii_lowercase().contains("uid")
}

#[async_trait]
impl KubePort for KubeClient {
    async fn get(&self, object: &ObjectRef) -> Result<Option<Value>, KubeError> {
        match self.read(Call::of("get", object, Method::GET)).await {
            Ok(it) => Ok(Some(it)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self, kind: ResourceKind, selector: &Selector) -> Result<Vec<Value>, KubeError> {
        let (mut items, mut token) = (Vec::new(), String::new());
        loop {
            let namespace = selector.namespace.as_deref().unwrap_or_default();
            let mut call = Call::get("list", kind.plural.to_owned(), path(kind, namespace, ""));
            call.query.push(("limit", PAGE.to_string()));
            if let Some(labels) = &selector.labels {
                call.query.push(("labelSelector", labels.clone()));
            }
            if let Some(fields) = &selector.fields {
                call.query.push(("fieldSelector", fields.clone()));
            }
            if !token.is_empty() {
                call.query.push(("continue", token));
            }
            let mut page = self.send(&self.watching, LIST_TIMEOUT, call).await?;
            if let Value::Array(listed) = page["items"].take() {
                for mut item in listed {
                    // A list does not repeat the kind in its items.
                    item["apiVersion"] = json!(kind.api_version());
                    item["kind"] = json!(kind.kind);
                    items.push(item);
                }
            }
            token = page["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
            if token.is_empty() {
                return Ok(items);
            }
        }
    }

    async fn create(&self, object: &ObjectRef, body: &Value, manager: &'static str) -> Result<Value, KubeError> {
        let body = complete(object, body);
        let mut call = Call::of("create", object, Method::POST).body(&body).by(manager);
        call.path = path(object.kind, &object.namespace, "");
        self.write(call).await
    }

    async fn apply(&self, object: &ObjectRef, body: &Value, how: Apply) -> Result<Value, KubeError> {
        let body = complete(object, body);
        let mut call = Call::of("apply", object, Method::PATCH).at(how.target).body(&body).by(how.manager);
        call.query.push(("force", how.force.to_string()));
        // JSON is YAML.
        self.write(call.typed("application/apply-patch+yaml")).await
    }

    async fn merge_patch(&self, object: &ObjectRef, patch: &Value, target: Target) -> Result<Value, KubeError> {
        let by = match target {
            Target::Main => manager::SPEC,
            Target::Status => manager::STATUS,
        };
        let call = Call::of("patch", object, Method::PATCH).at(target).body(patch).by(by);
        self.write(call.typed("application/merge-patch+json")).await
    }

    async fn json_patch(&self, object: &ObjectRef, patch: &Value) -> Result<Value, KubeError> {
        let call = Call::of("patch", object, Method::PATCH).body(patch).by(manager::SPEC);
        self.write(call.typed("application/json-patch+json")).await
    }

    async fn replace(&self, object: &ObjectRef, body: &Value) -> Result<Value, KubeError> {
        let body = complete(object, body);
        self.write(Call::of("update", object, Method::PUT).body(&body).by(manager::SPEC)).await
    }

    async fn delete(&self, object: &ObjectRef, uid: Option<&str>, how: Propagation) -> Result<(), KubeError> {
        let policy = match how {
            Propagation::Background => "Background",
            Propagation::Orphan => "Orphan",
        };
        let mut body = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy });
        if let Some(uid) = uid {
            body["preconditions"] = json!({ "uid": uid });
        }
        match self.write(Call::of("delete", object, Method::DELETE).body(&body)).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() || uid.is_some() && is_another(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn evict(&self, pod: &ObjectRef, uid: &str, grace_seconds: Option<i64>) -> Result<(), KubeError> {
        let mut options = json!({ "preconditions": { "uid": uid } });
        if let Some(seconds) = grace_seconds {
            options["gracePeriodSeconds"] = json!(seconds);
        }
        let body = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": { "name": pod.name, "namespace": pod.namespace },
            "deleteOptions": options,
        });
        match self.write(Call::of("evict", pod, Method::POST).under("eviction").body(&body)).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn delete_pod(&self, pod: &ObjectRef, uid: &str, grace_seconds: i64) -> Result<(), KubeError> {
        let body = json!({
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": grace_seconds,
            "preconditions": { "uid": uid },
        });
        match self.write(Call::of("delete", pod, Method::DELETE).body(&body)).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() || is_another(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn create_token(&self, account: &ObjectRef, life: Duration) -> Result<(String, Timestamp), KubeError> {
        let body = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": { "expirationSeconds": life.as_secs() },
        });
        let call = Call::of("create a token of", account, Method::POST).under("token").body(&body);
        let answer = self.write(call).await?;
        let status = &answer["status"];
        let expires = status["expirationTimestamp"].as_str().and_then(|it| it.parse().ok());
        match (status["token"].as_str(), expires) {
            (Some(token), Some(expires)) => Ok((token.to_owned(), expires)),
            _ => Err(KubeError {
                verb: "create a token of",
                object: account.to_string(),
                kind: KubeErrorKind::Unavailable,
                message: "the answer has no token".to_owned(),
                code: 0,
                causes: Vec::new(),
            }),
        }
    }

    async fn missing_rights(&self, rights: &[Right]) -> Result<Vec<String>, KubeError> {
        let ask = |right: Right| async move {
            let body = json!({
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": { "resourceAttributes": {
                    "verb": right.verb,
                    "group": right.group,
                    "resource": right.resource,
                    "subresource": right.subresource,
                } },
            });
            let name = right_name(right);
            let mut call = Call::get("review", name.clone(), path(kinds::ACCESS_REVIEW, "", "")).body(&body);
            call.method = Method::POST;
            // A question, not a write: a process that does not lead may ask it too.
            let answer = self.read(call).await?;
            Ok((answer["status"]["allowed"] != true).then_some(name))
        };
        let answers: Result<Vec<_>, KubeError> =
            futures::future::join_all(rights.iter().copied().map(ask)).await.into_iter().collect();
        Ok(answers?.into_iter().flatten().collect())
    }
}

/// As `patch nodes` or `create pods/eviction`.
fn right_name(right: Right) -> String {
    let mut name = format!("{} {}", right.verb, right.resource);
    if !right.group.is_empty() {
        name.push_str(&format!(".{}", right.group));
    }
    if !right.subresource.is_empty() {
        name.push_str(&format!("/{}", right.subresource));
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_queries_are_those_of_the_api() {
        assert_eq!(path(kinds::NODE, "default", "n1"), "/api/v1/nodes/n1");
        assert_eq!(path(kinds::POD, "", ""), "/api/v1/pods");
        assert_eq!(
            path(kinds::MACHINE_POOL, "default", "web"),
            "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machinepools/web"
        );
        let query = [("fieldSelector", "spec.nodeName=".to_owned()), ("limit", "500".to_owned())];
        assert_eq!(with_query("/x", &query), "/x?fieldSelector=spec.nodeName%3D&limit=500");
    }

    #[test]
    fn a_refusal_keeps_the_servers_words_and_causes() {
        let status = json!({
            "message": "Cannot evict pod as it would violate the pod's disruption budget.",
            "reason": "TooManyRequests",
            "details": { "causes": [{ "reason": "DisruptionBudget", "message": "needs 2" }], "retryAfterSeconds": 10 },
        });
        let error = refusal("evict", "Pod a/b", 429, None, Some(&status), String::new);
        assert_eq!(error.kind, KubeErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(10)) });
        assert_eq!(error.causes, [("DisruptionBudget".to_owned(), "needs 2".to_owned())]);
        assert!(error.to_string().starts_with("evict Pod a/b: Cannot evict"));
        let kind = |code, reason: &str| {
            refusal("x", "y", code, None, Some(&json!({ "reason": reason })), || "text".to_owned()).kind
        };
        assert_eq!(kind(409, "AlreadyExists"), KubeErrorKind::AlreadyExists);
        assert_eq!(kind(409, "Conflict"), KubeErrorKind::Conflict);
        assert_eq!(kind(422, "Invalid"), KubeErrorKind::Invalid);
        assert_eq!(kind(503, ""), KubeErrorKind::Unavailable);
    }

    #[test]
    fn rights_are_named_as_in_a_role() {
        let right = Right { verb: "create", group: "", resource: "pods", subresource: "eviction" };
        assert_eq!(right_name(right), "create pods/eviction");
        let right = Right { verb: "list", group: "storage.k8s.io", resource: "volumeattachments", subresource: "" };
        assert_eq!(right_name(right), "list volumeattachments.storage.k8s.io");
    }
}
