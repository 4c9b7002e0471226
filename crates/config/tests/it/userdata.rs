//! The userdata that is shipped as an example: it renders, is a shell script, and does what it is for.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nstance_config::render::{Context, InstanceData, RenderData, render_text};

const USERDATA: &str = include_str!("../../../../examples/userdata-agent.sh");
const NONCE: &str = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl";
const INSTANCE: &str = "knc06bgm7733st2576nx5jht4ecjw";

/// What the machine is given as its agent: it answers to `unit`.
const AGENT: &str = "#!/bin/sh\necho \"[Service] for $1\"\n";

fn rendered(sha256: &str) -> String {
    let data = RenderData {
        ca_cert: "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----".to_owned(),
        registration_addr: "[fd00::1]:8992".to_owned(),
        agent_addr: "10.0.0.1:8994".to_owned(),
        nonce: NONCE.to_owned(),
        instance: InstanceData { id: INSTANCE.to_owned(), ..InstanceData::default() },
        vars: [("AgentURL", "https://example.com/a?arch=amd64&v=1"), ("AgentSHA256", sha256)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        ..RenderData::default()
    };
    render_text(USERDATA, Context::Userdata, &data).expect("the example renders")
}

/// A machine below a directory: the script's places are there, and so are the programs that would need root.
struct Machine {
    root: PathBuf,
}

impl Machine {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("nstance-userdata-{}-{name}", std::process::id()));
        let machine = Self { root };
        for directory in ["opt", "etc/systemd/system", "usr/local/bin", "tmp", "bin"] {
            fs::create_dir_all(machine.root.join(directory)).expect("make directories");
        }
        machine.program("id", "#!/bin/sh\nexit 1\n");
        machine.program("useradd", "#!/bin/sh\necho useradd \"$@\" >> \"$ROOT/calls\"\n");
        machine.program("chown", "#!/bin/sh\nexit 0\n");
        // Nobody can stop a unit that is not there.
        machine.program(
            "systemctl",
            "#!/bin/sh\n[ -e \"$ROOT/opt/nstance-agent/identity/nonce.jwt\" ] && has=nonce || has=none\n\
             echo systemctl \"$@\", \"$has\" >> \"$ROOT/calls\"\n\
             [ \"$1\" != stop ] || [ -e \"$ROOT/etc/systemd/system/nstance-agent.service\" ]\n",
        );
        machine.program("curl", "#!/bin/sh\nwhile [ \"$1\" != -o ]; do shift; done\ncp \"$ROOT/agent\" \"$2\"\n");
        // Without the owner, which only root may set.
        machine.program(
            "install",
            "#!/bin/sh\nfor a in \"$@\"; do shift; case $a in -o|nstance-agent) ;; *) set -- \"$@\" \"$a\";; esac; done\n\
             PATH=/usr/bin:/bin exec install \"$@\"\n",
        );
        fs::write(machine.root.join("agent"), AGENT).expect("write the agent");
        machine
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.root.join("bin").join(name);
        fs::write(&path, text).expect("write a program");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("make it runnable");
    }

    fn run(&self, script: &str) -> bool {
        let mut script = script.to_owned();
        for place in ["/opt/nstance-agent", "/etc/nstance", "/etc/systemd/system", "/usr/local/bin", "/tmp/a"] {
            script = script.replace(place, &format!("{}{place}", self.root.display()));
        }
        let root = self.root.display();
        let status = Command::new("sh")
            .args(["-c", &script])
            .env_clear()
            .env("PATH", format!("{root}/bin:{root}/usr/local/bin:/usr/bin:/bin"))
            .env("ROOT", &self.root)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.expect("there is a shell").success()
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    fn mode(&self, path: &str) -> u32 {
        fs::metadata(self.root.join(path)).expect("it is there").permissions().mode() & 0o777
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn sha256(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().expect("coreutils are there");
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().expect("a sum").to_owned()
}

#[test]
fn example_userdata_is_a_shell_script() {
    let mut shell = Command::new("sh").arg("-n").stdin(Stdio::piped()).spawn().expect("there is a shell");
    let mut stdin = shell.stdin.take().expect("it was asked for");
    stdin.write_all(rendered("00").as_bytes()).expect("the shell reads");
    drop(stdin);
    assert!(shell.wait().expect("it ends").success());
}

#[test]
fn example_userdata_prepares_a_machine_and_may_run_again() {
    let machine = Machine::new("good");
    let script = rendered(&sha256(&machine.root.join("agent")));
    for boot in 1..=2 {
        assert!(machine.run(&script), "boot {boot}");
        assert_eq!(machine.text("opt/nstance-agent/identity/nonce.jwt"), NONCE);
        assert_eq!(machine.mode("opt/nstance-agent/identity/nonce.jwt"), 0o600);
        assert!(machine.text("opt/nstance-agent/identity/ca.crt").ends_with("-----END CERTIFICATE-----\n"));
        assert_eq!(
            (machine.mode("opt/nstance-agent/identity"), machine.mode("opt/nstance-agent/recv")),
            (0o700, 0o750)
        );
        assert_eq!(
            machine.text("etc/nstance/agent.env"),
            format!(
                "NSTANCE_INSTANCE_ID={INSTANCE}\nNSTANCE_SERVER_REGISTRATION_ADDR=[fd00::1]:8992\n\
                 NSTANCE_SERVER_AGENT_ADDR=10.0.0.1:8994\n"
            )
        );
        assert_eq!(machine.text("etc/systemd/system/nstance-agent.service"), "[Service] for unit\n");
    }
    let calls = machine.text("calls");
    assert_eq!(calls.matches("systemctl enable --now nstance-agent").count(), 2, "{calls}");
    assert_eq!(calls.matches("daemon-reload").count(), 1, "an agent that is there is not fetched again: {calls}");
}

/// On a later boot of a machine that has registered, what its agent has got since is worth more than the userdata.
#[test]
fn example_userdata_leaves_the_identity_of_its_machine_alone() {
    let machine = Machine::new("again");
    let script = rendered(&sha256(&machine.root.join("agent")));
    assert!(machine.run(&script));
    let identity = machine.root.join("opt/nstance-agent/identity");
    fs::write(identity.join("identity.crt"), "certificate").expect("write");
    fs::write(identity.join("ca.crt"), "newer bundle").expect("write");
    fs::remove_file(identity.join("nonce.jwt")).expect("it was there");
    let calls = |script: &str| {
        fs::remove_file(machine.root.join("calls")).expect("there were some");
        assert!(machine.run(script));
        let of_systemd = |line: &&str| line.starts_with("systemctl");
        machine.text("calls").lines().filter(of_systemd).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(calls(&script), ["systemctl enable --now nstance-agent, none"], "one that runs already runs on");
    assert_eq!(machine.text("opt/nstance-agent/identity/ca.crt"), "newer bundle");
    assert!(!identity.join("nonce.jwt").exists(), "a used nonce does not come back");

    // An image made of such a machine is another machine's. Its agent may have been started before, for the old one.
    assert_eq!(
        calls(&script.replace(INSTANCE, "knc16bgm7733st2576nx5jht4ecjw")),
        ["systemctl stop nstance-agent, none", "systemctl enable --now nstance-agent, nonce"],
    );
    assert_eq!(machine.text("opt/nstance-agent/identity/nonce.jwt"), NONCE);
    let mut names: Vec<_> =
        fs::read_dir(&identity).expect("it is there").map(|it| it.expect("a name").file_name()).collect();
    names.sort();
    assert_eq!(names, ["ca.crt", "identity.crt", "nonce.jwt"], "nothing half-written is left");
}

#[test]
fn example_userdata_does_not_install_what_it_did_not_ask_for() {
    let machine = Machine::new("bad");
    assert!(!machine.run(&rendered(&"0".repeat(64))));
    assert!(!machine.text("calls").contains("systemctl"), "and starts nothing");
    assert!(!machine.root.join("usr/local/bin/nstance-agent").exists());
}
