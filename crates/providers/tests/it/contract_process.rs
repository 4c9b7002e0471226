//! The provider contract on real directories and processes, and on real windows of tmux. A stand-in that sleeps takes the
//! agent's place.

use std::{
    fs,
    io::{self, Write as _},
    path::PathBuf,
    process::Command,
    sync::Arc,
};

use async_trait::async_trait;
use nstance_core::{
    ids::InstanceId,
    ports::{
        clock::Clock,
        provider::{ErrorClass, Owner, Provider},
    },
};
use nstance_providers::{
    contract::{self, Subject},
    process::{self, ProcessOptions, ProcessProvider, TmuxSession},
};
use nstance_rt::{clock::SystemClock, tasks::Tasks};
use serde_json::Value;
use tempfile::TempDir;

struct ProcessSubject {
    dir: TempDir,
    tasks: Tasks,
    tmux: Option<TmuxSession>,
}

impl Drop for ProcessSubject {
    fn drop(&mut self) {
        // That closes all windows as well, and a tmux server of this subject's own ends with its last one.
        let _ = process::end_all(&self.work_dir());
    }
}

impl ProcessSubject {
    fn new() -> Self {
        let subject = Self { dir: TempDir::new().expect("a directory"), tasks: Tasks::new(), tmux: None };
        // Written by another process, so that no fork of ours can hold the script open for writing.
        let status = Command::new("sh")
            .args(["-c", "printf '#!/bin/sh\\nexec sleep 600\\n' > \"$0\" && chmod 755 \"$0\""])
            .arg(subject.agent())
            .status()
            .expect("a shell");
        assert!(status.success());
        subject
    }

    fn in_tmux() -> Self {
        let mut subject = Self::new();
        let tmpdir = subject.dir.path().join("tmux");
        fs::create_dir(&tmpdir).expect("a directory");
        subject.tmux = Some(TmuxSession { name: "nstance-dev-agents".to_owned(), tmpdir: Some(tmpdir) });
        subject
    }

    fn options(&self, owner: Owner) -> ProcessOptions {
        ProcessOptions { tmux: self.tmux.clone(), ..ProcessOptions::new(owner, self.agent(), self.work_dir()) }
    }

    fn agent(&self) -> PathBuf {
        self.dir.path().join("agent")
    }

    fn work_dir(&self) -> PathBuf {
        self.dir.path().join("instances")
    }

    /// Changes the tags that are written down.
    fn edit_tags(&self, instance: InstanceId, edit: impl FnOnce(&mut serde_json::Map<String, Value>)) {
        let path = self.vm_json(instance);
        let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(file["tags"].as_object_mut().unwrap());
        fs::write(path, serde_json::to_vec(&file).unwrap()).unwrap();
    }

    fn vm_json(&self, instance: InstanceId) -> PathBuf {
        self.work_dir().join(instance.to_string()).join("vm.json")
    }
}

#[async_trait]
impl Subject for ProcessSubject {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider_of(self.owner())
    }

    fn owner(&self) -> Owner {
        Owner { cluster: "dev".parse().expect("a cluster"), shard: "dev-1".parse().expect("a shard") }
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SystemClock)
    }

    /// A new one each time, as if every call came from a server that has just started.
    fn provider_of(&self, owner: Owner) -> Arc<dyn Provider> {
        Arc::new(ProcessProvider::new(self.options(owner), self.clock(), self.tasks.clone()).on_machine("server-1"))
    }

    fn other_machine(&self) -> Option<Arc<dyn Provider>> {
        Some(Arc::new(
            ProcessProvider::new(self.options(self.owner()), self.clock(), self.tasks.clone()).on_machine("server-2"),
        ))
    }

    async fn kill(&self, instance: InstanceId) {
        assert!(process::kill_agent(&self.work_dir(), instance).expect("it is killed"));
    }

    async fn purge(&self, instance: InstanceId) {
        fs::remove_dir_all(self.work_dir().join(instance.to_string())).expect("files can be moved");
    }

    fn fail_reads(&self, instance: InstanceId, class: Option<ErrorClass>) -> bool {
        let (file, aside) = (self.vm_json(instance), self.dir.path().join("aside.json"));
        match class {
            Some(_) => {
                fs::rename(&file, aside).expect("files can be moved");
                fs::write(file, "torn").expect("files can be moved");
            }
            None => fs::rename(aside, file).expect("files can be moved"),
        }
        true
    }

    fn hide_tags(&self, instance: InstanceId, hidden: bool) -> bool {
        self.edit_tags(instance, |tags| {
            if hidden {
                tags.remove("epoch");
            } else {
                tags.insert("epoch".to_owned(), "2".into());
            }
        });
        true
    }

    fn spoil_tags(&self, instance: InstanceId, spoilt: bool) -> bool {
        self.edit_tags(instance, |tags| {
            tags.insert("epoch".to_owned(), if spoilt { "second" } else { "2" }.into());
        });
        true
    }

    fn add_untagged(&self, provider_id: &str) -> bool {
        fs::create_dir_all(self.work_dir().join(provider_id)).expect("files can be moved");
        true
    }
}

#[tokio::test]
async fn local_processes_keep_the_contract() {
    contract::run(async || Box::new(ProcessSubject::new()) as Box<dyn Subject>).await;
}

#[tokio::test]
async fn windows_of_tmux_keep_the_contract() {
    if Command::new("tmux").arg("-V").output().is_err() {
        // Not by a macro: what these print is shown of failed tests only.
        writeln!(io::stderr(), "NOT TESTED: the provider contract on tmux, which is not installed here").unwrap();
        return;
    }
    contract::run(async || Box::new(ProcessSubject::in_tmux()) as Box<dyn Subject>).await;
}
