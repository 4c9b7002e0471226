//! Looking at the machine: what its kernel, cloud-init, bootstrap and kubelet have left for everybody to see.

use std::{fs, net::SocketAddr, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use nstance_core::time::Timestamp;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::stages::CloudInit;
use crate::host::Host;

/// A kubelet on the same machine answers at once or not at all.
const KUBELET_LIMIT: Duration = Duration::from_millis(500);

/// What a file with a reason is read up to.
const MAX_REASON: u64 = 4096;

/// When the kernel started.
pub(crate) fn kernel(host: &Host) -> Option<Timestamp> {
    let stat = host.text("/proc/stat")?;
    let seconds: i64 = stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())?;
    Some(Timestamp::from_millis(seconds.checked_mul(1000)?))
}

/// Whether there is a way out of this machine.
pub(crate) fn routed(host: &Host) -> bool {
    let by = |path: &str, device: fn(&str) -> Option<&str>| {
        host.text(path).is_some_and(|text| text.lines().filter_map(device).any(|device| device != "lo"))
    };
    by("/proc/net/route", |line| line.split_whitespace().next().filter(|word| *word != "Iface"))
        // Link-local routes are there without any network.
        || by("/proc/net/ipv6_route", |line| {
            line.split_whitespace().next_back().filter(|_| !line.starts_with("fe80") && !line.starts_with("ff00"))
        })
}

pub(crate) fn cloud_init(host: &Host) -> CloudInit {
    let read = |name: &str| {
        let text = host.text(&format!("/run/cloud-init/{name}.json"))?;
        serde_json::from_str::<Value>(&text).ok()?.get("v1").cloned()
    };
    let Some(status) = read("status") else { return CloudInit::Absent };
    let result = read("result");
    let complaint = |of: &Value| of.get("errors")?.as_array()?.iter().find_map(|it| Some(it.as_str()?.to_owned()));
    let by_stage = status.as_object().into_iter().flat_map(|stages| stages.values()).find_map(complaint);
    if let Some(why) = result.as_ref().and_then(complaint).or(by_stage) {
        return CloudInit::Failed(why);
    }
    match result {
        Some(_) => CloudInit::Done,
        None => CloudInit::Running(status.get("stage").and_then(Value::as_str).unwrap_or_default().to_owned()),
    }
}

/// When a file came to be, if it is there.
pub(crate) fn since(path: &Path) -> Option<Timestamp> {
    let found = fs::metadata(path).ok()?;
    Some(Timestamp::from_millis(found.mtime().saturating_mul(1000).saturating_add(found.mtime_nsec() / 1_000_000)))
}

/// What a file says of a failure, if it is there.
pub(crate) fn reason(path: &Path) -> Option<String> {
    use std::io::Read as _;
    let found = fs::metadata(path).ok()?;
    let mut bytes = Vec::new();
    let read = |bytes: &mut Vec<u8>| fs::File::open(path)?.take(MAX_REASON).read_to_end(bytes);
    let text = match found.is_file().then(|| read(&mut bytes)) {
        Some(Ok(_)) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        _ => String::new(),
    };
    Some(if text.is_empty() { format!("{} is there", path.display()) } else { text })
}

/// When a batch of files was last committed: the time is in the file.
pub(crate) fn files(identity: &Path) -> Option<Timestamp> {
    fs::read_to_string(identity.join("write-files.last")).ok()?.trim().parse().ok().map(Timestamp::from_millis)
}

/// Whether there is no file in any of these directories.
pub(crate) fn is_bare(directories: &[&Path]) -> bool {
    directories.iter().all(|directory| {
        fs::read_dir(directory).is_ok_and(|mut entries| {
            entries.all(|entry| entry.is_ok_and(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())))
        })
    })
}

/// Whether the kubelet is well; `None` if this machine has none.
pub(crate) async fn kubelet(host: &Host) -> Option<bool> {
    let directories = ["/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
    let is_there = |directory: &str| host.path(format!("{directory}/kubelet.service")).is_some_and(|it| it.exists());
    if !directories.into_iter().any(is_there) {
        return None;
    }
    Some(timeout(KUBELET_LIMIT, is_well(host.kubelet)).await.unwrap_or(false))
}

async fn is_well(address: SocketAddr) -> bool {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n").await?;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    ask.await.is_ok_and(|answer| answer.starts_with(b"HTTP/1.") && answer.ends_with(b" 200"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let host = Host::at(dir.path());
        (dir, host)
    }

    #[test]
    fn kernel_tells_when_it_started() {
        let (_dir, host) = machine(&[("proc/stat", "cpu 1 2\nintr 5\nbtime 1769860800\nprocesses 3\n")]);
        assert_eq!(kernel(&host), Some(Timestamp::from_millis(1_769_860_800_000)));
        assert_eq!(kernel(&Host::nowhere()), None);
        assert!(kernel(&Host::machine()).is_some());
    }

    #[test]
    fn routes_of_either_family_count_and_loopback_does_not() {
        let header = "Iface\tDestination\tGateway\n";
        let v6 = "00000000000000000000000000000000 00 0 00 0 x 1 1 0 00000001     eth0\n";
        let local = "fe800000000000000000000000000000 40 0 00 0 x 1 1 0 00000001     eth0\n";
        for (v4, v6, expected) in [
            (header.to_owned(), "", false),
            (format!("{header}lo\t0000007F\t0\n"), local, false),
            (format!("{header}eth0\t00000000\t0100000A\n"), "", true),
            (header.to_owned(), v6, true),
        ] {
            let (_dir, host) = machine(&[("proc/net/route", &v4), ("proc/net/ipv6_route", v6)]);
            assert_eq!(routed(&host), expected, "{v4}{v6}");
        }
    }

    #[test]
    fn cloud_init_is_read_as_it_is_written() {
        let status = r#"{"v1":{"datasource":"DataSourceEc2","init":{"errors":[],"start":1.5,"finished":2.0},"stage":"modules-final"}}"#;
        let over = r#"{"v1":{"datasource":"DataSourceEc2","init":{"errors":[]},"stage":null}}"#;
        let bad_stage = r#"{"v1":{"modules-final":{"errors":["('scripts_user', RuntimeError('Runparts: 1 failures'))"]},"stage":null}}"#;
        for (status, result, expected) in [
            (None, None, CloudInit::Absent),
            (Some(status), None, CloudInit::Running("modules-final".into())),
            (Some(over), Some(r#"{"v1":{"datasource":"DataSourceEc2","errors":[]}}"#), CloudInit::Done),
            (Some(over), Some(r#"{"v1":{"errors":["no datasource"]}}"#), CloudInit::Failed("no datasource".into())),
            (Some(bad_stage), None, CloudInit::Failed("('scripts_user', RuntimeError('Runparts: 1 failures'))".into())),
            (Some("{half"), None, CloudInit::Absent),
        ] {
            let files: Vec<_> = [("run/cloud-init/status.json", status), ("run/cloud-init/result.json", result)]
                .into_iter()
                .filter_map(|(path, text)| Some((path, text?)))
                .collect();
            let (_dir, host) = machine(&files);
            assert_eq!(cloud_init(&host), expected);
        }
    }

    #[test]
    fn directory_with_a_file_is_not_bare() {
        let (dir, _) = machine(&[("keys/.stage/x", ""), ("recv/a", "")]);
        let at = |name: &str| dir.path().join(name);
        assert!(is_bare(&[&at("keys")]));
        assert!(!is_bare(&[&at("keys"), &at("recv")]));
        assert!(!is_bare(&[&at("none")]), "what cannot be seen is not known to be empty");
    }

    #[tokio::test]
    async fn kubelet_is_asked_only_where_its_unit_is() {
        use tokio::net::TcpListener;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answer = |status: &'static str| {
            let listener = &listener;
            async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 64];
                let _ = stream.read(&mut request).await.unwrap();
                stream.write_all(format!("HTTP/1.1 {status}\r\n\r\nok").as_bytes()).await.unwrap();
            }
        };
        let (_dir, host) = machine(&[]);
        assert_eq!(kubelet(&host.with_kubelet(address)).await, None);
        let (_dir, host) = machine(&[("etc/systemd/system/kubelet.service", "")]);
        let host = host.with_kubelet(address);
        assert_eq!(tokio::join!(kubelet(&host), answer("200 OK")).0, Some(true));
        assert_eq!(tokio::join!(kubelet(&host), answer("500 No")).0, Some(false));
        drop(listener);
        assert_eq!(kubelet(&host).await, Some(false));
    }
}
