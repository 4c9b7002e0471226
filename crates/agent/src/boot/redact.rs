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
        let Some(name) = secret_name(&text[kept..sign]) else { continue };
        let (from, to) = value(text, kept + name, sign);
        if from < to {
            out.push_str(&text[kept..from]);
            out.push_str(VALUE_GONE);
            (kept, at) = (to, to);
        }
    }
    out.push_str(&text[kept..]);
    out
}

/// Where the name at the end of `text` begins, if it means a secret.
fn secret_name(text: &str) -> Option<usize> {
    // The signs may be `+=`, `?=` or `:=`, and the name an index.
    let text = text.trim_end_matches([' ', '\t', '"', '\'', '`', '\\', '+', '?', ':', ']']);
    let length = text
        .bytes()
        .rev()
        .take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
        .count();
    let start = text.len() - length;
    let name = text[start..].to_ascii_uppercase();
    let means_secret =
        ["SECRET", "TOKEN", "_KEY", "-KEY", "APIKEY", "PASSWD", "PASSPHRASE"].iter().any(|end| name.ends_with(end))
            || name.contains("PASSWORD");
    means_secret.then_some(start)
}

/// Where the value begins and ends that the sign at `sign` gives to the name at `name`.
fn value(text: &str, name: usize, sign: usize) -> (usize, usize) {
    let bytes = text.as_bytes();
    let line = text[..name].rfind('\n').map_or(0, |at| at + 1);
    let line_end = text[sign..].find('\n').map_or(text.len(), |at| sign + at);
    let is_shell = bytes[sign] == b'=';
    if !is_shell && let Some(lines) = block(&text[line..], sign - line, line_end - line) {
        return (line + lines.0, line + lines.1);
    }
    // `==`, `:=` and `=>` are one sign.
    let from = sign + bytes[sign..].iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'=' | b':' | b'>')).count();
    let outer = around(bytes, line, name, sign, line_end);
    // Quoted inside something quoted: up to the same quote again, over lines if need be.
    for quote in ["\\\"", "\\'"] {
        if let Some(inner) = text[from..].strip_prefix(quote) {
            let start = from + quote.len();
            let close = start + closing(inner, quote);
            let after = text.len().min(close + quote.len());
            if !is_shell {
                return (start, close);
            }
            // A shell reads it otherwise; the longer reading counts.
            let ends = outer.open.is_none() && bytes.get(after).is_none_or(u8::is_ascii_whitespace);
            let rest = if ends { after } else { word_end(bytes, after, outer, outer.open) };
            let end = word_end(bytes, from, outer, outer.open).max(rest);
            return if end == after { (start, close) } else { (from, end) };
        }
    }
    let first = bytes.get(from).copied().filter(|byte| is_quote(*byte));
    match first {
        Some(_) if !is_shell => (from + 1, word_end(bytes, from, Quoting::default(), first)),
        _ if !is_shell => (from, word_end(bytes, from, outer, outer.open).max(line_end)),
        first => {
            let end = word_end(bytes, from, outer, outer.open);
            match first.filter(|_| outer.open.is_none()) {
                // Quotes around all of it stay, and so does one that is never closed.
                Some(quote) if from + 1 < end && bytes[end - 1] == quote => (from + 1, end - 1),
                Some(quote) if !bytes[from + 1..end].contains(&quote) => (from + 1, end),
                _ => (from, end),
            }
        }
    }
}

/// The lines of a YAML block whose header follows the sign: all that stand further in than its name.
fn block(text: &str, sign: usize, line_end: usize) -> Option<(usize, usize)> {
    let header = text[sign + 1..line_end].split(" #").next()?;
    let mut words = header.split_whitespace();
    let style = words.next_back()?.strip_prefix(['|', '>'])?;
    let is_header = style.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'+' | b'-'))
        && words.all(|word| word.starts_with(['!', '&']));
    let depth = text.bytes().take_while(|byte| matches!(byte, b' ' | b'-')).count();
    let (mut at, mut from, mut to) = (line_end, None, line_end);
    for line in text[line_end..].split_inclusive('\n') {
        let body = line.trim();
        let inset = line.len() - line.trim_start().len();
        if !body.is_empty() && inset <= depth {
            break;
        }
        if !body.is_empty() {
            from.get_or_insert(at + inset);
            to = at + inset + body.len();
        }
        at += line.len();
    }
    from.filter(|_| is_header).map(|from| (from, to))
}

/// What a shell has open while it reads a word.
#[derive(Clone, Copy, Default)]
struct Quoting {
    open: Option<u8>,
    /// Nothing can be escaped inside.
    literal: bool,
}

impl Quoting {
    /// Takes in the byte at `at`, with what it escapes; says where the next one is.
    fn step(&mut self, bytes: &[u8], at: usize) -> usize {
        let byte = bytes[at];
        if byte == b'\\' && !self.literal {
            return at + 2;
        }
        if self.open == Some(byte) {
            *self = Self::default();
        } else if self.open.is_none() && is_quote(byte) {
            *self = Self { open: Some(byte), literal: byte == b'\'' && !bytes[..at].ends_with(b"$") };
        }
        at + 1
    }
}

fn is_quote(byte: u8) -> bool {
    matches!(byte, b'"' | b'\'' | b'`')
}

/// The quotes in which the name stands together with its value, as in `'API_TOKEN=a b'`.
fn around(bytes: &[u8], line: usize, name: usize, sign: usize, line_end: usize) -> Quoting {
    let mut quoting = Quoting::default();
    let is_next_to_name = line < name && is_quote(bytes[name - 1]);
    let mut at = if is_next_to_name { name - 1 } else { line };
    while at < sign {
        // Within a word it is an apostrophe.
        let in_word = line < at && bytes[at - 1].is_ascii_alphanumeric();
        let is_letter = in_word && !is_next_to_name && quoting.open.is_none() && is_quote(bytes[at]);
        at = if is_letter { at + 1 } else { quoting.step(bytes, at) };
    }
    // One that merely stands somewhere before must be closed on the same line to count.
    match quoting.open {
        Some(open) if !is_next_to_name && !bytes[sign..line_end].contains(&open) => Quoting::default(),
        _ => quoting,
    }
}

/// Where the shell word that goes on at `at` ends: before white space outside of quotes, or before a quote of the kind
/// `last` that ends it.
fn word_end(bytes: &[u8], mut at: usize, mut quoting: Quoting, last: Option<u8>) -> usize {
    while at < bytes.len() {
        if quoting.open.is_none() && bytes[at].is_ascii_whitespace() {
            return at;
        }
        let was = quoting.open;
        let next = quoting.step(bytes, at);
        let ends = |byte: &u8| byte.is_ascii_whitespace() || b",}]):;".contains(byte);
        if was.is_some() && was == last && quoting.open.is_none() && bytes.get(next).is_none_or(ends) {
            return at;
        }
        at = next;
    }
    bytes.len()
}

/// Where the escaped quote that closes is; the end if there is none.
fn closing(text: &str, quote: &str) -> usize {
    let found = text.match_indices(quote).map(|(at, _)| at).find(|at| !text[..*at].ends_with('\\'));
    found.unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    /// As shells print what they run, and as people write it.
    #[test]
    fn values_go_to_the_end_of_their_shell_word() {
        for (text, expected) in [
            (r"+ DB_PASSWORD='it'\''s secret' next", "+ DB_PASSWORD='[redacted]' next"),
            (r#"+ DB_PASSWORD='it'"'"'s secret' next"#, "+ DB_PASSWORD='[redacted]' next"),
            (r"+ API_TOKEN=$'line1\nfoo\'s bar' next", "+ API_TOKEN=[redacted] next"),
            (r"TOKEN=a\ b next", "TOKEN=[redacted] next"),
            (r#"X_KEY="abc"def next"#, "X_KEY=[redacted] next"),
            (r#"X_KEY=abc"d e" next"#, "X_KEY=[redacted] next"),
            ("API_KEY+=abc next", "API_KEY+=[redacted] next"),
            ("API_KEY ?= abc next", "API_KEY ?= [redacted] next"),
            ("SECRETS[api_token]=abc next", "SECRETS[api_token]=[redacted] next"),
            (r"+ export 'DB_PASSWORD=it'\''s secret' next", "+ export 'DB_PASSWORD=[redacted]' next"),
            ("+ export $'DB_PASSWORD=two\\nlines and more' next", "+ export $'DB_PASSWORD=[redacted]' next"),
            ("+ curl -d 'user=a&password=b c' https://d", "+ curl -d 'user=a&password=[redacted]' https://d"),
            ("it can't use API_TOKEN='a b' or c'est ça", "it can't use API_TOKEN='[redacted]' or c'est ça"),
            (r#"{"message":"API_TOKEN=a refused","n":1}"#, r#"{"message":"API_TOKEN=[redacted]","n":1}"#),
            ("db_password = \"\"\"a\nb c\"\"\" next", "db_password = \"[redacted]\" next"),
        ] {
            assert_eq!(redact(text), expected);
            assert_eq!(redact(&redact(text)), expected, "twice");
        }
    }

    #[test]
    fn values_in_yaml_go_with_all_their_lines() {
        for (text, expected) in [
            ("client_secret: |\n  a\n\n    b\nnext: 1", "client_secret: |\n  [redacted]\nnext: 1"),
            (
                "a:\n  - api_token: >- # note\n      b\n    name: c\n",
                "a:\n  - api_token: >- # note\n      [redacted]\n    name: c\n",
            ),
            ("tls_key: !!binary |2\n  TUM0\n", "tls_key: !!binary |2\n  [redacted]\n"),
            ("password: 'it''s secret'\nnext: 1", "password: '[redacted]'\nnext: 1"),
            ("password: a |\n  next: 1", "password: [redacted]\n  next: 1"),
            ("password: |\nnext: 1", "password: [redacted]\nnext: 1"),
        ] {
            assert_eq!(redact(text), expected);
            assert_eq!(redact(&redact(text)), expected, "twice");
        }
    }

    /// One piece of a shell word, in one of the ways to quote it.
    fn quoted(piece: &str, way: usize) -> String {
        let escaped = |which: &str| {
            piece.chars().map(|c| if which.contains(c) { format!("\\{c}") } else { c.to_string() }).collect::<String>()
        };
        match way {
            0 => format!("'{}'", piece.replace('\'', r"'\''")),
            1 => format!("'{}'", piece.replace('\'', r#"'"'"'"#)),
            2 => format!("\"{}\"", escaped("\\\"$`")),
            3 => format!("$'{}'", escaped("\\'").replace('\n', "\\n")),
            // An escaped end of line is none at all, so it is quoted.
            _ => escaped("\\\"'$`;&|() ").replace('\n', "'\n'"),
        }
    }

    proptest! {
        #[test]
        fn secret_never_shows_however_it_is_quoted(
            pieces in prop::collection::vec(("[a \n'\"`\\\\$;&|()ü=:]{0,3}", 0..5usize), 1..5),
            whole in 0..4usize,
            sign in prop::sample::select(vec!["=", "+=", "?="]),
        ) {
            let secret: String = pieces.iter().map(|(around, _)| format!("{around}hunter2")).collect();
            let word: String =
                pieces.iter().map(|(around, way)| quoted(&format!("{around}hunter2"), *way)).collect();
            for text in [
                format!("+ API_TOKEN{sign}{word} next\n"),
                format!("it can't take DB_PASSWORD{sign}{word}\nnext"),
                format!("+ export {} next", quoted(&format!("API_TOKEN{sign}{secret}"), whole)),
            ] {
                let once = redact(&text);
                prop_assert!(!once.contains("hunter2"), "{text:?} became {once:?}");
            }
        }

        #[test]
        fn nonsense_is_survived(text in "([ \n'\"`\\\\$=:|>#-]|a_KEY|ü|☃){0,30}") {
            redact(&text);
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
