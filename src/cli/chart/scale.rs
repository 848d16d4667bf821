//! Where the numbers of an axis stand, and how they are written.

use super::figures::Axis;

/// What stands beside an axis: places and their texts, some `about` of them, at steps of 1, 2 or 5 times a power of ten.
pub fn ticks(axis: &Axis, about: usize) -> Vec<(f64, String)> {
    let span = (axis.to - axis.from).max(f64::MIN_POSITIVE);
    let rough = span / about.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let of_power = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough * 0.999).unwrap_or(10.0);
    let step = match axis.whole {
        // Of few, every one.
        true if span <= about as f64 + 2.0 => 1.0,
        true => (of_power * power).max(1.0).round(),
        false => of_power * power,
    };
    let digits = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    let first = (axis.from / step - 1e-9).ceil() as i64;
    let last = (axis.to / step + 1e-9).floor() as i64;
    (first..=last).map(|n| n as f64 * step).map(|at| (at, text(at, digits))).collect()
}

/// A number with so many digits behind the point and groups of three before it.
fn text(value: f64, digits: usize) -> String {
    let plain = format!("{value:.digits$}");
    let plain = if plain.trim_start_matches('-').bytes().all(|b| b == b'0' || b == b'.') {
        plain.trim_start_matches('-').to_owned()
    } else {
        plain
    };
    let (whole, fraction) = plain.split_once('.').map_or((plain.as_str(), None), |(w, f)| (w, Some(f)));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |w| ("−", w));
    let mut grouped = String::new();
    for (i, c) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) && whole.len() > 4 {
            grouped.push(',');
        }
        grouped.push(c);
    }
    let fraction = fraction.map_or(String::new(), |f| format!(".{f}"));
    format!("{sign}{grouped}{fraction}")
}

#[cfg(test)]
mod tests {
    use super::{Axis, ticks};

    fn texts(axis: &Axis, about: usize) -> Vec<String> {
        ticks(axis, about).into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn steps_are_round_and_lie_in_the_range() {
        assert_eq!(texts(&Axis::new("", 0.0, 100.0), 5), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(texts(&Axis::new("", -0.3, 1.04), 5), ["0.0", "0.5", "1.0"]);
        assert_eq!(texts(&Axis::new("", -3.0, 12_500.0), 3), ["0", "5000", "10,000"]);
        assert_eq!(texts(&Axis::new("", 33.42, 33.48), 4), ["33.42", "33.44", "33.46", "33.48"]);
    }

    #[test]
    fn layers_are_whole_whatever_their_number() {
        for layers in [1usize, 2, 5, 12, 32, 80] {
            let axis = Axis::new("", -0.5, layers as f64 - 0.5).whole();
            let texts = texts(&axis, 11);
            assert!(!texts.is_empty() && texts.len() <= 13, "{layers}: {texts:?}");
            assert!(texts.iter().all(|t| t.parse::<usize>().is_ok_and(|l| l < layers)), "{layers}: {texts:?}");
            assert_eq!(texts.len() == layers, layers <= 12, "{layers}: every one of few layers is named: {texts:?}");
        }
    }
}
