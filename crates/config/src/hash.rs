//! Two hashes that say whether an instance is still what the config asks for.
//!
//! Both are taken of the merged group *before* rendering: a new instance id, a resolved image or a rotated secret is no
//! change of the config. The spelling is canonical JSON (RFC 8785), so that formatting and key order do not matter.

use std::fmt::Write as _;

use nstance_core::value::{Object, Value};
use sha2::{Digest, Sha256};

use crate::{
    merge::MergedGroup,
    model::{CertificateSpec, FileSpec, Userdata},
    problems::write_json_string,
};

impl MergedGroup {
    /// The hash of what the machine itself is made of: a difference is drift, and the instance is rotated.
    pub fn infra_hash(&self) -> String {
        hash_text(&canonical(&self.infra_form()))
    }

    /// The hash of what is pushed to a running instance. `ca_bundle` is `None` while no CA is known.
    pub fn runtime_hash(&self, ca_bundle: Option<&[u8]>) -> String {
        hash_text(&canonical(&self.runtime_form(ca_bundle)))
    }

    fn infra_form(&self) -> Value {
        let mut form = Object::new();
        form.insert("args", Value::Object(self.args.clone()));
        form.insert("arch", self.arch.as_str().into());
        if let Some(instance_type) = &self.instance_type {
            form.insert("instance_type", instance_type.as_str().into());
        }
        form.insert("kind", self.kind.as_str().into());
        form.insert("subnet_pool", self.subnet_pool.as_str().into());
        if let Some(userdata) = &self.userdata {
            form.insert("userdata", userdata_form(userdata));
        }
        Value::Object(form)
    }

    fn runtime_form(&self, ca_bundle: Option<&[u8]>) -> Value {
        let certificates = self.certificates.iter().map(|(name, it)| (name.clone(), certificate_form(it))).collect();
        let files = self.files.iter().map(|(name, it)| (name.clone(), file_form(it))).collect();
        let mut form = Object::new();
        form.insert("ca", ca_bundle.map(hash_bytes).unwrap_or_default().as_str().into());
        form.insert("certificates", Value::Object(certificates));
        form.insert("files", Value::Object(files));
        form.insert("vars", string_form(self.vars.iter()));
        Value::Object(form)
    }
}

fn string_form<'a>(entries: impl Iterator<Item = (&'a String, &'a String)>) -> Value {
    Value::Object(entries.map(|(key, value)| (key.clone(), value.as_str().into())).collect())
}

fn userdata_form(userdata: &Userdata) -> Value {
    let mut form = Object::new();
    form.insert("content", userdata.content.as_str().into());
    form.insert("encoding", userdata.encoding.as_str().into());
    if let Some(sha256) = &userdata.sha256 {
        form.insert("sha256", sha256.as_str().into());
    }
    form.insert("source", userdata.source.as_str().into());
    Value::Object(form)
}

fn certificate_form(certificate: &CertificateSpec) -> Value {
    let mut form = Object::new();
    form.insert("kind", certificate.kind.as_str().into());
    form.insert("cn", certificate.cn.as_str().into());
    for (key, list) in certificate.names.lists() {
        if !list.is_empty() {
            form.insert(key, Value::Array(list.iter().map(|it| it.as_str().into()).collect()));
        }
    }
    let millis = i64::try_from(certificate.ttl.as_millis()).unwrap_or(i64::MAX);
    form.insert("ttl", Value::Int(millis));
    Value::Object(form)
}

fn file_form(file: &FileSpec) -> Value {
    let mut form = Object::new();
    form.insert("kind", file.kind().into());
    match file {
        FileSpec::Certificate { template, key } => {
            let mut key_form = Object::new();
            key_form.insert("name", key.as_str().into());
            key_form.insert("source", "agent".into());
            form.insert("key", Value::Object(key_form));
            form.insert("template", template.as_str().into());
        }
        FileSpec::Secret { source } | FileSpec::Storage { source } => form.insert("source", source.as_str().into()),
        FileSpec::Env { template } => form.insert("template", string_form(template.iter())),
        FileSpec::Json { template } => form.insert("template", template.clone()),
        FileSpec::String { template } => form.insert("template", template.as_str().into()),
    }
    Value::Object(form)
}

fn hash_text(text: &str) -> String {
    hash_bytes(text.as_bytes())
}

/// `sha256:` and the hash in hex.
pub fn hash_bytes(bytes: &[u8]) -> String {
    format!("sha256:{}", data_encoding::HEXLOWER.encode(&Sha256::digest(bytes)))
}

/// Canonical JSON of RFC 8785: no white space, keys by UTF-16 code units, numbers as ECMAScript writes them.
///
/// One difference: integers beyond 2^53 keep all their digits, for two configs that differ there differ.
pub fn canonical(value: &Value) -> String {
    let mut out = String::new();
    write_canonical(&mut out, value);
    out
}

fn write_canonical(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(it) => out.push_str(if *it { "true" } else { "false" }),
        Value::Int(it) => {
            let _ = write!(out, "{it}");
        }
        Value::Float(it) => write_number(out, *it),
        Value::String(it) => write_json_string(out, it),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i != 0 {
                    out.push(',');
                }
                write_canonical(out, item);
            }
            out.push(']');
        }
        Value::Object(object) => {
            let mut entries: Vec<(&str, &Value)> = object.iter().collect();
            entries.sort_by(|(a, _), (b, _)| a.encode_utf16().cmp(b.encode_utf16()));
            out.push('{');
            for (i, (key, value)) in entries.into_iter().enumerate() {
                if i != 0 {
                    out.push(',');
                }
                write_json_string(out, key);
                out.push(':');
                write_canonical(out, value);
            }
            out.push('}');
        }
    }
}

/// A number in the spelling of ECMAScript's `Number.prototype.toString`: the shortest digits that read back, plain
/// between 1e-7 and 1e21, with an exponent outside.
pub(crate) fn write_number(out: &mut String, number: f64) {
    if number == 0.0 || !number.is_finite() {
        out.push('0'); // no JSON text yields a number that is not finite
        return;
    }
    if number < 0.0 {
        out.push('-');
    }
    let scientific = format!("{:e}", number.abs());
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    let n_digits = i32::try_from(digits.len()).unwrap_or(i32::MAX);
    let point = exponent.parse::<i32>().unwrap_or(0) + 1; // digits before the decimal point
    let zeros = |n: i32| "0".repeat(usize::try_from(n).unwrap_or(0));
    let split = |n: i32| digits.split_at(usize::try_from(n).unwrap_or(0).min(digits.len()));
    if n_digits <= point && point <= 21 {
        out.push_str(&digits);
        out.push_str(&zeros(point - n_digits));
    } else if 0 < point && point <= 21 {
        let (whole, fraction) = split(point);
        let _ = write!(out, "{whole}.{fraction}");
    } else if -6 < point && point <= 0 {
        let _ = write!(out, "0.{}{digits}", zeros(-point));
    } else {
        let (first, rest) = split(1);
        let dot = if rest.is_empty() { "" } else { "." };
        let sign = if 0 < point { "+" } else { "-" };
        let _ = write!(out, "{first}{dot}{rest}e{sign}{}", (point - 1).abs());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_ecmascript_writes_them() {
        for (number, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (1.0, "1"),
            (-1.5, "-1.5"),
            (333_333_333.333_333_3, "333333333.3333333"),
            (1e30, "1e+30"),
            (4.50, "4.5"),
            (2e-3, "0.002"),
            (0.000_000_000_000_000_000_000_000_001, "1e-27"),
            (1e21, "1e+21"),
            (1e20, "100000000000000000000"),
            (1e-6, "0.000001"),
            (1e-7, "1e-7"),
            (5e-324, "5e-324"),
            (1.797_693_134_862_315_7e308, "1.7976931348623157e+308"),
            (9_007_199_254_740_992.0, "9007199254740992"),
            (1.25e-7, "1.25e-7"),
        ] {
            let mut out = String::new();
            write_number(&mut out, number);
            assert_eq!(out, text);
        }
    }

    #[test]
    fn keys_sort_by_utf_16_code_units() {
        // The example of RFC 8785, section 3.2.3.
        let keys = ["\u{20ac}", "\r", "\u{fb33}", "1", "\u{1f600}", "\u{80}", "\u{f6}"];
        let object: Object = keys.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
        assert_eq!(
            canonical(&Value::Object(object)),
            "{\"\\r\":null,\"1\":null,\"\u{80}\":null,\"\u{f6}\":null,\"\u{20ac}\":null,\"\u{1f600}\":null,\"\u{fb33}\":null}"
        );
    }
}
