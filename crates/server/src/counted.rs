//! Every request to the object store is counted: at rest there are few, and somebody pays for them.

use std::sync::Arc;

use async_trait::async_trait;
use nstance_core::ports::objects::{Condition, ETag, Listed, Object, ObjectStore, ShowPage, StoreError, StoreFault};

use crate::metrics::{Metrics, StoreLabels};

pub struct CountedStore {
    inner: Arc<dyn ObjectStore>,
    metrics: Arc<Metrics>,
}

impl CountedStore {
    pub fn new(inner: Arc<dyn ObjectStore>, metrics: Arc<Metrics>) -> Self {
        Self { inner, metrics }
    }

    /// Counts a call when it is over, also one that nobody waited for to the end.
    async fn counted<T>(
        &self,
        op: &'static str,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let mut counting = Counting { metrics: &self.metrics, op, outcome: "abandoned" };
        let done = call.await;
        counting.outcome = match done.as_ref().err().map(|error| error.fault) {
            None => "ok",
            Some(StoreFault::NotFound) => "not_found",
            Some(StoreFault::Precondition) => "precondition",
            Some(StoreFault::Ambiguous) => "ambiguous",
            Some(StoreFault::Unavailable(_)) => "unavailable",
        };
        done
    }
}

struct Counting<'a> {
    metrics: &'a Metrics,
    op: &'static str,
    outcome: &'static str,
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        let labels = StoreLabels { op: self.op, outcome: self.outcome };
        self.metrics.store_requests.get_or_create(&labels).inc();
    }
}

#[async_trait]
impl ObjectStore for CountedStore {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        self.counted("get", self.inner.get(key)).await
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        self.counted("get", self.inner.get_if_changed(key, etag)).await
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        self.counted("put", self.inner.put(key, body, condition)).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.counted("delete", self.inner.delete(key)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.counted("list", self.inner.list(prefix)).await
    }

    async fn list_pages(&self, prefix: &str, show: ShowPage<'_>) -> Result<Vec<Listed>, StoreError> {
        self.counted("list", self.inner.list_pages(prefix, show)).await
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}
