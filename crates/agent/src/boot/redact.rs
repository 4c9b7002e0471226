//! Taking secrets out of log lines before they leave the machine. Whatever is in doubt is taken out.

const KEY_GONE: &str = "[private key redacted]";
const TOKEN_GONE: &str = "[token redacted]";
const VALUE_GONE: &str = "[redacted]";

/// Takes out private keys in PEM, JSON web tokens, and what is assigned to names that mean secrets.
pub(crate) fn redact(text: &str) -> String {
    assigned_values(&tokens(&private_keys(text)))
}

fn private_keys(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    // An end without a beginning: the beginning was cut off, and all before it may be key.
    if let Some((end, after)) = boundary(rest, "-----END ")
        && boundary(rest, "-----BEGIN ").is_none_or(|(begin, _)| end < begin)
    {
        out.push_str(KEY_GONE);
        rest = &rest[after..];
    }
    while let Some((begin, _)) = boundary(rest, "-----BEGIN ") {
        out.push_str(&rest[..begin]);
        out.push_str(KEY_GONE);
        // Without an end, all of the rest may be key.
        rest = boundary(&rest[begin..], "-----END ").map_or("", |(_, after)| &rest[begin + after..]);
    }
    out.push_str(rest);
    out
}

/// The first boundary line of a private key: where it starts and where it ends.
fn boundary(text: &str, kind: &str) -> Option<(usize, usize)> {
    text.match_indices(kind).find_map(|(at, _)| {
        let label = &text[at + kind.len()..];
        let length = label.find("-----")?;
        // A label is short and on one line; anything else is prose with dashes.
        let is_key = length <= 64 && label[..length].ends_with("PRIVATE KEY") && !label[..length].contains('\n');
        is_key.then(|| (at, at + kind.len() + length + "-----".len()))
    })
}

fn tokens(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let (mut kept, mut at) = (0, 0);
    while let Some(found) = text[at..].find("eyJ") {
        let start = at + found;
        let after_name = start == 0 || !is_token_byte(bytes[start - 1]);
        match token_end(bytes, start).filter(|_| after_name) {
            Some(end) => {
                out.push_str(&text[kept..start]);
                out.push_str(TOKEN_GONE);
                (kept, at) = (end, end);
            }
            None => at = start + "eyJ".len(),
        }
    }
    out.push_str(&text[kept..]);
    out
}

/// Three parts of base64url, joined by dots; the last may be missing, for a token that was cut is half a secret still.
fn token_end(bytes: &[u8], start: usize) -> Option<usize> {
    let part = |from: usize| from + bytes[from..].iter().take_while(|byte| is_token_byte(**byte)).count();
    let header = part(start);
    if header < start + 8 || bytes.get(header) != Some(&b'.') {
        return None;
    }
    let claims = part(header + 1);
    if claims < header + 9 {
        return None;
    }
    Some(if bytes.get(claims) == Some(&b'.') { part(claims + 1) } else { claims })
}

fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

fn assigned_values(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut kept, mut at) = (0, 0);
    while let Some(found) = text[at..].find(['=', ':']) {
        let sign = at + found;
        at = sign + 1;
        if !is_secret_name(&text[kept..sign]) {
            continue;
        }
        let (from, to) = value(text, sign);
        if from < to {
            out.push_str(&text[kept..from]);
            out.push_str(VALUE_GONE);
            (kept, at) = (to, to);
        }
    }
    out.push_str(&text[kept..]);
    out
}

/// Whether the name at the end of `text` means a secret.
fn is_secret_name(text: &str) -> bool {
    let text = text.trim_end_matches([' ', '\t']).trim_end_matches(['"', '\'', '`', '\\']);
    let length = text
        .bytes()
        .rev()
        .take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
        .count();
    let name = text[text.len() - length..].to_ascii_uppercase();
    ["SECRET", "TOKEN", "_KEY", "-KEY", "APIKEY", "PASSWD", "PASSPHRASE"].iter().any(|end| name.ends_with(end))
        || name.contains("PASSWORD")
}

/// Where the value after the sign at `sign` begins and ends.
fn value(text: &str, sign: usize) -> (usize, usize) {
    let bytes = text.as_bytes();
    // `==`, `:=` and `=>` are one sign.
    let from = sign + bytes[sign..].iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'=' | b':' | b'>')).count();
    let rest = &text[from..];
    // Quoted, or quoted inside something quoted: up to the same quote again, over lines if need be.
    for quote in ["\\\"", "\\'", "\"", "'", "`"] {
        if let Some(inner) = rest.strip_prefix(quote) {
            let start = from + quote.len();
            return (start, start + closing(inner, quote));
        }
    }
    let ends = if bytes[sign] == b'=' { |c: char| c.is_whitespace() } else { |c: char| c == '\n' };
    (from, from + rest.find(ends).unwrap_or(rest.len()))
}

/// Where the closing quote is; the end if there is none.
fn closing(text: &str, quote: &str) -> usize {
    text.match_indices(quote)
        .map(|(at, _)| at)
        .find(|at| 1 < quote.len() || quote == "'" || !text[..*at].ends_with('\\'))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_keys_go_and_certificates_stay() {
        for label in
            ["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY", "OPENSSH PRIVATE KEY", "ENCRYPTED PRIVATE KEY"]
        {
            let text = format!("before\n-----BEGIN {label}-----\nMC4CAQ\nAwBQY\n-----END {label}-----\nafter\n");
            assert_eq!(redact(&text), format!("before\n{KEY_GONE}\nafter\n"));
        }
        let escaped = r#"{"key":"-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----\n","n":1}"#;
        assert!(!redact(escaped).contains("MC4CAQ"));
        assert!(redact(escaped).contains("\"n\":1"));
        let certificate = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
        assert_eq!(redact(certificate), certificate);
    }

    #[test]
    fn half_a_private_key_goes_too() {
        assert_eq!(redact("AwBQY\nMC4CAQ\n-----END PRIVATE KEY-----\nafter"), format!("{KEY_GONE}\nafter"));
        assert_eq!(redact("before\n-----BEGIN PRIVATE KEY-----\nMC4CAQ"), format!("before\n{KEY_GONE}"));
        let end_first =
            "AwBQY\n-----END PRIVATE KEY-----\na\n-----BEGIN PRIVATE KEY-----\nX\n-----END PRIVATE KEY-----\nb";
        assert_eq!(redact(end_first), format!("{KEY_GONE}\na\n{KEY_GONE}\nb"));
        let two = "a\n-----BEGIN PRIVATE KEY-----\nX\n-----END PRIVATE KEY-----\nb\n-----BEGIN PRIVATE KEY-----\nY";
        assert_eq!(redact(two), format!("a\n{KEY_GONE}\nb\n{KEY_GONE}"));
    }

    #[test]
    fn tokens_go_wherever_they_stand() {
        let token = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJrbmMwNiJ9.c2lnbmF0dXJl_-Q";
        for (text, expected) in [
            (format!("nonce {token} used"), format!("nonce {TOKEN_GONE} used")),
            (
                format!("curl -H 'Authorization: Bearer {token}'"),
                format!("curl -H 'Authorization: Bearer {TOKEN_GONE}'"),
            ),
            (format!("{token}\n{token}"), format!("{TOKEN_GONE}\n{TOKEN_GONE}")),
            (token[..40].to_owned(), TOKEN_GONE.to_owned()),
            ("eyJ is how they begin".to_owned(), "eyJ is how they begin".to_owned()),
            ("see www.example.com".to_owned(), "see www.example.com".to_owned()),
        ] {
            assert_eq!(redact(&text), expected);
        }
    }

    #[test]
    fn values_of_secret_names_go_and_others_stay() {
        for (text, expected) in [
            ("+ DB_PASSWORD=hunter2 start", "+ DB_PASSWORD=[redacted] start"),
            ("export API_TOKEN='a b' next", "export API_TOKEN='[redacted]' next"),
            ("AWS_SECRET_ACCESS_KEY=\"x\\\"y\" z", "AWS_SECRET_ACCESS_KEY=\"[redacted]\" z"),
            ("client_secret: correct horse\nnext: line", "client_secret: [redacted]\nnext: line"),
            (r#"{"db_password":"x","port":1}"#, r#"{"db_password":"[redacted]","port":1}"#),
            (r#"{"m":"{\"api_token\":\"x\",\"n\":2}"}"#, r#"{"m":"{\"api_token\":\"[redacted]\",\"n\":2}"}"#),
            ("password = hunter2", "password = [redacted]"),
            ("--registry-token=abc pull", "--registry-token=[redacted] pull"),
            ("SIGNING_KEY='two\nlines' end", "SIGNING_KEY='[redacted]' end"),
            ("API_TOKEN='never closed", "API_TOKEN='[redacted]"),
            ("API_TOKEN=\nnext", "API_TOKEN=\nnext"),
            ("KEYBOARD=de monkey: yes", "KEYBOARD=de monkey: yes"),
            ("error: connection refused", "error: connection refused"),
        ] {
            assert_eq!(redact(text), expected);
            assert_eq!(redact(&redact(text)), expected, "twice");
        }
    }

    #[test]
    fn any_text_is_survived() {
        for text in [
            "",
            "=",
            "ü_TOKEN=ü",
            "PASSWORD:",
            "_KEY='",
            "-----BEGIN ",
            "eyJ",
            "a_KEY=\\\"",
            "☃-----END PRIVATE KEY-----☃",
        ] {
            let once = redact(text);
            assert_eq!(redact(&once), once);
        }
    }
}
