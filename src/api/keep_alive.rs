//! How long an unused model is kept: ollama's `keep_alive`.

use super::error::ApiError;
use crate::clock::Duration;
use crate::error::excerpt;
use serde_json::Value;

/// How long a model is kept after its last use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keep {
    /// Until it is unloaded.
    Forever,
    /// For so long.
    For(Duration),
}

impl Keep {
    /// The setting `serve.keep_alive`, in seconds; 0: for ever.
    pub fn of_setting(seconds: u64) -> Keep {
        if seconds == 0 { Keep::Forever } else { Keep::For(Duration::from_secs(seconds)) }
    }

    /// The field `keep_alive`: seconds, or a text as `5m` or `1h30m`; below 0: for ever; 0: not at all.
    ///
    /// # Errors
    /// 400 for anything else.
    pub fn read(value: &Value) -> Result<Keep, ApiError> {
        let read = match value {
            Value::Number(number) => number.as_f64().map(of_seconds),
            Value::String(text) => duration(text).map(of_seconds),
            _ => None,
        };
        let bad = || {
            let message =
                format!("keep_alive is {}; give seconds, or a duration such as 5m", excerpt(value.to_string()));
            ApiError::field("keep_alive", message)
        };
        read.ok_or_else(bad)
    }

    /// Whether it is over for a model that was not used for `idle`.
    pub fn is_over(self, idle: Duration) -> bool {
        matches!(self, Keep::For(time) if idle >= time)
    }
}

fn of_seconds(seconds: f64) -> Keep {
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) => Keep::For(time),
        // Below 0, or longer than anything lasts.
        Err(_) => Keep::Forever,
    }
}

/// Seconds of a duration as Go writes it; a plain number has none of its units.
fn duration(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 6] = [("h", 3600.0), ("ms", 1e-3), ("m", 60.0), ("s", 1.0), ("us", 1e-6), ("ns", 1e-9)];
    let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    let is_plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if is_plain(rest) {
        return Some(sign * rest.parse::<f64>().ok()?);
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, unit) = rest.split_at(digits);
        let end = unit.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(unit.len());
        let factor = UNITS.iter().find(|(name, _)| *name == &unit[..end])?.1;
        seconds += number.parse::<f64>().ok()? * factor;
        rest = &unit[end..];
    }
    (!text.is_empty() && text != "-").then_some(sign * seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_duration_is_read_as_ollama_reads_it() {
        for (value, seconds) in [
            (json!(0), Some(0.0)),
            (json!("0"), Some(0.0)),
            (json!("5m"), Some(300.0)),
            (json!("1h30m"), Some(5400.0)),
            (json!("1.5s"), Some(1.5)),
            (json!("300ms"), Some(0.3)),
            (json!(90), Some(90.0)),
            (json!("90"), Some(90.0)),
            (json!(-1), None),
            (json!("-1m"), None),
            (json!(1e300), None),
        ] {
            let wanted = seconds.map_or(Keep::Forever, |s| Keep::For(Duration::from_secs_f64(s)));
            assert_eq!(Keep::read(&value), Ok(wanted), "{value}");
        }
        for bad in [
            json!("soon"),
            json!(""),
            json!("-"),
            json!("5 m"),
            json!("m"),
            json!("5x"),
            json!({}),
            json!(true),
            json!("1.2.3s"),
        ] {
            assert!(Keep::read(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn it_is_over_when_its_time_is() {
        let second = Duration::from_secs(1);
        assert!(Keep::of_setting(1).is_over(second) && !Keep::of_setting(2).is_over(second));
        assert!(!Keep::of_setting(0).is_over(Duration::MAX) && !Keep::Forever.is_over(Duration::MAX));
        assert!(Keep::For(Duration::ZERO).is_over(Duration::ZERO));
    }
}
