//! `cluster doctor`: what of `check` concerns the bucket, and how well the bucket is kept.

use clap::Args;

use crate::{
    args::Context,
    check::{Group, Section, Sheet, Verdict, config, secrets, store},
    cmd::check::show,
    exit::Exit,
    failure::Failure,
    storage::{StorageProvider, StoreArgs},
};

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) async fn run(context: &Context, args: DoctorArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let mut sheet = Sheet::default();
    store::check(sheet.of(Group::Store), &cluster).await;
    if sheet.has_failed(Group::Store) {
        sheet.of(Group::Secrets).skip("all", "the store failed");
        sheet.of(Group::Config).skip("all", "the store failed");
    } else {
        secrets::check(sheet.of(Group::Secrets), &cluster, &args.store).await;
        config::check(sheet.of(Group::Config), &cluster, None).await;
    }
    hygiene(sheet.of(Group::Bucket), &args.store);
    show(context, &sheet);
    Ok(if 0 < sheet.count(Verdict::Fail) { Exit::Failed } else { Exit::Done })
}

/// Servers need no right to look at the settings of a bucket, and so we have none to ask by: a person is told how.
fn hygiene(mut section: Section<'_>, args: &StoreArgs) {
    if args.storage_provider == StorageProvider::File {
        section.skip("all", "a directory has no settings; back it up, and keep it from others (mode 0700)");
        return;
    }
    let bucket = args.storage_bucket.as_deref().unwrap_or_default();
    let ask = |what: &str| format!("not asked by this build: aws s3api {what} --bucket {bucket}");
    section.skip("versioning", format!("{}; it should be Enabled", ask("get-bucket-versioning")));
    section.skip("retention", format!("{}; keep old versions for 30 days", ask("get-bucket-lifecycle-configuration")));
    section.skip("public-access", format!("{}; all four should be true", ask("get-public-access-block")));
}
