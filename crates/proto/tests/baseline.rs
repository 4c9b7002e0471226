//! A released number keeps its meaning for ever.
//!
//! `tests/baseline.txt` lists every field and enum value as `message.field = number type`. A line may be added, none
//! may change or vanish. `UPDATE_EXPECT=1` adds the new ones.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;

use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};

fn message(lines: &mut BTreeMap<String, String>, scope: &str, it: &DescriptorProto) {
    let scope = format!("{scope}.{}", it.name());
    for field in &it.field {
        let kind =
            if field.type_name().is_empty() { format!("{:?}", field.r#type()) } else { field.type_name().to_owned() };
        let line = format!("{} {kind} {:?}", field.number(), field.label());
        lines.insert(format!("{scope}.{}", field.name()), line);
    }
    for nested in &it.nested_type {
        message(lines, &scope, nested);
    }
    for nested in &it.enum_type {
        enumeration(lines, &scope, nested);
    }
}

fn enumeration(lines: &mut BTreeMap<String, String>, scope: &str, it: &EnumDescriptorProto) {
    for value in &it.value {
        lines.insert(format!("{scope}.{}.{}", it.name(), value.name()), value.number().to_string());
    }
}

fn today() -> BTreeMap<String, String> {
    let set: FileDescriptorSet = prost::Message::decode(nstance_proto::DESCRIPTORS).unwrap();
    let mut lines = BTreeMap::new();
    for file in set.file.iter().filter(|file| file.package() == "nstance.v1") {
        for it in &file.message_type {
            message(&mut lines, file.package(), it);
        }
        for it in &file.enum_type {
            enumeration(&mut lines, file.package(), it);
        }
        for service in &file.service {
            for method in &service.method {
                let arrow = format!(
                    "{}{} -> {}{}",
                    if method.client_streaming() { "stream " } else { "" },
                    method.input_type(),
                    if method.server_streaming() { "stream " } else { "" },
                    method.output_type()
                );
                lines.insert(format!("{}.{}.{}", file.package(), service.name(), method.name()), arrow);
            }
        }
    }
    lines
}

#[test]
fn no_released_number_changes() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/baseline.txt");
    let today = today();
    let released: BTreeMap<String, String> = std::fs::read_to_string(&path)
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.split_once(" = "))
        .map(|(name, meaning)| (name.to_owned(), meaning.to_owned()))
        .collect();
    for (name, meaning) in &released {
        assert_eq!(today.get(name), Some(meaning), "{name} was released with this meaning");
    }
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        let text: String = today.iter().map(|(name, meaning)| format!("{name} = {meaning}\n")).collect();
        std::fs::write(&path, text).unwrap();
    } else {
        assert_eq!(released.len(), today.len(), "run with UPDATE_EXPECT=1 to add what is new");
    }
}
