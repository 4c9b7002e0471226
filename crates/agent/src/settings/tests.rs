use super::*;

const REQUIRED: [(&str, &str); 3] = [
    ("NSTANCE_INSTANCE_ID", "knc06bgm7733st2576nx5jht4ecjw"),
    ("NSTANCE_SERVER_REGISTRATION_ADDR", "nstance.example.com:8992"),
    ("NSTANCE_SERVER_AGENT_ADDR", "nstance.example.com:8994"),
];

fn read(more: &[(&str, &str)]) -> Result<Settings, Vec<Problem>> {
    let all: BTreeMap<String, String> = REQUIRED
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .chain(more.iter().map(|(name, value)| (format!("{PREFIX}{name}"), (*value).to_owned())))
        .collect();
    Settings::read(|name| all.get(name).cloned())
}

#[test]
fn three_variables_suffice() {
    let settings = read(&[]).unwrap();
    assert_eq!(settings.registration, [Address { host: "nstance.example.com".into(), port: 8992 }]);
    assert_eq!(settings.identity.path, PathBuf::from("/opt/nstance-agent/identity"));
    assert_eq!(settings.identity.file_mode, 0o600);
    assert_eq!(settings.recv.file_mode, 0o640);
    assert_eq!(settings.metrics_interval, Duration::from_secs(60));
    assert_eq!(settings.spot_poll_interval, Duration::from_secs(2));
    assert_eq!(settings.boot_timeout, Duration::from_secs(900));
    assert_eq!(settings.environment, "development");
    assert_eq!(settings.leave_on_stop, LeaveOnStop::Auto);
    assert_eq!(settings.boot_logs, [PathBuf::from("/var/log/cloud-init-output.log")]);
    assert_eq!(settings.health_addr, None);
}

#[test]
fn all_problems_are_told_together() {
    let problems = Settings::read(|_| None).unwrap_err();
    let names: Vec<_> = problems.iter().map(|it| it.variable.as_str()).collect();
    assert_eq!(names, ["NSTANCE_INSTANCE_ID", "NSTANCE_SERVER_REGISTRATION_ADDR", "NSTANCE_SERVER_AGENT_ADDR"]);
    let problems = read(&[("DEBUG", "maybe"), ("METRICS_INTERVAL", "soon"), ("KEYS_MODE", "0999")]).unwrap_err();
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert_eq!(problems[0].to_string(), "NSTANCE_DEBUG: `maybe` cannot be used: use true or false");
}

/// Whichever is missing or wrong: every other variable is judged all the same.
#[test]
fn missing_id_hides_no_other_problem() {
    let bad = ["SERVER_AGENT_ADDR", "DEBUG", "RECV_GROUP", "INSTANCE_IPV6", "BOOT_TIMEOUT", "HEALTH_ADDR"];
    for id in [None, Some("nonsense".to_owned())] {
        let problems = Settings::read(|name| match name.strip_prefix(PREFIX).unwrap() {
            "INSTANCE_ID" => id.clone(),
            "SERVER_REGISTRATION_ADDR" => Some("a:1".to_owned()),
            "KEYS_DIR" | "RECV_DIR" => Some("/tmp/a".to_owned()),
            name => bad.contains(&name).then(|| "no such thing".to_owned()),
        })
        .unwrap_err();
        let names: Vec<_> = problems.iter().map(|it| it.variable.strip_prefix(PREFIX).unwrap()).collect();
        assert_eq!(names[0], "INSTANCE_ID");
        assert_eq!(names.len(), bad.len() + 2, "{names:?}");
        assert!(bad.iter().chain(&["RECV_DIR"]).all(|name| names.contains(name)), "{names:?}");
    }
}

/// A value that is there and cannot be read is not a value that is not there.
#[test]
fn value_that_is_no_text_is_a_problem_of_its_variable() {
    use std::os::unix::ffi::OsStringExt as _;

    for name in ["INSTANCE_ID", "INSTANCE_KIND", "SERVER_AGENT_ADDR", "ENVIRONMENT", "KEYS_DIR", "BOOT_LOGS"] {
        let variable = format!("{PREFIX}{name}");
        let problems = Settings::read_raw(&|asked| {
            let value = REQUIRED.iter().find(|(name, _)| *name == asked).map(|(_, value)| OsString::from(value));
            if asked == variable { Some(OsString::from_vec(b"/caf\xe9".to_vec())) } else { value }
        })
        .unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].to_string(), format!("{variable}: `/caf\u{fffd}` cannot be used: use UTF-8"));
    }
    let identity = identity_path(|_| Some(OsString::from_vec(b"/caf\xe9".to_vec())));
    assert_eq!(identity.unwrap_err().variable, "NSTANCE_IDENTITY_DIR");
}

#[test]
fn every_rule_has_a_good_and_a_bad_value() {
    for (name, good, bad) in [
        ("DEBUG", "true", "yes please"),
        ("DEBUG", "0", "TRUE"),
        ("SERVER_REGISTRATION_ADDR", "nstance.example.com:1", "nstance.example.com"),
        ("SERVER_REGISTRATION_ADDR", "10.0.0.1:65535", "10.0.0.1:65536"),
        ("SERVER_AGENT_ADDR", "a:1", "a:1,b"),
        ("SERVER_REGISTRATION_ADDR", "a:1,[::1]:2, 10.0.0.1:65535", "a:0"),
        ("SERVER_AGENT_ADDR", "[fd00::1]:8994", "fd00::1:8994"),
        ("SERVER_AGENT_ADDR", "srv-1:8994", "srv_1:8994"),
        ("SERVER_AGENT_ADDR", "srv-1:8994", ","),
        ("IDENTITY_DIR", "/tmp/i", "i"),
        ("KEYS_DIR", "/tmp/k", "./k"),
        ("RECV_DIR", "/tmp/r", "r"),
        ("IDENTITY_MODE", "0400", "1000"),
        ("IDENTITY_MODE", "0777", "-1"),
        ("KEYS_MODE", "640", "8"),
        ("RECV_MODE", "0644", "rw"),
        ("KEYS_GROUP", "0", "no group of this name"),
        ("RECV_GROUP", "root", "no group of this name"),
        ("INSTANCE_ID", "tst06bgm7733st2576nx5jht4ecjw", "opr06bgm7733st2576nx5jht4ecjw"),
        ("INSTANCE_ID", "knc06bgm7733st2576nx5jht4ecjw", "knc06bgm7733st2576nx5jht4ecj"),
        ("INSTANCE_KIND", "knc", "tst"),
        ("INSTANCE_KIND", "knc", "KNC"),
        ("INSTANCE_HOSTNAME", "web-1", "web 1"),
        ("INSTANCE_FQDN", "web-1.example.com", "-web"),
        ("INSTANCE_IPV4", "10.0.0.1", "fd00::1"),
        ("INSTANCE_IPV6", "fd00::1", "10.0.0.1"),
        ("METRICS_INTERVAL", "0", "60"),
        ("SPOT_POLL_INTERVAL", "500ms", "-1s"),
        ("PROVIDER", "proxmox", "vmware"),
        ("PROVIDER", "auto", "AWS"),
        ("PROVIDER", "aws", "amazon"),
        ("PROVIDER", "gcp", "google"),
        ("PROVIDER", "azure", "azur"),
        ("PROVIDER", "dev", "tmux"),
        ("PROVIDER", "none", "off"),
        ("NOTICE_FILE", "/tmp/n", "n"),
        ("LEAVE_ON_STOP", "never", "no"),
        ("LEAVE_ON_STOP", "always", "yes"),
        ("LEAVE_ON_STOP", "auto", "maybe"),
        ("ON_CHANGE", "/bin/true", "true"),
        ("BOOT_SENTINEL", "/run/x", "x"),
        ("BOOT_ERROR_FILE", "/run/x", "x"),
        ("BOOT_LOGS", "/a,/b", "/a,b"),
        ("BOOT_TIMEOUT", "1h30m", "1h30"),
        ("BOOT_TIMEOUT", "0", "15"),
        ("HEALTH_ADDR", "127.0.0.1:9000", "9000"),
        ("HEALTH_ADDR", "[::1]:9000", "localhost:9000"),
        ("ENVIRONMENT", "any text at all", ""),
    ] {
        assert!(read(&[(name, good)]).is_ok(), "{name}={good}");
        if bad.is_empty() {
            continue; // any text will do
        }
        let problems = read(&[(name, bad)]).unwrap_err();
        assert_eq!(problems.len(), 1, "{name}={bad}: {problems:?}");
        assert_eq!(problems[0].variable, format!("NSTANCE_{name}"));
    }
}

#[test]
fn commands_that_need_the_identity_alone_judge_nothing_else() {
    let path =
        |value: &'static str| identity_path(move |name| (name == "NSTANCE_IDENTITY_DIR").then(|| value.to_owned()));
    assert_eq!(path("/tmp/i").unwrap(), PathBuf::from("/tmp/i"));
    assert_eq!(path("").unwrap(), PathBuf::from("/opt/nstance-agent/identity"));
    assert_eq!(path("here").unwrap_err().variable, "NSTANCE_IDENTITY_DIR");
    assert!(identity_path(|name| (name != "NSTANCE_IDENTITY_DIR").then(|| "nonsense".to_owned())).is_ok());
}

#[test]
fn directories_must_differ() {
    let problems = read(&[("KEYS_DIR", "/tmp/a"), ("RECV_DIR", "/tmp/a")]).unwrap_err();
    assert_eq!(problems[0].variable, "NSTANCE_RECV_DIR");
    assert!(problems[0].why.contains("NSTANCE_KEYS_DIR"));
}

#[test]
fn addresses_are_written_as_they_are_dialled() {
    let settings = read(&[("SERVER_AGENT_ADDR", "[::1]:8994,10.0.0.1:8994")]).unwrap();
    let shown: Vec<_> = settings.agent.iter().map(Address::to_string).collect();
    assert_eq!(shown, ["[::1]:8994", "10.0.0.1:8994"]);
}

#[test]
fn empty_values_count_as_unset() {
    assert_eq!(read(&[("PROVIDER", ""), ("METRICS_INTERVAL", "")]).unwrap(), read(&[]).unwrap());
}
