//! Operations on single objects.

use std::io::{Read, Seek, SeekFrom};

use hyper::{HeaderMap, header::HeaderValue};
use s3s::{Body, S3Error, S3Request, S3Response, S3Result, dto::*, s3_error};

use super::{
    checksums::Claims,
    conditions::{Conditions, Refusal},
    disk::{DiskError, Object, Stat, io},
    keys::Key,
    meta::Meta,
    service::{Backend, effects, read_body, write_conditions},
};

/// What S3 says of an object whose sender gave it no type.
const DEFAULT_TYPE: &str = "binary/octet-stream";

/// An object, or as much of it as was asked for.
pub(super) struct Fetched {
    pub(super) stat: Stat,
    pub(super) meta: Meta,
    /// First and one past the last byte, if a range was asked for.
    range: Option<(u64, u64)>,
    pub(super) bytes: Vec<u8>,
}

/// Which part of an object, and if at all.
#[derive(Default)]
pub(super) struct Want {
    pub(super) range: Option<Range>,
    pub(super) conditions: Conditions,
    pub(super) since: Option<Timestamp>,
    pub(super) not_since: Option<Timestamp>,
    pub(super) head_only: bool,
}

enum Outcome {
    Fetched(Fetched),
    NotModified(Stat),
    NotSatisfiable(u64),
}

impl Backend {
    pub(super) async fn get(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let headers = overrides(&req.input)?;
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        check_version(input.version_id.as_deref())?;
        let want = Want {
            range: input.range,
            conditions: Conditions::read(input.if_match, input.if_none_match),
            since: input.if_modified_since,
            not_since: input.if_unmodified_since,
            head_only: false,
        };
        let Fetched { stat, meta, range, bytes } = self.fetch(key, want).await?;
        let output = GetObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: i64::try_from(bytes.len()).ok(),
            content_range: range.map(|range| content_range(range, stat.size)),
            body: Some(StreamingBlob::from(Body::from(bytes))),
            e_tag: Some(ETag::Strong(stat.etag)),
            last_modified: Some(stat.modified.into()),
            content_type: Some(meta.content_type.unwrap_or_else(|| DEFAULT_TYPE.to_owned())),
            content_encoding: meta.content_encoding,
            content_disposition: meta.content_disposition,
            content_language: meta.content_language,
            cache_control: meta.cache_control,
            metadata: some_user(meta.user),
            ..Default::default()
        };
        Ok(S3Response::with_headers(output, headers))
    }

    pub(super) async fn head(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        check_version(input.version_id.as_deref())?;
        let want = Want {
            range: input.range,
            conditions: Conditions::read(input.if_match, input.if_none_match),
            since: input.if_modified_since,
            not_since: input.if_unmodified_since,
            head_only: true,
        };
        let Fetched { stat, meta, range, .. } = self.fetch(key, want).await?;
        let length = range.map_or(stat.size, |(start, end)| end - start);
        Ok(S3Response::new(HeadObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            content_length: i64::try_from(length).ok(),
            content_range: range.map(|range| content_range(range, stat.size)),
            e_tag: Some(ETag::Strong(stat.etag)),
            last_modified: Some(stat.modified.into()),
            content_type: Some(meta.content_type.unwrap_or_else(|| DEFAULT_TYPE.to_owned())),
            content_encoding: meta.content_encoding,
            content_disposition: meta.content_disposition,
            content_language: meta.content_language,
            cache_control: meta.cache_control,
            metadata: some_user(meta.user),
            ..Default::default()
        }))
    }

    pub(super) async fn put(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let (effects, trailers) = (effects(&req), req.trailing_headers);
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        if input.write_offset_bytes.is_some() {
            return Err(s3_error!(NotImplemented, "appending is not implemented"));
        }
        let conditions = write_conditions(&effects, input.if_match, input.if_none_match)?;
        let bytes = read_body(input.body).await?;
        let claims = Claims {
            md5: input.content_md5,
            crc32: input.checksum_crc32,
            crc32c: input.checksum_crc32c,
            crc64nvme: input.checksum_crc64nvme,
            sha1: input.checksum_sha1,
            sha256: input.checksum_sha256,
        };
        let sums = claims.or_trailers(trailers.and_then(|it| it.take()).as_ref()).verify(&bytes)?;
        let meta = Meta::new(
            input.content_type,
            input.content_encoding,
            input.content_disposition,
            input.content_language,
            input.cache_control,
            input.metadata,
        );
        let stat = self.run(move |disk| disk.put(&key, &bytes, &meta, &conditions)).await?;
        Ok(S3Response::new(PutObjectOutput {
            e_tag: Some(ETag::Strong(stat.etag)),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..Default::default()
        }))
    }

    pub(super) async fn copy(&self, req: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        let effects = effects(&req);
        // The library knows the conditions on the source only; S3 has them on the destination too.
        let conditions = write_conditions(
            &effects,
            header_condition(&req.headers, "if-match")?,
            header_condition(&req.headers, "if-none-match")?,
        )?;
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        let source = self.source(&input.copy_source)?;
        let replace = input.metadata_directive.as_ref().is_some_and(|it| it.as_str() == MetadataDirective::REPLACE);
        if source == key && !replace {
            return Err(s3_error!(InvalidRequest, "copying an object to itself needs new metadata"));
        }
        let want = Want {
            conditions: Conditions::read(input.copy_source_if_match, input.copy_source_if_none_match),
            since: input.copy_source_if_modified_since,
            not_since: input.copy_source_if_unmodified_since,
            ..Want::default()
        };
        let fetched = self.fetch_source(source, want).await?;
        let meta = match replace {
            false => fetched.meta,
            true => Meta::new(
                input.content_type,
                input.content_encoding,
                input.content_disposition,
                input.content_language,
                input.cache_control,
                input.metadata,
            ),
        };
        let stat = self.run(move |disk| disk.put(&key, &fetched.bytes, &meta, &conditions)).await?;
        let result = CopyObjectResult {
            e_tag: Some(ETag::Strong(stat.etag)),
            last_modified: Some(stat.modified.into()),
            ..Default::default()
        };
        Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() }))
    }

    pub(super) async fn delete(&self, req: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        let effects = effects(&req);
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        check_version(input.version_id.as_deref())?;
        let conditions = write_conditions(&effects, input.if_match, None)?;
        self.run(move |disk| disk.delete(&key, &conditions)).await?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    pub(super) async fn delete_many(
        &self,
        req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let effects = effects(&req);
        let input = req.input;
        self.check_bucket(&input.bucket)?;
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for object in input.delete.objects {
            let etag = object.e_tag.map(ETagCondition::ETag);
            let done = match self.key(&input.bucket, &object.key) {
                Ok(key) => {
                    let conditions = write_conditions(&effects, etag, None)?;
                    self.run(move |disk| disk.delete(&key, &conditions)).await
                }
                Err(err) => Err(err),
            };
            match done {
                Ok(()) => deleted.push(DeletedObject { key: Some(object.key), ..Default::default() }),
                Err(err) => errors.push(Error {
                    code: Some(err.code().as_str().to_owned()),
                    key: Some(object.key),
                    message: err.message().map(str::to_owned),
                    version_id: None,
                }),
            }
        }
        let quiet = input.delete.quiet.unwrap_or(false);
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted: (!quiet).then_some(deleted),
            errors: Some(errors),
            ..Default::default()
        }))
    }

    pub(super) fn source(&self, source: &CopySource) -> S3Result<Key> {
        match source {
            CopySource::Bucket { bucket, key, version_id } => {
                check_version(version_id.as_deref())?;
                self.key(bucket, key)
            }
            _ => Err(s3_error!(NotImplemented, "only a bucket and a key may be copied from")),
        }
    }

    /// Like `fetch`, but a copy has no use for "not modified": any condition that does not hold is a 412.
    pub(super) async fn fetch_source(&self, key: Key, want: Want) -> S3Result<Fetched> {
        self.fetch(key, want).await.map_err(|err| match err.code() {
            s3s::S3ErrorCode::NotModified => s3_error!(PreconditionFailed, "a condition on the source does not hold"),
            _ => err,
        })
    }

    async fn fetch(&self, key: Key, want: Want) -> S3Result<Fetched> {
        let outcome = self
            .run(move |disk| {
                let mut object = disk.get(&key)?;
                let checked = want
                    .conditions
                    .check_read(&object.stat.etag)
                    .and_then(|()| want.conditions.check_dates(object.stat.modified, want.since, want.not_since));
                match checked {
                    Ok(()) => (),
                    Err(Refusal::NotModified) => return Ok(Outcome::NotModified(object.stat)),
                    Err(refusal) => return Err(refusal.into()),
                }
                let range = match want.range.map(|range| range.check(object.stat.size)) {
                    None => None,
                    Some(Ok(range)) => Some((range.start, range.end)),
                    Some(Err(_)) => return Ok(Outcome::NotSatisfiable(object.stat.size)),
                };
                let bytes = if want.head_only { Vec::new() } else { read(&mut object, range, &key)? };
                Ok(Outcome::Fetched(Fetched { meta: object.meta(), stat: object.stat, range, bytes }))
            })
            .await?;
        match outcome {
            Outcome::Fetched(fetched) => Ok(fetched),
            Outcome::NotModified(stat) => {
                let mut headers = HeaderMap::new();
                insert(&mut headers, "etag", &format!("\"{}\"", stat.etag));
                Err(with_headers(s3_error!(NotModified), headers))
            }
            Outcome::NotSatisfiable(size) => {
                let mut headers = HeaderMap::new();
                insert(&mut headers, "content-range", &format!("bytes */{size}"));
                insert(&mut headers, "content-type", "application/xml");
                Err(with_headers(s3_error!(InvalidRange, "the object has {size} bytes"), headers))
            }
        }
    }
}

fn read(object: &mut Object, range: Option<(u64, u64)>, key: &Key) -> Result<Vec<u8>, DiskError> {
    let (start, end) = range.unwrap_or((0, object.stat.size));
    let mut bytes = Vec::with_capacity(usize::try_from(end - start).unwrap_or_default());
    let done = object
        .file
        .seek(SeekFrom::Start(start))
        .and_then(|_| (&mut object.file).take(end - start).read_to_end(&mut bytes));
    io("read", key.as_str().as_ref(), done)?;
    Ok(bytes)
}

fn content_range((start, end): (u64, u64), size: u64) -> String {
    format!("bytes {start}-{}/{size}", end - 1)
}

fn some_user(user: std::collections::BTreeMap<String, String>) -> Option<Metadata> {
    (!user.is_empty()).then(|| user.into_iter().collect())
}

/// There are no versions; the only one there is goes by the name of `null`.
fn check_version(version: Option<&str>) -> S3Result<()> {
    match version {
        None | Some("null") => Ok(()),
        Some(_) => Err(s3_error!(NoSuchVersion)),
    }
}

fn header_condition(headers: &HeaderMap, name: &str) -> S3Result<Option<ETagCondition>> {
    let parse = |value: &HeaderValue| {
        ETagCondition::parse_http_header(value.as_bytes()).map_err(|err| s3_error!(err, InvalidArgument, "bad {name}"))
    };
    headers.get(name).map(parse).transpose()
}

/// `response-content-type` and its like, by which an address decides on headers of the answer.
fn overrides(input: &GetObjectInput) -> S3Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("content-type", &input.response_content_type),
        ("content-language", &input.response_content_language),
        ("cache-control", &input.response_cache_control),
        ("content-disposition", &input.response_content_disposition),
        ("content-encoding", &input.response_content_encoding),
    ] {
        if let Some(value) = value {
            let value = HeaderValue::from_str(value).map_err(|err| s3_error!(err, InvalidArgument, "bad {name}"))?;
            headers.insert(name, value);
        }
    }
    Ok(headers)
}

fn insert(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn with_headers(mut err: S3Error, headers: HeaderMap) -> S3Error {
    err.set_headers(headers);
    err
}
