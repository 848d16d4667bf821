//! Sizes as people write them.

use crate::error::excerpt;

/// More than any one memory has; a larger number has a unit too many.
const ABSURD: u64 = 1 << 50;

/// Letters alone are powers of two, as of `docker -m 8g` and `ls -h`.
const UNITS: [(&str, u64); 13] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
    ("T", 1 << 40),
    ("B", 1),
];

/// Bytes from `8GiB`, `8G`, `8 GB`, `8192MiB`, `1.5GiB` or plain bytes. GiB and G are 2^30 bytes, GB 10^9. A fraction of a byte is
/// dropped.
pub fn parse(text: &str) -> Result<u64, String> {
    let shown = excerpt(text);
    let how = "write 8GiB or 8G (2^30 bytes), 8GB (10^9 bytes), 8192MiB or plain bytes";
    let trimmed = text.trim();
    let unit = UNITS.iter().find_map(|(name, bytes)| {
        let at = trimmed.len().checked_sub(name.len())?;
        let (number, unit) = trimmed.split_at_checked(at)?;
        unit.eq_ignore_ascii_case(name).then_some((number.trim_end(), *bytes))
    });
    let (number, unit) = unit.unwrap_or((trimmed, 1));
    if number.starts_with('-') {
        return Err(format!("'{shown}' is negative; {how}"));
    }
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || fraction.len() > 9 || number.ends_with('.') {
        return Err(format!("'{shown}' is not a size; {how}"));
    }
    let absurd = || format!("'{shown}' is more than any memory holds ({} TiB); {how}", ABSURD >> 40);
    let whole: u64 = whole.parse().map_err(|_| absurd())?;
    // In 128 bits: exact to the byte, where floats would round.
    let part = fraction.parse::<u128>().unwrap_or(0) * unit as u128 / 10u128.pow(fraction.len() as u32);
    let bytes = whole as u128 * unit as u128 + part;
    match bytes {
        0 => Err(format!("'{shown}' is zero; {how}")),
        b if b > ABSURD as u128 => Err(absurd()),
        b => Ok(b as u64),
    }
}

/// Bytes as [`parse`] reads them back: in the largest unit of which they are a whole number.
pub fn written(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB")];
    match units.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift) {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn sizes_are_exact_to_the_byte() {
        for (text, bytes) in [
            ("8GiB", 8 << 30),
            ("8gib", 8 << 30),
            ("8 GiB", 8 << 30),
            ("8G", 8 << 30),
            ("8g", 8 << 30),
            ("1.5k", 1536),
            ("1T", 1 << 40),
            ("8192MiB", 8 << 30),
            ("8GB", 8_000_000_000),
            ("1.5KiB", 1536),
            ("0.1B", 0),
            ("1", 1),
            ("8589934593", (8 << 30) + 1),
            ("0.000000001GB", 1),
            ("1024TiB", 1 << 50),
        ] {
            match bytes {
                0 => assert!(parse(text).unwrap_err().contains("is zero")),
                _ => assert_eq!(parse(text), Ok(bytes), "{text}"),
            }
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_what_to_write() {
        for (text, why) in [
            ("0", "is zero"),
            ("0GiB", "is zero"),
            ("-8GiB", "is negative"),
            ("-0", "is negative"),
            ("8 Gi", "not a size"),
            ("G", "not a size"),
            ("8.GiB", "not a size"),
            (".5GiB", "not a size"),
            ("GiB", "not a size"),
            ("", "not a size"),
            ("1e9", "not a size"),
            ("nan", "not a size"),
            ("inf", "not a size"),
            ("8GiBGiB", "not a size"),
            ("٨GiB", "not a size"),
            ("1025TiB", "more than any memory holds"),
            ("99999999999999999999999", "more than any memory holds"),
            ("999999999TiB", "more than any memory holds"),
        ] {
            let said = parse(text).unwrap_err();
            assert!(said.contains(why) && said.contains("write 8GiB"), "{text}: {said}");
        }
    }

    #[test]
    fn a_size_is_written_as_it_is_read() {
        for (bytes, text) in [(8 << 30, "8GiB"), (1536 << 20, "1536MiB"), (1_000_000, "1000000")] {
            assert_eq!((super::written(bytes).as_str(), parse(text)), (text, Ok(bytes)));
        }
    }
}
