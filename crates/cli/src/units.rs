//! Sizes, times and numbers as people write and read them.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Parses a size in bytes: `4096`, `64K`, `1M`, `2GiB`. Units are powers of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kb" | "kib" => Some(10),
        "m" | "mb" | "mib" => Some(20),
        "g" | "gb" | "gib" => Some(30),
        "t" | "tb" | "tib" => Some(40),
        _ => None,
    };
    let size = shift.and_then(|shift| number.parse::<u64>().ok()?.checked_mul(1 << shift));
    size.ok_or_else(|| "expected a size such as 4096, 64K, 1M or 2GiB".into())
}

/// Parses a number: decimal, or hexadecimal after `0x`.
pub(crate) fn parse_number(text: &str) -> Result<u64, String> {
    let is_digits = |part: &str, digit: fn(&u8) -> bool| part.bytes().all(|b| digit(&b));
    let number = match text.strip_prefix("0x") {
        Some(hex) if is_digits(hex, u8::is_ascii_hexdigit) => u64::from_str_radix(hex, 16).ok(),
        None if is_digits(text, u8::is_ascii_digit) => text.parse().ok(),
        _ => None,
    };
    number.ok_or_else(|| "expected a whole number below 2^64, decimal or hexadecimal after 0x".into())
}

/// A parser for whole numbers within bounds.
pub(crate) fn within<T: TryFrom<u64>>(
    bounds: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|n| bounds.contains(n)).and_then(|n| T::try_from(n).ok());
        number.ok_or_else(|| format!("expected a whole number from {} to {}", bounds.start(), bounds.end()))
    }
}

/// Parses a time from 1 ms to 1 h: `500ms`, `1.5s`. A number without a unit is in seconds.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let fits = |time: &Duration| (Duration::from_millis(1)..=Duration::from_secs(3600)).contains(time);
    time_of(text)
        .filter(fits)
        .ok_or_else(|| "expected a time from 1ms to 3600s, such as 500ms, 10s or 10 (seconds)".into())
}

/// Parses a pause from 0 to 5 s.
pub(crate) fn parse_pause(text: &str) -> Result<Duration, String> {
    time_of(text)
        .filter(|time| *time <= Duration::from_secs(5))
        .ok_or_else(|| "expected a time from 0 to 5s, such as 50ms or 1 (second)".into())
}

fn time_of(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
    let (number, unit) = text.split_at(digits);
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * scale).ok()
}

/// Formats bytes for people: exactly if that is short, otherwise rounded.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} bytes");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    // A value that would print as 1024.0 uses the next unit.
    while (value * 10.0).round() >= 10240.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let exact = value.fract() == 0.0;
    format!("{value:.*} {}", usize::from(!exact), UNITS[unit])
}

/// Formats a count with its noun.
pub(crate) fn count(n: u64, noun: &str) -> String {
    match (n, noun.strip_suffix('y')) {
        (1, _) => format!("{n} {noun}"),
        (_, Some(stem)) => format!("{n} {stem}ies"),
        _ if noun.ends_with("ch") => format!("{n} {noun}es"),
        _ => format!("{n} {noun}s"),
    }
}

/// Formats a time for people.
pub(crate) fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds >= 1.0 {
        format!("{seconds:.2} s")
    } else if seconds >= 1e-3 {
        format!("{:.1} ms", seconds * 1e3)
    } else {
        format!("{:.0} us", seconds * 1e6)
    }
}

/// Formats bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("4096", 4096), ("64K", 65536), ("1M", 1 << 20), ("2GiB", 2 << 30), ("1t", 1 << 40)]
        {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for bad in ["", "K", "-1", "1.5M", "1X", "99999999999T", "1 M", "0x10", "١K"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(bytes(1023), "1023 bytes");
        assert_eq!(bytes(16 << 20), "16 MiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16 EiB");
        for (exponent, unit) in [(20, "MiB"), (30, "GiB"), (40, "TiB"), (50, "PiB"), (60, "EiB")] {
            let whole = 1_u64 << exponent;
            assert_eq!(bytes(whole), format!("1 {unit}"));
            assert_eq!(
                bytes(whole - 1),
                if exponent < 60 { format!("1.0 {unit}") } else { format!("1 {unit}") }
            );
        }
        assert_eq!(bytes(1_048_524), "1023.9 KiB");
        assert_eq!(bytes(1_048_525), "1.0 MiB");
    }

    #[test]
    fn numbers_and_times() {
        assert_eq!(parse_number("0x1f"), Ok(31));
        assert_eq!(parse_number("18446744073709551615"), Ok(u64::MAX));
        for bad in ["", "0x", "+1", "-1", "18446744073709551616", "1e3"] {
            assert!(parse_number(bad).is_err(), "{bad}");
        }
        let few = within::<u8>(1..=64);
        assert_eq!((few("1"), few("64")), (Ok(1), Ok(64)));
        for bad in ["", "0", "65", "257", "-1", "1.5"] {
            assert_eq!(few(bad), Err("expected a whole number from 1 to 64".into()), "{bad}");
        }
        assert_eq!(parse_time("500ms"), Ok(Duration::from_millis(500)));
        for (text, millis) in [("5", 5000), ("5s", 5000), ("0.5", 500), ("1.5s", 1500), ("2500us", 2)] {
            assert_eq!(parse_time(text).unwrap().as_millis(), millis, "{text}");
        }
        for bad in
            ["", "0", "s", "0s", "1h", "99999999999999999999s", "3601s", ".", "1.2.3", "-1", "1e3", "inf"]
        {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
        assert_eq!(
            (parse_pause("0"), parse_pause("50ms")),
            (Ok(Duration::ZERO), Ok(Duration::from_millis(50)))
        );
        assert!(parse_pause("6s").is_err() && parse_pause("50").is_err());
    }
}
