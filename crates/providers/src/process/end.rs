//! The end of a VM: asked for, waited for, recorded; and of processes that have lost their VM.

use std::{io, path::Path, sync::Arc, time::Duration};

use nstance_core::{
    ids::InstanceId,
    ports::provider::{DeleteHow, ErrorClass, ProviderError, VmRef, VmTags},
    term::Permit,
};

use super::{
    Inner, held, io_error, locked,
    proc::{self, Found, Held, Process, Scan},
    provider_id, tags_absent,
    tmux::TmuxSession,
    vm_file::{Read, VmState, Whose},
};

/// How often, and for how long at most, a search waits for processes that show no environment yet. The first is longer
/// than most need; the second is more than any gets on a machine that still works, and some never show one.
pub(super) const EXEC_LOOK: Duration = Duration::from_millis(5);
pub(super) const EXEC_SETTLES: Duration = Duration::from_millis(500);

/// One wait for one VM's end, at most, in this process.
struct Ending {
    inner: Arc<Inner>,
    instance: InstanceId,
}

impl Ending {
    fn begin(inner: &Arc<Inner>, instance: InstanceId) -> Option<Self> {
        held(&inner.ending).insert(instance).then(|| Self { inner: inner.clone(), instance })
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        held(&self.inner.ending).remove(&self.instance);
    }
}

impl Inner {
    /// Returns once the end is recorded as wanted and the process is told; a task waits for the process. If that task
    /// dies with its server, the state stays `deleting` and a repeated delete goes on.
    pub(super) async fn delete(
        self: &Arc<Self>,
        _permit: Permit,
        vm: &VmRef,
        how: DeleteHow,
    ) -> Result<(), ProviderError> {
        let failed = |error: io::Error| io_error("delete", &error);
        let instance = vm.instance;
        if !Self::names(vm) {
            return Ok(());
        }
        let dir = self.dir(instance);
        let Some(lock) = locked("delete", &dir).await? else {
            return self.end_agents_of(instance).await.map_err(failed);
        };
        let mut file = match dir.read() {
            Read::File(file) => file,
            Read::NoDirectory => return self.end_agents_of(instance).await.map_err(failed),
            Read::Unreadable(error) => return Err(failed(error)),
        };
        if file.whose(&self.options.owner) == Whose::Foreign {
            return Ok(());
        }
        match file.shown_tags(instance) {
            VmTags::Complete(_) => {}
            VmTags::Foreign => return Ok(()),
            VmTags::Absent => return Err(tags_absent("delete", instance)),
        }
        if file.state == VmState::Deleted {
            return Ok(());
        }
        if file.state == VmState::Starting {
            // Its creator may have died between starting the agent and recording it.
            file.process = self.unrecorded(instance, file.tmux.as_ref()).await.map_err(failed)?;
        }
        let target = match file.process {
            Some(process) => process.hold().map_err(failed)?,
            None => None,
        };
        let Some(target) = target else {
            file.state = VmState::Deleted;
            dir.write(&lock, &file).map_err(failed)?;
            self.hide_node(instance);
            close_window(instance, file.tmux.as_ref()).await;
            return self.end_agents_of(instance).await.map_err(failed);
        };
        if file.state != VmState::Deleting {
            file.state = VmState::Deleting;
            dir.write(&lock, &file).map_err(failed)?;
        }
        drop(lock);
        let ending = Ending::begin(self, instance);
        match how {
            // It was told already, and a second SIGTERM may mean "at once" to it.
            DeleteHow::Graceful if ending.is_none() => return Ok(()),
            DeleteHow::Graceful => target.terminate().map_err(failed)?,
            DeleteHow::Now => target.kill().map_err(failed)?,
        }
        if let Some(ending) = ending {
            self.tasks.spawn_droppable("process: end", async move {
                if let Err(error) = ending.inner.see_to_the_end(instance, &target, how).await {
                    tracing::warn!(%instance, %error, "end of the VM not recorded");
                }
            });
        }
        Ok(())
    }

    async fn see_to_the_end(&self, instance: InstanceId, target: &Held, how: DeleteHow) -> io::Result<()> {
        if how == DeleteHow::Graceful
            && let Err(_elapsed) = tokio::time::timeout(self.grace, target.ended()).await
        {
            target.kill()?;
        }
        target.ended().await?;
        self.end_agents_of(instance).await?;
        let dir = self.dir(instance);
        // A directory that is gone by now needs no record.
        if let Ok(Some(lock)) = locked("delete", &dir).await
            && let Read::File(mut file) = dir.read()
        {
            close_window(instance, file.tmux.as_ref()).await;
            file.state = VmState::Deleted;
            dir.write(&lock, &file)?;
        }
        self.hide_node(instance);
        Ok(())
    }

    /// Removes the directory of a VM that is gone. One that lives is not touched: that would be a delete.
    pub(super) async fn clean(&self, _permit: Permit, vm: &VmRef) -> Result<(), ProviderError> {
        let failed = |error: io::Error| io_error("clean", &error);
        if !Self::names(vm) {
            return Ok(());
        }
        let dir = self.dir(vm.instance);
        let Some(lock) = locked("clean", &dir).await? else {
            self.hide_node(vm.instance);
            return Ok(());
        };
        match dir.read() {
            Read::NoDirectory => return Ok(()),
            Read::Unreadable(error) => return Err(failed(error)),
            Read::File(file) => {
                if file.whose(&self.options.owner) != Whose::Ours {
                    return Ok(());
                }
                let seen = Self::seen(&file).map_err(failed)?;
                if seen != nstance_core::instance::Seen::Gone {
                    let message =
                        format!("instance {} is {} and not gone; delete it first", vm.instance, seen.as_str());
                    return Err(ProviderError::new("clean", ErrorClass::Invalid, message));
                }
                if file.is_process_left().map_err(failed)? {
                    self.end_agents_of(vm.instance).await.map_err(failed)?;
                }
                close_window(vm.instance, file.tmux.as_ref()).await;
            }
        }
        self.hide_node(vm.instance);
        dir.remove(lock).map_err(failed)
    }

    /// The agent of this instance that runs without being recorded, if any. Needs the lock: only then is it sure that
    /// no start is under way that this look could not see.
    pub(super) async fn unrecorded(
        &self,
        instance: InstanceId,
        session: Option<&TmuxSession>,
    ) -> io::Result<Option<Process>> {
        if let Some(agent) = in_window(instance, session).await? {
            return Ok(Some(agent));
        }
        let mut patience = EXEC_SETTLES;
        loop {
            let scan = scan(&self.options.work_dir).await?;
            if let Some(agent) = self.agents_of(instance, &scan).next() {
                return Ok(Some(agent));
            }
            if !scan.unsettled || patience.is_zero() {
                return Ok(None);
            }
            tokio::time::sleep(EXEC_LOOK).await;
            patience = patience.saturating_sub(EXEC_LOOK);
        }
    }

    /// Living processes of one instance of ours, the agent first.
    fn agents_of(&self, instance: InstanceId, scan: &Scan) -> impl Iterator<Item = Process> {
        let name = instance.to_string();
        scan.found.iter().filter(move |it| it.instance == name && it.owner == self.owner_text).map(|it| it.process)
    }

    /// Ends what is left of a VM whose window was closed.
    pub(super) async fn end_left_over(&self, instance: InstanceId) {
        tracing::debug!(%instance, "agent without its window is ended");
        if let Err(error) = self.end_agents_of(instance).await {
            tracing::warn!(%instance, %error, "agent without its window not ended");
        }
    }

    /// Ends whatever still runs of an instance whose VM is dead: agents without a directory, helpers without an agent.
    async fn end_agents_of(&self, instance: InstanceId) -> io::Result<()> {
        let scan = scan(&self.options.work_dir).await?;
        for process in self.agents_of(instance, &scan) {
            end(process, instance)?;
        }
        Ok(())
    }

    /// Ends agents of ours whose directory somebody removed. That VM is dead by definition, and nobody else would ever
    /// find its process. A directory always exists before its agent, so a process without one is no newcomer.
    pub(super) async fn end_strays(&self) {
        let found = match scan(&self.options.work_dir).await {
            Ok(scan) => scan.found,
            Err(error) => {
                tracing::warn!(%error, "stray agents not looked for");
                return;
            }
        };
        for Found { process, instance, .. } in found.into_iter().filter(|it| it.owner == self.owner_text) {
            let Ok(instance) = instance.parse() else { continue };
            if let Read::NoDirectory = self.dir(instance).read() {
                tracing::warn!(%instance, pid = process.pid, "agent without a directory is ended");
                if let Err(error) = end(process, instance) {
                    tracing::warn!(%instance, pid = process.pid, %error, "agent without a directory not ended");
                }
                self.hide_node(instance);
                close_window(instance, self.options.tmux.as_ref()).await;
            }
        }
    }
}

/// The process in an instance's window.
async fn in_window(instance: InstanceId, session: Option<&TmuxSession>) -> io::Result<Option<Process>> {
    let Some(session) = session.cloned() else { return Ok(None) };
    let found = tokio::task::spawn_blocking(move || session.process_in(&provider_id(instance)));
    found.await.unwrap_or_else(|join| Err(join.into()))
}

/// Closes the window of a VM that is dead. Usually it closed with its process; the user's settings may keep it, or the
/// user has split it. One that cannot be closed harms nobody.
pub(super) async fn close_window(instance: InstanceId, session: Option<&TmuxSession>) {
    let Some(session) = session.cloned() else { return };
    let closed = tokio::task::spawn_blocking(move || session.close(&provider_id(instance)));
    if let Err(error) = closed.await.unwrap_or_else(|join| Err(join.into())) {
        tracing::warn!(%instance, %error, "window not closed");
    }
}

fn end(process: Process, instance: InstanceId) -> io::Result<()> {
    match process.hold()? {
        Some(held) => {
            tracing::debug!(%instance, pid = process.pid, "left-over process is ended");
            held.kill()
        }
        None => Ok(()),
    }
}

/// Reads the environment of every process; too long for an executor's thread.
pub(super) async fn scan(work_dir: &Path) -> io::Result<Scan> {
    let work_dir = work_dir.to_owned();
    tokio::task::spawn_blocking(move || proc::scan(&work_dir)).await.unwrap_or_else(|join| Err(join.into()))
}
