//! The only clock. Everything that measures time asks here, so that a simulation can answer instead.

pub use std::time::{Duration, Instant};

pub fn now() -> Instant {
    Instant::now()
}

/// Seconds since the Unix epoch, for time stamps in files.
pub fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Nanoseconds since `mark`, which is set to now.
pub fn lap(mark: &mut Instant) -> u64 {
    let now = now();
    let passed = now.duration_since(*mark);
    *mark = now;
    passed.as_nanos() as u64
}
