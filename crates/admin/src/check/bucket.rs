//! How well is the bucket kept? It is the only treasure of a cluster: what is deleted by accident must come back, nothing
//! may be taken away by a rule, and nobody else may look in. What cannot be found out is never called good.

use nstance_store::upkeep::{Access, Answer, Retention, Upkeep, Versioning};

use super::Section;

/// `bucket`: as commands of others name it.
pub async fn check(mut section: Section<'_>, upkeep: &dyn Upkeep, bucket: &str) {
    let (versioning, retention, access) =
        futures::future::join3(upkeep.versioning(), upkeep.retention(), upkeep.access()).await;
    section.versioning(versioning, bucket);
    section.retention(retention, bucket);
    section.access(access, bucket);
}

impl Section<'_> {
    fn versioning(&mut self, answer: Answer<Versioning>, bucket: &str) {
        let name = "versioning";
        let fix =
            format!("aws s3api put-bucket-versioning --bucket {bucket} --versioning-configuration Status=Enabled");
        match answer {
            Answer::Known(Versioning::Enabled) => self.ok(name, "what is deleted by accident can be had again"),
            Answer::Known(Versioning::Suspended) => {
                self.warn(name, "suspended: what is written now cannot be had again once it is deleted", fix);
            }
            Answer::Known(Versioning::Off) => {
                self.warn(name, "off: what is deleted by accident is gone, and only a server's cache has a copy", fix);
            }
            Answer::Known(Versioning::None) => self.skip(name, "a directory keeps no versions; back it up"),
            Answer::Unknown(why) => self.unknown(name, &why, "s3:GetBucketVersioning", "get-bucket-versioning", bucket),
        }
    }

    fn retention(&mut self, answer: Answer<Retention>, bucket: &str) {
        let name = "retention";
        let action = "s3:GetLifecycleConfiguration";
        match answer {
            Answer::Known(Retention { takers, old_versions_days }) if takers.is_empty() => {
                let old = old_versions_days.map(|days| format!("; old versions are kept for {days} days"));
                self.ok(name, format!("no rule takes away what is in use{}", old.unwrap_or_default()));
            }
            Answer::Known(Retention { takers, .. }) => {
                let told = takers.iter().map(|it| {
                    let rule = if it.rule.is_empty() { "without a name" } else { &it.rule };
                    let keys = if it.prefix.is_empty() { "everything" } else { &it.prefix };
                    format!("rule {rule}: {keys} {}", it.effect)
                });
                let fix = format!(
                    "take these rules away, or let them end only old versions (NoncurrentVersionExpiration): aws s3api \
                     put-bucket-lifecycle-configuration --bucket {bucket}"
                );
                self.fail(name, told.collect::<Vec<_>>().join("; "), fix);
            }
            Answer::Unknown(why) => self.unknown(name, &why, action, "get-bucket-lifecycle-configuration", bucket),
        }
    }

    fn access(&mut self, answer: Answer<Access>, bucket: &str) {
        let name = "public-access";
        match answer {
            Answer::Known(Access::Closed) => self.ok(name, "nobody else can be let in"),
            Answer::Known(Access::Ajar(open)) => {
                let detail =
                    format!("not blocked for this bucket: {}; unless the whole account blocks it", open.join(", "));
                let all =
                    "BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true";
                let fix = format!(
                    "aws s3api put-public-access-block --bucket {bucket} --public-access-block-configuration {all}"
                );
                self.warn(name, detail, fix);
            }
            Answer::Known(Access::Open(who)) => {
                self.fail(name, format!("may be looked into by {who}"), format!("chmod 0700 {bucket}"));
            }
            Answer::Unknown(why) => {
                self.unknown(name, &why, "s3:GetBucketPublicAccessBlock", "get-public-access-block", bucket);
            }
        }
    }

    /// Not a pass: somebody has to look.
    fn unknown(&mut self, name: &str, why: &str, action: &str, command: &str, bucket: &str) {
        let fix =
            format!("allow {action} to these credentials, or look by others: aws s3api {command} --bucket {bucket}");
        self.warn(name, format!("not known: {why}"), fix);
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use expect_test::{Expect, expect};
    use nstance_store::upkeep::Taker;

    use super::*;
    use crate::check::{Group, Sheet};

    struct Kept(Answer<Versioning>, Answer<Retention>, Answer<Access>);

    #[async_trait]
    impl Upkeep for Kept {
        async fn versioning(&self) -> Answer<Versioning> {
            self.0.clone()
        }

        async fn retention(&self) -> Answer<Retention> {
            self.1.clone()
        }

        async fn access(&self) -> Answer<Access> {
            self.2.clone()
        }
    }

    async fn says(kept: Kept, expected: Expect) {
        let mut sheet = Sheet::default();
        check(sheet.of(Group::Bucket), &kept, "b").await;
        let line = |it: &crate::check::Line| {
            let fix = it.fix.as_ref().map(|fix| format!("  fix: {fix}\n")).unwrap_or_default();
            format!("{} {}: {}\n{fix}", it.verdict.as_str(), it.name, it.detail)
        };
        expected.assert_eq(&sheet.lines.iter().map(line).collect::<String>());
    }

    #[tokio::test]
    async fn a_bucket_that_is_kept_well_passes() {
        let retention = Retention { takers: Vec::new(), old_versions_days: Some(30) };
        let kept = Kept(Answer::Known(Versioning::Enabled), Answer::Known(retention), Answer::Known(Access::Closed));
        says(
            kept,
            expect![[r#"
                ok versioning: what is deleted by accident can be had again
                ok retention: no rule takes away what is in use; old versions are kept for 30 days
                ok public-access: nobody else can be let in
            "#]],
        )
        .await;
    }

    #[tokio::test]
    async fn whatever_is_wrong_has_its_remedy() {
        let taker = |rule: &str, prefix: &str| Taker {
            rule: rule.into(),
            prefix: prefix.into(),
            effect: "expires after 30 days".into(),
        };
        let retention = Retention { takers: vec![taker("", ""), taker("tidy", "prod/")], old_versions_days: None };
        let ajar = Access::Ajar(vec!["BlockPublicPolicy".into(), "RestrictPublicBuckets".into()]);
        let kept = Kept(Answer::Known(Versioning::Off), Answer::Known(retention), Answer::Known(ajar));
        says(kept, expect![[r#"
            warn versioning: off: what is deleted by accident is gone, and only a server's cache has a copy
              fix: aws s3api put-bucket-versioning --bucket b --versioning-configuration Status=Enabled
            FAIL retention: rule without a name: everything expires after 30 days; rule tidy: prod/ expires after 30 days
              fix: take these rules away, or let them end only old versions (NoncurrentVersionExpiration): aws s3api put-bucket-lifecycle-configuration --bucket b
            warn public-access: not blocked for this bucket: BlockPublicPolicy, RestrictPublicBuckets; unless the whole account blocks it
              fix: aws s3api put-public-access-block --bucket b --public-access-block-configuration BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true
        "#]]).await;
    }

    #[tokio::test]
    async fn a_directory_has_its_mode_and_nothing_else() {
        let open = Access::Open("everybody on this machine, by mode 0755 of /srv/b".into());
        let kept = Kept(Answer::Known(Versioning::None), Answer::Known(Retention::default()), Answer::Known(open));
        says(
            kept,
            expect![[r#"
            skip versioning: a directory keeps no versions; back it up
            ok retention: no rule takes away what is in use
            FAIL public-access: may be looked into by everybody on this machine, by mode 0755 of /srv/b
              fix: chmod 0700 b
        "#]],
        )
        .await;
    }

    #[tokio::test]
    async fn what_is_not_known_never_passes() {
        let why = || "the store denies it (403 AccessDenied)".to_owned();
        says(Kept(Answer::Unknown(why()), Answer::Unknown(why()), Answer::Unknown(why())), expect![[r#"
            warn versioning: not known: the store denies it (403 AccessDenied)
              fix: allow s3:GetBucketVersioning to these credentials, or look by others: aws s3api get-bucket-versioning --bucket b
            warn retention: not known: the store denies it (403 AccessDenied)
              fix: allow s3:GetLifecycleConfiguration to these credentials, or look by others: aws s3api get-bucket-lifecycle-configuration --bucket b
            warn public-access: not known: the store denies it (403 AccessDenied)
              fix: allow s3:GetBucketPublicAccessBlock to these credentials, or look by others: aws s3api get-public-access-block --bucket b
        "#]]).await;
    }
}
