//! Multipart operations.

use s3s::{S3Request, S3Response, S3Result, dto::*, s3_error};

use super::{
    checksums::Claims,
    conditions::Conditions,
    lists::{MAX_PER_PAGE, page_size},
    meta::Meta,
    objects::Want,
    service::{Backend, effects, read_body, write_conditions},
};

const MAX_PART_NUMBER: i32 = 10_000;

impl Backend {
    pub(super) async fn create_multipart(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        let meta = Meta::new(
            input.content_type,
            input.content_encoding,
            input.content_disposition,
            input.content_language,
            input.cache_control,
            input.metadata,
        );
        let id = self.run(move |disk| disk.create_upload(&key, &meta)).await?;
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..Default::default()
        }))
    }

    pub(super) async fn put_one_part(&self, req: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let trailers = req.trailing_headers;
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        let number = check_number(input.part_number)?;
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
        let etag = self.run(move |disk| disk.put_part(&input.upload_id, &key, number, &bytes)).await?;
        Ok(S3Response::new(UploadPartOutput {
            e_tag: Some(ETag::Strong(etag)),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..Default::default()
        }))
    }

    pub(super) async fn copy_part(
        &self,
        req: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        let number = check_number(input.part_number)?;
        let source = self.source(&input.copy_source)?;
        let range = input.copy_source_range.as_deref().map(Range::parse).transpose();
        let want = Want {
            range: range.map_err(|err| s3_error!(err, InvalidArgument, "bad x-amz-copy-source-range"))?,
            conditions: Conditions::read(input.copy_source_if_match, input.copy_source_if_none_match),
            since: input.copy_source_if_modified_since,
            not_since: input.copy_source_if_unmodified_since,
            ..Want::default()
        };
        let fetched = self.fetch_source(source, want).await?;
        let modified = fetched.stat.modified;
        let etag = self.run(move |disk| disk.put_part(&input.upload_id, &key, number, &fetched.bytes)).await?;
        let result = CopyPartResult {
            e_tag: Some(ETag::Strong(etag)),
            last_modified: Some(modified.into()),
            ..Default::default()
        };
        Ok(S3Response::new(UploadPartCopyOutput { copy_part_result: Some(result), ..Default::default() }))
    }

    pub(super) async fn complete_multipart(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let effects = effects(&req);
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        let conditions = write_conditions(&effects, input.if_match, input.if_none_match)?;
        let parts: Vec<(i32, Option<String>)> = input
            .multipart_upload
            .and_then(|it| it.parts)
            .unwrap_or_default()
            .into_iter()
            .map(|part| (part.part_number.unwrap_or_default(), part.e_tag.map(ETag::into_value)))
            .collect();
        if parts.is_empty() {
            return Err(s3_error!(MalformedXML, "an object needs at least one part"));
        }
        let id = input.upload_id;
        let stat = self.run(move |disk| disk.complete_upload(&id, &key, &parts, &conditions)).await?;
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            location: Some(format!("/{}/{}", input.bucket, input.key)),
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(ETag::Strong(stat.etag)),
            ..Default::default()
        }))
    }

    pub(super) async fn abort_multipart(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        self.run(move |disk| disk.abort_upload(&input.upload_id, &key)).await?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    pub(super) async fn list_all_parts(&self, req: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
        let input = req.input;
        let key = self.key(&input.bucket, &input.key)?;
        let max = page_size(input.max_parts)?;
        let after = input.part_number_marker.unwrap_or_default();
        let id = input.upload_id.clone();
        let mut parts = self.run(move |disk| disk.parts(&id, &key)).await?;
        parts.retain(|part| after < part.number);
        let n_page = usize::try_from(max).unwrap_or_default();
        let truncated = n_page < parts.len();
        parts.truncate(n_page);
        let next = parts.last().map(|part| part.number).filter(|_| truncated);
        let parts = parts.into_iter().map(|part| Part {
            part_number: Some(part.number),
            e_tag: Some(ETag::Strong(part.stat.etag)),
            size: i64::try_from(part.stat.size).ok(),
            last_modified: Some(part.stat.modified.into()),
            ..Default::default()
        });
        Ok(S3Response::new(ListPartsOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            part_number_marker: Some(after),
            next_part_number_marker: next,
            max_parts: Some(max),
            is_truncated: Some(truncated),
            parts: Some(parts.collect()),
            ..Default::default()
        }))
    }

    /// All on one page, up to the usual limit: development has no thousand uploads at once. No delimiter either.
    pub(super) async fn list_uploads(
        &self,
        req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = req.input;
        self.check_bucket(&input.bucket)?;
        let max = page_size(input.max_uploads)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let after = input.key_marker.clone().unwrap_or_default();
        let mut uploads = self.run(|disk| disk.uploads()).await?;
        uploads.retain(|it| {
            it.key.as_str().starts_with(&prefix) && (after.is_empty() || after.as_str() < it.key.as_str())
        });
        let n_page = usize::try_from(max.min(MAX_PER_PAGE)).unwrap_or_default();
        let truncated = n_page < uploads.len();
        uploads.truncate(n_page);
        let last = uploads.last().filter(|_| truncated);
        let (next_key_marker, next_upload_id_marker) =
            last.map(|it| (it.key.as_str().to_owned(), it.id.clone())).unzip();
        let uploads = uploads.into_iter().map(|upload| MultipartUpload {
            key: Some(upload.key.as_str().to_owned()),
            upload_id: Some(upload.id),
            initiated: Some(upload.initiated.into()),
            ..Default::default()
        });
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            prefix: input.prefix,
            key_marker: input.key_marker,
            max_uploads: Some(max),
            is_truncated: Some(truncated),
            next_key_marker,
            next_upload_id_marker,
            uploads: Some(uploads.collect()),
            ..Default::default()
        }))
    }
}

fn check_number(number: i32) -> S3Result<i32> {
    match number {
        1..=MAX_PART_NUMBER => Ok(number),
        _ => Err(s3_error!(InvalidArgument, "part numbers go from 1 to {MAX_PART_NUMBER}")),
    }
}
