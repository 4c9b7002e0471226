//! What may be broken on purpose: `server/2`, `shard/dev-1` (its leader), `instance/ID`, `operator`, `k8s`, `s3`.

use std::{fs, io, str::FromStr};

use anyhow::{Context, bail};
use nstance_core::ids::{InstanceId, Shard};
use nstance_providers::process::Process;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::{
    layout::Layout,
    records::{self, RunFile},
    roles, shape,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    Server(u16),
    /// Whoever leads it at that moment.
    Shard(Shard),
    Instance(String),
    Store,
    Kubernetes,
    Operator,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown =
            || format!("{text:?} is no target; targets are instance/ID, server/N, shard/NAME, operator, k8s and s3");
        match text.split_once('/') {
            Some(("server", number)) => number.parse().map(Self::Server).map_err(|_| unknown()),
            Some(("shard", shard)) => shard.parse().map(Self::Shard).map_err(|_| unknown()),
            Some(("instance" | "agent", id)) => Ok(Self::Instance(id.to_owned())),
            None if text == "s3" || text == records::STORE => Ok(Self::Store),
            None if text == "k8s" || text == records::K8S => Ok(Self::Kubernetes),
            None if text == records::OPERATOR => Ok(Self::Operator),
            // As `instance list -o name` prints them.
            None if text.parse::<InstanceId>().is_ok() => Ok(Self::Instance(text.to_owned())),
            _ => Err(unknown()),
        }
    }
}

/// The component a target stands for, which must be running.
pub(crate) async fn component(layout: &Layout, target: &Target) -> anyhow::Result<RunFile> {
    let flag = layout.dir_flag();
    let shape = records::shape(layout);
    let name = match target {
        Target::Server(number) => {
            if !(1..=shape.n_servers()).contains(number) {
                let known: Vec<String> = (1..=shape.n_servers()).map(|it| format!("server/{it}")).collect();
                bail!("there is no server/{number}; there is {}", known.join(", "));
            }
            format!("server-{number}")
        }
        Target::Shard(shard) => {
            if !shape.shards().any(|it| it == *shard) {
                let known: Vec<String> = shape.shards().map(|it| format!("shard/{it}")).collect();
                bail!("there is no shard/{shard}; there is {}", known.join(", "));
            }
            let leader = roles::leader(layout, shard.as_str()).await;
            return leader.with_context(|| format!("nobody leads {shard} now; look with `nstance-dev status{flag}`"));
        }
        Target::Store => records::STORE.to_owned(),
        Target::Kubernetes => records::K8S.to_owned(),
        Target::Operator => records::OPERATOR.to_owned(),
        Target::Instance(id) => bail!("instance/{id} is no component"),
    };
    let record = RunFile::read(layout, &name).filter(|it| it.process.lives());
    record.with_context(|| format!("{name} is not running; look with `nstance-dev status{flag}`"))
}

/// The shard of an instance, by the tags of its VM.
pub(crate) fn shard_of(layout: &Layout, id: &str) -> Shard {
    let tags = layout.vm(id).and_then(|vm| vm.tags(id.parse().ok()?));
    tags.map_or_else(|| shape::shard(1), |it| it.shard)
}

/// The living agent of an instance, or a word to somebody who mistyped it.
pub(crate) fn agent(layout: &Layout, id: &str) -> anyhow::Result<Process> {
    match layout.agent(id) {
        Some(agent) => Ok(agent),
        None => bail!(unknown(id, &living(layout))),
    }
}

/// Sends a signal to exactly this process; says whether it was there.
pub(crate) fn signal(process: Process, signal: Signal) -> io::Result<bool> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { return Ok(false) };
    let hold = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(hold) => hold,
        Err(rustix::io::Errno::SRCH) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    // After the open: what we compared is what we signal, even if the pid changes hands now.
    if !process.lives() {
        return Ok(false);
    }
    rustix::process::pidfd_send_signal(&hold, signal)?;
    Ok(true)
}

/// Instances whose agent lives.
pub(crate) fn living(layout: &Layout) -> Vec<String> {
    let entries = fs::read_dir(layout.instances()).into_iter().flatten().flatten();
    let mut ids: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|id| layout.agent(id).is_some())
        .collect();
    ids.sort();
    ids
}

/// What to say to somebody who named an instance that does not live.
fn unknown(id: &str, living: &[String]) -> String {
    if living.is_empty() {
        return format!("there is no living instance {id:?}, and no other; look with `nstance-dev status`");
    }
    let nearest =
        living.iter().min_by_key(|it| distance(id, it)).filter(|it| distance(id, it) <= 6 || it.starts_with(id));
    match nearest {
        Some(nearest) if !id.is_empty() => format!("there is no living instance {id:?}; did you mean {nearest}?"),
        _ => format!("there is no living instance {id:?}; there is\n  {}", living.join("\n  ")),
    }
}

/// Edits between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (corner + usize::from(x != *y)).min(above + 1).min(row[j] + 1);
            corner = above;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_instance_is_answered_with_the_nearest_or_the_list() {
        let living = vec!["tst06bgm7733st2576nx5jht4ecjw".to_owned(), "tst06bgm7733st2576nx5jht4aaaa".to_owned()];
        assert!(
            unknown("tst06bgm7733st2576nx5jht4ecjx", &living).contains("did you mean tst06bgm7733st2576nx5jht4ecjw?")
        );
        assert!(unknown("tst06bgm7733", &living).contains("did you mean"));
        let list = unknown("web-1", &living);
        assert!(list.contains("ecjw\n") && list.contains("aaaa"), "{list}");
        assert!(unknown("x", &[]).contains("no other"));
    }

    #[test]
    fn distances_count_edits() {
        assert_eq!(
            (distance("abc", "abc"), distance("abc", "axc"), distance("", "abc"), distance("ab", "b")),
            (0, 1, 3, 1)
        );
    }

    #[test]
    fn targets_are_named_by_their_kind() {
        assert_eq!("server/2".parse(), Ok(Target::Server(2)));
        assert_eq!("shard/dev-1".parse(), Ok(Target::Shard(shape::shard(1))));
        assert_eq!("instance/x".parse(), Ok(Target::Instance("x".into())));
        assert_eq!("s3".parse(), Ok(Target::Store));
        assert_eq!(("k8s".parse(), "operator".parse()), (Ok(Target::Kubernetes), Ok(Target::Operator)));
        let id = "tst06bgm7733st2576nx5jht4ecjw";
        assert_eq!(id.parse(), Ok(Target::Instance(id.into())), "as lists print it");
        for bad in ["moon", "server/x", "server", "shard/"] {
            assert!(bad.parse::<Target>().is_err_and(|it| it.contains("is no target")), "{bad}");
        }
    }
}
