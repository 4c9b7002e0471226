//! A store with one fault, chosen by key: what a bucket does that is only partly there, or not safe at all.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use async_trait::async_trait;
use nstance_core::ports::objects::{Condition, ETag, Listed, Object, ObjectStore, StoreError, StoreFault, Unavailable};
use tokio::sync::watch;

pub struct Meddler {
    inner: Arc<dyn ObjectStore>,
    /// Reads of keys and lists of prefixes that contain this find no connection.
    unreadable: Mutex<Option<String>>,
    /// How often it did not let somebody read.
    hidden: AtomicUsize,
    /// Writes of keys that contain one of these find no connection.
    unwritable: Mutex<Vec<String>>,
    /// Writes of keys that contain this wait until they are let through.
    held: watch::Sender<Option<String>>,
    /// Bodies that contain this are not taken, as those that are too large are not.
    untaken: Mutex<Option<String>>,
    /// The keys of all puts, in their order.
    puts: Mutex<Vec<String>>,
    /// An update of a missing key is taken for a create.
    careless: bool,
}

impl Meddler {
    pub fn new(inner: Arc<dyn ObjectStore>) -> Self {
        Self {
            inner,
            unreadable: Mutex::default(),
            hidden: AtomicUsize::default(),
            unwritable: Mutex::default(),
            held: watch::Sender::new(None),
            untaken: Mutex::default(),
            puts: Mutex::default(),
            careless: false,
        }
    }

    pub fn careless(inner: Arc<dyn ObjectStore>) -> Self {
        Self { careless: true, ..Self::new(inner) }
    }

    pub fn hide(&self, part_of_key: Option<&str>) {
        *self.unreadable.lock().expect("no panic") = part_of_key.map(str::to_owned);
    }

    /// How often somebody looked in vain.
    pub fn n_hidden(&self) -> usize {
        self.hidden.load(Ordering::SeqCst)
    }

    /// Lets no write of such keys through, until told otherwise.
    pub fn cut(&self, parts_of_keys: &[&str]) {
        *self.unwritable.lock().expect("no panic") = parts_of_keys.iter().map(|it| (*it).to_owned()).collect();
    }

    /// Holds writes back, or lets all of them through.
    pub fn hold(&self, part_of_key: Option<&str>) {
        self.held.send_replace(part_of_key.map(str::to_owned));
    }

    /// Refuses bodies for what is in them.
    pub fn refuse(&self, part_of_body: &str) {
        *self.untaken.lock().expect("no panic") = Some(part_of_body.to_owned());
    }

    /// How often keys that contain this were put, those being held included.
    pub fn n_puts(&self, part_of_key: &str) -> usize {
        self.puts(part_of_key).len()
    }

    /// These keys, in the order of their puts.
    pub fn puts(&self, part_of_key: &str) -> Vec<String> {
        self.puts.lock().expect("no panic").iter().filter(|key| key.contains(part_of_key)).cloned().collect()
    }

    /// Whether a write waits.
    pub fn is_holding(&self) -> bool {
        0 < self.held.receiver_count()
    }

    fn check(&self, op: &'static str, key: &str) -> Result<(), StoreError> {
        let unreadable = self.unreadable.lock().expect("no panic");
        if unreadable.as_ref().is_some_and(|part| key.contains(part)) {
            self.hidden.fetch_add(1, Ordering::SeqCst);
            let fault = StoreFault::Unavailable(Unavailable::Network);
            return Err(StoreError::new(op, key, fault, "no connection"));
        }
        Ok(())
    }
}

#[async_trait]
impl ObjectStore for Meddler {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        self.check("get", key)?;
        self.inner.get(key).await
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        self.check("get", key)?;
        self.inner.get_if_changed(key, etag).await
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        self.puts.lock().expect("no panic").push(key.to_owned());
        let free = |held: &Option<String>| !held.as_ref().is_some_and(|part| key.contains(part));
        let _ = self.held.subscribe().wait_for(free).await;
        if self.unwritable.lock().expect("no panic").iter().any(|part| key.contains(part)) {
            let fault = StoreFault::Unavailable(Unavailable::Network);
            return Err(StoreError::new("put", key, fault, "no connection"));
        }
        let untaken = self.untaken.lock().expect("no panic").clone();
        if untaken.is_some_and(|part| String::from_utf8_lossy(&body).contains(&part)) {
            let fault = StoreFault::Unavailable(Unavailable::Invalid);
            return Err(StoreError::new("put", key, fault, "this body is not taken"));
        }
        let missing = self.careless
            && matches!(condition, Condition::Match(_))
            && self.inner.get(key).await.is_err_and(|error| error.is_not_found());
        self.inner.put(key, body, if missing { Condition::Create } else { condition }).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.inner.delete(key).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.check("list", prefix)?;
        self.inner.list(prefix).await
    }

    fn describe(&self) -> String {
        "meddled memory".to_owned()
    }
}
