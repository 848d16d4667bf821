//! What the worker counts, for anyone to read at any time.

use crate::clock::Duration;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that is added to or set, and read without waiting.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds of the buckets in seconds: from a small model's token to a long prompt on a slow machine.
pub const BOUNDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// Durations by size.
#[derive(Debug, Default)]
pub struct Histogram {
    /// One per bound, and what is above all of them.
    buckets: [Number; BOUNDS.len() + 1],
    nanoseconds: Number,
}

impl Histogram {
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = BOUNDS.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].add(1);
        self.nanoseconds.add(duration.as_nanos() as u64);
    }

    /// Observations up to each bound, and all of them.
    pub fn cumulative(&self) -> [u64; BOUNDS.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|bucket| {
            sum += self.buckets[bucket].get();
            sum
        })
    }

    pub fn seconds(&self) -> f64 {
        self.nanoseconds.get() as f64 / 1e9
    }
}

/// All sums are since the worker started.
#[derive(Debug, Default)]
pub struct Metrics {
    pub time_to_first_token: Histogram,
    pub inter_token_latency: Histogram,
    pub request_latency: Histogram,
    pub queue_time: Histogram,
    pub running: Number,
    pub waiting: Number,
    pub slots: Number,
    pub prompt_tokens: Number,
    /// Of the prompts, what was still there from an answer before.
    pub cached_tokens: Number,
    pub generated_tokens: Number,
    pub finished_stop: Number,
    pub finished_length: Number,
    pub failed: Number,
    /// Jobs whose asker went away, waiting or running.
    pub disconnects: Number,
    pub refused_full: Number,
    /// Answers that ended because their schema was too much for the library.
    pub refused_schema: Number,
    /// Passes through the model: of decoding, their columns, and of prompts.
    pub decode_passes: Number,
    pub decode_columns: Number,
    pub prompt_passes: Number,
    /// Nanoseconds in the engine, by part.
    pub attention_ns: Number,
    pub predictor_ns: Number,
    pub ffn_ns: Number,
    pub head_ns: Number,
    /// Bytes of FFN rows that the CPU read.
    pub ffn_bytes: Number,
    /// Neurons times tokens that were computed, and all there were.
    pub neurons_computed: Number,
    pub neurons_all: Number,
    /// Of the device; all 0 without one.
    pub hits: Number,
    pub misses: Number,
    pub migrations: Number,
    pub device_budget_bytes: Number,
    pub device_used_bytes: Number,
    pub device_slots: Number,
    /// What the device's kernels read from its memory, and what was brought to it, with the time of each by the device's clock.
    pub device_bytes: Number,
    pub device_ns: Number,
    pub link_bytes: Number,
    pub link_ns: Number,
    /// Of the live audit: tokens, truly active neurons of predicted layers, and those of them that were computed.
    pub audited_tokens: Number,
    pub audited_active: Number,
    pub audited_found: Number,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_a_bound_belongs_to_its_own() {
        let histogram = Histogram::default();
        for ms in [1, 2, 1000, 500_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let counts = histogram.cumulative();
        assert_eq!((counts[0], counts[1], counts[8], counts[9], counts[14]), (1, 2, 2, 3, 4));
        assert!((histogram.seconds() - 501.003).abs() < 1e-9);
    }
}
