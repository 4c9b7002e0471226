//! What the development object store promises, operation by operation.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use crate::s3_common::{Store, element, elements, etag, header, object_store_at};
use futures::TryStreamExt;
use nstance_dev::s3::{S3Options, S3Server};
use object_store::{
    Error, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, UpdateVersion, path::Path,
};

#[tokio::test]
async fn objects_come_back_as_they_were_put() {
    let store = Store::start().await;
    let put = store
        .send("PUT", "a/b%20c.json", &[("content-type", "application/json"), ("x-amz-meta-who", "me")], "{}")
        .await;
    assert_eq!((put.status().as_u16(), etag(&put).as_str()), (200, "\"99914b932bd37a50b983c5e7c90ae93b\""));
    assert_eq!(std::fs::read_to_string(store.dir.path().join("a/b c.json")).unwrap(), "{}");
    for method in ["GET", "HEAD"] {
        let got = store.send(method, "a/b%20c.json", &[], "").await;
        assert_eq!(got.status(), 200);
        let headers = ["etag", "content-type", "content-length", "x-amz-meta-who", "accept-ranges"];
        assert_eq!(
            headers.map(|name| header(&got, name)),
            ["\"99914b932bd37a50b983c5e7c90ae93b\"", "application/json", "2", "me", "bytes"]
        );
        assert!(header(&got, "last-modified").ends_with("GMT"));
        assert_eq!(got.text().await.unwrap(), if method == "GET" { "{}" } else { "" });
    }
    let missing = store.send("GET", "nope", &[], "").await;
    assert_eq!(missing.status(), 404);
    let id = header(&missing, "x-amz-request-id");
    let body = missing.text().await.unwrap();
    assert_eq!((element(&body, "Code").as_str(), element(&body, "RequestId")), ("NoSuchKey", id));
}

#[tokio::test]
async fn conditional_writes_follow_the_table() {
    let store = Store::start().await;
    let (x, stale) = ("\"9dd4e461268c8034f5c8564e155c67a6\"", "\"00000000000000000000000000000000\"");
    // (exists before, method, condition, value, status)
    for (exists, method, condition, value, status) in [
        (false, "PUT", "if-none-match", "*", 200),
        (true, "PUT", "if-none-match", "*", 412),
        (true, "PUT", "if-match", x, 200),
        (true, "PUT", "if-match", stale, 412),
        (true, "PUT", "if-match", "*", 200),
        (true, "PUT", "if-match", &x[1..33], 200),
        (true, "PUT", "if-match", "W/\"9dd4e461268c8034f5c8564e155c67a6\"", 412),
        (false, "PUT", "if-match", x, 404),
        (false, "PUT", "if-match", "*", 404),
        (true, "PUT", "if-none-match", x, 501),
        (true, "DELETE", "if-match", stale, 412),
        (true, "DELETE", "if-match", x, 204),
        (false, "DELETE", "if-match", x, 404),
        (false, "DELETE", "x-none", "", 204),
        (true, "GET", "if-match", x, 200),
        (true, "GET", "if-match", stale, 412),
        (true, "GET", "if-none-match", x, 304),
        (true, "GET", "if-none-match", "\"a\", \"9dd4e461268c8034f5c8564e155c67a6\"", 304),
        (true, "GET", "if-none-match", stale, 200),
        (true, "HEAD", "if-none-match", x, 304),
        (true, "HEAD", "if-match", stale, 412),
        (true, "GET", "if-modified-since", "Fri, 01 Jan 2100 00:00:00 GMT", 304),
        (true, "GET", "if-unmodified-since", "Sat, 01 Jan 2000 00:00:00 GMT", 412),
        (false, "GET", "if-match", x, 404),
    ] {
        match exists {
            true => assert_eq!(store.put("k", "x").await, x),
            false => assert_eq!(store.status("DELETE", "k", &[]).await, 204),
        }
        let answer = store.send(method, "k", &[(condition, value)], "x").await;
        assert_eq!(answer.status(), status, "{exists} {method} {condition}: {value}");
        if status == 304 {
            assert_eq!(etag(&answer), x);
        }
        if status == 404 && method != "HEAD" {
            assert_eq!(element(&answer.text().await.unwrap(), "Code"), "NoSuchKey");
        }
    }
}

#[tokio::test]
async fn ranges_give_the_bytes_asked_for() {
    let store = Store::start().await;
    store.put("k", "0123456789").await;
    for (range, status, body, content_range) in [
        ("bytes=0-3", 206, "0123", "bytes 0-3/10"),
        ("bytes=7-", 206, "789", "bytes 7-9/10"),
        ("bytes=-2", 206, "89", "bytes 8-9/10"),
        ("bytes=5-100", 206, "56789", "bytes 5-9/10"),
    ] {
        let got = store.send("GET", "k", &[("range", range)], "").await;
        assert_eq!((got.status().as_u16(), header(&got, "content-range").as_str()), (status, content_range));
        assert_eq!(got.text().await.unwrap(), body);
    }
    let beyond = store.send("GET", "k", &[("range", "bytes=10-")], "").await;
    assert_eq!((beyond.status().as_u16(), header(&beyond, "content-range").as_str()), (416, "bytes */10"));
}

#[tokio::test]
async fn listings_page_through_everything_in_order() {
    let store = Store::start().await;
    let mut expected: Vec<String> = (0..2500).map(|n| format!("p/{:03}/{n:04}", n % 7)).collect();
    // Written by hand: the store lists what lies there, however it came to be.
    for key in &expected {
        let path = store.dir.path().join(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, key).unwrap();
    }
    expected.sort();
    let (mut found, mut token, mut n_pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = store.get(&format!("?list-type=2&prefix=p/{token}")).await;
        let keys = elements(&page, "Key");
        assert_eq!(element(&page, "KeyCount"), keys.len().to_string());
        found.extend(keys);
        n_pages += 1;
        if element(&page, "IsTruncated") == "false" {
            break;
        }
        token = format!("&continuation-token={}", element(&page, "NextContinuationToken"));
    }
    assert_eq!((n_pages, found == expected), (3, true));

    let (mut found, mut marker) = (Vec::new(), String::new());
    loop {
        let page = store.get(&format!("?prefix=p/&max-keys=999&marker={marker}")).await;
        found.extend(elements(&page, "Key"));
        marker = element(&page, "NextMarker");
        if marker.is_empty() {
            break;
        }
    }
    assert_eq!(found, expected);
    let listed: Vec<String> = store
        .object_store("me")
        .list(Some(&Path::from("p")))
        .map_ok(|it| it.location.to_string())
        .try_collect()
        .await
        .unwrap();
    assert_eq!(listed, expected);
}

#[tokio::test]
async fn listings_group_encode_and_begin_as_asked() {
    let store = Store::start().await;
    for key in ["a", "a/1", "a/2", "b%20%26%3C/1", "c"] {
        store.put(key, "x").await;
    }
    let page = store.get("?list-type=2&delimiter=/").await;
    assert_eq!(elements(&page, "Key"), ["a", "c"]);
    assert_eq!(elements(&page, "Prefix"), ["", "a/", "b &amp;&lt;/"]);
    assert_eq!(element(&page, "Size"), "1");
    assert!(element(&page, "ETag").contains("9dd4e461268c8034f5c8564e155c67a6"));
    let page = store.get("?list-type=2&encoding-type=url&prefix=b").await;
    assert_eq!(elements(&page, "Key"), ["b%20%26%3C/1"]);
    assert_eq!(elements(&store.get("?list-type=2&start-after=a/1").await, "Key"), ["a/2", "b &amp;&lt;/1", "c"]);
    let page = store.get("?list-type=2&max-keys=1&delimiter=/&start-after=a").await;
    assert_eq!(elements(&page, "Prefix"), ["", "a/"]);
    let next = element(&page, "NextContinuationToken");
    let page = store.get(&format!("?list-type=2&max-keys=1&delimiter=/&continuation-token={next}")).await;
    assert_eq!(elements(&page, "Prefix"), ["", "b &amp;&lt;/"]);
    let page = store.get("?list-type=2&max-keys=5000").await;
    assert_eq!(element(&page, "MaxKeys"), "1000");
    assert_eq!(store.status("GET", "?list-type=2&max-keys=-1", &[]).await, 400);
    assert_eq!(store.status("GET", "?list-type=2&continuation-token=!", &[]).await, 400);
}

#[tokio::test]
async fn edits_by_hand_are_seen() {
    let store = Store::start().await;
    let before = store.put("config/dev-1.jsonc", "one").await;
    let path = store.dir.path().join("config/dev-1.jsonc");
    for text in ["two", "six", "ten"] {
        std::fs::write(&path, text).unwrap(); // of the same length, at once, in place
        assert_eq!(store.get("config/dev-1.jsonc").await, text);
        assert_eq!(store.status("PUT", "config/dev-1.jsonc", &[("if-match", &before)]).await, 412);
        let head = store.send("HEAD", "config/dev-1.jsonc", &[], "").await;
        let page = store.get("?list-type=2").await;
        assert_eq!(element(&page, "ETag").replace("&quot;", "\""), etag(&head));
        assert_ne!(etag(&head), before);
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(store.status("GET", "config/dev-1.jsonc", &[]).await, 404);
    std::fs::write(store.dir.path().join("new"), "by hand").unwrap();
    assert_eq!(store.get("new").await, "by hand");
    assert_eq!(elements(&store.get("?list-type=2").await, "Key"), ["new"]);
}

#[tokio::test]
async fn a_restart_keeps_objects_etags_and_metadata() {
    let store = Store::start().await;
    let etag_before = store.put("a", "1").await;
    store.put("a/b", "2").await;
    store.send("PUT", "m", &[("x-amz-meta-k", "v")], "3").await;
    let store = store.restart().await;
    assert_eq!((store.get("a").await, store.get("a/b").await), ("1".into(), "2".into()));
    assert_eq!(etag(&store.send("HEAD", "a", &[], "").await), etag_before);
    assert_eq!(header(&store.send("HEAD", "m", &[], "").await, "x-amz-meta-k"), "v");
    assert_eq!(elements(&store.get("?list-type=2").await, "Key"), ["a", "a/b", "m"]);
}

#[tokio::test]
async fn a_durable_store_works_the_same() {
    let store = Store::start_with(|options| S3Options { durable: true, ..options }).await;
    let tag = store.put("deep/down/k", "1").await;
    assert_eq!(store.status("PUT", "deep/down/k", &[("if-match", &tag)]).await, 200);
    assert_eq!(store.status("DELETE", "deep/down/k", &[]).await, 204);
    assert_eq!(store.status("GET", "deep/down/k", &[]).await, 404);
}

#[tokio::test]
async fn hostile_keys_are_refused_and_touch_nothing() {
    let store = Store::start().await;
    let outside = store.dir.path().join("../outside.txt");
    // Clients tidy such paths up, so they are sent byte by byte.
    for path in [
        "/dev/../outside.txt",
        "/dev/%2e%2e/outside.txt",
        "/dev/a/..%2f..%2foutside.txt",
        "/dev/a/%2e%2e/b",
        "/dev//etc/passwd",
        "/dev/%2Fetc%2Fpasswd",
        "/dev/a%00b",
    ] {
        for method in ["PUT", "GET", "DELETE"] {
            let answer = raw(
                &store,
                &format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx"),
            )
            .await;
            assert!(answer.starts_with("HTTP/1.1 400"), "{method} {path}: {answer}");
            assert!(answer.contains("<Code>InvalidArgument</Code>"), "{answer}");
        }
    }
    assert!(!outside.exists());
    let long = "x".repeat(1025);
    assert_eq!(store.status("PUT", &long, &[]).await, 400);
    store.put(&"y".repeat(1024), "long but fine").await;
    store.put(".s3/lock", "a key like any other").await;
    assert_eq!(store.get(".s3/lock").await, "a key like any other");
    let evil = "..%2f..%2f";
    assert_eq!(store.status("PUT", &format!("k?partNumber=1&uploadId={evil}"), &[]).await, 404);
}

#[tokio::test]
async fn only_the_one_bucket_exists() {
    let store = Store::start().await;
    let at = |path: &str| format!("{}/{path}", store.server.endpoint());
    let code = |method: reqwest::Method, path: &str| {
        let request = store.http.request(method, at(path));
        async move { element(&request.send().await.unwrap().text().await.unwrap(), "Code") }
    };
    for path in ["other/k", "other?list-type=2", "other?location", "other/k?uploads"] {
        let method = if path.contains("uploads") { reqwest::Method::POST } else { reqwest::Method::GET };
        assert_eq!(code(method, path).await, "NoSuchBucket", "{path}");
    }
    assert_eq!(code(reqwest::Method::PUT, "other").await, "NoSuchBucket");
    assert_eq!(store.http.head(at("other")).send().await.unwrap().status(), 404);
    assert_eq!(store.http.head(at("dev")).send().await.unwrap().status(), 200);
    assert_eq!(store.http.put(at("dev")).send().await.unwrap().status(), 200);
    let buckets = store.http.get(at("")).send().await.unwrap().text().await.unwrap();
    assert_eq!(elements(&buckets, "Name"), ["dev"]);
    let location = store.http.get(at("dev?location")).send().await.unwrap().text().await.unwrap();
    assert!(location.contains("dev"), "{location}");
}

#[tokio::test]
async fn the_bucket_may_stand_in_the_host_name() {
    let store = Store::start().await;
    store.put("a", "1").await;
    let got = raw(&store, "GET /a HTTP/1.1\r\nhost: dev.localhost:9\r\nconnection: close\r\n\r\n").await;
    assert!(got.starts_with("HTTP/1.1 200") && got.ends_with("\r\n\r\n1"), "{got}");
    let got = raw(&store, "GET /dev/a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await;
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
}

#[tokio::test]
async fn any_signature_is_accepted_unless_one_is_required() {
    let store = Store::start().await;
    store.put("k", "1").await;
    let path = Path::from("k");
    for secret in ["dev", "wrong"] {
        object_store_at(&store.server.endpoint(), "someone", secret).get(&path).await.unwrap();
    }
    let presigned =
        "k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=a%2Fb%2Fc%2Fs3%2Faws4_request&X-Amz-Signature=0";
    assert_eq!(store.status("GET", presigned, &[]).await, 200);
    let sigv4a = "AWS4-ECDSA-P256-SHA256 Credential=me/20260101/s3/aws4_request, SignedHeaders=host, Signature=00";
    assert_eq!(store.status("GET", "k", &[("authorization", sigv4a)]).await, 200);

    let strict = Store::start_with(|options| S3Options { require_auth: true, ..options }).await;
    let endpoint = strict.server.endpoint();
    let right = object_store_at(&endpoint, "anyone", "dev");
    right.put(&path, "1".into()).await.unwrap();
    assert_eq!(right.get(&path).await.unwrap().bytes().await.unwrap(), "1");
    assert!(object_store_at(&endpoint, "anyone", "wrong").get(&path).await.is_err());
    assert_eq!(strict.status("GET", "k", &[]).await, 403);
}

#[tokio::test]
async fn chunked_signed_bodies_and_trailers_are_decoded_and_verified() {
    let store = Store::start().await;
    let headers = [
        ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"),
        ("x-amz-decoded-content-length", "11"),
        ("content-encoding", "aws-chunked,gzip"),
        ("authorization", "AWS4-HMAC-SHA256 Credential=me/20260101/dev/s3/aws4_request, Signature=0"),
    ];
    let body = |crc32: &str| {
        let chunks = "5;chunk-signature=0\r\nhello\r\n6;chunk-signature=0\r\n world\r\n0;chunk-signature=0\r\n";
        format!("{chunks}x-amz-checksum-crc32:{crc32}\r\nx-amz-trailer-signature:0\r\n\r\n")
    };
    assert_eq!(store.send("PUT", "k", &headers, &body("DUoRhQ==")).await.status(), 200);
    assert_eq!(store.get("k").await, "hello world");
    assert_eq!(header(&store.send("HEAD", "k", &[], "").await, "content-encoding"), "gzip");
    let refused = store.send("PUT", "k2", &headers, &body("AAAAAA==")).await;
    assert_eq!(element(&refused.text().await.unwrap(), "Code"), "BadDigest");
    let short = store.send("PUT", "k2", &headers, "5\r\nhel").await;
    assert_eq!(element(&short.text().await.unwrap(), "Code"), "IncompleteBody");
    assert_eq!(store.status("GET", "k2", &[]).await, 404);
}

#[tokio::test]
async fn digests_that_are_sent_are_checked() {
    let store = Store::start().await;
    for (name, right, wrong) in [
        ("content-md5", "XUFAKrxLKna5cZ2REBfFkg==", "AAAAAAAAAAAAAAAAAAAAAA=="),
        ("x-amz-checksum-sha256", "LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=", "AAAA"),
        ("x-amz-checksum-crc32", "NhCmhg==", "AAAAAA=="),
        (
            "x-amz-content-sha256",
            "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
            "0000000000000000000000000000000000000000000000000000000000000000",
        ),
    ] {
        assert_eq!(store.send("PUT", "k", &[(name, right)], "hello").await.status(), 200, "{name}");
        assert_eq!(store.send("PUT", "k", &[(name, wrong)], "hello").await.status(), 400, "{name}");
    }
}

#[tokio::test]
async fn copies_carry_content_metadata_and_conditions() {
    let store = Store::start().await;
    store.send("PUT", "from", &[("x-amz-meta-a", "1")], "text").await;
    let tag = etag(&store.send("HEAD", "from", &[], "").await);
    assert_eq!(store.status("PUT", "to", &[("x-amz-copy-source", "/dev/from")]).await, 200);
    assert_eq!(store.get("to").await, "text");
    assert_eq!(header(&store.send("HEAD", "to", &[], "").await, "x-amz-meta-a"), "1");
    for (condition, value, status) in [
        ("if-none-match", "*", 412),
        ("if-match", "\"0\"", 412),
        ("if-match", &tag, 200),
        ("x-amz-copy-source-if-match", "\"0\"", 412),
        ("x-amz-copy-source-if-none-match", &tag, 412),
        ("x-amz-copy-source-if-none-match", "\"0\"", 200),
    ] {
        let headers = [("x-amz-copy-source", "dev/from"), (condition, value)];
        assert_eq!(store.status("PUT", "to", &headers).await, status, "{condition}: {value}");
    }
    assert_eq!(store.status("PUT", "to", &[("x-amz-copy-source", "dev/none")]).await, 404);
    assert_eq!(store.status("PUT", "to", &[("x-amz-copy-source", "other/from")]).await, 404);
    assert_eq!(store.status("PUT", "from", &[("x-amz-copy-source", "dev/from")]).await, 400);
}

#[tokio::test]
async fn many_objects_are_deleted_in_one_request() {
    let store = Store::start().await;
    store.put("a", "1").await;
    store.put("b", "2").await;
    let body = "<Delete><Object><Key>a</Key></Object><Object><Key>none</Key></Object>\
                <Object><Key>b</Key><ETag>\"0\"</ETag></Object><Object><Key>../x</Key></Object></Delete>";
    let answer = store.send("POST", "?delete", &[], body).await;
    assert_eq!(answer.status(), 200);
    let answer = answer.text().await.unwrap();
    assert_eq!(elements(&answer, "Code"), ["PreconditionFailed", "InvalidArgument"]);
    assert_eq!(elements(&store.get("?list-type=2").await, "Key"), ["b"]);
}

#[tokio::test]
async fn multipart_uploads_assemble_list_and_abort() {
    let store = Store::start().await;
    let begin = || async {
        let answer = store.send("POST", "big?uploads", &[("x-amz-meta-a", "1")], "").await;
        element(&answer.text().await.unwrap(), "UploadId")
    };
    let id = begin().await;
    let large = "x".repeat(5 * 1024 * 1024);
    let one = etag(&store.send("PUT", &format!("big?partNumber=1&uploadId={id}"), &[], &large).await);
    let two = etag(&store.send("PUT", &format!("big?partNumber=2&uploadId={id}"), &[], "end").await);
    let parts = store.get(&format!("big?uploadId={id}")).await;
    assert_eq!(elements(&parts, "PartNumber"), ["1", "2"]);
    assert_eq!(elements(&parts, "Size"), ["5242880", "3"]);
    assert_eq!(elements(&store.get("?uploads").await, "UploadId"), [id.as_str()]);
    assert_eq!(store.status("GET", "big", &[]).await, 404);

    let part = |n: u8, etag: &str| format!("<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>");
    let body = |parts: &[String]| format!("<CompleteMultipartUpload>{}</CompleteMultipartUpload>", parts.concat());
    let path = format!("big?uploadId={id}");
    for (parts, code) in [
        (vec![part(2, &two), part(1, &one)], "InvalidPartOrder"),
        (vec![part(1, &two)], "InvalidPart"),
        (vec![part(1, &one), part(3, &two)], "InvalidPart"),
    ] {
        let answer = store.send("POST", &path, &[], &body(&parts)).await;
        assert_eq!(element(&answer.text().await.unwrap(), "Code"), code);
    }
    let whole = body(&[part(1, &one), part(2, &two)]);
    store.put("big", "in the way").await;
    assert_eq!(store.send("POST", &path, &[("if-none-match", "*")], &whole).await.status(), 412);
    assert_eq!(store.send("DELETE", "big", &[], "").await.status(), 204);
    let done = store.send("POST", &path, &[("if-none-match", "*")], &whole).await;
    assert_eq!(done.status(), 200);
    let got = store.send("GET", "big", &[], "").await;
    assert_eq!(header(&got, "x-amz-meta-a"), "1");
    assert_eq!(got.text().await.unwrap(), large + "end");
    assert_eq!(store.send("POST", &path, &[], &whole).await.status(), 404);

    let id = begin().await;
    let small = etag(&store.send("PUT", &format!("big?partNumber=1&uploadId={id}"), &[], "s").await);
    let copied = store
        .send(
            "PUT",
            &format!("big?partNumber=2&uploadId={id}"),
            &[("x-amz-copy-source", "dev/big"), ("x-amz-copy-source-range", "bytes=0-3")],
            "",
        )
        .await;
    let copied = element(&copied.text().await.unwrap(), "ETag").replace("&quot;", "\"");
    let answer =
        store.send("POST", &format!("big?uploadId={id}"), &[], &body(&[part(1, &small), part(2, &copied)])).await;
    assert_eq!(element(&answer.text().await.unwrap(), "Code"), "EntityTooSmall");
    assert_eq!(store.status("DELETE", &format!("big?uploadId={id}"), &[]).await, 204);
    assert_eq!(store.status("DELETE", &format!("big?uploadId={id}"), &[]).await, 404);
    assert!(elements(&store.get("?uploads").await, "UploadId").is_empty());
}

#[tokio::test]
async fn object_store_finds_all_it_needs() {
    let store = Store::start().await;
    let s3 = store.object_store("dev-server-1");
    let path = Path::from("shard/dev-1/leader.json");
    let put = |body: &'static str, mode: PutMode| {
        let (s3, path) = (&s3, &path);
        async move { s3.put_opts(path, PutPayload::from(body), PutOptions::from(mode)).await }
    };
    let first = put("1", PutMode::Create).await.unwrap();
    assert!(matches!(put("2", PutMode::Create).await, Err(Error::AlreadyExists { .. })));
    let version = |etag: &Option<String>| PutMode::Update(UpdateVersion { e_tag: etag.clone(), version: None });
    let second = put("2", version(&first.e_tag)).await.unwrap();
    assert!(matches!(put("3", version(&first.e_tag)).await, Err(Error::Precondition { .. })));
    let got = s3.get(&path).await.unwrap();
    assert_eq!(got.meta.e_tag, second.e_tag);
    assert_eq!(got.bytes().await.unwrap(), "2");
    assert_eq!(s3.get_range(&path, 0..1).await.unwrap(), "2");
    let listed = s3.list_with_delimiter(Some(&Path::from("shard"))).await.unwrap();
    assert_eq!(listed.common_prefixes, [Path::from("shard/dev-1")]);
    s3.copy(&path, &Path::from("copy")).await.unwrap();
    s3.delete(&path).await.unwrap();
    assert!(matches!(s3.get(&path).await, Err(Error::NotFound { .. })));
    assert!(matches!(put("4", version(&second.e_tag)).await, Err(Error::Precondition { .. })));
    let mut upload = s3.put_multipart_opts(&path, PutMultipartOptions::default()).await.unwrap();
    upload.put_part(vec![b'a'; 5 << 20].into()).await.unwrap();
    upload.put_part("b".into()).await.unwrap();
    upload.complete().await.unwrap();
    assert_eq!(s3.head(&path).await.unwrap().size, (5 << 20) + 1);
    let stats = store.server.stats();
    assert_eq!(stats.clients["dev-server-1"]["DeleteObjects"] + stats.operations.get("DeleteObject").unwrap_or(&0), 1);
}

#[tokio::test]
async fn requests_are_counted_by_operation_and_client() {
    let store = Store::start().await;
    store.put("a", "1").await;
    store.get("a").await;
    store.get("a").await;
    store.status("GET", "none", &[]).await;
    let at = format!("{}/-/stats", store.server.endpoint());
    let text = store.http.get(&at).send().await.unwrap().text().await.unwrap();
    let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(stats["operations"], serde_json::json!({"GetObject": 3, "PutObject": 1}));
    assert_eq!((&stats["requests"], &stats["clients"][""]["GetObject"]), (&4.into(), &3.into()));
    assert_eq!(stats["statuses"], serde_json::json!({"200": 3, "404": 1}));
    store.http.delete(&at).send().await.unwrap();
    assert_eq!(store.server.stats().requests, 0);
    let health = store.http.get(format!("{}/-/health", store.server.endpoint())).send().await.unwrap();
    assert_eq!(health.status(), 200);
}

#[tokio::test]
async fn http_2_is_spoken_to_those_who_ask() {
    let store = Store::start().await;
    store.put("k", "1").await;
    let client = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let at = format!("{}/dev/k", store.server.endpoint());
    let got = client.get(&at).send().await.unwrap();
    assert_eq!((got.version(), got.status().as_u16()), (reqwest::Version::HTTP_2, 200));
    assert_eq!(client.put(&at).header("if-none-match", "*").body("2").send().await.unwrap().status(), 412);
}

#[tokio::test]
async fn what_is_not_there_says_so() {
    let store = Store::start().await;
    let answer = store.send("GET", "?policy", &[], "").await;
    assert_eq!(answer.status(), 501);
    let body = answer.text().await.unwrap();
    assert!(body.contains("<Code>NotImplemented</Code>") && body.contains("<RequestId>"), "{body}");
}

#[tokio::test]
async fn a_directory_in_use_and_a_bad_bucket_name_are_refused_at_start() {
    let store = Store::start().await;
    let second = S3Server::start(S3Options::new(store.dir.path())).await;
    let error = format!("{:#}", second.err().unwrap());
    assert!(error.contains("is another server using it?"), "{error}");
    let other = tempfile::tempdir().unwrap();
    assert!(S3Server::start(S3Options { bucket: "x".into(), ..S3Options::new(other.path()) }).await.is_err());
    store.server.stop().await;
    S3Server::start(S3Options::new(store.dir.path())).await.unwrap().stop().await;
}

#[tokio::test]
async fn stopping_does_not_wait_for_idle_connections() {
    let store = Store::start().await;
    store.put("a", "1").await; // leaves a connection in the client's pool
    let (addr, began) = (store.server.addr(), tokio::time::Instant::now());
    store.server.stop().await;
    assert!(began.elapsed() < std::time::Duration::from_millis(1900), "the grace period is 2 s");
    let refused = std::net::TcpStream::connect(addr);
    assert!(refused.is_err(), "nobody listens any more");
}

/// Sends bytes as they are, which must ask for the connection to be closed, and gives back the whole answer.
async fn raw(store: &Store, request: &str) -> String {
    let (addr, request) = (store.server.addr(), request.to_owned());
    let exchange = move || {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}
