//! Which thing a path names.

use crate::{
    object::Key,
    query::decode,
    resources::{Registry, Served},
};

#[derive(Debug)]
pub(crate) enum Target {
    Collection { served: Served, namespace: Option<String> },
    Object { served: Served, key: Key, subresource: Option<String> },
}

/// Splits a path into its decoded parts.
pub(crate) fn parts(path: &str) -> Vec<String> {
    path.split('/').filter(|part| !part.is_empty()).map(decode).collect()
}

/// `None` for what is not served.
pub(crate) fn target(registry: &Registry, parts: &[&str]) -> Option<Target> {
    let (group, version, rest) = match parts {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let find = |plural: &str| registry.find(group, version, plural);
    let subresource = |rest: &[&str]| match rest {
        [] => Some(None),
        [name] => Some(Some((*name).to_owned())),
        _ => None,
    };
    // A namespace's own subresources look like resources in it.
    if let (true, ["namespaces", name, rest @ ..]) = (group.is_empty(), rest)
        && matches!(rest, [] | ["status" | "finalize"])
    {
        let (served, subresource) = (find("namespaces")?, subresource(rest)?);
        return Some(Target::Object { served, key: Key::new("", *name), subresource });
    }
    match rest {
        ["namespaces", namespace, plural] => {
            let served = find(plural).filter(|it| it.resource.namespaced)?;
            Some(Target::Collection { served, namespace: Some((*namespace).to_owned()) })
        }
        ["namespaces", namespace, plural, name, rest @ ..] => {
            let served = find(plural).filter(|it| it.resource.namespaced)?;
            let (key, subresource) = (Key::new(*namespace, *name), subresource(rest)?);
            Some(Target::Object { served, key, subresource })
        }
        [plural] => Some(Target::Collection { served: find(plural)?, namespace: None }),
        [plural, name, rest @ ..] => {
            let served = find(plural).filter(|it| !it.resource.namespaced)?;
            let (key, subresource) = (Key::new("", *name), subresource(rest)?);
            Some(Target::Object { served, key, subresource })
        }
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(path: &str) -> String {
        let parts = parts(path);
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        match target(&Registry::new(&[]), &parts) {
            None => "-".to_owned(),
            Some(Target::Collection { served, namespace }) => {
                format!("{} in {}", served.resource.id, namespace.unwrap_or_else(|| "all".to_owned()))
            }
            Some(Target::Object { served, key, subresource }) => {
                let of = subresource.unwrap_or_default();
                format!("{} {}/{} {of}", served.resource.id, key.namespace, key.name).trim().to_owned()
            }
        }
    }

    #[test]
    fn paths_name_their_targets() {
        let capi = "/apis/cluster.x-k8s.io/v1beta2";
        for (path, shown) in [
            ("/api/v1/nodes", "nodes in all"),
            ("/api/v1/nodes/a%2Eb/status", "nodes /a.b status"),
            ("/api/v1/namespaces", "namespaces in all"),
            ("/api/v1/namespaces/x", "namespaces /x"),
            ("/api/v1/namespaces/x/finalize", "namespaces /x finalize"),
            ("/api/v1/namespaces/x/pods", "pods in x"),
            ("/api/v1/namespaces/x/pods/p/eviction", "pods x/p eviction"),
            (&format!("{capi}/machines"), "machines.cluster.x-k8s.io in all"),
            (&format!("{capi}/namespaces/x/machinepools/p/scale"), "machinepools.cluster.x-k8s.io x/p scale"),
            ("/api/v1/pods/p", "-"),
            ("/api/v1/namespaces/x/nodes", "-"),
            ("/api/v1/namespaces/x/pods/p/eviction/y", "-"),
            ("/apis/cluster.x-k8s.io/v9/machines", "-"),
            ("/other", "-"),
        ] {
            assert_eq!(show(path), shown, "{path}");
        }
    }
}
