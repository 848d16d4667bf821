//! What the worker counts. Any thread may read it at any time.

use super::prompt_cache::PromptCounts;
use super::prompt_files::PromptFiles;
use crate::cache::Tier;
use crate::clock::Duration;
use crate::device::Stream;
use crate::engine::Engine;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that is added to or set, and read without waiting.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Replaces the number by `n`.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Replaces the number by `n` if that is more.
    pub fn raise(&self, n: u64) {
        self.0.fetch_max(n, Ordering::Relaxed);
    }

    /// The number now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds of a histogram's buckets in seconds: from a small model's token to a long prompt on a slow machine.
pub const BOUNDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// Counts durations by size.
#[derive(Debug, Default)]
pub struct Histogram {
    /// One per bound, and one for durations above all bounds.
    buckets: [Number; BOUNDS.len() + 1],
    nanoseconds: Number,
}

impl Histogram {
    /// Counts one duration; a duration equal to a bound belongs to that bound's bucket.
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = BOUNDS.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].add(1);
        self.nanoseconds.add(duration.as_nanos() as u64);
    }

    /// How many durations are up to each bound; the last entry counts all of them.
    pub fn cumulative(&self) -> [u64; BOUNDS.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|bucket| {
            sum += self.buckets[bucket].get();
            sum
        })
    }

    /// Sum of all durations, in seconds.
    pub fn seconds(&self) -> f64 {
        self.nanoseconds.get() as f64 / 1e9
    }
}

/// Numbers of the prompt cache; `_total` are sums since the worker started, the others are states.
#[derive(Debug, Default)]
pub struct PromptNumbers {
    /// Bytes that it takes.
    pub bytes: Number,
    /// Bytes that it may take.
    pub budget: Number,
    /// Texts that it holds.
    pub texts: Number,
    /// Parts of texts whose states it holds.
    pub states: Number,
    /// Tokens of prompts that were restored from it.
    pub restored_tokens_total: Number,
    /// Texts that were saved in it.
    pub saved_total: Number,
    /// Texts that were evicted to make room.
    pub evicted_total: Number,
    /// Bytes of the texts on disk.
    pub disk_bytes: Number,
    /// Files of the directory that are no texts, or damaged.
    pub files_ignored_total: Number,
}

impl PromptNumbers {
    pub(super) fn take_files(&self, files: Option<&PromptFiles>) {
        if let Some(files) = files {
            self.disk_bytes.set(files.bytes());
            self.files_ignored_total.set(files.ignored);
        }
    }

    pub(super) fn take(&self, counts: PromptCounts) {
        for (number, count) in [
            (&self.bytes, counts.bytes),
            (&self.budget, counts.budget),
            (&self.texts, counts.texts),
            (&self.states, counts.states),
            (&self.restored_tokens_total, counts.restored_tokens),
            (&self.saved_total, counts.saved),
            (&self.evicted_total, counts.evicted),
        ] {
            number.set(count);
        }
    }
}

/// What comparing moving with the static placement can show, in the order of [`Metrics::verdict`].
pub const VERDICTS: [&str; 4] = ["unknown", "pays", "even", "loses"];

/// Numbers of one worker. Sums are since it started; `running`, `waiting` and the `device_..._bytes` and `device_slots` are states.
#[derive(Debug, Default)]
pub struct Metrics {
    /// From the request to its first token.
    pub time_to_first_token: Histogram,
    /// From one token of an answer to the next.
    pub inter_token_latency: Histogram,
    /// From the request to its last token.
    pub request_latency: Histogram,
    /// From the request to its slot.
    pub queue_time: Histogram,
    /// Answers that are being generated now.
    pub running: Number,
    /// Jobs that wait for a slot now.
    pub waiting: Number,
    /// Answers that can be generated at once.
    pub slots: Number,
    /// Tokens of prompts that were run.
    pub prompt_tokens: Number,
    /// Tokens of prompts that were not run, because an earlier answer left their keys and values.
    pub cached_tokens: Number,
    /// The prompt cache.
    pub prompts: PromptNumbers,
    /// Tokens that were generated.
    pub generated_tokens: Number,
    /// Answers that ended with [`Reason::Stop`](super::Reason::Stop).
    pub finished_stop: Number,
    /// Answers that ended with [`Reason::Length`](super::Reason::Length).
    pub finished_length: Number,
    /// Answers that the engine could not finish.
    pub failed: Number,
    /// Jobs whose client went away while they waited or ran.
    pub disconnects: Number,
    /// Jobs refused because the queue was full.
    pub refused_full: Number,
    /// Answers that ended because their schema was too costly for the grammar library.
    pub refused_schema: Number,
    /// Passes through the model that generated tokens.
    pub decode_passes: Number,
    /// Tokens in these passes, one for each sequence in a pass, without guessed ones.
    pub decode_columns: Number,
    /// Tokens that were guessed and run to be compared with those that answers got.
    pub guessed_tokens: Number,
    /// Guessed tokens that were right.
    pub accepted_tokens: Number,
    /// Passes through the model over chunks of prompts.
    pub prompt_passes: Number,
    /// Passes that made tokens and with which tokens of a prompt went along.
    pub prompts_along: Number,
    /// Passes over parts of texts whose embeddings are wanted.
    pub embedding_passes: Number,
    /// Tokens in these passes.
    pub embedding_tokens: Number,
    /// Questions that were answered between passes, changes to the engine among them.
    pub questions: Number,
    /// Steps of other work (questions, parts of prompts and of texts to embed) that an answer has waited for between two tokens, at most.
    pub held_up_most: Number,
    /// Nanoseconds in attention.
    pub attention_ns: Number,
    /// Nanoseconds in predictors.
    pub predictor_ns: Number,
    /// Nanoseconds that the engine's thread spent for the scheduler: showing it layers and beginning its moves.
    pub scheduler_ns: Number,
    /// Nanoseconds in FFNs.
    pub ffn_ns: Number,
    /// Nanoseconds in the head, which makes the logits.
    pub head_ns: Number,
    /// Bytes of FFN rows that the CPU read.
    pub ffn_bytes: Number,
    /// Neurons times tokens that were computed.
    pub neurons_computed: Number,
    /// Neurons times tokens that a dense model would have computed.
    pub neurons_all: Number,
    /// Neurons that were in host memory when they were needed; 0 where all are, as the next six.
    pub ram_hits: Number,
    /// Neurons that were needed and had to be read from disk.
    pub ram_misses: Number,
    /// Bytes read from disk.
    pub disk_bytes: Number,
    /// Reads from disk.
    pub disk_reads: Number,
    /// Reads that failed, came short or were wrong, and were asked for once more.
    pub disk_reads_again: Number,
    /// Bytes that were compared with their checksums, being read for the first time.
    pub disk_verified_bytes: Number,
    /// Nanoseconds that threads have waited for the disk, all together.
    pub disk_wait_ns: Number,
    /// Bytes of host memory that the model may take; 0 where all of it is there, as the next.
    pub ram_budget_bytes: Number,
    /// Bytes of host memory that it takes.
    pub ram_used_bytes: Number,
    /// Active neurons times tokens that the device computed; 0 without a device, as all that follow up to the audit's.
    pub hits: Number,
    /// Active neurons times tokens that the CPU computed beside a device.
    pub misses: Number,
    /// Neurons whose copy to the device was begun.
    pub migrations: Number,
    /// 1 while neurons move, 0 while the static placement is kept.
    pub moving: Number,
    /// Place in [`VERDICTS`] of what comparing moving with the static placement has shown last.
    pub verdict: Number,
    /// Mean time of a token in that comparison, ns: while neurons moved, and with the static placement.
    pub compared_ns: [Number; 2],
    /// Bytes of the device's memory that may be used.
    pub device_budget_bytes: Number,
    /// Bytes of the device's memory that are used.
    pub device_used_bytes: Number,
    /// Neuron slots on the device, over all layers.
    pub device_slots: Number,
    /// Bytes of weights that the device's kernels read from its memory.
    pub device_bytes: Number,
    /// Nanoseconds in which these kernels ran, by the device's clock.
    pub device_ns: Number,
    /// Bytes of neurons, and of attention that has no room there, that were copied to the device while it ran.
    pub link_bytes: Number,
    /// Nanoseconds in which these copies ran, by the device's clock.
    pub link_ns: Number,
    /// Tokens at which the live audit compared predictions with true activations.
    pub audited_tokens: Number,
    /// At these tokens, truly active neurons of the predicted layers.
    pub audited_active: Number,
    /// Of these neurons, those that were computed.
    pub audited_found: Number,
}

impl Metrics {
    /// Takes what the engine has counted since the last time, and its states.
    pub(super) fn take(&self, engine: &mut Engine) {
        let report = &engine.report;
        self.attention_ns.add(report.attention_ns);
        self.predictor_ns.add(report.predictor_ns);
        self.scheduler_ns.add(report.scheduler_ns);
        self.ffn_ns.add(report.ffn_ns);
        self.head_ns.add(report.head_ns);
        self.ffn_bytes.add(report.ffn_bytes);
        let cache = &report.host_cache;
        self.ram_hits.add(cache.hits);
        self.ram_misses.add(cache.misses + cache.early);
        self.disk_bytes.add(cache.reads.bytes);
        self.disk_reads.add(cache.reads.reads);
        self.disk_reads_again.add(cache.reads.again);
        self.disk_verified_bytes.add(cache.reads.verified_bytes);
        self.disk_wait_ns.add(cache.waited_ns);
        if let Some(cached) = &engine.cached {
            let memory = cached.memory();
            self.ram_budget_bytes.set(memory.budget);
            self.ram_used_bytes.set(memory.used);
        }
        let (computed, all) = report.neurons(&engine.model.config);
        self.neurons_computed.add(computed);
        self.neurons_all.add(all);
        engine.report.clear();
        if let Some(split) = &engine.split {
            let (counters, memory) = (split.cache.counters, split.device.memory());
            self.hits.set(counters.computed[Tier::Device]);
            self.misses.set(counters.computed[Tier::Host]);
            self.migrations.set(counters.migrations);
            let scheduler = split.migrator.as_ref().map(|migrator| migrator.counts()).unwrap_or_default();
            self.moving.set(u64::from(scheduler.moving));
            self.verdict.set(scheduler.gain.verdict as u64);
            let compared = [scheduler.gain.moving_ns, scheduler.gain.resting_ns];
            self.compared_ns.iter().zip(compared).for_each(|(to, ns)| to.set(ns));
            self.device_budget_bytes.set(memory.budget);
            self.device_used_bytes.set(memory.used);
            let totals = split.device.totals();
            self.device_bytes.set(totals.device_bytes);
            self.device_ns.set(totals.busy_ns[Stream::Compute as usize]);
            self.link_bytes.set(totals.migrated_bytes);
            self.link_ns.set(totals.busy_ns[Stream::Copy as usize]);
            self.device_slots.set(split.cache.layers.iter().map(|l| l.table.slots().len() as u64).sum());
        }
        if let Some(audit) = &engine.audit {
            self.audited_tokens.set(audit.counts.tokens);
            self.audited_active.set(audit.counts.active);
            self.audited_found.set(audit.counts.found);
        }
    }
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
