//! One spelling for all JSON numbers of the same value. No number type is involved, so nothing is rounded.

/// Returns sign, digits and exponent of a JSON number: `1`, `1.0` and `10e-1` give `1e0`. Returns `None` if the exponent
/// does not fit into 64 bits.
pub(super) fn normalize(number: &str) -> Option<String> {
    let (sign, rest) = number.strip_prefix('-').map_or(("", number), |rest| ("-", rest));
    let (digits, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let all = [whole, fraction].concat();
    let significant = all.trim_start_matches('0');
    if significant.is_empty() {
        return Some("0".into());
    }
    let kept = significant.trim_end_matches('0');
    let exponent = exponent.parse::<i64>().ok()?.checked_sub(fraction.len() as i64)?;
    let exponent = exponent.checked_add((significant.len() - kept.len()) as i64)?;
    Some(format!("{sign}{kept}e{exponent}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_same_value_have_one_spelling() {
        for (spellings, normal) in [
            (&["1", "1.0", "1.00", "10e-1", "0.1e1", "1E0", "1e+0"][..], "1e0"),
            (&["-120", "-1.2e2", "-12e1", "-120.0"], "-12e1"),
            (&["0", "-0", "0.0", "-0e5", "0e99999999999999999999"], "0"),
            (&["9007199254740993", "9007199254740993.0"], "9007199254740993e0"),
            (&["1e9223372036854775807"], "1e9223372036854775807"),
        ] {
            for spelling in spellings {
                assert_eq!(normalize(spelling).as_deref(), Some(normal), "{spelling}");
            }
        }
        assert_ne!(normalize("9007199254740992"), normalize("9007199254740993"));
        for unbounded in ["1e9223372036854775808", "10e9223372036854775807", "0.1e-9223372036854775808"] {
            assert_eq!(normalize(unbounded), None, "{unbounded}");
        }
    }

    proptest::proptest! {
        /// Zeros at either end, a moved point and the exponent that makes up for it change nothing; a digit does.
        #[test]
        fn only_the_value_counts(digits in 1u64.., zeros in 0usize..40, exponent in -1_000_000i64..1_000_000) {
            let plain = normalize(&format!("{digits}e{exponent}"));
            let padding = "0".repeat(zeros);
            let shifted = exponent - zeros as i64;
            proptest::prop_assert_eq!(&normalize(&format!("{digits}{padding}E{shifted:+}")), &plain);
            proptest::prop_assert_eq!(&normalize(&format!("{digits}.{padding}0e{exponent}")), &plain);
            let length = digits.to_string().len() as i64;
            let moved = format!("0.{padding}{digits}e{}", exponent + length + zeros as i64);
            proptest::prop_assert_eq!(&normalize(&moved), &plain);
            proptest::prop_assert_ne!(&normalize(&format!("{}e{exponent}", digits ^ 1)), &plain);
            proptest::prop_assert_ne!(&normalize(&format!("-{digits}e{exponent}")), &plain);
        }
    }
}
