//! The only clock. Everything that measures time asks here, so that a simulation can answer instead.

use std::sync::atomic::{AtomicU64, Ordering};
pub use std::time::{Duration, Instant};

/// The monotonic clock's present time, for durations; the date is [`unix_seconds`].
pub fn now() -> Instant {
    Instant::now()
}

/// Seconds since the Unix epoch, for time stamps in files.
pub fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A time stamp as people write it: `2026-11-23 09:05 UTC`.
pub fn utc_text(unix_seconds: u64) -> String {
    let (year, month, day) = date(unix_seconds);
    let seconds = unix_seconds % 86_400;
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60)
}

/// A time stamp as programs write it (RFC 3339): `2026-11-23T09:05:07Z`.
pub fn rfc3339(unix_seconds: u64) -> String {
    let (year, month, day) = date(unix_seconds);
    let seconds = unix_seconds % 86_400;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{seconds:02}Z")
}

/// Year, month and day.
fn date(unix_seconds: u64) -> (u64, u64, u64) {
    let mut day = unix_seconds / 86_400;
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let mut year = 1970;
    // Only a broken file has a date so far away that this would take long.
    while year < 9999 && day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for days in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < days {
            break;
        }
        (day, month) = (day - days, month + 1);
    }
    (year, month, day + 1)
}

/// Processor time of this thread so far. A limit on the work for a foreign file must not count the time in which other threads had
/// the core.
pub fn computed() -> Duration {
    processor_time(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Processor time of all threads of this process so far.
pub fn process_computed() -> Duration {
    processor_time(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn processor_time(of: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which is ours; a clock that every Linux has cannot be refused.
    let refused = unsafe { libc::clock_gettime(of, &raw mut time) };
    debug_assert_eq!(refused, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Nanoseconds since `mark`, which is set to now.
pub fn lap(mark: &mut Instant) -> u64 {
    let now = now();
    let passed = now.duration_since(*mark);
    *mark = now;
    passed.as_nanos() as u64
}

/// Lets the first warning of a kind through, and then at most one a minute: a full disk is reported without filling the log.
#[derive(Debug)]
pub struct Seldom(AtomicU64);

impl Seldom {
    /// One that has let nothing through yet, so that the first warning is due at once.
    pub const fn new() -> Seldom {
        Seldom(AtomicU64::new(0))
    }

    /// Whether a warning is due at `now`, in seconds above 0 by any clock, such as [`unix_seconds`].
    pub fn is_due(&self, now: u64) -> bool {
        let last = self.0.load(Ordering::Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= 60;
        // Of two threads that ask at once, one gets `true`.
        due && self.0.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Default for Seldom {
    fn default() -> Seldom {
        Seldom::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (unix, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_795_309_214, "2026-11-22 01:00 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
        ] {
            assert_eq!(utc_text(unix), text);
            assert!(rfc3339(unix).starts_with(&text[..16].replace(' ', "T")));
        }
    }

    #[test]
    fn a_programs_time_stamp_has_seconds() {
        assert_eq!(rfc3339(951_782_399), "2000-02-28T23:59:59Z");
    }

    /// A tokenizer was refused as too slow on a machine where other programs had the cores.
    #[test]
    fn what_others_compute_is_not_this_threads_time() {
        let spin = || {
            let before = computed();
            while computed() - before < Duration::from_millis(20) {}
        };
        let before = computed();
        std::thread::spawn(spin).join().unwrap();
        let waited = computed() - before;
        assert!(waited < Duration::from_millis(10), "{waited:?} of waiting for a thread that computed for 20 ms");
        let before = computed();
        spin();
        assert!(computed() - before >= Duration::from_millis(20));
    }

    #[test]
    fn a_warning_that_comes_again_is_said_once_a_minute() {
        let seldom = Seldom::new();
        let said: Vec<u64> = (1000..1200).filter(|&now| seldom.is_due(now)).collect();
        assert_eq!(said, [1000, 1060, 1120, 1180]);
        // A clock that was set back says nothing wrong, only later.
        assert!(!seldom.is_due(900) && seldom.is_due(1240));
    }
}
