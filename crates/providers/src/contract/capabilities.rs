//! What a provider says of itself and of the config.

use nstance_core::ports::provider::CheckSeverity;

use super::*;

pub async fn capabilities_are_sane(subject: &dyn Subject) {
    let capabilities = subject.provider().capabilities();
    let deadlines = capabilities.deadlines;
    assert!([deadlines.create, deadlines.assign, deadlines.other].iter().all(|it| !it.is_zero()));
    assert!(capabilities.visibility_delay < deadlines.create, "{:?}", capabilities.visibility_delay);
    assert!(1 <= capabilities.create_pace.burst);
    assert!(1 <= capabilities.describe_batch);
    assert_eq!(capabilities, subject.restarted().capabilities(), "they are constants");
}

pub async fn a_need_that_cannot_be_met_is_reported(subject: &dyn Subject) {
    let Some((needs, bad)) = subject.bad_need() else { return };
    for _ in 0..TRIES {
        let problems = subject.provider().check(&needs).await;
        if problems.iter().any(|it| it.need == bad && it.severity == CheckSeverity::Error) {
            let others: Vec<_> = problems.iter().filter(|it| it.need != bad).collect();
            assert!(others.is_empty(), "only what cannot be met is reported: {others:?}");
            return;
        }
        // Behind a bad network the check itself may fail.
        assert!(problems.iter().any(|it| it.need == Need::Account && is_passing(&it.error)), "{problems:?}");
        tokio::time::sleep(PAUSE).await;
    }
    panic!("no check was answered");
}
