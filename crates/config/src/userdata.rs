//! Encodings of userdata.
use crate::model::UserdataEncoding;
pub fn decode(_encoding: UserdataEncoding, bytes: &[u8]) -> Result<Vec<u8>, String> { Ok(bytes.to_vec()) }
