//! When models were loaded, so that requests that name different ones in turn do not have the daemon do nothing but load.

use crate::clock::{Duration, Instant};
use std::collections::BTreeMap;

/// The last time that each model was loaded.
#[derive(Debug, Default)]
pub struct Residency(BTreeMap<String, Instant>);

impl Residency {
    /// Models whose times are kept, at most: the oldest one is forgotten.
    const MAX: usize = 256;

    /// Notes that a model was loaded.
    pub fn note(&mut self, origin: &str, now: Instant) {
        self.0.insert(origin.to_owned(), now);
        if self.0.len() > Self::MAX {
            let oldest = self.0.iter().min_by_key(|(_, at)| **at).map(|(origin, _)| origin.clone());
            oldest.iter().for_each(|origin| _ = self.0.remove(origin));
        }
    }

    /// The time until a model may be loaded in another's place: none is loaded twice within `min`.
    pub fn wait(&self, origin: &str, now: Instant, min: Duration) -> Duration {
        let since = self.0.get(origin).map(|at| now.saturating_duration_since(*at));
        since.map_or(Duration::ZERO, |since| min.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_model_is_loaded_twice_within_its_residency_and_the_first_time_never_waits() {
        let (mut residency, start) = (Residency::default(), crate::clock::now());
        let (min, at) = (Duration::from_secs(30), |seconds| start + Duration::from_secs(seconds));
        assert_eq!(residency.wait("a", start, min), Duration::ZERO);
        residency.note("a", at(0));
        residency.note("b", at(1));
        assert_eq!(residency.wait("a", at(2), min), Duration::from_secs(28));
        assert_eq!(residency.wait("b", at(2), min), Duration::from_secs(29));
        assert_eq!(residency.wait("c", at(2), min), Duration::ZERO);
        assert_eq!(residency.wait("a", at(30), min), Duration::ZERO);
        (0..1000).for_each(|i| residency.note(&format!("{i}"), at(100 + i)));
        assert!(residency.0.len() <= Residency::MAX && residency.wait("999", at(1099), min) == min);
    }
}
