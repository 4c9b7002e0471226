//! The end of an environment: everything that was started is stopped, in its order.

use std::{collections::BTreeSet, time::Duration};

use futures::future::join_all;
use nstance_providers::process::power;
use tokio_util::sync::CancellationToken;

use super::{Signals, Slot, Up};
use crate::{
    layout::Layout,
    records::{Phase, RunFile},
    roles, stop,
};

impl Up {
    /// Operator, servers, agents, Kubernetes, store: a server that still ran would replace the agents we stop.
    pub(super) async fn stop(&mut self, signals: &mut Signals) {
        self.record.phase = Phase::Stopping;
        let _ = self.record.write(&self.layout);
        let hurry = CancellationToken::new();
        {
            let work = self.stop_all(hurry.clone());
            tokio::pin!(work);
            loop {
                tokio::select! {
                    biased;
                    () = &mut work => break,
                    _ = signals.next(), if !hurry.is_cancelled() => hurry.cancel(),
                }
            }
        }
        self.record.forget(&self.layout);
        self.steps.say(&format!("state stays in {}; the next `up` goes on with it", self.layout.shown()));
    }

    async fn stop_all(&mut self, hurry: CancellationToken) {
        if let Some(line) = stop_one(self.operator.as_mut(), &self.layout, &hurry).await {
            self.steps.say(&line);
        }
        // Standbys before leaders: nobody is to take over from a leader that is stopped for good.
        let records: Vec<RunFile> =
            self.servers.iter().filter_map(Slot::component).map(|it| it.record.clone()).collect();
        let leaders = tokio::select! {
            biased;
            () = hurry.cancelled() => BTreeSet::new(),
            leaders = roles::leaders(&records) => leaders,
        };
        for leads in [false, true] {
            let some = self.servers.iter_mut().filter(|it| leaders.contains(it.name()) == leads);
            let (layout, steps, hurry) = (&self.layout, &self.steps, &hurry);
            join_all(some.map(|slot| async move {
                if let Some(line) = slot.stop(layout, hurry).await {
                    steps.say(&line);
                }
            }))
            .await;
        }
        if self.agents_may_run {
            let dir = self.layout.instances();
            let off = tokio::select! {
                biased;
                () = hurry.cancelled() => None,
                off = power::power_off(&dir, stop::AGENT_GRACE) => Some(off),
            };
            let off = match off {
                Some(off) => off,
                None => power::power_off(&dir, Duration::ZERO).await,
            };
            match off {
                Ok(off) => {
                    self.steps.say(&format!("switched off {} agents", off.instances.len() + off.strays));
                    for problem in off.problems {
                        self.steps.say(&format!("agent not switched off: {problem}"));
                    }
                }
                Err(error) => self.steps.say(&format!("agents not switched off: {error}")),
            }
        }
        for slot in [self.kubernetes.as_mut(), self.store.as_mut()] {
            if let Some(line) = stop_one(slot, &self.layout, &hurry).await {
                self.steps.say(&line);
            }
        }
        self.links.end(Duration::from_millis(200)).await;
    }
}

async fn stop_one(slot: Option<&mut Slot>, layout: &Layout, hurry: &CancellationToken) -> Option<String> {
    slot?.stop(layout, hurry).await
}
