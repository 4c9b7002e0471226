//! `cluster doctor`: what of `check` concerns the bucket, and how well the bucket is kept.

use clap::Args;

use crate::{
    args::Context,
    check::{Group, Sheet, Verdict, bucket, config, secrets, store},
    cmd::check::show,
    exit::Exit,
    failure::Failure,
    storage::StoreArgs,
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
    let (upkeep, name) = (args.store.upkeep()?, args.store.storage_bucket.as_deref().unwrap_or_default());
    bucket::check(sheet.of(Group::Bucket), upkeep.as_ref(), name).await;
    show(context, &sheet);
    Ok(if 0 < sheet.count(Verdict::Fail) { Exit::Failed } else { Exit::Done })
}
