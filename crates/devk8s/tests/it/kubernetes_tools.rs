//! `tools/kubernetes/build`, with a stand-in for Go that makes empty programs.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

const PROGRAMS: [&str; 6] =
    ["etcd", "kube-apiserver", "cluster-api-core-manager", "kube-controller-manager", "kube-scheduler", "clusterctl"];

/// What the script itself uses. Nothing else is on its path, so that a Go of this machine is not found.
const TOOLS: [&str; 23] = [
    "awk",
    "bash",
    "cat",
    "chmod",
    "cp",
    "cut",
    "dirname",
    "env",
    "find",
    "flock",
    "head",
    "mkdir",
    "mv",
    "rm",
    "rmdir",
    "sh",
    "sha256sum",
    "sleep",
    "sort",
    "tail",
    "timeout",
    "uname",
    "wc",
];

/// `$WAIT_AT` is a program at which it waits until it is ended; `$MODULE` a directory like that of Cluster API's module.
const GO: &str = r#"#!/bin/sh
case "$1 $2" in
"env GOVERSION") echo "$VERSION" ;;
"list -m") echo "$MODULE" ;;
"build "*)
  while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then out=$2; fi
    shift
  done
  mkdir -p "$GOCACHE"
  if [ "${out##*/}" = "$WAIT_AT" ]; then sleep 1000; fi
  echo '#!/bin/sh' > "$out"
  chmod +x "$out"
  ;;
esac
"#;

struct Bench {
    dir: tempfile::TempDir,
}

struct Outcome {
    code: Option<i32>,
    stdout: String,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bench = Self { dir };
        let config = bench.path("module/core/config");
        fs::create_dir_all(config.join("crd/bases")).unwrap();
        fs::create_dir_all(config.join("webhook")).unwrap();
        fs::write(config.join("crd/bases/machines.yaml"), "").unwrap();
        fs::write(config.join("webhook/manifests.yaml"), "").unwrap();
        fs::create_dir(bench.path("bin")).unwrap();
        let path = std::env::var_os("PATH").unwrap();
        for tool in TOOLS {
            let found = std::env::split_paths(&path).map(|dir| dir.join(tool)).find(|it| it.is_file());
            symlink(found.unwrap_or_else(|| panic!("{tool} is missing")), bench.path("bin").join(tool)).unwrap();
        }
        // kubectl and helm are on this machine, so that nothing is downloaded.
        for program in ["kubectl", "helm"] {
            bench.write_program(program, "#!/bin/sh\n");
        }
        bench
    }

    fn with_go() -> Self {
        let bench = Self::new();
        bench.write_program("go", GO);
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write_program(&self, name: &str, text: &str) {
        let path = self.path("bin").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/kubernetes/build");
        let mut command = Command::new(script);
        command
            .args(args)
            .env_clear()
            .env("PATH", self.path("bin"))
            .env("HOME", self.dir.path())
            .env("NSTANCE_KUBERNETES_TOOLS", self.path("cache"))
            .env("MODULE", self.path("module"))
            .env("VERSION", "go1.99.0");
        command
    }

    fn run(&self, args: &[&str]) -> Outcome {
        outcome(&mut self.command(args))
    }
}

fn outcome(command: &mut Command) -> Outcome {
    let output = command.output().unwrap();
    Outcome { code: output.status.code(), stdout: String::from_utf8(output.stdout).unwrap() }
}

impl Outcome {
    /// The directory, as `--print` gives it.
    fn assets(&self) -> PathBuf {
        PathBuf::from(self.stdout.lines().last().unwrap())
    }

    fn has_line(&self, start: &str) -> bool {
        self.stdout.lines().any(|line| line.starts_with(start))
    }
}

#[test]
fn everything_is_built_and_the_directory_printed_last() {
    let bench = Bench::with_go();
    let built = bench.run(&["--print"]);
    assert_eq!(built.code, Some(0), "{}", built.stdout);
    let assets = built.assets();
    for name in PROGRAMS.into_iter().chain(["capi/crds/machines.yaml", "capi/webhooks.yaml"]) {
        assert!(assets.join(name).is_file(), "{name} is missing; {}", built.stdout);
    }
    assert!(!assets.join("build").join("etcd").exists(), "build caches go");
    assert!(!assets.join("scratch").exists());
    assert_eq!(assets.parent().unwrap(), bench.path("cache").canonicalize().unwrap());

    let again = bench.run(&[]);
    let all = PROGRAMS.join(" ");
    let expected = format!("built: {all} capi/\nKUBEBUILDER_ASSETS={}\n", assets.display());
    assert_eq!((again.code, again.stdout), (Some(0), expected));
}

#[test]
fn time_limit_ends_a_build_and_the_next_run_goes_on() {
    let bench = Bench::with_go();
    let cut = outcome(bench.command(&["--time-limit", "2"]).env("WAIT_AT", "kube-apiserver"));
    assert_eq!(cut.code, Some(0), "{}", cut.stdout);
    assert!(cut.has_line("built: etcd capi/"), "{}", cut.stdout);
    let missing = "MISSING: kube-apiserver cluster-api-core-manager kube-controller-manager kube-scheduler clusterctl;";
    assert!(cut.has_line(missing), "{}", cut.stdout);

    let rest = bench.run(&[]);
    assert_eq!(rest.code, Some(0), "{}", rest.stdout);
    assert!(!rest.has_line("building etcd"), "{}", rest.stdout);
    assert!(rest.has_line("built kube-apiserver in"), "{}", rest.stdout);
}

#[test]
fn no_time_at_all_only_tells_what_is_there() {
    let bench = Bench::with_go();
    let told = bench.run(&["--time-limit", "0", "--print"]);
    assert_eq!(told.code, Some(0));
    assert!(told.stdout.starts_with("built: nothing\nMISSING: etcd "), "{}", told.stdout);
    assert!(fs::read_dir(told.assets()).unwrap().next().is_none());
}

#[test]
fn missing_go_fails_unless_there_is_a_time_limit() {
    let bench = Bench::new();
    for (args, code) in [(&[][..], 1), (&["--time-limit", "60"], 0)] {
        let told = bench.run(args);
        assert_eq!(told.code, Some(code), "{}", told.stdout);
        assert!(told.has_line("NOT BUILT: everything that is missing: Go is not installed"), "{}", told.stdout);
        assert!(told.has_line("MISSING: etcd "), "{}", told.stdout);
    }
}

#[test]
fn go_that_is_too_old_is_named_with_its_version() {
    let bench = Bench::with_go();
    let told = outcome(bench.command(&[]).env("VERSION", "go1.25.9"));
    assert_eq!(told.code, Some(1));
    assert!(told.stdout.contains("Go 1.26.0 or newer is needed, this is 1.25.9"), "{}", told.stdout);
}
