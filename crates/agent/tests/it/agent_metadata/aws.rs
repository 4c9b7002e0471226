//! Amazon: tokens, the three endpoints, and everything that is not a notice.

use std::time::Duration;

use super::{HOUR, MINUTE, SECOND, deadline_of, dialled, next_notice, quiet, settled, start, until_fact};
use crate::common::{
    World,
    imds::{self, Answer, Imds, Tokens},
};

pub(crate) const ACTION: &str = "/latest/meta-data/spot/instance-action";
const REBALANCE: &str = "/latest/meta-data/events/recommendations/rebalance";
const MAINTENANCE: &str = "/latest/meta-data/events/maintenance/scheduled";

const TERMINATE: &str = r#"{"action":"terminate","time":"2026-01-31T12:02:00Z"}"#;

/// 2026-01-31T12:02:00Z.
pub(crate) const DEADLINE: i64 = 1_769_860_920;

#[tokio::test(start_paused = true)]
async fn token_only_metadata_still_sees_the_notice() {
    let imds = Imds::aws("spot");
    let mut world = settled("aws", &imds, imds::V4).await;
    quiet(&mut world, MINUTE).await;
    assert_eq!(imds.n_tokens(), 1);
    let gets: Vec<_> = imds.take_asked().into_iter().filter(|asked| asked.method == "GET").collect();
    assert!(gets.iter().all(|asked| asked.headers["x-aws-ec2-metadata-token"] == "token-1=="));
    imds.set(ACTION, TERMINATE);
    let (at, notice) = next_notice(&mut world).await;
    assert_eq!((notice.action.as_str(), deadline_of(&notice)), ("terminate", Some(DEADLINE)));
    assert!(notice.detected_at.is_some() && !notice.notice_id.is_empty());
    // On the stream in the very moment in which the service said it.
    let said = imds.take_asked().into_iter().rfind(|asked| asked.path == ACTION && asked.at <= at);
    assert_eq!(said.unwrap().at, at);
}

#[tokio::test(start_paused = true)]
async fn every_spot_action_is_told_by_its_name_once_and_repeated() {
    for action in ["terminate", "stop", "hibernate"] {
        let imds = Imds::aws("spot");
        let mut world = settled("aws", &imds, imds::V4).await;
        imds.set(ACTION, Answer::Chunked(format!(r#"{{"action":"{action}","time":"2026-01-31T12:02:00Z"}}"#)));
        let (_, notice) = next_notice(&mut world).await;
        assert_eq!((notice.action.as_str(), deadline_of(&notice)), (action, Some(DEADLINE)));
        assert_eq!(quiet(&mut world, 2 * MINUTE).await.as_deref(), Some(action));
        // Whatever the service says later: a notice is sticky.
        imds.unset(ACTION);
        assert_eq!(quiet(&mut world, 2 * MINUTE).await.as_deref(), Some(action));
    }
}

#[tokio::test(start_paused = true)]
async fn advice_grows_into_an_order_and_never_shrinks() {
    let imds = Imds::aws("spot");
    let mut world = settled("aws", &imds, imds::V4).await;
    imds.set(REBALANCE, r#"{"noticeTime":"2026-01-31T11:59:00Z"}"#);
    let (_, first) = next_notice(&mut world).await;
    assert_eq!((first.action.as_str(), first.deadline), ("rebalance", None));
    imds.set(MAINTENANCE, r#"[{"Code":"system-reboot","State":"active","NotBefore":"1 Feb 2026 00:00:00 GMT"}]"#);
    let (_, second) = next_notice(&mut world).await;
    assert_eq!((second.action.as_str(), deadline_of(&second)), ("maintenance", Some(1_769_904_000)));
    // Both pieces of advice stand: they are not told by turns.
    assert_eq!(quiet(&mut world, 5 * MINUTE).await.as_deref(), Some("maintenance"));
    imds.set(MAINTENANCE, "[]");
    assert_eq!(quiet(&mut world, 5 * MINUTE).await.as_deref(), Some("maintenance"));
    imds.set(ACTION, r#"{"action":"terminate"}"#);
    let (_, third) = next_notice(&mut world).await;
    assert_eq!((third.action.as_str(), third.deadline), ("terminate", None));
    imds.set(ACTION, r#"{"action":"terminate","time":"2026-01-31T12:30:00Z"}"#);
    let (_, fourth) = next_notice(&mut world).await;
    assert_eq!(deadline_of(&fourth), Some(DEADLINE + 28 * 60), "a deadline appears");
    imds.set(ACTION, TERMINATE);
    let (_, fifth) = next_notice(&mut world).await;
    assert_eq!(deadline_of(&fifth), Some(DEADLINE), "an earlier one counts");
    assert_eq!(third.notice_id, fifth.notice_id);
    assert_ne!(second.notice_id, third.notice_id);
    imds.set(ACTION, r#"{"action":"terminate","time":"2026-01-31T13:00:00Z"}"#);
    assert_eq!(quiet(&mut world, 2 * MINUTE).await.as_deref(), Some("terminate"), "a later one does not");
}

#[tokio::test(start_paused = true)]
async fn token_is_renewed_before_it_ends() {
    let imds = Imds::aws("spot");
    imds.tokens(Tokens::Wanted(Duration::from_secs(100)));
    let mut world = World::new();
    imds.listen(&world, imds::V4);
    start(&world, &[("PROVIDER", "aws")]);
    until_fact(&mut world, "spot_monitor", "ok").await;
    quiet(&mut world, 250 * SECOND).await;
    let puts: Vec<_> = imds.take_asked().into_iter().filter(|asked| asked.method == "PUT").map(|it| it.at).collect();
    let gaps: Vec<_> = puts.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(gaps, [80, 80, 80], "at 80 % of its life, not after a refusal");
}

#[tokio::test(start_paused = true)]
async fn token_that_cannot_be_renewed_is_used_while_it_holds() {
    let imds = Imds::aws("spot");
    imds.tokens(Tokens::Wanted(Duration::from_secs(1000)));
    let mut world = World::new();
    imds.listen(&world, imds::V4);
    start(&world, &[("PROVIDER", "aws")]);
    until_fact(&mut world, "spot_monitor", "ok").await;
    imds.tokens(Tokens::Absent(503));
    quiet(&mut world, 900 * SECOND).await;
    imds.set(ACTION, TERMINATE);
    assert_eq!(next_notice(&mut world).await.1.action, "terminate");
}

#[tokio::test(start_paused = true)]
async fn refused_token_is_replaced_within_the_same_look() {
    let imds = Imds::aws("spot");
    let mut world = settled("aws", &imds, imds::V4).await;
    imds.take_asked();
    imds.forget_tokens();
    imds.set(ACTION, TERMINATE);
    let (at, notice) = next_notice(&mut world).await;
    assert_eq!(notice.action, "terminate");
    let asked = imds.take_asked();
    let first = asked.iter().find(|asked| asked.path == ACTION).unwrap();
    assert_eq!((imds.n_tokens(), first.at), (2, at));
}

#[tokio::test(start_paused = true)]
async fn metadata_without_tokens_is_asked_only_if_the_service_says_so() {
    for status in [403, 404, 405] {
        let imds = Imds::aws("spot");
        imds.tokens(Tokens::Absent(status));
        let mut world = World::new();
        imds.listen(&world, imds::V4);
        start(&world, &[("PROVIDER", "aws")]);
        until_fact(&mut world, "spot_monitor", "tokenless").await;
        imds.set(ACTION, TERMINATE);
        assert_eq!(next_notice(&mut world).await.1.action, "terminate");
        if status == 403 {
            // Tokens that come later are found and used.
            imds.tokens(Tokens::Wanted(HOUR));
            until_fact(&mut world, "spot_monitor", "ok").await;
        }
    }
    for tokens in [Tokens::Silent, Tokens::Absent(500), Tokens::Absent(400), Tokens::Absent(302)] {
        let imds = Imds::aws("spot");
        imds.tokens(tokens);
        imds.set(ACTION, TERMINATE);
        let mut world = World::new();
        imds.listen(&world, imds::V4);
        start(&world, &[("PROVIDER", "aws")]);
        let (_, report) = until_fact(&mut world, "spot_monitor", "unknown").await;
        assert_eq!(report.provider_facts["provider"], "aws");
        assert_eq!(quiet(&mut world, 10 * MINUTE).await, None);
        assert!(imds.take_asked().iter().all(|asked| asked.method == "PUT"), "{tokens:?}");
        imds.tokens(Tokens::Wanted(HOUR));
        assert_eq!(next_notice(&mut world).await.1.action, "terminate", "{tokens:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_a_well_formed_answer_is_a_notice() {
    let torn = format!("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{TERMINATE}");
    let vast = format!("HTTP/1.1 200 OK\r\n\r\n{TERMINATE}{}", " ".repeat(20 * 1024));
    for bad in [
        Answer::Status(500),
        Answer::Status(400),
        Answer::Status(206),
        Answer::from(""),
        Answer::from("<html>terminate</html>"),
        Answer::from(r#"{"action":"dance","time":"2026-01-31T12:02:00Z"}"#),
        Answer::from(r#"{"action":"terminate","time":"soon"}"#),
        Answer::from(r#"{"action":"terminate","#),
        Answer::Redirect("http://192.0.2.1/latest/meta-data/spot/instance-action".into()),
        Answer::Raw(b"\x16\x03\x01 terminate".to_vec()),
        Answer::Raw(Vec::new()),
        Answer::Raw(torn.into_bytes()),
        Answer::Raw(vast.into_bytes()),
        Answer::Hang,
        Answer::Late(3 * SECOND, TERMINATE.into()),
    ] {
        let imds = Imds::aws("spot");
        let mut world = settled("aws", &imds, imds::V4).await;
        let elsewhere = Imds::aws("spot");
        elsewhere.set(ACTION, TERMINATE);
        elsewhere.listen(&world, "192.0.2.1:80");
        imds.set(ACTION, bad.clone());
        let (_, report) = until_fact(&mut world, "spot_monitor", "failing").await;
        assert!(report.termination_notice.is_none(), "{bad:?}");
        assert_eq!(quiet(&mut world, 20 * SECOND).await, None, "{bad:?}");
        assert!(dialled(&world, "192.0.2.1:80").is_empty());
        imds.unset(ACTION);
        until_fact(&mut world, "spot_monitor", "ok").await;
        imds.set(ACTION, TERMINATE);
        assert_eq!(next_notice(&mut world).await.1.action, "terminate", "{bad:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn second_address_is_used_when_the_first_is_not_there_or_silent() {
    for silent in [false, true] {
        let mut world = World::new();
        let (v4, v6) = (Imds::aws("spot"), Imds::aws("spot"));
        if silent {
            v4.tokens(Tokens::Silent);
            v4.listen(&world, imds::V4);
        }
        v6.listen(&world, imds::V6);
        start(&world, &[("PROVIDER", "aws")]);
        until_fact(&mut world, "spot_monitor", "ok").await;
        quiet(&mut world, MINUTE).await;
        assert_eq!(dialled(&world, imds::V4).len(), 1, "the address that answers is asked first from then on");
        v6.set(ACTION, TERMINATE);
        assert_eq!(next_notice(&mut world).await.1.action, "terminate");
    }
}

#[tokio::test(start_paused = true)]
async fn machine_that_is_not_spot_asks_for_advice_once_a_minute() {
    let imds = Imds::aws("on-demand");
    let mut world = settled("aws", &imds, imds::V4).await;
    imds.take_asked();
    imds.set(ACTION, TERMINATE);
    assert_eq!(quiet(&mut world, 10 * MINUTE).await, None);
    let asked = imds.take_asked();
    assert!(asked.len() <= 20, "{}", asked.len());
    assert!(asked.iter().all(|asked| asked.path == REBALANCE || asked.path == MAINTENANCE));
    imds.set(
        MAINTENANCE,
        r#"[{"Code":"instance-retirement","State":"active","NotBefore":"31 Jan 2026 12:02:00 GMT"}]"#,
    );
    let (_, notice) = next_notice(&mut world).await;
    assert_eq!((notice.action.as_str(), deadline_of(&notice)), ("maintenance", Some(DEADLINE)));
}
