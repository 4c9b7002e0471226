//! Which images a group cannot be made without.

use std::collections::BTreeSet;

use nstance_core::value::{Object, Value};

use super::Program;
use crate::{
    model::{Userdata, UserdataSource},
    userdata,
};

/// Names of the images that args and inline userdata ask for. An image that may be missing, by `default` or `if`, is
/// not among them.
pub(crate) fn images_of(args: &Object, userdata: Option<&Userdata>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    in_object(args, &mut names);
    if let Some(userdata @ Userdata { source: UserdataSource::Inline, .. }) = userdata
        && let Ok(text) = userdata::decode(userdata.encoding, userdata.content.as_bytes())
    {
        in_text(&text, &mut names);
    }
    names
}

fn in_object(object: &Object, names: &mut BTreeSet<String>) {
    for (_, value) in object.iter() {
        in_value(value, names);
    }
}

fn in_value(value: &Value, names: &mut BTreeSet<String>) {
    match value {
        Value::String(text) => in_text(text, names),
        Value::Array(items) => items.iter().for_each(|item| in_value(item, names)),
        Value::Object(object) => in_object(object, names),
        _ => {}
    }
}

fn in_text(text: &str, names: &mut BTreeSet<String>) {
    // What does not parse is refused when it is rendered, with its place.
    if text.contains("{{")
        && let Ok(program) = Program::parse(text)
    {
        names.extend(program.needed_keys().into_iter().filter(|it| it.parent == "Image").map(|it| it.key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let mut object = Object::new();
        object.insert("ImageId", Value::Array(vec![Value::String(text.to_owned())]));
        let mut names = BTreeSet::new();
        in_object(&object, &mut names);
        names.into_iter().collect()
    }

    #[test]
    fn images_are_found_however_they_are_named() {
        assert_eq!(names("{{ .Image.web }}"), ["web"]);
        assert_eq!(names(r#"{{ index .Image "a-b" }}"#), ["a-b"]);
        assert_eq!(names("{{ .Image.b }}{{ .Image.a }}{{ .Vars.c }}"), ["a", "b"]);
    }

    #[test]
    fn an_image_that_may_be_missing_is_not_needed() {
        assert!(names(r#"{{ .Image.web | default "ami-1" }}"#).is_empty());
        assert!(names("{{ if .Image.web }}{{ .Image.web }}{{ end }}").is_empty());
        assert!(names("no template").is_empty());
    }
}
