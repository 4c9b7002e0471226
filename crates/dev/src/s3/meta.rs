//! What a client says about an object besides its bytes.

use std::collections::BTreeMap;

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
