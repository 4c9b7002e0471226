//! Adding and dropping one finalizer, without touching those of others.

use kube::api::ObjectMeta;
use serde_json::{Value, json};

use super::context::Context;
use crate::ports::{KubeError, ObjectRef};

impl Context {
    /// Adds the finalizer unless it is there. Whether it is there now; if not, the object changed meanwhile and the reconcile
    /// comes again.
    pub async fn ensure_finalizer(
        &self,
        object: &ObjectRef,
        meta: &ObjectMeta,
        finalizer: &str,
    ) -> Result<bool, KubeError> {
        let present = meta.finalizers.as_deref().unwrap_or_default();
        if present.iter().any(|it| it == finalizer) {
            return Ok(true);
        }
        let mut patch = vec![
            json!({"op": "test", "path": "/metadata/uid", "value": meta.uid}),
            json!({"op": "test", "path": "/metadata/resourceVersion", "value": meta.resource_version}),
        ];
        if present.is_empty() {
            patch.push(json!({"op": "add", "path": "/metadata/finalizers", "value": [finalizer]}));
        } else {
            patch.push(json!({"op": "add", "path": "/metadata/finalizers/-", "value": finalizer}));
        }
        self.patched(object, patch).await
    }

    /// Drops the finalizer if it is there. Whether it is gone now.
    pub async fn drop_finalizer(
        &self,
        object: &ObjectRef,
        meta: &ObjectMeta,
        finalizer: &str,
    ) -> Result<bool, KubeError> {
        let present = meta.finalizers.as_deref().unwrap_or_default();
        let Some(at) = present.iter().position(|it| it == finalizer) else { return Ok(true) };
        let path = format!("/metadata/finalizers/{at}");
        let patch = vec![
            json!({"op": "test", "path": "/metadata/uid", "value": meta.uid}),
            json!({"op": "test", "path": path, "value": finalizer}),
            json!({"op": "remove", "path": path}),
        ];
        self.patched(object, patch).await
    }

    /// An object that changed meanwhile, or is gone, is no error: the watch tells, and the reconcile comes again.
    async fn patched(&self, object: &ObjectRef, patch: Vec<Value>) -> Result<bool, KubeError> {
        use crate::ports::KubeErrorKind::{Conflict, Invalid, NotFound};
        match self.kube.json_patch(object, &Value::Array(patch)).await {
            Ok(_) => Ok(true),
            // A failed `test` is told as "invalid" by the API server.
            Err(error) if matches!(error.kind, Conflict | Invalid | NotFound) => {
                tracing::debug!(%object, error = %error, "finalizer not changed yet");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
