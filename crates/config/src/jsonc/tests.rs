use proptest::prelude::*;

use super::*;

fn faults(text: &str) -> Vec<String> {
    let (_, problems) = parse(text.as_bytes());
    problems.iter().map(|it| format!("{}:{} {}", it.line, it.column, it.message)).collect()
}

fn read(text: &str) -> Value {
    let (node, problems) = parse(text.as_bytes());
    assert!(problems.is_empty(), "{problems:?}");
    node.unwrap().to_value()
}

#[test]
fn comments_trailing_commas_and_a_byte_order_mark_are_read() {
    let text =
        "\u{feff}// head\n{ \"a\": [1, -2.5e1, true, null,], /* b */ \"b\": \"x\\n\\u00e9\\ud83d\\ude00/*\", }\n// end";
    assert_eq!(format!("{:?}", read(text)), r#"{"a": [1, -25.0, true, null], "b": "x\né😀/*"}"#);
}

#[test]
fn every_key_and_value_knows_its_place_in_characters() {
    let (node, _) = parse("{\n  \"é\": /* ü */ [1,\n 22]}".as_bytes());
    let node = node.unwrap();
    let entry = node.entry("é").unwrap();
    assert_eq!(entry.key_pos, Pos { line: 2, column: 3 });
    assert_eq!(entry.value.pos, Pos { line: 2, column: 16 });
    let Json::Array(items) = &entry.value.json else { panic!() };
    assert_eq!((items[0].pos, items[1].pos), (Pos { line: 2, column: 17 }, Pos { line: 3, column: 2 }));
}

#[test]
fn faults_that_leave_the_rest_readable_are_all_reported() {
    let text =
        "{\n 'a': 1\n \"b\": True,\n c: 01,\n \"d\": 5m,\n \"e\": \"\\q\",\n \"f\": ,\n \"a\": 2,\n \"g\": 1e999,,\n}";
    assert_eq!(
        faults(text),
        [
            "2:2 strings are written in double quotes",
            "3:2 a comma is missing before this",
            "3:7 a bare word is no value",
            "4:2 a key must be in double quotes",
            "4:5 this is no JSON number",
            "5:7 this is no JSON number",
            "6:8 this escape is unknown",
            "7:7 a value is missing here",
            "8:2 key `a` occurs twice in this object",
            "9:7 this number does not fit into 64 bits",
            "9:13 a comma too many",
        ]
    );
    assert!(parse(text.as_bytes()).0.is_some());
}

#[test]
fn lost_structure_ends_the_reading_at_its_cause() {
    for (text, fault) in [
        ("", "1:1 the file is empty"),
        ("  // nothing", "1:13 the file is empty"),
        ("{\n \"a\": {", "2:7 this `{` is never closed"),
        ("{\"a\": [1, 2}", "1:12 `,` or the closing bracket is expected here"),
        ("[1, 2", "1:1 this `[` is never closed"),
        ("{\"a\": \"b\n\"}", "1:7 this string is not closed on its line"),
        ("{/* ", "1:2 this comment is never closed"),
        ("{} {}", "1:4 text after the end of the config"),
        ("{\"a\" 1}", "1:6 `:` is expected after a key"),
    ] {
        assert_eq!(faults(text), [fault], "{text}");
    }
    assert_eq!(faults(&"[".repeat(65)), ["1:65 nested deeper than 64 levels"]);
    assert!(faults(&format!("{}1{}", "[".repeat(64), "]".repeat(64))).is_empty());
}

#[test]
fn too_large_or_wrongly_encoded_files_are_refused() {
    let (node, problems) = parse(&vec![b' '; MAX_BYTES + 1]);
    assert!(node.is_none());
    assert_eq!(problems[0].code, Code::Limit);
    let many: String = (0..=MAX_KEYS).map(|i| format!("\"{i}\":0,")).collect();
    assert_eq!(parse(format!("{{{many}}}").as_bytes()).1[0].code, Code::Limit);
    let (_, problems) = parse(b"{\n \"a\": \"\xff\"}");
    assert_eq!((problems[0].line, problems[0].column), (2, 8));
}

#[test]
fn a_syntax_fault_never_quotes_the_file() {
    for text in
        ["{\"k\": hunter2}", "{\"k\": \"hunter2\\q\"}", "{\"k\": \"hunter2", "{\"k\": 12hunter2}", "hunter2 hunter2"]
    {
        let (_, problems) = parse(text.as_bytes());
        assert!(!problems.is_empty());
        assert!(!format!("{problems:?}").contains("hunter2"), "{problems:?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_upset_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn arbitrary_near_json_never_upsets_the_reader(text in r#"([{}\[\]:,"'/*\\ \n]|\\u[0-9a-d]{4}|true|-?[0-9.e]{1,4}|"a"){0,40}"#) {
        let (node, problems) = parse(text.as_bytes());
        prop_assert!(node.is_some() || !problems.is_empty());
    }
}
