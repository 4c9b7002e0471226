//! Whether a text is JSON (RFC 8259), without building anything: a file of three megabytes must not cost thirty.

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not JSON: line {line}, column {column}")]
pub(crate) struct JsonError {
    pub(crate) line: usize,
    /// In bytes, from one.
    pub(crate) column: usize,
}

/// What may come next.
#[derive(Clone, Copy)]
enum Next {
    Value,
    /// A value, or the end of the array that was just opened.
    FirstItem,
    /// A key, or the end of the object that was just opened.
    FirstKey,
    Key,
    /// A comma or the end of what is open; at the outermost level, the end of the text.
    Rest,
}

pub(crate) fn check(text: &[u8]) -> Result<(), JsonError> {
    let mut scan = Scan { text, at: 0 };
    let fine = std::str::from_utf8(text).map_err(|error| scan.at = error.valid_up_to()).is_ok();
    if fine && scan.document().is_some() {
        return Ok(());
    }
    let before = &text[..scan.at.min(text.len())];
    let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
    let column = 1 + before.iter().rev().take_while(|byte| **byte != b'\n').count();
    Err(JsonError { line, column })
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    fn document(&mut self) -> Option<()> {
        // What is open, by its closing byte. A stack of our own: the depth of a text must not become ours.
        let mut open: Vec<u8> = Vec::new();
        let mut next = Next::Value;
        loop {
            self.skip(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
            let here = self.peek();
            next = match (next, here) {
                (Next::FirstItem | Next::FirstKey | Next::Rest, Some(close)) if open.last() == Some(&close) => {
                    open.pop();
                    self.at += 1;
                    Next::Rest
                }
                (Next::Rest, None) if open.is_empty() => return Some(()),
                (Next::Rest, Some(b',')) => {
                    let inside = *open.last()?;
                    self.at += 1;
                    if inside == b'}' { Next::Key } else { Next::Value }
                }
                (Next::Key | Next::FirstKey, Some(b'"')) => {
                    self.string()?;
                    self.skip(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
                    self.byte(b':')?;
                    Next::Value
                }
                (Next::Value | Next::FirstItem, Some(b'[')) => {
                    open.push(b']');
                    self.at += 1;
                    Next::FirstItem
                }
                (Next::Value | Next::FirstItem, Some(b'{')) => {
                    open.push(b'}');
                    self.at += 1;
                    Next::FirstKey
                }
                (Next::Value | Next::FirstItem, Some(first)) => {
                    self.scalar(first)?;
                    Next::Rest
                }
                _ => return None,
            };
        }
    }

    fn scalar(&mut self, first: u8) -> Option<()> {
        match first {
            b'"' => self.string(),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            _ => self.number(),
        }
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        self.text[self.at..].starts_with(word).then(|| self.at += word.len())
    }

    fn number(&mut self) -> Option<()> {
        let _ = self.byte(b'-');
        // A leading zero stands alone.
        if self.byte(b'0').is_none() {
            self.digits()?;
        }
        if self.byte(b'.').is_some() {
            self.digits()?;
        }
        if self.byte(b'e').or_else(|| self.byte(b'E')).is_some() {
            let _ = self.byte(b'+').or_else(|| self.byte(b'-'));
            self.digits()?;
        }
        Some(())
    }

    fn digits(&mut self) -> Option<()> {
        self.peek().filter(u8::is_ascii_digit)?;
        self.skip(|byte| byte.is_ascii_digit());
        Some(())
    }

    fn string(&mut self) -> Option<()> {
        self.byte(b'"')?;
        loop {
            self.skip(|byte| !matches!(byte, b'"' | b'\\' | 0..=0x1f));
            match self.peek()? {
                b'"' => return self.byte(b'"'),
                b'\\' => {
                    self.at += 1;
                    self.escape()?;
                }
                _ => return None,
            }
        }
    }

    fn escape(&mut self) -> Option<()> {
        match self.peek()? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 1,
            b'u' => {
                self.at += 1;
                for _ in 0..4 {
                    self.peek().filter(u8::is_ascii_hexdigit)?;
                    self.at += 1;
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn byte(&mut self, wanted: u8) -> Option<()> {
        (self.peek() == Some(wanted)).then(|| self.at += 1)
    }

    fn skip(&mut self, skipped: impl Fn(u8) -> bool) {
        while self.peek().is_some_and(&skipped) {
            self.at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_of_the_grammar_are_taken() {
        for good in [
            "0",
            "-0.5e+10",
            "1E2",
            " null ",
            "\"\"",
            r#""\u00e9\n\/\ud800""#,
            "[]",
            "{}",
            "[ ]",
            "{ \"a\" : [1, {\"b\": true}, []] }\n",
            "\"ä\u{7f}\"",
            r#"{"a":1,"a":2}"#,
        ] {
            assert_eq!(check(good.as_bytes()), Ok(()), "{good}");
        }
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert_eq!(check(deep.as_bytes()), Ok(()));
    }

    #[test]
    fn everything_else_is_refused() {
        for bad in [
            "",
            " ",
            "01",
            "+1",
            "1.",
            ".5",
            "1e",
            "-",
            "nul",
            "truer",
            "'a'",
            "\"a",
            "\"\n\"",
            r#""\x""#,
            r#""\u12g4""#,
            "[1,]",
            "[,1]",
            "[1 2]",
            "[1}",
            "{1:2}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{\"a\":1",
            "1 2",
            "]",
            "// c\n1",
            "NaN",
            "\u{feff}1",
        ] {
            assert!(check(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(check(b"\"\xff\"").is_err());
    }

    #[test]
    fn place_of_the_mistake_is_told() {
        assert_eq!(check(b"{\n  \"a\": 1,\n  b\n}"), Err(JsonError { line: 3, column: 3 }));
        assert_eq!(check(b""), Err(JsonError { line: 1, column: 1 }));
    }

    proptest! {
        #[test]
        fn judgement_is_that_of_a_full_parser(text in r#"[\[\]{},:"0-9eE+.\\ntruefalse -]{0,12}"#) {
            let theirs = serde_json::from_str::<serde_json::Value>(&text);
            // A number too large for its type is JSON all the same.
            if theirs.as_ref().err().is_none_or(|error| !error.to_string().contains("out of range")) {
                prop_assert_eq!(check(text.as_bytes()).is_ok(), theirs.is_ok(), "{}", text);
            }
        }

        #[test]
        fn what_a_writer_writes_is_taken(text: String, numbers: Vec<f64>, n: i64) {
            let value = serde_json::json!({ (text.as_str()): [text, numbers, n, null, true], "b": {} });
            let pretty = format!("{value:#}");
            prop_assert!(check(value.to_string().as_bytes()).is_ok());
            prop_assert!(check(pretty.as_bytes()).is_ok());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = check(&bytes);
        }
    }
}
