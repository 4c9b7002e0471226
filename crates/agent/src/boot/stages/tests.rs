use super::{super::spool::StageName, *};

const TIMEOUT: Duration = Duration::from_secs(900);

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_millis(1_769_860_800_000 + seconds * 1000)
}

/// A look `seconds` after the box was opened, at a machine that shows nothing.
fn look<'a>(seconds: u32) -> Look<'a> {
    Look {
        now: at(seconds.into()),
        age: Duration::from_secs(seconds.into()),
        kernel: Some(at(-9)),
        progress: Progress { started: true, ..Progress::default() },
        files: None,
        bare: false,
        cloud_init: CloudInit::Absent,
        sentinel: None,
        error_file: None,
        kubelet: None,
        words: &[],
    }
}

fn serving() -> Progress {
    Progress { started: true, routed: true, registered: true, session: true, ..Progress::default() }
}

fn parked(why: &str) -> Progress {
    Progress { started: true, parked: Some(why.into()), ..Progress::default() }
}

fn stage(seconds: i64, name: &str, detail: &str, failed: bool) -> Said {
    let name = StageName::parse(name).unwrap();
    Said { at: at(seconds), word: Word::Stage { name, detail: detail.into(), failed } }
}

fn fail(seconds: i64, why: &str) -> Said {
    Said { at: at(seconds), word: Word::Fail(why.into()) }
}

fn ready(seconds: i64) -> Said {
    Said { at: at(seconds), word: Word::Ready }
}

fn take(looks: &[Look<'_>]) -> Timeline {
    let mut timeline = Timeline::default();
    for look in looks {
        timeline.take(look, TIMEOUT);
    }
    timeline
}

/// The timeline in short: `name state start-end`.
fn told(timeline: &Timeline) -> Vec<String> {
    let seconds = |time: Timestamp| (time.as_millis() - at(0).as_millis()) / 1000;
    let line = |it: &Stage| {
        let end = it.ended.map(|ended| seconds(ended).to_string()).unwrap_or_default();
        let detail = if it.detail.is_empty() { String::new() } else { format!(" ({})", it.detail) };
        format!("{} {} {}..{end}{detail}", it.name, it.state.as_str(), seconds(it.started))
    };
    timeline.stages.iter().map(line).collect()
}

fn failure(timeline: &Timeline) -> (&str, &str) {
    let failure = timeline.failure.as_ref().expect("a failed boot");
    (&failure.stage, &failure.reason)
}

#[test]
fn good_boot_is_a_timeline_and_closes() {
    let timeline = take(&[
        Look { progress: Progress::default(), ..look(0) },
        look(1),
        Look { progress: Progress { started: true, routed: true, ..Progress::default() }, ..look(2) },
        Look { progress: Progress { registered: true, ..look(0).progress }, ..look(3) },
        Look { progress: serving(), ..look(5) },
        Look { progress: serving(), files: Some(at(7)), ..look(8) },
    ]);
    assert_eq!(
        told(&timeline),
        [
            "kernel done -9..0",
            "agent done 0..1",
            "network done 0..2",
            "registered done 1..3",
            "session done 3..5",
            "files done 5..7",
            "ready done 8..8",
        ]
    );
    assert!(timeline.finished && timeline.closed && timeline.failure.is_none());
}

#[test]
fn looks_that_come_twice_or_late_tell_the_same() {
    let good = |seconds| Look { progress: serving(), files: Some(at(4)), ..look(seconds) };
    let mut timeline = take(&[look(0), Look { progress: serving(), ..look(3) }]);
    let before = timeline.clone();
    timeline.take(&Look { progress: serving(), ..look(4) }, TIMEOUT);
    assert_eq!(timeline, before);
    timeline.take(&good(5), TIMEOUT);
    let closed = timeline.clone();
    timeline.take(&good(500), TIMEOUT);
    assert_eq!(timeline, closed);
}

#[test]
fn remark_is_told_at_the_stage_that_is_under_way_and_taken_back() {
    let with = |remark, progress| Progress { remark, ..progress };
    let detail = |timeline: &Timeline, name: &str| timeline.find(name).map(|stage| stage.detail.clone());
    let mut timeline = take(&[Look { progress: with(Some("clock"), look(1).progress), ..look(1) }]);
    assert_eq!(detail(&timeline, REGISTERED).as_deref(), Some("clock"));
    timeline.take(&look(2), TIMEOUT);
    assert_eq!(detail(&timeline, REGISTERED).as_deref(), Some(""));

    // The reason of an earlier failure is not a remark.
    timeline.take(&Look { progress: parked("NONCE_USED: no"), ..look(3) }, TIMEOUT);
    timeline.take(&look(4), TIMEOUT);
    assert_eq!(detail(&timeline, REGISTERED).as_deref(), Some("NONCE_USED: no"));

    let registered = Progress { registered: true, ..look(5).progress };
    timeline.take(&Look { progress: with(Some("clock"), registered), ..look(5) }, TIMEOUT);
    assert_eq!(detail(&timeline, REGISTERED).as_deref(), Some(""));
    assert_eq!(detail(&timeline, SESSION).as_deref(), Some("clock"));
}

#[test]
fn cloud_init_is_waited_for() {
    let with = |seconds, cloud_init| Look { progress: serving(), files: Some(at(2)), cloud_init, ..look(seconds) };
    let mut timeline = take(&[with(3, CloudInit::Running("init".into()))]);
    assert!(!timeline.finished);
    assert!(told(&timeline).contains(&"cloud-init running 3.. (init)".to_owned()));
    timeline.take(&with(9, CloudInit::Done), TIMEOUT);
    assert!(timeline.finished && timeline.closed);
    assert!(told(&timeline).contains(&"cloud-init done 3..9".to_owned()));
}

#[test]
fn sentinel_finishes_and_the_box_waits_for_the_session() {
    let mut timeline = take(&[look(0), Look { sentinel: Some(at(4)), ..look(5) }]);
    assert!(timeline.finished && !timeline.closed);
    assert!(told(&timeline).contains(&"bootstrap done 4..4".to_owned()));
    timeline.take(&Look { progress: serving(), sentinel: Some(at(4)), files: Some(at(6)), ..look(7) }, TIMEOUT);
    assert!(timeline.closed);
    assert!(told(&timeline).contains(&"ready done 5..5".to_owned()));
}

#[test]
fn every_trigger_fails_the_boot_with_its_reason() {
    let said_fail = [stage(1, "packages", "", false), fail(2, "no disk")];
    let said_stage = [stage(1, "packages", "apt broke", true)];
    for (what, expected) in [
        (Look { words: &said_fail, ..look(3) }, ("user:packages", "no disk")),
        (Look { words: &said_fail[1..], ..look(3) }, ("ready", "no disk")),
        (Look { words: &said_stage, ..look(3) }, ("user:packages", "apt broke")),
        (Look { cloud_init: CloudInit::Failed("runparts".into()), ..look(3) }, ("cloud-init", "runparts")),
        (Look { error_file: Some("kubeadm join".into()), ..look(3) }, ("bootstrap", "kubeadm join")),
        (Look { progress: parked("NONCE_USED: no"), ..look(3) }, ("registered", "NONCE_USED: no")),
        (look(900), ("network", "not finished after 900s, waiting for network, registered")),
    ] {
        let timeline = take(&[look(0), what.clone()]);
        assert_eq!(failure(&timeline), expected);
        assert!(!timeline.finished && !timeline.closed);
        let state = if what.age == TIMEOUT { StageState::Stalled } else { StageState::Failed };
        if expected.0 != READY {
            assert_eq!(timeline.find(expected.0).unwrap().state, state, "{expected:?}");
        }
    }
}

#[test]
fn untrusted_server_is_a_failed_stage_after_ten_minutes() {
    let untrusted = |seconds: u32| Progress {
        started: true,
        untrusted: Some(Duration::from_secs(seconds.into())),
        ..Progress::default()
    };
    let mut timeline = take(&[look(0), Look { progress: untrusted(599), ..look(599) }]);
    assert_eq!(timeline.failure, None);
    timeline.take(&Look { progress: untrusted(600), ..look(600) }, TIMEOUT);
    assert_eq!(failure(&timeline), ("registered", "the server's certificate is not trusted"));
    timeline.take(&Look { progress: serving(), files: Some(at(602)), ..look(602) }, TIMEOUT);
    assert!(timeline.finished && timeline.failure.is_none());
}

#[test]
fn stalled_boot_that_ends_well_is_good() {
    let mut timeline = take(&[look(0), Look { progress: serving(), ..look(900) }]);
    assert_eq!(failure(&timeline), ("files", "not finished after 900s, waiting for files"));
    timeline.take(&Look { progress: serving(), files: Some(at(950)), ..look(951) }, TIMEOUT);
    assert!(timeline.finished && timeline.closed && timeline.failure.is_none());
    assert!(told(&timeline).contains(&"files done 900..950".to_owned()));
}

#[test]
fn machine_that_boots_again_has_its_files_already() {
    let timeline = take(&[look(0), Look { progress: serving(), files: Some(at(-86_400)), ..look(4) }]);
    assert!(told(&timeline).contains(&"files done 4..4 (from an earlier boot)".to_owned()), "{:?}", told(&timeline));
    assert!(timeline.finished && timeline.closed);
}

#[test]
fn machine_that_is_sent_nothing_finishes_without_files() {
    let with = |seconds, bare| Look { progress: serving(), bare, ..look(seconds) };
    let mut timeline = take(&[with(5, true), with(304, true)]);
    assert!(!timeline.finished);
    let mut asked = timeline.clone();
    asked.take(&with(305, false), TIMEOUT);
    assert!(!asked.finished, "files are on their way");
    timeline.take(&with(305, true), TIMEOUT);
    assert!(timeline.finished && timeline.closed);
    assert!(told(&timeline).contains(&"files done 5..305 (none were sent)".to_owned()), "{:?}", told(&timeline));
}

#[test]
fn patience_for_files_does_not_depend_on_the_wall_clock() {
    let with = |seconds: i64, age: u64| Look {
        progress: serving(),
        bare: true,
        now: at(seconds),
        age: Duration::from_secs(age),
        ..look(0)
    };
    // Set right by ten minutes, as soon as there is a network to ask for the time.
    let mut timeline = take(&[with(5, 5), with(607, 7)]);
    assert!(!timeline.finished);
    timeline.take(&with(904, 304), TIMEOUT);
    assert!(!timeline.finished);
    timeline.take(&with(905, 305), TIMEOUT);
    assert!(timeline.finished);
    let timeline = take(&[with(1000, 5), with(100, 400)]);
    assert!(told(&timeline).contains(&"files done 1000..1000 (none were sent)".to_owned()), "{:?}", told(&timeline));
    assert!(timeline.finished);
    // Whoever starts anew does not know when it began, and waits no longer than since the box was opened.
    let kept = Timeline { files_from: Duration::ZERO, ..take(&[with(250, 250)]) };
    for (age, finished) in [(299, false), (300, true)] {
        let mut timeline = kept.clone();
        timeline.take(&with(age, age.cast_unsigned()), TIMEOUT);
        assert_eq!(timeline.finished, finished, "{age}");
    }
}

#[test]
fn boot_without_a_limit_never_stalls_and_still_closes() {
    let mut timeline = take(&[look(0)]);
    timeline.take(&look(3599), Duration::ZERO);
    assert!(timeline.failure.is_none() && !timeline.closed);
    timeline.take(&look(3600), Duration::ZERO);
    assert!(timeline.failure.is_none() && timeline.closed);
    assert!(take(&[look(0), look(3600)]).failure.is_some());
}

#[test]
fn parked_agent_that_is_helped_goes_on() {
    let mut timeline = take(&[look(0), Look { progress: parked("nonce"), ..look(3) }]);
    assert!(told(&timeline).contains(&"registered failed 0..3 (nonce)".to_owned()), "{:?}", told(&timeline));
    timeline.take(&Look { progress: parked("nonce"), ..look(9) }, TIMEOUT);
    assert!(told(&timeline).contains(&"registered failed 0..3 (nonce)".to_owned()));
    timeline.take(&look(10), TIMEOUT);
    assert_eq!(timeline.failure, None);
    assert_eq!(timeline.find(REGISTERED).unwrap().state, StageState::Running);
}

#[test]
fn scripts_have_the_last_word_but_over_a_parked_agent() {
    let words = [fail(1, "first try"), stage(2, "again", "", false), ready(3)];
    let broken = CloudInit::Failed("x".into());
    assert!(take(&[Look { words: &words, cloud_init: broken.clone(), ..look(4) }]).finished);
    assert!(!take(&[Look { words: &words[..2], sentinel: Some(at(3)), ..look(4) }]).finished);
    let timeline = take(&[Look { words: &words, progress: parked("revoked"), ..look(4) }]);
    assert_eq!(failure(&timeline), ("registered", "revoked"));
    assert!(take(&[Look { sentinel: Some(at(1)), cloud_init: broken, ..look(4) }]).finished);
}

#[test]
fn named_stage_runs_until_the_next_begins() {
    let words = [stage(1, "one", "a", false), stage(2, "two", "", false), stage(5, "two", "half", false), ready(9)];
    let timeline = take(&[Look { words: &words[..3], ..look(6) }]);
    let user: Vec<_> = told(&timeline).into_iter().filter(|line| line.starts_with("user:")).collect();
    assert_eq!(user, ["user:one done 1..2 (a)", "user:two running 2.. (half)"]);
    let timeline = take(&[Look { words: &words[..3], ..look(6) }, Look { words: &words, ..look(10) }]);
    assert!(told(&timeline).contains(&"user:two done 2..9 (half)".to_owned()));
    assert!(told(&timeline).contains(&"ready done 9..9".to_owned()));
}

#[test]
fn named_stage_that_nobody_ends_is_over_when_the_boot_is() {
    let finished = |seconds, words| Look { sentinel: Some(at(4)), kubelet: Some(false), words, ..look(seconds) };
    let words = [stage(1, "a", "", false), stage(8, "late", "", false)];
    let mut timeline = take(&[finished(5, &words[..1])]);
    assert!(timeline.finished && !timeline.closed, "the kubelet is waited for");
    assert!(told(&timeline).contains(&"user:a done 1..5".to_owned()), "{:?}", told(&timeline));
    let before = timeline.clone();
    timeline.take(&finished(7, &words[..1]), TIMEOUT);
    assert_eq!(timeline, before, "nothing happened, so there is nothing to write or to tell");
    timeline.take(&finished(9, &words), TIMEOUT);
    let user: Vec<_> = told(&timeline).into_iter().filter(|line| line.starts_with("user:")).collect();
    assert_eq!(user, ["user:a done 1..8", "user:late done 8..8"]);
    let before = timeline.clone();
    timeline.take(&finished(11, &words), TIMEOUT);
    assert_eq!(timeline, before);
}

#[test]
fn secrets_do_not_reach_reasons_and_details() {
    let words = [stage(1, "login", "DB_PASSWORD=hunter2", true)];
    let timeline = take(&[Look { words: &words, ..look(2) }]);
    assert_eq!(failure(&timeline).1, "DB_PASSWORD=[redacted]");
    assert_eq!(timeline.find("user:login").unwrap().detail, "DB_PASSWORD=[redacted]");
    let timeline = take(&[Look { error_file: Some(format!("API_TOKEN=x {}", "é".repeat(300))), ..look(2) }]);
    assert!(failure(&timeline).1.len() <= 256);
    assert!(!failure(&timeline).1.contains("API_TOKEN=x"));
}

#[test]
fn chatty_scripts_fill_no_more_than_their_share() {
    let words: Vec<_> = (0..500).map(|n| stage(n, &format!("s{n}"), "", false)).collect();
    assert!(take(&[Look { words: &words, ..look(2) }]).stages.len() <= MAX_USER_STAGES + 4);
}

#[test]
fn stage_that_is_one_too_many_still_fails_the_boot() {
    let mut words: Vec<_> = (0..64).map(|n| stage(n, &format!("s{n}"), "", false)).collect();
    for (name, recorded) in [("s63", true), ("s1", true), ("new", false)] {
        words.push(stage(70, name, "no disk", true));
        let timeline = take(&[Look { words: &words, ..look(80) }]);
        let full_name = format!("user:{name}");
        assert_eq!(failure(&timeline), (full_name.as_str(), "no disk"));
        let state = timeline.find(&full_name).map(|stage| stage.state);
        assert_eq!(state, recorded.then_some(StageState::Failed), "{name}");
        assert!(timeline.stages.len() <= MAX_USER_STAGES + 4);
        words.pop();
    }
    // What is known already still gets its details.
    words.push(stage(70, "s63", "half", false));
    let timeline = take(&[Look { words: &words, ..look(80) }]);
    assert_eq!(timeline.find("user:s63").unwrap().detail, "half");
}

#[test]
fn remark_reaches_a_closed_box() {
    let good = Look { progress: serving(), files: Some(at(2)), ..look(3) };
    let mut timeline = take(std::slice::from_ref(&good));
    assert!(timeline.closed);
    let progress = Progress { remark: Some("identity-shared"), ..serving() };
    timeline.take(&Look { progress, ..good.clone() }, TIMEOUT);
    assert_eq!(timeline.find(SESSION).unwrap().detail, "identity-shared");
    timeline.take(&good, TIMEOUT);
    assert_eq!(timeline.find(SESSION).unwrap().detail, "", "a session without a remark has none");
}
