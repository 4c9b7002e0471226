//! Provider ids and local places that one process gives to its creates before anything exists.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use nstance_core::ports::provider::{ErrorClass, ProviderError, Reservation, ReserveSpec};
use tokio::sync::Semaphore;

use super::{
    FakeProvider,
    options::FakeOptions,
    script::{About, Op, Outcome},
};

/// Numbers below this are never given.
const FIRST_NUMBER: u64 = 100;

pub(super) struct Allocator {
    /// The highest number that this process knows to be reserved.
    highest: AtomicU64,
    /// Gives places in the order in which they were asked for; `None` means no limit.
    places: Option<Arc<Semaphore>>,
}

impl Allocator {
    pub(super) fn new(options: &FakeOptions) -> Self {
        let places = (0 < options.places).then(|| Arc::new(Semaphore::new(options.places)));
        Self { highest: AtomicU64::new(FIRST_NUMBER - 1), places }
    }

    pub(super) fn free_places(&self) -> Option<usize> {
        self.places.as_ref().map(|places| places.available_permits())
    }

    pub(super) fn restore(&self, reserved: &[String]) {
        for number in reserved.iter().filter_map(|id| id.parse().ok()) {
            self.highest.fetch_max(number, Ordering::Relaxed);
        }
    }

    /// A number above `there` and above all that are reserved.
    fn next_number(&self, there: Option<u64>) -> u64 {
        self.highest.fetch_max(there.unwrap_or_default(), Ordering::Relaxed);
        self.highest.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl FakeProvider {
    /// Not a call to the cloud, so it takes no latency and is in no log; a scripted refusal or delay applies.
    pub(super) async fn choose_id(&self, spec: &ReserveSpec) -> Result<Reservation, ProviderError> {
        let about = About {
            instance: Some(spec.instance),
            group: Some(spec.tags.group_ref()),
            subnet: Some(spec.subnet.clone()),
            epoch: None,
        };
        let outcome = self.cloud().script(Op::Reserve, 0, &about);
        match outcome {
            Some(Outcome::Refuse(class)) => return Err(Op::Reserve.scripted(class)),
            Some(Outcome::RefuseWith(error)) => return Err(Op::Reserve.scripted_with(&error)),
            Some(Outcome::Delay(delay)) => tokio::time::sleep(delay).await,
            Some(Outcome::Hang) => std::future::pending().await,
            _ => {}
        }
        let place = match &self.allocator.places {
            Some(places) => {
                let closed = |_| Op::Reserve.error(ErrorClass::Unavailable, "no places are given any more");
                Some(places.clone().acquire_owned().await.map_err(closed)?)
            }
            None => None,
        };
        let options = &self.shared.options;
        let reservation = if options.reserve_numbers {
            let there = self.cloud().highest_number();
            Reservation::named(self.allocator.next_number(there).to_string())
        } else if options.reserve {
            Reservation::named(format!("fake-{}", spec.instance))
        } else {
            Reservation::none()
        };
        Ok(match place {
            Some(place) => reservation.with_places(place),
            None => reservation,
        })
    }
}
