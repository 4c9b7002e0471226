//! The place of one component: it is started, and started again when it dies.

use std::{path::Path, sync::Arc, time::Duration};

use nstance_core::ports::clock::Entropy;
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    component::{Component, Spec},
    layout::Layout,
    records,
};

const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// Having lived this long, a component has not died of its start.
const SETTLED: Duration = Duration::from_secs(10);
/// How often a held component is looked at.
const HELD: Duration = Duration::from_millis(100);

pub(super) struct Slot {
    spec: Spec,
    running: Option<(Component, Instant)>,
    /// When it is due again, once it has died.
    due: Instant,
    restarts: u32,
    backoff: Backoff,
    entropy: Arc<dyn Entropy>,
    held: bool,
}

impl Slot {
    pub(super) fn start(layout: &Layout, spec: Spec) -> anyhow::Result<Self> {
        // What an earlier environment was told not to start again.
        let _ = std::fs::remove_file(records::hold_path(layout, &spec.name));
        let component = Component::start(layout, spec.clone(), 0)?;
        Ok(Self {
            spec,
            running: Some((component, Instant::now())),
            due: Instant::now(),
            restarts: 0,
            backoff: Backoff::new(FIRST_WAIT, LONGEST_WAIT),
            entropy: Arc::new(SystemEntropy::new()),
            held: false,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(super) fn component(&self) -> Option<&Component> {
        self.running.as_ref().map(|(component, _)| component)
    }

    /// Asks it to end if it runs this program, which is another one now: it is started again as that. Says so.
    pub(super) fn renew(&mut self, program: &Path) -> Option<String> {
        let (component, _) = self.running.as_ref().filter(|_| self.spec.program == program)?;
        let (name, pid) = (&self.spec.name, component.pid());
        Some(match component.record.process.ask_to_end() {
            Ok(_) => format!("{name} (pid {pid}) was built anew and is started again"),
            Err(error) => format!("{name} (pid {pid}) not asked to end: {error}"),
        })
    }

    /// Why it has ended, if it has; for the start, during which nothing is started again.
    pub(super) async fn has_ended(&mut self) -> Option<String> {
        let (component, _) = self.running.as_mut()?;
        tokio::time::timeout(Duration::ZERO, component.ended()).await.ok()
    }

    /// Waits for the next thing that happens here, sees to it, and says what it was. May be dropped and called again.
    pub(super) async fn next(&mut self, layout: &Layout) -> String {
        let name = self.spec.name.clone();
        if let Some((component, since)) = &mut self.running {
            let how = component.ended().await;
            let pid = component.pid();
            if SETTLED <= since.elapsed() {
                self.backoff.reset();
            }
            component.record.forget(layout);
            self.running = None;
            let wait = self.backoff.next(self.entropy.as_ref());
            self.due = Instant::now() + wait;
            if records::hold_path(layout, &name).exists() {
                self.held = true;
                return format!(
                    "{name} (pid {pid}) {how}; it stays down until `nstance-dev heal{}`",
                    layout.dir_flag()
                );
            }
            return format!("{name} (pid {pid}) {how}; it is started again in {} ms", wait.as_millis());
        }
        tokio::time::sleep_until(self.due).await;
        while records::hold_path(layout, &name).exists() {
            tokio::time::sleep(HELD).await;
        }
        self.held = false;
        match Component::start(layout, self.spec.clone(), self.restarts + 1) {
            Ok(component) => {
                self.restarts += 1;
                let line = format!("{name} runs again (pid {}, restart {})", component.pid(), self.restarts);
                self.running = Some((component, Instant::now()));
                line
            }
            Err(error) => {
                self.due = Instant::now() + self.backoff.next(self.entropy.as_ref()).max(FIRST_WAIT);
                format!("{name} not started again: {error:#}")
            }
        }
    }

    /// Ends it; at once when `hurry` is cancelled. Says what was done.
    pub(super) async fn stop(&mut self, layout: &Layout, hurry: &CancellationToken) -> Option<String> {
        let (mut component, _) = self.running.take()?;
        let stopped = tokio::select! {
            biased;
            () = hurry.cancelled() => None,
            stopped = component.stop(layout, self.spec.grace) => Some(stopped),
        };
        let (stopped, word) = match stopped {
            Some(stopped) => (stopped, "stopped"),
            None => (component.stop(layout, Duration::ZERO).await, "killed"),
        };
        Some(match stopped {
            Ok(()) => format!("{word} {} (pid {})", component.name(), component.pid()),
            Err(error) => format!("{} (pid {}) not stopped: {error}", component.name(), component.pid()),
        })
    }
}
