//! A VM ends when it is asked to, and no other VM with it.

use nstance_core::{instance::Seen, ports::provider::DeleteHow};

use super::*;

async fn ends(subject: &dyn Subject, vm: &VmRef) {
    until("it is gone", async || matches!(seen(subject, vm).await, None | Some(Seen::Gone))).await;
    until("it is not listed", async || !list(subject).await.contains_key(&vm.instance)).await;
}

pub async fn delete_is_idempotent(subject: &dyn Subject) {
    for (n, how) in [(1, DeleteHow::Graceful), (2, DeleteHow::Now)] {
        let made = create(subject, n).await;
        settle(subject).await;
        until("it runs", async || seen(subject, &made.vm).await == Some(Seen::Running)).await;
        for _ in 0..3 {
            delete(subject, &made.vm, how).await;
        }
        ends(subject, &made.vm).await;
        delete(subject, &made.vm, how).await;
        delete(subject, &by_name(n), how).await;
    }
    delete(subject, &by_name(9), DeleteHow::Now).await; // never existed
}

pub async fn delete_refuses_a_stranger(subject: &dyn Subject) {
    let standing = create(subject, 1).await;
    settle(subject).await;
    until("it runs", async || seen(subject, &standing.vm).await == Some(Seen::Running)).await;
    // The id was once another instance's, and was used again.
    let mistaken = VmRef { instance: instance(2), provider_id: standing.vm.provider_id.clone() };
    delete(subject, &mistaken, DeleteHow::Now).await;
    assert_eq!(seen(subject, &mistaken).await, None, "that VM is gone, whoever has its id now");
    assert_eq!(seen(subject, &standing.vm).await, Some(Seen::Running));
}

pub async fn an_answered_delete_stays_open_until_seen(subject: &dyn Subject) {
    let made = create(subject, 1).await;
    settle(subject).await;
    until("it runs", async || seen(subject, &made.vm).await == Some(Seen::Running)).await;
    until("it is listed", async || list(subject).await.contains_key(&instance(1))).await;
    let is_delayed = subject.delay_deletes();
    delete(subject, &made.vm, DeleteHow::Now).await;
    if is_delayed {
        assert!(!matches!(seen(subject, &made.vm).await, None | Some(Seen::Gone)), "an answer is not the end");
    }
    // Until it is gone, listings do not lose it.
    until("it is gone", async || {
        let is_listed = list(subject).await.contains_key(&instance(1));
        let is_gone = matches!(seen(subject, &made.vm).await, None | Some(Seen::Gone));
        assert!(is_listed || is_gone, "it was in no listing before it was gone");
        if !is_gone {
            delete(subject, &made.vm, DeleteHow::Now).await;
        }
        is_gone
    })
    .await;
    ends(subject, &made.vm).await;
}

pub async fn clean_leaves_nothing(subject: &dyn Subject) {
    let provider = subject.provider();
    let made = create(subject, 1).await;
    settle(subject).await;
    delete(subject, &made.vm, DeleteHow::Now).await;
    ends(subject, &made.vm).await;
    for _ in 0..2 {
        retry(async || provider.clean(permit(subject), &made.vm).await).await;
    }
    // A provider without leftovers need not forget what is gone.
    assert!(matches!(seen(subject, &made.vm).await, None | Some(Seen::Gone)));
}
