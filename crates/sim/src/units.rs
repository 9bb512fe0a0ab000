//! Sizes, durations and numbers in options.

use std::time::Duration;

/// Longer times are assumed to be typing errors.
const LONGEST: Duration = Duration::from_secs(1_000_000);

/// Bytes: `4096`, `64K`, `1M`, `2GiB`; all units are powers of 1024.
pub(crate) fn size(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

/// A time: `100ns`, `50us`, `10ms`, `2s`.
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = split(text)?;
    let time = match unit {
        "ns" => Duration::from_nanos(number),
        "us" => Duration::from_micros(number),
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "" if number == 0 => Duration::ZERO,
        _ => return None,
    };
    (time <= LONGEST).then_some(time)
}

/// A whole number, decimal or `0x…`.
pub(crate) fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) if hex.bytes().all(|b| b.is_ascii_hexdigit()) => u64::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
        None => None,
    }
}

/// `0` or `1`.
pub(crate) fn flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

fn split(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    Some((number.parse().ok()?, unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("4096"), Some(4096));
        assert_eq!(size("64K"), Some(65536));
        assert_eq!(size("1M"), Some(1 << 20));
        assert_eq!(size("2GiB"), Some(2 << 30));
        for bad in ["", "K", "-1", "1.5M", "1X", "99999999999T", "1 M"] {
            assert_eq!(size(bad), None, "{bad}");
        }
    }

    #[test]
    fn times_and_numbers() {
        assert_eq!(duration("50us"), Some(Duration::from_micros(50)));
        assert_eq!(duration("2s"), Some(Duration::from_secs(2)));
        assert_eq!(duration("0"), Some(Duration::ZERO));
        assert_eq!(duration("5"), None);
        assert_eq!(number("0x1f"), Some(31));
        assert_eq!(number("0x"), None);
        assert_eq!(number("+1"), None);
        assert_eq!(flag("1"), Some(true));
        assert_eq!(flag("yes"), None);
    }
}
