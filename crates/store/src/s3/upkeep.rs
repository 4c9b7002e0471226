//! The settings of a bucket, by requests of our own: the library underneath knows objects only.

use std::fmt::Write as _;

use async_trait::async_trait;
use futures::StreamExt as _;
use http::{Request, StatusCode};
use nstance_rt::chain::Chain;
use object_store::{
    aws::AwsAuthorizer,
    client::{HttpConnector as _, HttpRequest, HttpRequestBody, ReqwestConnector},
};
use serde::{Deserialize, de::DeserializeOwned};

use super::S3Store;
use crate::upkeep::{Access, Answer, Retention, Taker, Upkeep, Versioning};

/// Far more than any of these documents has.
const MAX_BODY: usize = 1024 * 1024;

/// What a store says to a question.
enum Said {
    Document(Vec<u8>),
    /// Its own code, as in `NoSuchLifecycleConfiguration`.
    Refused(StatusCode, String),
}

impl S3Store {
    /// Asks for the bucket's setting of this name.
    async fn setting(&self, name: &str) -> Result<Said, String> {
        let credential = self.client.credentials().get_credential().await.map_err(|error| Chain(&error).to_string())?;
        let mut request: HttpRequest = Request::get(format!("{}?{name}", self.bucket.url))
            .body(HttpRequestBody::empty())
            .map_err(|error| Chain(&error).to_string())?;
        let signer = AwsAuthorizer::new(&credential, "s3", &self.bucket.region);
        signer.try_authorize(&mut request, None).map_err(|error| Chain(&error).to_string())?;
        let client = ReqwestConnector::default().connect(&self.bucket.options);
        let client = client.map_err(|error| Chain(&error).to_string())?;
        let response = client.execute(request).await.map_err(|error| Chain(&error).to_string())?;
        let status = response.status();
        let (mut body, mut chunks) = (Vec::new(), response.into_body().bytes_stream());
        while let Some(chunk) = chunks.next().await {
            body.extend_from_slice(&chunk.map_err(|error| Chain(&error).to_string())?);
            if MAX_BODY < body.len() {
                return Err(format!("its answer is longer than {MAX_BODY} bytes"));
            }
        }
        if status == StatusCode::OK {
            return Ok(Said::Document(body));
        }
        let code = parsed::<Refusal>(&body).map(|it| it.code).unwrap_or_default();
        Ok(Said::Refused(status, code))
    }

    /// The setting of this name; `absent` is the code with which a store says that there is none.
    async fn asked<T: DeserializeOwned>(&self, name: &str, absent: &str) -> Answer<Option<T>> {
        match self.setting(name).await {
            Err(error) => Answer::Unknown(error),
            Ok(Said::Refused(StatusCode::NOT_FOUND, code)) if code == absent => Answer::Known(None),
            Ok(Said::Refused(status, code)) => Answer::Unknown(refused(status, &code)),
            Ok(Said::Document(body)) => match parsed(&body) {
                Ok(document) => Answer::Known(Some(document)),
                Err(error) => Answer::Unknown(format!("its answer is not understood: {error}")),
            },
        }
    }
}

fn refused(status: StatusCode, code: &str) -> String {
    let mut text = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "the store denies it".to_owned(),
        StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED => "the store does not offer it".to_owned(),
        _ => "the store refuses".to_owned(),
    };
    // It is only text, so it cannot fail.
    let _ = write!(text, " ({}{}{code})", status.as_u16(), if code.is_empty() { "" } else { " " });
    text
}

fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    let text = std::str::from_utf8(body).map_err(|error| error.to_string())?;
    quick_xml::de::from_str(text).map_err(|error| error.to_string())
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Refusal {
    code: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct VersioningConfiguration {
    status: Option<String>,
}

#[derive(Deserialize)]
struct LifecycleConfiguration {
    #[serde(rename = "Rule", default)]
    rules: Vec<Rule>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Rule {
    #[serde(rename = "ID")]
    id: String,
    status: String,
    /// As rules were written before they had filters.
    prefix: Option<String>,
    filter: Option<Filter>,
    expiration: Option<Expiration>,
    #[serde(rename = "Transition")]
    transitions: Vec<Transition>,
    noncurrent_version_expiration: Option<NoncurrentVersionExpiration>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Filter {
    prefix: Option<String>,
    tag: Option<Tag>,
    and: Option<Box<And>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct And {
    prefix: Option<String>,
    #[serde(rename = "Tag")]
    tags: Vec<Tag>,
}

#[derive(Deserialize)]
struct Tag {}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Expiration {
    days: Option<u32>,
    date: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Transition {
    storage_class: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct NoncurrentVersionExpiration {
    noncurrent_days: Option<u32>,
}

/// Where an object cannot be read without being fetched back first.
const COLD: [&str; 2] = ["GLACIER", "DEEP_ARCHIVE"];

impl Rule {
    /// Of which keys, if it may be of ours: we tag nothing, so a rule for tagged objects is not.
    fn concerns(&self, prefix: &str) -> Option<String> {
        let filter = self.filter.as_ref();
        let and = filter.and_then(|it| it.and.as_deref());
        let tagged = filter.is_some_and(|it| it.tag.is_some()) || and.is_some_and(|it| !it.tags.is_empty());
        let own = and.and_then(|it| it.prefix.clone()).or_else(|| filter.and_then(|it| it.prefix.clone()));
        let own = own.or_else(|| self.prefix.clone()).unwrap_or_default();
        let overlaps = own.starts_with(prefix) || prefix.starts_with(&own);
        (self.status == "Enabled" && !tagged && overlaps).then_some(own)
    }

    /// What it does to objects in use.
    fn effects(&self) -> Vec<String> {
        let mut effects = Vec::new();
        match &self.expiration {
            Some(Expiration { days: Some(days), .. }) => effects.push(format!("expires after {days} days")),
            Some(Expiration { date: Some(date), .. }) => effects.push(format!("expires at {date}")),
            // Of markers of what is deleted already.
            Some(Expiration { days: None, date: None }) | None => {}
        }
        let cold = self.transitions.iter().filter(|it| COLD.contains(&it.storage_class.as_str()));
        effects.extend(cold.map(|it| format!("goes to {}, where it cannot be read", it.storage_class)));
        effects
    }
}

/// What rules do to the keys below a prefix.
fn retention(rules: &[Rule], prefix: &str) -> Retention {
    let mut retention = Retention::default();
    for rule in rules {
        let Some(own) = rule.concerns(prefix) else { continue };
        let effects = rule.effects().into_iter();
        retention.takers.extend(effects.map(|effect| Taker { rule: rule.id.clone(), prefix: own.clone(), effect }));
        let days = rule.noncurrent_version_expiration.as_ref().and_then(|it| it.noncurrent_days);
        retention.old_versions_days = match (retention.old_versions_days, days) {
            (Some(known), Some(days)) => Some(known.min(days)),
            (known, days) => known.or(days),
        };
    }
    retention
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct PublicAccessBlockConfiguration {
    block_public_acls: bool,
    ignore_public_acls: bool,
    block_public_policy: bool,
    restrict_public_buckets: bool,
}

impl PublicAccessBlockConfiguration {
    fn access(&self) -> Access {
        let shut = [
            ("BlockPublicAcls", self.block_public_acls),
            ("IgnorePublicAcls", self.ignore_public_acls),
            ("BlockPublicPolicy", self.block_public_policy),
            ("RestrictPublicBuckets", self.restrict_public_buckets),
        ];
        let ajar: Vec<String> = shut.iter().filter(|(_, shut)| !shut).map(|(name, _)| (*name).to_owned()).collect();
        if ajar.is_empty() { Access::Closed } else { Access::Ajar(ajar) }
    }
}

#[async_trait]
impl Upkeep for S3Store {
    async fn versioning(&self) -> Answer<Versioning> {
        match self.asked::<VersioningConfiguration>("versioning", "").await {
            Answer::Unknown(why) => Answer::Unknown(why),
            Answer::Known(it) => match it.and_then(|it| it.status).as_deref() {
                None => Answer::Known(Versioning::Off),
                Some("Enabled") => Answer::Known(Versioning::Enabled),
                Some("Suspended") => Answer::Known(Versioning::Suspended),
                Some(other) => Answer::Unknown(format!("its status `{other}` is not understood")),
            },
        }
    }

    async fn retention(&self) -> Answer<Retention> {
        match self.asked::<LifecycleConfiguration>("lifecycle", "NoSuchLifecycleConfiguration").await {
            Answer::Unknown(why) => Answer::Unknown(why),
            Answer::Known(it) => {
                Answer::Known(retention(it.map(|it| it.rules).as_deref().unwrap_or_default(), &self.prefix))
            }
        }
    }

    async fn access(&self) -> Answer<Access> {
        let absent = "NoSuchPublicAccessBlockConfiguration";
        match self.asked::<PublicAccessBlockConfiguration>("publicAccessBlock", absent).await {
            Answer::Unknown(why) => Answer::Unknown(why),
            Answer::Known(it) => Answer::Known(it.unwrap_or_default().access()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{Reply, server},
        *,
    };

    /// Asks a server that gives this answer, and holds that it was asked for that, and signed.
    async fn asked<T>(reply: Reply, setting: &str, ask: impl AsyncFnOnce(&S3Store) -> T) -> T {
        let server = server(reply).await;
        let answer = ask(&server.store).await;
        let request = server.last.lock().unwrap().clone();
        assert!(request.starts_with(&format!("GET /bucket?{setting} HTTP/1.1\r\n")), "{request}");
        assert!(request.contains("AWS4-HMAC-SHA256 Credential=key/"), "{request}");
        answer
    }

    fn xml(body: &'static str) -> Reply {
        Reply::Say(200, "content-type: application/xml\r\n", body)
    }

    fn taken(it: Answer<Retention>) -> Vec<String> {
        let Answer::Known(it) = it else { panic!("{it:?}") };
        it.takers.iter().map(|it| format!("{} {:?} {}", it.rule, it.prefix, it.effect)).collect()
    }

    #[tokio::test]
    async fn versioning_is_what_the_bucket_says() {
        for (body, expected) in [
            (r#"<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>"#, Versioning::Off),
            (
                r#"<?xml version="1.0" encoding="UTF-8"?>
                <VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status></VersioningConfiguration>"#,
                Versioning::Enabled,
            ),
            (
                "<VersioningConfiguration><MfaDelete>Disabled</MfaDelete><Status>Suspended</Status></VersioningConfiguration>",
                Versioning::Suspended,
            ),
        ] {
            let answer = asked(xml(body), "versioning", async |store| store.versioning().await).await;
            assert_eq!(answer, Answer::Known(expected), "{body}");
        }
    }

    #[tokio::test]
    async fn what_is_denied_or_not_offered_is_not_known() {
        for (reply, reason) in [
            (Reply::Say(403, "", "<Error><Code>AccessDenied</Code></Error>"), "the store denies it (403 AccessDenied)"),
            (
                Reply::Say(501, "", "<Error><Code>NotImplemented</Code></Error>"),
                "the store does not offer it (501 NotImplemented)",
            ),
            (Reply::Say(404, "", "<Error><Code>NoSuchBucket</Code></Error>"), "the store refuses (404 NoSuchBucket)"),
            (Reply::Say(500, "", "oh"), "the store refuses (500)"),
            (Reply::Say(200, "", "{}"), "its answer is not understood"),
            (Reply::HangUp, ""),
        ] {
            let answers =
                asked(reply, "lifecycle", async |store| (store.retention().await, store.retention().await)).await;
            let Answer::Unknown(why) = answers.0 else { panic!("{answers:?}") };
            assert!(why.starts_with(reason), "{why}");
        }
    }

    #[tokio::test]
    async fn rules_that_take_what_is_in_use_are_found() {
        let none = Reply::Say(404, "", "<Error><Code>NoSuchLifecycleConfiguration</Code></Error>");
        let answer = asked(none, "lifecycle", async |store| store.retention().await).await;
        assert_eq!(answer, Answer::Known(Retention::default()));
        // Ours are below some/prefix/.
        let body = "<LifecycleConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
            <Rule><ID>all</ID><Filter/><Status>Enabled</Status><Expiration><Days>30</Days></Expiration></Rule>\
            <Rule><ID>off</ID><Filter/><Status>Disabled</Status><Expiration><Days>1</Days></Expiration></Rule>\
            <Rule><ID>within</ID><Filter><Prefix>some/prefix/shard/</Prefix></Filter><Status>Enabled</Status>\
              <Expiration><Date>2030-01-01T00:00:00Z</Date></Expiration></Rule>\
            <Rule><ID>elsewhere</ID><Filter><Prefix>logs/</Prefix></Filter><Status>Enabled</Status>\
              <Expiration><Days>1</Days></Expiration></Rule>\
            <Rule><ID>tagged</ID><Filter><And><Prefix>some/</Prefix><Tag><Key>a</Key><Value>b</Value></Tag></And></Filter>\
              <Status>Enabled</Status><Expiration><Days>1</Days></Expiration></Rule>\
            <Rule><ID>old-form</ID><Prefix>some/</Prefix><Status>Enabled</Status>\
              <Transition><Days>1</Days><StorageClass>STANDARD_IA</StorageClass></Transition>\
              <Transition><Days>90</Days><StorageClass>GLACIER</StorageClass></Transition></Rule>\
            <Rule><ID>kept</ID><Filter><Prefix></Prefix></Filter><Status>Enabled</Status>\
              <Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>\
              <NoncurrentVersionExpiration><NoncurrentDays>30</NoncurrentDays></NoncurrentVersionExpiration>\
              <AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule>\
            </LifecycleConfiguration>";
        let answer = asked(xml(body), "lifecycle", async |store| store.retention().await).await;
        assert!(matches!(&answer, Answer::Known(it) if it.old_versions_days == Some(30)), "{answer:?}");
        let expected = [
            "all \"\" expires after 30 days",
            "within \"some/prefix/shard/\" expires at 2030-01-01T00:00:00Z",
            "old-form \"some/\" goes to GLACIER, where it cannot be read",
        ];
        assert_eq!(taken(answer), expected);
    }

    #[tokio::test]
    async fn access_is_shut_only_if_all_of_it_is() {
        let shut = "<PublicAccessBlockConfiguration><BlockPublicAcls>true</BlockPublicAcls>\
            <IgnorePublicAcls>true</IgnorePublicAcls><BlockPublicPolicy>true</BlockPublicPolicy>\
            <RestrictPublicBuckets>true</RestrictPublicBuckets></PublicAccessBlockConfiguration>";
        let answer = asked(xml(shut), "publicAccessBlock", async |store| store.access().await).await;
        assert_eq!(answer, Answer::Known(Access::Closed));
        let half = "<PublicAccessBlockConfiguration><BlockPublicAcls>true</BlockPublicAcls>\
            <IgnorePublicAcls>true</IgnorePublicAcls><BlockPublicPolicy>false</BlockPublicPolicy>\
            </PublicAccessBlockConfiguration>";
        let answer = asked(xml(half), "publicAccessBlock", async |store| store.access().await).await;
        let ajar = ["BlockPublicPolicy", "RestrictPublicBuckets"].map(str::to_owned);
        assert_eq!(answer, Answer::Known(Access::Ajar(ajar.into())));
        let none = Reply::Say(404, "", "<Error><Code>NoSuchPublicAccessBlockConfiguration</Code></Error>");
        let answer = asked(none, "publicAccessBlock", async |store| store.access().await).await;
        assert!(matches!(&answer, Answer::Known(Access::Ajar(it)) if it.len() == 4), "{answer:?}");
    }
}
