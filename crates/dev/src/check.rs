//! `check`: which tools and ports of this machine `up` and the tests find, one line for each.

use std::{path::Path, process::ExitCode};

use crate::{ports, ports::Ports, shape::Shape};

enum Need {
    Required,
    /// And what it is for.
    Optional(&'static str),
}

struct Found {
    is_there: bool,
    need: Need,
    what: String,
    detail: String,
}

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let mut all = vec![tool("cargo", Need::Required, "builds everything; https://rustup.rs")];
    all.extend(Ports::usual(Shape::new(2, 1, false)?).into_iter().map(port));
    let dashboard = Need::Optional("`nstance-admin serve` listens there");
    all.push(Found { need: dashboard, ..port((8080, "nstance-admin serve".to_owned())) });
    all.push(tool("tmux", Need::Optional("`make dev-tmux` and `make dev-tmux-k8s` show agents in it"), ""));
    all.push(tool("kubectl", Need::Optional("to look at and change what `nstance-dev up` shows"), ""));
    all.push(assets(std::env::var("KUBEBUILDER_ASSETS").ok().as_deref()));
    let mut is_ready = true;
    for it in &all {
        is_ready &= it.is_there || matches!(it.need, Need::Optional(_));
        say!("{}", line(it));
    }
    Ok(if is_ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn line(it: &Found) -> String {
    let mark = match (it.is_there, &it.need) {
        (true, _) => "ok",
        (false, Need::Required) => "no",
        (false, Need::Optional(_)) => "--",
    };
    let purpose = match &it.need {
        Need::Optional(purpose) if !it.is_there => format!(" (optional: {purpose})"),
        _ => String::new(),
    };
    format!("{mark}  {:<24} {}{purpose}", it.what, it.detail).trim_end().to_owned()
}

fn tool(name: &str, need: Need, missing: &str) -> Found {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let place = std::env::split_paths(&paths).map(|dir| dir.join(name)).find(|it| it.is_file());
    let detail = match &place {
        Some(place) => place.display().to_string(),
        None if missing.is_empty() => "not installed".to_owned(),
        None => format!("not installed; {missing}"),
    };
    Found { is_there: place.is_some(), need, what: name.to_owned(), detail }
}

fn port((number, user): (u16, String)) -> Found {
    let is_there = !ports::is_taken(number);
    let detail = if is_there {
        format!("free, for {user}")
    } else {
        format!("taken, needed for {user}; an environment that is up, or another program")
    };
    Found { is_there, need: Need::Required, what: format!("port {number}"), detail }
}

fn assets(value: Option<&str>) -> Found {
    let has = |dir: &str, name: &str| Path::new(dir).join(name).is_file();
    let (is_there, detail) = match value {
        Some(dir) if has(dir, "etcd") && has(dir, "kube-apiserver") => (true, dir.to_owned()),
        Some(dir) => (false, format!("{dir} has no etcd and kube-apiserver; `make kubernetes-tools` builds them")),
        None => (false, "not set; `make kubernetes-tools` builds what it is to name".to_owned()),
    };
    let need = Need::Optional("tests on a real Kubernetes API server");
    Found { is_there, need, what: "KUBEBUILDER_ASSETS".to_owned(), detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_what_it_is_for() {
        let none = assets(None);
        assert!(!none.is_there);
        let text = line(&none);
        assert!(text.starts_with("--  KUBEBUILDER_ASSETS") && text.contains("make kubernetes-tools"), "{text}");
        assert!(text.contains("optional: tests on a real"), "{text}");
        let dir = tempfile::tempdir().unwrap();
        assert!(!assets(dir.path().to_str()).is_there);
        for name in ["etcd", "kube-apiserver"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        assert!(assets(dir.path().to_str()).is_there);
        let missing = tool("no-such-program-of-anybody", Need::Required, "build it");
        assert_eq!(line(&missing), "no  no-such-program-of-anybody not installed; build it");
    }

    #[test]
    fn a_port_that_is_taken_is_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let number = listener.local_addr().unwrap().port();
        let found = port((number, "the store".to_owned()));
        assert!(!found.is_there && line(&found).contains("taken, needed for the store"), "{}", line(&found));
    }
}
