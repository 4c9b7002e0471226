//! Kubernetes quantities: `500m`, `16Gi`, `1e3`. Written in the one form that Kubernetes itself would write.

use std::{cmp::Ordering, fmt, str::FromStr};

/// All values are counted in billionths, as Kubernetes does; what is finer is rounded up.
const UNITS: i128 = 1_000_000_000;

const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// Suffix and power of ten.
const DECIMAL: [(&str, u32); 10] =
    [("n", 0), ("u", 3), ("m", 6), ("", 9), ("k", 12), ("M", 15), ("G", 18), ("T", 21), ("P", 24), ("E", 27)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notation {
    Decimal,
    Binary,
    Exponent,
}

/// An amount of a resource. Two are equal if they are the same amount, however they are written.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    /// In billionths.
    amount: i128,
    notation: Notation,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a Kubernetes quantity; write it as 500m, 2 or 16Gi")]
pub struct QuantityError(String);

impl Quantity {
    pub fn is_positive(&self) -> bool {
        0 < self.amount
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.amount == other.amount
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.amount.cmp(&other.amount)
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        parse(text).ok_or_else(|| QuantityError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Quantity> {
    let (is_negative, number) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = number.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(number.len());
    let (number, suffix) = number.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let (numerator, denominator, notation) = factor(suffix)?;
    // value = digits * factor / 10^(digits of the fraction), in billionths, rounded up.
    let fraction = fraction.trim_end_matches('0');
    let digits: i128 = format!("0{whole}{fraction}").parse().ok()?;
    let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?.checked_mul(denominator)?;
    let product = digits.checked_mul(numerator)?;
    let amount = product / scale + i128::from(product % scale != 0);
    // No value may be beyond what fits into 63 bits.
    let amount = amount.min(i128::from(i64::MAX) * UNITS);
    Some(Quantity { amount: if is_negative { -amount } else { amount }, notation })
}

/// What one of this suffix is in billionths, as a fraction.
fn factor(suffix: &str) -> Option<(i128, i128, Notation)> {
    if let Some((_, power)) = DECIMAL.iter().find(|(it, _)| *it == suffix) {
        return Some((10_i128.pow(*power), 1, Notation::Decimal));
    }
    if let Some(power) = BINARY.iter().position(|it| *it == suffix) {
        return Some((UNITS << (10 * power), 1, Notation::Binary));
    }
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let power = exponent.checked_add(9)?;
    let factor = 10_i128.checked_pow(power.unsigned_abs())?;
    Some(if power < 0 { (1, factor, Notation::Exponent) } else { (factor, 1, Notation::Exponent) })
}

/// The canonical form: the largest suffix with which the number is whole.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.amount == 0 {
            return f.write_str("0");
        }
        // Below 1024, or with a fraction, binary amounts are written as decimal ones.
        let is_binary =
            self.notation == Notation::Binary && self.amount % UNITS == 0 && 1024 * UNITS <= self.amount.abs();
        if is_binary {
            let whole = self.amount / UNITS;
            let power = (0..BINARY.len()).rev().find(|power| whole % (1 << (10 * power)) == 0).unwrap_or(0);
            return write!(f, "{}{}", whole >> (10 * power), BINARY[power]);
        }
        let fits = |power: u32| self.amount % 10_i128.pow(power) == 0;
        let (suffix, power) = DECIMAL.iter().rev().find(|(_, power)| fits(*power)).copied().unwrap_or(("n", 0));
        let number = self.amount / 10_i128.pow(power);
        match self.notation {
            Notation::Exponent if power != 9 => write!(f, "{number}e{}", i64::from(power) - 9),
            _ => write!(f, "{number}{suffix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn canonical(text: &str) -> String {
        text.parse::<Quantity>().map_or_else(|_| "refused".to_owned(), |it| it.to_string())
    }

    #[test]
    fn quantities_are_written_as_kubernetes_writes_them() {
        for (text, expected) in [
            ("0", "0"),
            ("4", "4"),
            ("4000m", "4"),
            ("1500m", "1500m"),
            ("0.5", "500m"),
            (".5", "500m"),
            ("1.", "1"),
            ("1000", "1k"),
            ("16384Ki", "16Mi"),
            ("1.5Gi", "1536Mi"),
            ("512Ki", "512Ki"),
            ("0.5Ki", "512"),
            ("0.0001Ki", "102400u"),
            ("7936Mi", "7936Mi"),
            ("16Gi", "16Gi"),
            ("1Ei", "1Ei"),
            ("12e6", "12e6"),
            ("1E3", "1e3"),
            ("9E", "9E"),
            ("1e-3", "1e-3"),
            ("0.1n", "1n"),
            ("+2", "2"),
            ("-2", "-2"),
            ("100E", "9223372036854775807"),
        ] {
            assert_eq!(canonical(text), expected, "{text}");
        }
        for text in ["", "m", "Gi", "1.5.2", "4 ", "4GiB", "1e", "four", "-", "1e99999999999", "٣"] {
            assert_eq!(canonical(text), "refused", "{text}");
        }
    }

    #[test]
    fn amounts_are_compared_and_not_their_spelling() {
        let quantity = |text: &str| text.parse::<Quantity>().unwrap();
        assert_eq!(quantity("2"), quantity("2000m"));
        assert_eq!(quantity("1Ki"), quantity("1024"));
        assert!(quantity("16G") < quantity("16Gi"));
        assert!(!quantity("0").is_positive() && quantity("1n").is_positive());
    }

    proptest! {
        #[test]
        fn the_canonical_form_is_the_same_amount_and_stays_as_it_is(
            number in 0_u64..10_000_000,
            suffix in prop::sample::select(vec!["", "n", "m", "k", "M", "Ki", "Mi", "Gi", "e3", "e-3"]),
        ) {
            let quantity: Quantity = format!("{number}{suffix}").parse().unwrap();
            let again: Quantity = quantity.to_string().parse().unwrap();
            prop_assert_eq!(quantity, again);
            prop_assert_eq!(quantity.to_string(), again.to_string());
        }
    }
}
