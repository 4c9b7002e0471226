//! Checks of a body against what its sender says about it.

use data_encoding::BASE64;
use md5::{Digest, Md5};
use s3s::{
    S3Result,
    checksum::ChecksumHasher,
    crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Sha1, Sha256},
    dto::Checksum,
    s3_error,
};

/// What was sent, in headers or trailers; in the form of base64 each.
#[derive(Debug, Clone, Default)]
pub(super) struct Claims {
    pub(super) md5: Option<String>,
    pub(super) crc32: Option<String>,
    pub(super) crc32c: Option<String>,
    pub(super) crc64nvme: Option<String>,
    pub(super) sha1: Option<String>,
    pub(super) sha256: Option<String>,
}

impl Claims {
    /// Fills in what came behind the body.
    pub(super) fn or_trailers(mut self, trailers: Option<&hyper::HeaderMap>) -> Claims {
        let Some(trailers) = trailers else { return self };
        for (claim, name) in [
            (&mut self.crc32, "x-amz-checksum-crc32"),
            (&mut self.crc32c, "x-amz-checksum-crc32c"),
            (&mut self.crc64nvme, "x-amz-checksum-crc64nvme"),
            (&mut self.sha1, "x-amz-checksum-sha1"),
            (&mut self.sha256, "x-amz-checksum-sha256"),
        ] {
            let trailer = trailers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
            *claim = claim.take().or(trailer);
        }
        self
    }

    /// Checks every claim, and gives back those that S3 repeats in its answer.
    pub(super) fn verify(&self, bytes: &[u8]) -> S3Result<Checksum> {
        if let Some(md5) = &self.md5 {
            match BASE64.decode(md5.as_bytes()) {
                Ok(claimed) if claimed.len() == 16 => {
                    if claimed != Md5::digest(bytes)[..] {
                        return Err(s3_error!(BadDigest, "the Content-MD5 does not match the body"));
                    }
                }
                _ => return Err(s3_error!(InvalidDigest, "the Content-MD5 is not one")),
            }
        }
        let mut hasher = ChecksumHasher {
            crc32: self.crc32.as_ref().map(|_| Crc32::new()),
            crc32c: self.crc32c.as_ref().map(|_| Crc32c::new()),
            sha1: self.sha1.as_ref().map(|_| Sha1::new()),
            sha256: self.sha256.as_ref().map(|_| Sha256::new()),
            crc64nvme: self.crc64nvme.as_ref().map(|_| Crc64Nvme::new()),
        };
        hasher.update(bytes);
        let found = hasher.finalize();
        for (name, claimed, found) in [
            ("crc32", &self.crc32, &found.checksum_crc32),
            ("crc32c", &self.crc32c, &found.checksum_crc32c),
            ("crc64nvme", &self.crc64nvme, &found.checksum_crc64nvme),
            ("sha1", &self.sha1, &found.checksum_sha1),
            ("sha256", &self.sha256, &found.checksum_sha256),
        ] {
            if claimed != found {
                return Err(s3_error!(BadDigest, "the {name} checksum does not match the body"));
            }
        }
        Ok(found)
    }
}
