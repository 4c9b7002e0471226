//! The S3 operations we serve, each handed to the file that knows its subject. All others are `NotImplemented`.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use hyper::StatusCode;
use s3s::{
    S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result,
    dto::*,
    host::{S3Host, VirtualHost},
    s3_error,
};

use super::{
    conditions::Conditions,
    disk::{Disk, DiskError, DiskResult},
    gate::Effects,
    keys::{BadKey, Key},
};

/// What `AWS_REGION` is set to in the development environment. No client's region is refused.
const REGION: &str = "dev";

pub(super) struct Backend {
    disk: Arc<Disk>,
    pub(super) bucket: String,
    /// Nobody comes in without a signature.
    shut: bool,
}

impl Backend {
    pub(super) fn new(disk: Arc<Disk>, bucket: String, shut: bool) -> Backend {
        Backend { disk, bucket, shut }
    }

    pub(super) fn check_bucket(&self, bucket: &str) -> S3Result<()> {
        if bucket == self.bucket {
            return Ok(());
        }
        Err(s3_error!(NoSuchBucket, "there is only the bucket {:?} here", self.bucket))
    }

    pub(super) fn key(&self, bucket: &str, key: &str) -> S3Result<Key> {
        self.check_bucket(bucket)?;
        Key::parse(key).map_err(|err| match err {
            BadKey::TooLong => s3_error!(KeyTooLongError),
            err => s3_error!(InvalidArgument, "{err}"),
        })
    }

    /// Runs storage work on a thread that may block. It runs to its end even if the request is given up.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Disk) -> DiskResult<T> + Send + 'static,
    ) -> S3Result<T> {
        let disk = Arc::clone(&self.disk);
        match tokio::task::spawn_blocking(move || work(&disk)).await {
            Ok(done) => done.map_err(answer),
            Err(err) => Err(S3Error::internal_error(err)),
        }
    }
}

/// What a fault rule has to say to this operation.
pub(super) fn effects<T>(request: &S3Request<T>) -> Effects {
    request.extensions.get::<Effects>().cloned().unwrap_or_default()
}

/// The conditions of a write, unless a fault rule makes us forget them.
pub(super) fn write_conditions(
    effects: &Effects,
    if_match: Option<IfMatch>,
    if_none_match: Option<IfNoneMatch>,
) -> S3Result<Conditions> {
    if effects.ignore_conditions {
        return Ok(Conditions::default());
    }
    Conditions::write(if_match, if_none_match)
}

pub(super) async fn read_body(body: Option<StreamingBlob>) -> S3Result<Bytes> {
    let Some(mut body) = body else { return Ok(Bytes::new()) };
    let mut whole = BytesMut::new();
    let mut first = Bytes::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|err| {
            let mut refusal = s3_error!(BadDigest, "the body does not match its length or signature");
            refusal.set_source(err);
            refusal
        })?;
        // Nearly always there is one chunk; it is passed on as it is.
        match (first.is_empty(), whole.is_empty()) {
            (true, true) => first = chunk,
            (false, true) => {
                whole.extend_from_slice(&first);
                whole.extend_from_slice(&chunk);
            }
            _ => whole.extend_from_slice(&chunk),
        }
    }
    Ok(if whole.is_empty() { first } else { whole.freeze() })
}

fn answer(err: DiskError) -> S3Error {
    match err {
        DiskError::Missing => s3_error!(NoSuchKey, "the key does not exist"),
        DiskError::Precondition => s3_error!(PreconditionFailed, "a condition of the request does not hold"),
        DiskError::NotModified => s3_error!(NotModified),
        DiskError::NoSuchUpload => s3_error!(NoSuchUpload, "the upload does not exist, or has ended"),
        DiskError::InvalidPart(_) => s3_error!(InvalidPart, "{err}"),
        DiskError::PartOrder => s3_error!(InvalidPartOrder, "{err}"),
        DiskError::PartTooSmall(_) => s3_error!(EntityTooSmall, "{err}"),
        DiskError::Closed => s3_error!(ServiceUnavailable, "the server is stopping"),
        DiskError::Io { ref source, .. } => {
            tracing::warn!(error = %err, cause = %source, "storage failed");
            s3_error!(InternalError, "{err}: {source}")
        }
    }
}

/// `{bucket}.any.host` addresses the bucket; every other name is just a name of this server.
pub(super) struct BucketHost {
    pub(super) bucket: String,
}

impl S3Host for BucketHost {
    fn parse_host_header<'a>(&'a self, host: &'a str) -> S3Result<VirtualHost<'a>> {
        let domain = host.strip_prefix(self.bucket.as_str()).and_then(|rest| rest.strip_prefix('.'));
        Ok(match domain {
            Some(domain) => VirtualHost::new(domain).with_bucket(self.bucket.as_str()),
            None => VirtualHost::new(host),
        })
    }
}

type Answer<T> = S3Result<S3Response<T>>;

#[async_trait]
impl S3 for Backend {
    // The bucket has one version of everything, no rules, and is shut if signatures are demanded.

    async fn get_bucket_versioning(
        &self,
        req: S3Request<GetBucketVersioningInput>,
    ) -> Answer<GetBucketVersioningOutput> {
        self.check_bucket(&req.input.bucket)?;
        Ok(S3Response::new(GetBucketVersioningOutput::default()))
    }

    async fn get_bucket_lifecycle_configuration(
        &self,
        req: S3Request<GetBucketLifecycleConfigurationInput>,
    ) -> Answer<GetBucketLifecycleConfigurationOutput> {
        self.check_bucket(&req.input.bucket)?;
        Err(s3_error!(NoSuchLifecycleConfiguration, "the bucket has no rules"))
    }

    async fn get_public_access_block(
        &self,
        req: S3Request<GetPublicAccessBlockInput>,
    ) -> Answer<GetPublicAccessBlockOutput> {
        self.check_bucket(&req.input.bucket)?;
        if !self.shut {
            // A code that the library has no name for.
            let code = S3ErrorCode::Custom("NoSuchPublicAccessBlockConfiguration".into());
            let mut refusal = S3Error::with_message(code, "everybody is let in");
            refusal.set_status_code(StatusCode::NOT_FOUND);
            return Err(refusal);
        }
        let shut = PublicAccessBlockConfiguration {
            block_public_acls: Some(true),
            block_public_policy: Some(true),
            ignore_public_acls: Some(true),
            restrict_public_buckets: Some(true),
        };
        Ok(S3Response::new(GetPublicAccessBlockOutput { public_access_block_configuration: Some(shut) }))
    }

    async fn get_object(&self, req: S3Request<GetObjectInput>) -> Answer<GetObjectOutput> {
        self.get(req).await
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> Answer<HeadObjectOutput> {
        self.head(req).await
    }

    async fn put_object(&self, req: S3Request<PutObjectInput>) -> Answer<PutObjectOutput> {
        self.put(req).await
    }

    async fn copy_object(&self, req: S3Request<CopyObjectInput>) -> Answer<CopyObjectOutput> {
        self.copy(req).await
    }

    async fn delete_object(&self, req: S3Request<DeleteObjectInput>) -> Answer<DeleteObjectOutput> {
        self.delete(req).await
    }

    async fn delete_objects(&self, req: S3Request<DeleteObjectsInput>) -> Answer<DeleteObjectsOutput> {
        self.delete_many(req).await
    }

    async fn list_objects_v2(&self, req: S3Request<ListObjectsV2Input>) -> Answer<ListObjectsV2Output> {
        self.list_v2(req).await
    }

    async fn list_objects(&self, req: S3Request<ListObjectsInput>) -> Answer<ListObjectsOutput> {
        self.list_v1(req).await
    }

    async fn create_multipart_upload(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> Answer<CreateMultipartUploadOutput> {
        self.create_multipart(req).await
    }

    async fn upload_part(&self, req: S3Request<UploadPartInput>) -> Answer<UploadPartOutput> {
        self.put_one_part(req).await
    }

    async fn upload_part_copy(&self, req: S3Request<UploadPartCopyInput>) -> Answer<UploadPartCopyOutput> {
        self.copy_part(req).await
    }

    async fn complete_multipart_upload(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> Answer<CompleteMultipartUploadOutput> {
        self.complete_multipart(req).await
    }

    async fn abort_multipart_upload(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> Answer<AbortMultipartUploadOutput> {
        self.abort_multipart(req).await
    }

    async fn list_parts(&self, req: S3Request<ListPartsInput>) -> Answer<ListPartsOutput> {
        self.list_all_parts(req).await
    }

    async fn list_multipart_uploads(
        &self,
        req: S3Request<ListMultipartUploadsInput>,
    ) -> Answer<ListMultipartUploadsOutput> {
        self.list_uploads(req).await
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> Answer<HeadBucketOutput> {
        self.check_bucket(&req.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput { bucket_region: Some(REGION.to_owned()), ..Default::default() }))
    }

    /// The one bucket is always there already, which its owner is told as a success.
    async fn create_bucket(&self, req: S3Request<CreateBucketInput>) -> Answer<CreateBucketOutput> {
        self.check_bucket(&req.input.bucket)?;
        Ok(S3Response::new(CreateBucketOutput { location: Some(format!("/{}", self.bucket)) }))
    }

    async fn list_buckets(&self, _req: S3Request<ListBucketsInput>) -> Answer<ListBucketsOutput> {
        let created = std::fs::metadata(&self.disk.root).and_then(|it| it.modified()).ok().map(Timestamp::from);
        let bucket =
            Bucket { name: Some(self.bucket.clone()), creation_date: created, bucket_region: Some(REGION.to_owned()) };
        Ok(S3Response::new(ListBucketsOutput { buckets: Some(vec![bucket]), ..Default::default() }))
    }

    async fn get_bucket_location(&self, req: S3Request<GetBucketLocationInput>) -> Answer<GetBucketLocationOutput> {
        self.check_bucket(&req.input.bucket)?;
        let constraint = BucketLocationConstraint::from_static(REGION);
        Ok(S3Response::new(GetBucketLocationOutput { location_constraint: Some(constraint) }))
    }
}
