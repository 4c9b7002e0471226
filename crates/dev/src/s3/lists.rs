//! Listings of the bucket, in both versions of the protocol.

use data_encoding::BASE64URL_NOPAD;
use s3s::{S3Request, S3Response, S3Result, dto::*, s3_error};

use super::{
    caller::percent_encode,
    disk::Listed,
    gate::Effects,
    listing::{Item, Page, Query, page},
    service::{Backend, effects},
};

pub(super) const MAX_PER_PAGE: i32 = 1000;

impl Backend {
    pub(super) async fn list_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let effects = effects(&req);
        let input = req.input;
        self.check_bucket(&input.bucket)?;
        let max = page_size(input.max_keys)?;
        let url = is_url(input.encoding_type.as_ref());
        let after = match &input.continuation_token {
            Some(token) => unseal(token)?,
            None => input.start_after.clone().unwrap_or_default(),
        };
        let query = query(input.prefix.as_deref(), input.delimiter.as_deref(), after, max);
        let page = self.page(query, effects).await?;
        let next = page.next.as_deref().map(|next| BASE64URL_NOPAD.encode(next.as_bytes()));
        let n_items = page.items.len();
        let (contents, common_prefixes) = split(page, url);
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: Some(encode(input.prefix.unwrap_or_default(), url)),
            delimiter: input.delimiter.map(|it| encode(it, url)),
            start_after: input.start_after.map(|it| encode(it, url)),
            max_keys: Some(max),
            key_count: i32::try_from(n_items).ok(),
            continuation_token: input.continuation_token,
            is_truncated: Some(next.is_some()),
            next_continuation_token: next,
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            encoding_type: input.encoding_type,
            ..Default::default()
        }))
    }

    pub(super) async fn list_v1(&self, req: S3Request<ListObjectsInput>) -> S3Result<S3Response<ListObjectsOutput>> {
        let effects = effects(&req);
        let input = req.input;
        self.check_bucket(&input.bucket)?;
        let max = page_size(input.max_keys)?;
        let url = is_url(input.encoding_type.as_ref());
        let after = input.marker.clone().unwrap_or_default();
        let query = query(input.prefix.as_deref(), input.delimiter.as_deref(), after, max);
        let page = self.page(query, effects).await?;
        let next = page.next.clone();
        let (contents, common_prefixes) = split(page, url);
        Ok(S3Response::new(ListObjectsOutput {
            name: Some(input.bucket),
            prefix: Some(encode(input.prefix.unwrap_or_default(), url)),
            marker: Some(encode(input.marker.unwrap_or_default(), url)),
            delimiter: input.delimiter.map(|it| encode(it, url)),
            max_keys: Some(max),
            is_truncated: Some(next.is_some()),
            // S3 gives it only with a delimiter; clients otherwise take the last key, which is the same.
            next_marker: next.map(|it| encode(it, url)),
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            encoding_type: input.encoding_type,
            ..Default::default()
        }))
    }

    async fn page(&self, query: Query, effects: Effects) -> S3Result<Page<Listed>> {
        match effects.stale {
            Some(stale) => Ok(page(stale.iter().cloned(), &query, |it| it.key.as_str())),
            None => self.run(move |disk| disk.list(&query)).await,
        }
    }
}

fn query(prefix: Option<&str>, delimiter: Option<&str>, after: String, max: i32) -> Query {
    Query {
        prefix: prefix.unwrap_or_default().to_owned(),
        delimiter: delimiter.map(str::to_owned),
        after,
        max: usize::try_from(max).unwrap_or_default(),
    }
}

pub(super) fn page_size(asked: Option<i32>) -> S3Result<i32> {
    match asked {
        Some(asked) if asked < 0 => Err(s3_error!(InvalidArgument, "a page cannot have {asked} entries")),
        asked => Ok(asked.unwrap_or(MAX_PER_PAGE).min(MAX_PER_PAGE)),
    }
}

fn unseal(token: &str) -> S3Result<String> {
    BASE64URL_NOPAD
        .decode(token.as_bytes())
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .ok_or_else(|| s3_error!(InvalidArgument, "the continuation token is not one of ours"))
}

fn is_url(encoding: Option<&EncodingType>) -> bool {
    encoding.is_some_and(|it| it.as_str() == EncodingType::URL)
}

fn encode(text: String, url: bool) -> String {
    if url { percent_encode(&text) } else { text }
}

fn split(page: Page<Listed>, url: bool) -> (ObjectList, CommonPrefixList) {
    let (mut objects, mut prefixes) = (Vec::new(), Vec::new());
    for item in page.items {
        match item {
            Item::Object(Listed { key, stat }) => objects.push(Object {
                key: Some(encode(key.as_str().to_owned(), url)),
                e_tag: Some(ETag::Strong(stat.etag)),
                size: i64::try_from(stat.size).ok(),
                last_modified: Some(stat.modified.into()),
                storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
                ..Default::default()
            }),
            Item::Prefix(prefix) => prefixes.push(CommonPrefix { prefix: Some(encode(prefix, url)) }),
        }
    }
    (objects, prefixes)
}
