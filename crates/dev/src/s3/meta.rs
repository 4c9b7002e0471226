//! What a client says about an object besides its bytes.

use std::collections::BTreeMap;

use s3s::dto::Metadata;
use serde::{Deserialize, Serialize};

/// Stored as JSON in an extended attribute.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Meta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_encoding: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_disposition: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_language: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cache_control: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) user: BTreeMap<String, String>,
}

impl Meta {
    /// Leaves out the encoding `aws-chunked`, which is of the transfer and not of the object.
    pub(super) fn new(
        content_type: Option<String>,
        content_encoding: Option<String>,
        content_disposition: Option<String>,
        content_language: Option<String>,
        cache_control: Option<String>,
        user: Option<Metadata>,
    ) -> Meta {
        let kept = |encodings: String| {
            let kept: Vec<&str> = encodings.split(',').map(str::trim).filter(|it| *it != "aws-chunked").collect();
            kept.join(", ")
        };
        Meta {
            content_type,
            content_encoding: content_encoding.map(kept).filter(|encodings| !encodings.is_empty()),
            content_disposition,
            content_language,
            cache_control,
            user: user.unwrap_or_default().into_iter().collect(),
        }
    }
}
