//! `strftime_now`: Python's `datetime.now().strftime`, in UTC, as it is with the C library of most Linux systems.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
/// Characters of a directive, at most.
const MAX_WIDTH: usize = 1024;

struct Moment {
    now: i64,
    days: i64,
    year: i64,
    month: i64,
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

/// The value of a directive: a text, or a number with its least digits and the character that fills it up to them.
enum Field {
    Text(String),
    Number(i64, usize, char),
}

/// The time `now`, in seconds since 1970, in the form that `format` says. Unknown directives stay as they are.
pub fn strftime(now: i64, format: &str) -> String {
    let moment = Moment::of(now);
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let directive = &rest[at + 1..];
        let flags = directive.len() - directive.trim_start_matches(['_', '-', '0', '^', '#']).len();
        let (flags, behind) = directive.split_at(flags);
        let digits = behind.len() - behind.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (width, behind) = behind.split_at(digits);
        let field = behind.chars().next().and_then(|c| Some((c, moment.field(c)?)));
        match field {
            Some((c, field)) => {
                out.push_str(&shown(field, flags, width.parse::<usize>().ok().map(|n| n.min(MAX_WIDTH))));
                rest = &behind[c.len_utf8()..];
            }
            None => {
                out.push('%');
                rest = directive;
            }
        }
    }
    out + rest
}

fn shown(field: Field, flags: &str, width: Option<usize>) -> String {
    let flag = |c: char| flags.contains(c);
    match field {
        Field::Text(text) => {
            let text = match () {
                () if flag('^') => text.to_uppercase(),
                // `%#p` is small, all else large.
                () if flag('#') && matches!(text.as_str(), "AM" | "PM") => text.to_lowercase(),
                () if flag('#') => text.to_uppercase(),
                () => text,
            };
            let fill = if flag('0') { '0' } else { ' ' };
            let spare = width.unwrap_or(0).saturating_sub(text.chars().count());
            String::from_iter(std::iter::repeat_n(fill, spare)) + &text
        }
        Field::Number(n, digits, fill) => {
            let fill = match flags.chars().rfind(|c| matches!(c, '_' | '-' | '0')) {
                Some('_') => ' ',
                Some('0') => '0',
                Some(_) => return n.to_string(),
                None => fill,
            };
            let shown = n.to_string();
            let spare = width.unwrap_or(digits).saturating_sub(shown.len());
            String::from_iter(std::iter::repeat_n(fill, spare)) + &shown
        }
    }
}

impl Moment {
    fn of(now: i64) -> Moment {
        let (days, seconds) = (now.div_euclid(86_400), now.rem_euclid(86_400));
        let (year, month, day) = civil(days);
        Moment { now, days, year, month, day, hour: seconds / 3600, minute: seconds / 60 % 60, second: seconds % 60 }
    }

    fn field(&self, directive: char) -> Option<Field> {
        let two = |n: i64| Field::Number(n, 2, '0');
        let text = |text: &str| Field::Text(text.to_owned());
        let weekday = (self.days + 4).rem_euclid(7);
        let day_of_year = self.days - days_of(self.year, 1, 1);
        let (month, day) = (MONTHS[self.month as usize - 1], DAYS[weekday as usize]);
        let hour12 = (self.hour + 11) % 12 + 1;
        let half = if self.hour < 12 { "AM" } else { "PM" };
        Some(match directive {
            'Y' => Field::Number(self.year, 1, '0'),
            'C' => two(self.year.div_euclid(100)),
            'y' => two(self.year.rem_euclid(100)),
            'm' => two(self.month),
            'd' => two(self.day),
            'e' => Field::Number(self.day, 2, ' '),
            'B' => text(month),
            'b' | 'h' => text(&month[..3]),
            'A' => text(day),
            'a' => text(&day[..3]),
            'H' => two(self.hour),
            'I' => two(hour12),
            'k' => Field::Number(self.hour, 2, ' '),
            'l' => Field::Number(hour12, 2, ' '),
            'M' => two(self.minute),
            'S' => two(self.second),
            'p' => text(half),
            'P' => text(&half.to_lowercase()),
            'j' => Field::Number(day_of_year + 1, 3, '0'),
            'u' => Field::Number((weekday + 6) % 7 + 1, 1, '0'),
            'w' => Field::Number(weekday, 1, '0'),
            'U' => two((day_of_year + 7 - weekday) / 7),
            'W' => two((day_of_year + 7 - (weekday + 6) % 7) / 7),
            'V' => two(self.iso_week().1),
            'G' => Field::Number(self.iso_week().0, 1, '0'),
            'g' => two(self.iso_week().0.rem_euclid(100)),
            's' => Field::Number(self.now, 1, '0'),
            'f' => text("000000"),
            'z' | 'Z' => text(""),
            'n' => text("\n"),
            't' => text("\t"),
            '%' => text("%"),
            'c' => self.several("%a %b %e %H:%M:%S %Y"),
            'D' | 'x' => self.several("%m/%d/%y"),
            'F' => self.several("%Y-%m-%d"),
            'R' => self.several("%H:%M"),
            'r' => self.several("%I:%M:%S %p"),
            'T' | 'X' => self.several("%H:%M:%S"),
            _ => return None,
        })
    }

    fn several(&self, format: &str) -> Field {
        Field::Text(strftime(self.now, format))
    }

    /// Year and week by ISO 8601: a week belongs to the year that has its Thursday.
    fn iso_week(&self) -> (i64, i64) {
        let thursday = self.days - (self.days + 3).rem_euclid(7) + 3;
        let (year, ..) = civil(thursday);
        (year, (thursday - days_of(year, 1, 1)) / 7 + 1)
    }
}

/// Year, month and day of a day since 1970 (Hinnant's `civil_from_days`: years begin in March, 400 of them are an era).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_dates_are_inverse() {
        for days in (-1_000_000..1_000_000).step_by(7) {
            let (year, month, day) = civil(days);
            assert_eq!(days_of(year, month, day), days);
        }
    }

    #[test]
    fn dates_are_those_of_python() {
        // 2026-11-20 13:05:09 UTC, a Friday.
        let now = 1_795_179_909;
        assert_eq!(strftime(now, "%d %b %Y"), "20 Nov 2026");
        assert_eq!(
            strftime(now, "%A, %B %-d, %I:%M:%S %p %j %y %% %F %T %Q %"),
            "Friday, November 20, 01:05:09 PM 324 26 % 2026-11-20 13:05:09 %Q %"
        );
        assert_eq!(strftime(951_782_400, "%F %a"), "2000-02-29 Tue");
        // Days of which week and year differ: 2027-01-03 is a Sunday, 2020-12-31 a Thursday.
        assert_eq!(strftime(1_798_934_400, "%F %G-W%V-%u %U %W"), "2027-01-03 2026-W53-7 01 00");
        assert_eq!(strftime(1_609_372_800, "%F %G-W%V-%u"), "2020-12-31 2020-W53-4");
    }
}
