//! Comments and trailing commas, blanked in place, so that the parser's line and column stay true.

/// Replaces comments and commas before a closing bracket by spaces. Strings are left alone.
pub(super) fn blank(text: &[u8]) -> Vec<u8> {
    let mut out = text.to_vec();
    let mut comma = None;
    let mut at = 0;
    while at < out.len() {
        match out[at] {
            b'"' => {
                comma = None;
                at = string_end(&out, at);
                continue;
            }
            b'/' if out.get(at + 1) == Some(&b'/') => {
                while at < out.len() && out[at] != b'\n' {
                    out[at] = b' ';
                    at += 1;
                }
                continue;
            }
            b'/' if out.get(at + 1) == Some(&b'*') => {
                let end = out[at + 2..].windows(2).position(|it| it == b"*/").map_or(out.len(), |it| at + it + 4);
                for byte in &mut out[at..end] {
                    if *byte != b'\n' {
                        *byte = b' ';
                    }
                }
                at = end;
                continue;
            }
            b',' => comma = Some(at),
            b'}' | b']' => {
                if let Some(comma) = comma.take() {
                    out[comma] = b' ';
                }
            }
            byte if byte.is_ascii_whitespace() => {}
            _ => comma = None,
        }
        at += 1;
    }
    out
}

/// The first byte after the string that begins at `at`.
fn string_end(text: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while at < text.len() {
        match text[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_trailing_commas_vanish_in_place() {
        let text = "{ // size\n \"a\": \"//, }\", /* x\n y */ \"b\": [1, 2, ], }";
        let blanked = String::from_utf8(blank(text.as_bytes())).unwrap();
        assert_eq!(blanked.len(), text.len());
        assert_eq!(blanked.matches('\n').count(), 2);
        let value: serde_json::Value = serde_json::from_str(&blanked).unwrap();
        assert_eq!(value, serde_json::json!({ "a": "//, }", "b": [1, 2] }));
    }

    #[test]
    fn broken_text_is_left_for_the_parser() {
        for text in ["\"open", "/* open", "{,}", "\"\\", "/", "//"] {
            assert_eq!(blank(text.as_bytes()).len(), text.len());
        }
        assert!(serde_json::from_slice::<serde_json::Value>(&blank(b"[1,,]")).is_err());
    }
}
