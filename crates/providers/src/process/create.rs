//! The beginning of a VM: accepted, made, started; and whatever somebody else left half-way.

use std::{io, sync::Arc, time::Duration};

use nstance_core::{
    ids::InstanceId,
    instance::Seen,
    ports::provider::{ErrorClass, Landed, ProviderError, Vm, VmSpec},
    term::Permit,
};

use super::{
    Inner, agent,
    dir::{Lock, LockOutcome, Published, VmDir},
    held, io_error, locked, tags_absent,
    vm_file::{self, Read, VmFile, VmState, Whose},
};

impl Inner {
    /// Makes the directory, unless it exists or its subnet is full.
    pub(super) fn place(
        &self,
        permit: &Permit,
        dir: &VmDir,
        spec: &VmSpec,
    ) -> Result<(Published, VmFile), ProviderError> {
        let now = self.clock.now();
        let file = VmFile {
            state: VmState::Starting,
            process: None,
            tags: vm_file::tag_words(&spec.tags),
            epoch: permit.epoch().0,
            subnet: spec.subnet.clone(),
            instance_type: spec.instance_type.clone(),
            created_at: now.to_string(),
            boots_at: now.plus(self.options.boot_delay).to_string(),
            registration_addr: spec.bootstrap.registration_addr.clone(),
            agent_addr: spec.bootstrap.agent_addr.clone(),
            metrics_interval: nstance_schemas::duration::text(self.options.metrics_interval),
            tmux: self.options.tmux.clone(),
            node_shown: false,
        };
        let failed = |error: io::Error| io_error("create", &error);
        let limit = self.options.subnet_capacity.get(&spec.subnet).copied();
        let _placing = limit.is_some().then(|| held(&self.placing));
        if let Some(limit) = limit
            && !dir.path.exists()
            && limit <= self.n_in_subnet(&spec.subnet).map_err(failed)?
        {
            let message = format!("subnet {} has no room: all of its {limit} places are taken", spec.subnet);
            return Err(ProviderError::new("create", ErrorClass::Capacity, message));
        }
        Ok((dir.publish(&file, &spec.bootstrap).map_err(failed)?, file))
    }

    /// Starts the agent and records it. The caller knows that none runs.
    fn boot(&self, lock: &Lock, dir: &VmDir, file: &mut VmFile) -> io::Result<()> {
        let options = &self.options;
        let mut started =
            agent::start(&options.agent_binary, lock, dir, file, &options.owner, options.metrics_interval)?;
        file.state = VmState::Running;
        file.process = Some(started.process);
        let recorded = dir.write(lock, file);
        if recorded.is_err() {
            started.kill();
        }
        let instance = dir.instance;
        // Reaped by us while we live, by whoever inherits it afterwards; a zombie counts as dead either way.
        if let Some(mut child) = started.into_child() {
            self.tasks.spawn_droppable("process: reap", async move {
                match child.wait().await {
                    Ok(status) => tracing::debug!(%instance, %status, "agent process ended"),
                    Err(error) => tracing::warn!(%instance, %error, "agent process not waited for"),
                }
            });
        }
        recorded?;
        self.show_node(lock, dir, file);
        Ok(())
    }

    /// Goes on where somebody stopped: an agent that runs unrecorded is recorded, one that was never started is started.
    async fn resume(self: &Arc<Self>, lock: &Arc<Lock>, dir: &VmDir, file: &mut VmFile) -> Result<(), ProviderError> {
        let failed = |error: io::Error| self.not_started(&error);
        match self.unrecorded(dir.instance, file.tmux.as_ref()).await.map_err(failed)? {
            Some(process) => {
                file.state = VmState::Running;
                file.process = Some(process);
                dir.write(lock, file).map_err(failed)?;
                self.show_node(lock, dir, file);
            }
            None => {
                let (inner, lock, dir, mut booted) = (self.clone(), lock.clone(), dir.clone(), file.clone());
                let boot = move || inner.boot(&lock, &dir, &mut booted).map(|()| booted);
                *file = self.starter.run(boot).await?.map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Boots a VM whose creator stopped before its agent ran, or that is due by now.
    pub(super) async fn boot_later(self: Arc<Self>, instance: InstanceId, delay: Duration) {
        tokio::time::sleep(delay).await;
        let dir = self.dir(instance);
        let Ok(LockOutcome::Locked(lock)) = dir.lock().await else { return };
        let lock = Arc::new(lock);
        let Read::File(mut file) = dir.read() else { return };
        if file.state != VmState::Starting || file.whose(&self.options.owner) != Whose::Ours {
            return;
        }
        if let Err(error) = self.resume(&lock, &dir, &mut file).await {
            if error.class == ErrorClass::Throttled {
                return; // it stays due, and the next listing tries again
            }
            tracing::warn!(%instance, %error, "agent not started, the VM is stopped");
            file.state = VmState::Stopped;
            let _ = dir.write(&lock, &file);
        }
    }

    /// Shows the Node of a VM whose agent was started by somebody who did not get to it.
    pub(super) async fn show_node_later(&self, instance: InstanceId) {
        let dir = self.dir(instance);
        let Ok(LockOutcome::Locked(lock)) = dir.lock().await else { return };
        if let Read::File(mut file) = dir.read()
            && file.state == VmState::Running
            && file.whose(&self.options.owner) == Whose::Ours
            && Self::seen(&file).is_ok_and(|seen| seen == Seen::Running)
        {
            self.show_node(&lock, &dir, &mut file);
        }
    }

    pub(super) async fn create(self: &Arc<Self>, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError> {
        let refuse = |message: String| Err(ProviderError::new("create", ErrorClass::Invalid, message));
        if let Some(key) = spec.args.keys().next() {
            return refuse(format!(
                "the {} provider takes no args, and `{key}` is one; remove it",
                self.options.kind()
            ));
        }
        if spec.tags.instance != spec.instance {
            return refuse(format!("the tags name {}, the request {}", spec.tags.instance, spec.instance));
        }
        if (&spec.tags.cluster, &spec.tags.shard) != (&self.options.owner.cluster, &self.options.owner.shard) {
            return refuse(format!("the tags are not those of {}", self.owner_text));
        }
        if !self.options.create_delay.is_zero() {
            tokio::time::sleep(self.options.create_delay).await;
        }
        let (inner, asked) = (self.clone(), spec.clone());
        let fresh = self.starter.run(move || inner.create_now(&permit, &asked)).await;
        match fresh?? {
            Some(vm) => Ok(vm),
            None => self.create_again(&self.dir(spec.instance)).await,
        }
    }

    /// Makes the VM, unless its directory exists. Blocking.
    fn create_now(self: &Arc<Self>, permit: &Permit, spec: &VmSpec) -> Result<Option<Vm>, ProviderError> {
        let dir = self.dir(spec.instance);
        match self.place(permit, &dir, spec)? {
            (Published::New(lock), mut file) if self.options.boot_delay.is_zero() => {
                match self.boot(&lock, &dir, &mut file) {
                    Ok(()) => Ok(Some(Self::view(spec.instance, &file, Seen::Running))),
                    Err(error) => {
                        let refused = self.not_started(&error);
                        // A directory that stays is booted by the next listing.
                        Err(if dir.remove(lock).is_ok() { refused } else { refused.with_landed(Landed::Maybe) })
                    }
                }
            }
            (Published::New(_), file) => {
                let (inner, delay) = (self.clone(), self.options.boot_delay);
                self.tasks.spawn_droppable("process: boot", inner.boot_later(spec.instance, delay));
                Ok(Some(Self::view(spec.instance, &file, Seen::Pending)))
            }
            (Published::Exists, _) => Ok(None),
        }
    }

    /// The directory is there already: the same VM, made earlier or just now by somebody else.
    async fn create_again(self: &Arc<Self>, dir: &VmDir) -> Result<Vm, ProviderError> {
        let failed = |error: &io::Error| io_error("create", error);
        let gone = || {
            let message = format!("instance {} existed and is gone", dir.instance);
            ProviderError::new("create", ErrorClass::NotFound, message).with_code("gone")
        };
        let mut lock = None;
        loop {
            let mut file = match dir.read() {
                Read::File(file) => file,
                Read::NoDirectory => return Err(gone()),
                // Something of that name is there, and what it is cannot be told.
                Read::Unreadable(error) => {
                    return Err(ProviderError::new("create", ErrorClass::Ambiguous, error.to_string()));
                }
            };
            match file.whose(&self.options.owner) {
                Whose::Ours => {}
                Whose::Foreign => {
                    let message = format!("instance {} exists and is another shard's", dir.instance);
                    return Err(ProviderError::new("create", ErrorClass::Invalid, message));
                }
                Whose::Unsaid => {
                    return Err(tags_absent("create", dir.instance).with_landed(Landed::Maybe));
                }
            }
            match (Self::seen(&file).map_err(|error| failed(&error))?, &lock) {
                (Seen::Gone | Seen::Deleting, _) => return Err(gone()),
                (Seen::Pending, None) if file.is_due(self.clock.now()) => {
                    // Whoever is starting it holds the lock; we look again when we have it.
                    lock = Some(Arc::new(locked("create", dir).await?.ok_or_else(gone)?));
                }
                (Seen::Pending, Some(lock)) => {
                    self.resume(lock, dir, &mut file).await?;
                    return Ok(Self::view(dir.instance, &file, Seen::Running));
                }
                (seen, _) => return Ok(Self::view(dir.instance, &file, seen)),
            }
        }
    }

    fn not_started(&self, error: &io::Error) -> ProviderError {
        let message = format!("start {}: {error}", self.options.agent_binary.display());
        let class = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput => {
                ErrorClass::Invalid
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull => ErrorClass::Capacity,
            _ => ErrorClass::Unavailable,
        };
        ProviderError::new("create", class, message)
    }
}
