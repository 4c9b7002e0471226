//! The guard before the parser: blocks must balance.
//!
//! The parser takes a template whose `if` is never closed, or with an `end` too many, and renders what is left of it.
//! A cut-off boot script must not come into being that way, so the blocks are counted here first, by Go's rules.
//!
//! Comments are taken out on the same pass. The parser lets `{{- /* x */}}` trim the text *after* it too, which Go does
//! not; an empty string in the comment's place trims as it should.

use super::fault::Fault;

struct Block {
    keyword: &'static str,
    line: usize,
    /// A bare `else` was there: only `end` may follow.
    closed_else: bool,
}

/// Checks the blocks of `source` and returns it without comments, line for line.
pub(super) fn scan(source: &str) -> Result<String, Fault> {
    let mut out = String::with_capacity(source.len());
    let mut blocks: Vec<Block> = Vec::new();
    let mut rest = source;
    let mut line = 1;
    while let Some(start) = rest.find("{{") {
        out.push_str(&rest[..start]);
        line += newlines(&rest[..start]);
        let body = &rest[start + 2..];
        let trims = body.starts_with('-') && body[1..].starts_with([' ', '\t', '\r', '\n']);
        let inner = if trims { body[1..].trim_start_matches([' ', '\t', '\r', '\n']) } else { body };
        if !inner.starts_with("/*") && inner.trim_start().starts_with("/*") {
            return Err(comment_fault(line));
        }
        let action = if inner.starts_with("/*") { None } else { Some(action_end(body, line)?) };
        let length = match action {
            Some(length) => {
                let text = inner.trim_start();
                step(&mut blocks, text, line)?;
                out.push_str("{{");
                out.push_str(&body[..length]);
                length
            }
            None => {
                let (comment, after) = comment_end(inner, line)?;
                let length = body.len() - after.len();
                out.push_str(if trims { "{{- \"\"" } else { "{{\"\"" });
                out.extend(std::iter::repeat_n('\n', newlines(comment)));
                out.push_str(if body[..length].ends_with("-}}") { " -}}" } else { "}}" });
                length
            }
        };
        line += newlines(&body[..length]);
        rest = &body[length..];
    }
    out.push_str(rest);
    match blocks.last() {
        None => Ok(out),
        Some(block) => Err(Fault::syntax(block.line, format!("`{}` is never closed", block.keyword))
            .with_help("close it with {{ end }}")),
    }
}

fn newlines(text: &str) -> usize {
    text.bytes().filter(|byte| *byte == b'\n').count()
}

/// Length of an action up to and with its `}}`, quotes respected.
fn action_end(body: &str, line: usize) -> Result<usize, Fault> {
    let mut chars = body.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '}' if body[at..].starts_with("}}") => return Ok(at + 2),
            '"' | '\'' | '`' => loop {
                match chars.next() {
                    Some((_, '\\')) if c != '`' => {
                        chars.next();
                    }
                    Some((_, it)) if it == c => break,
                    Some((_, '\n')) if c != '`' => {
                        return Err(Fault::syntax(line, "a string is not closed".to_owned()));
                    }
                    Some(_) => {}
                    None => return Err(Fault::syntax(line, "a string is not closed".to_owned())),
                }
            },
            _ => {}
        }
    }
    Err(Fault::syntax(line, "`{{` is never closed".to_owned()).with_help("close it with }}"))
}

/// A comment, from `/*`, and what follows its action.
fn comment_end(inner: &str, line: usize) -> Result<(&str, &str), Fault> {
    let end = inner.find("*/").ok_or_else(|| Fault::syntax(line, "a comment is never closed".to_owned()))?;
    let (comment, after) = inner.split_at(end + 2);
    let trimmed = after.trim_start_matches([' ', '\t', '\r', '\n']);
    if let Some(after) = after.strip_prefix("}}") {
        return Ok((comment, after));
    }
    match trimmed.strip_prefix("-}}").filter(|_| trimmed.len() < after.len()) {
        Some(rest) => Ok((comment, rest)),
        None => Err(comment_fault(line)),
    }
}

fn comment_fault(line: usize) -> Fault {
    Fault::syntax(line, "a comment must fill its action".to_owned())
        .with_help("write {{/* … */}}, with the delimiters right beside")
}

const OPENERS: [&str; 5] = ["if", "range", "with", "block", "define"];

/// Follows one action through the open blocks.
fn step(blocks: &mut Vec<Block>, text: &str, line: usize) -> Result<(), Fault> {
    let (word, after) = split_word(text);
    if let Some(keyword) = OPENERS.into_iter().find(|it| *it == word) {
        if keyword == "define" && !blocks.is_empty() {
            return Err(Fault::syntax(line, "`define` stands inside another block".to_owned())
                .with_help("put it at the top level"));
        }
        blocks.push(Block { keyword, line, closed_else: false });
        return Ok(());
    }
    match word {
        "end" => match blocks.pop() {
            Some(_) => Ok(()),
            None => Err(Fault::syntax(line, "`end` without a block to close".to_owned())),
        },
        "else" => {
            let Some(block) = blocks.last_mut().filter(|it| matches!(it.keyword, "if" | "range" | "with")) else {
                return Err(Fault::syntax(line, "`else` outside of if, range and with".to_owned()));
            };
            if block.closed_else {
                return Err(Fault::syntax(line, "`else` after `else`".to_owned()));
            }
            match split_word(after.trim_start()).0 {
                word @ ("if" | "with") if word == block.keyword => {}
                word @ ("if" | "with") => {
                    return Err(Fault::syntax(line, format!("`else {word}` inside `{}`", block.keyword)));
                }
                _ => block.closed_else = true,
            }
            Ok(())
        }
        "break" | "continue" => {
            let inside = blocks.iter().rev().take_while(|it| !matches!(it.keyword, "define" | "block"));
            match inside.into_iter().any(|it| it.keyword == "range") {
                true => Ok(()),
                false => Err(Fault::syntax(line, format!("`{word}` outside of range"))),
            }
        }
        _ => Ok(()),
    }
}

fn split_word(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn unbalanced_blocks_are_refused_where_they_begin() {
        for (source, line, message) in [
            ("{{ if .A }}x", 1, "`if` is never closed"),
            ("a\n{{ range .A }}{{ end }}\n{{with .B}}", 3, "`with` is never closed"),
            ("{{ define \"x\" }}", 1, "`define` is never closed"),
            ("{{ block \"x\" . }}", 1, "`block` is never closed"),
            ("x{{ end }}", 1, "`end` without a block to close"),
            ("{{ if .A }}{{ else }}{{ else }}{{ end }}", 1, "`else` after `else`"),
            ("{{ else }}", 1, "`else` outside of if, range and with"),
            ("{{ with .A }}{{ else if .B }}{{ end }}", 1, "`else if` inside `with`"),
            ("{{ if .A }}{{ define \"x\" }}{{ end }}{{ end }}", 1, "`define` stands inside another block"),
            ("{{ break }}", 1, "`break` outside of range"),
            ("{{ range .A }}{{ block \"x\" . }}{{ continue }}{{ end }}{{ end }}", 1, "`continue` outside of range"),
            ("{{ .A", 1, "`{{` is never closed"),
            ("\n{{ \"a }}", 2, "a string is not closed"),
            ("{{/* x }}", 1, "a comment is never closed"),
            ("{{ /* don't */ }}", 1, "a comment must fill its action"),
            ("{{/* x */ .A }}", 1, "a comment must fill its action"),
        ] {
            let fault = scan(source).unwrap_err();
            assert_eq!((fault.line, fault.message.as_str()), (line, message), "{source}");
        }
    }

    #[test]
    fn balanced_blocks_pass_as_they_are() {
        for source in [
            "",
            "no action",
            "{{ .ending }}{{ ender }}{{ if .A }}{{ else if .B }}{{ else }}{{ end }}",
            "{{ \"}} {{ if\" }}{{ `{{ range }}` }}{{ '\\'' }}",
            "{{ range .A }}{{ if . }}{{ break }}{{ end }}{{ else }}{{ end }}",
            "{{- with .A -}} {{- else with .B -}} {{- end -}}",
        ] {
            assert_eq!(scan(source).as_deref(), Ok(source));
        }
    }

    #[test]
    fn comments_leave_their_trimming_and_their_lines() {
        assert_eq!(scan("a {{- /* x */}} b").as_deref(), Ok("a {{- \"\"}} b"));
        assert_eq!(scan("a {{/* x\n\n}} */ -}} b").as_deref(), Ok("a {{\"\"\n\n -}} b"));
        assert_eq!(scan("{{- /* if */ -}}").as_deref(), Ok("{{- \"\" -}}"));
    }

    proptest! {
        #[test]
        fn no_text_upsets_the_scanner(text in "([{}\"'`*/ \\n-]|if|end|else|range|define|\\.A){0,30}") {
            let _ = scan(&text);
        }
    }
}
