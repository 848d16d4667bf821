//! What a plan for a model larger than memory is made of: this machine's disk, and what a cache of each size would read.

use super::device::Need;
use super::ram::{all_bytes, ffn_bytes, open_disk, resident_with};
use crate::disk::DiskCosts;
use crate::error::{Error, Result, human_bytes};
use crate::host_cache::{HostCacheOptions, Rehearsal, least_bytes};
use crate::ids::StoreId;
use crate::model::{KvType, Model};
use crate::placement::disk_plan::{DiskMachine, DiskModel, DiskPoint};
use crate::placement::drawn::Drawn;
use crate::placement::memory_plan::Footprint;

/// Shares of the way from the least memory to all of it, at which a cache is rehearsed.
const SHARES: [f64; 8] = [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9];

/// Microseconds of the threads' time that a read takes beside what asking for it costs the thread that asks: interrupts, waking, and copying
/// the neuron to its frame. The same in f16 and q4_0 with half of the neurons in memory, on two threads (runs/2026-11-23-plans-of-memory).
const UNSEEN_US: f64 = 4.0;

/// What is planned for.
pub struct RamQuestion<'a> {
    /// A packed model.
    pub model: &'a Model,
    /// How often each neuron was active, in the published order, `[layers][ffn]`.
    pub counts: Vec<Vec<u64>>,
    /// In how many tokens they were counted.
    pub tokens: u64,
    /// Share of the neurons that the predictors have computed, 0 to 1; 1 without.
    pub computed_share: f64,
    /// Share of those that are active, 0 to 1.
    pub precision: f64,
    /// Bytes of the predictors that a token reads.
    pub predictor_bytes: u64,
    /// Bytes of the file that they lie in, which is kept in memory.
    pub predictor_file_bytes: u64,
    /// Whether they look one layer ahead.
    pub ahead: bool,
    /// Positions of keys and values, their type, and sequences that are decoded at once.
    pub context: usize,
    /// See above.
    pub kv: KvType,
    /// See above.
    pub sequences: usize,
    /// Bytes a second that 1, 2 and more threads read from memory.
    pub bytes_s: Vec<f64>,
}

/// What was found out.
pub struct RamAnswer {
    /// This machine.
    pub machine: DiskMachine,
    /// The model on it.
    pub model: DiskModel,
    /// The least memory that it runs with.
    pub least_bytes: u64,
    /// Memory with which all of it stays there.
    pub all_bytes: u64,
    /// How the disk is read, for people.
    pub disk: String,
}

/// Measures the disk that the model lies on and rehearses caches of several sizes.
///
/// # Errors
/// [`Error::Usage`] where there is nothing to plan: no neurons of their own, or a model so small that it is kept whole in any memory that it
/// runs in. [`Error::Io`] if the file cannot be opened again.
pub fn ram_plan(question: RamQuestion<'_>) -> Result<RamAnswer> {
    let RamQuestion { model, computed_share, predictor_bytes, ahead, context, kv, sequences, .. } = question;
    if !model.has_neurons() {
        return Err(Error::Usage(
            "only a packed model with neurons of its own is kept in part on disk; pack it: dynamicinfer pack MODEL"
                .into(),
        ));
    }
    let need = Need { context, kv, sequences, ram: None };
    let (blocks, mut opened) = open_disk(model)?;
    let disk = &mut *opened.disk;
    let span = blocks[0].block_bytes as u64 * model.config.ffn as u64;
    let costs = DiskCosts::measure(disk, blocks[0].offset, span).unwrap_or(DiskCosts::USUAL);
    let ask_us = DiskCosts::measure_asking(disk, blocks[0].offset, span).unwrap_or(0.0);
    let options = HostCacheOptions { costs, ahead: usize::from(ahead), ..HostCacheOptions::new(0) };
    // When it is opened the disk is measured again, and the longest gap that may be worth reading along decides how much room reads take.
    let longest_gap = HostCacheOptions { costs: DiskCosts { read_us: f64::MAX, ..costs }, ..options };
    let least = least_bytes(&blocks, model.config.ffn, disk.align(), &longest_gap);
    let (resident, all) = (resident_with(model, need, question.predictor_file_bytes), all_bytes(model, need));
    if resident + least >= all {
        return Err(Error::Usage(format!(
            "this model takes {} with all of it in memory, and there is less to it than what it needs beside its neurons ({}): it is kept \
             whole, and nothing is to be planned",
            human_bytes(all),
            human_bytes(resident + least)
        )));
    }
    let counts: Vec<Vec<u64>> =
        question.counts.into_iter().zip(&model.layers).map(|(counts, l)| l.order.into_store(counts)).collect();
    let rehearsal = Rehearsal { layers: &blocks, align: disk.align(), counts: &counts, tokens: question.tokens };
    let mut points = Vec::new();
    for share in SHARES {
        let bytes = least + ((all - resident - least) as f64 * share) as u64;
        // For every size the same tokens.
        let mut drawn = Drawn::new(&counts, question.tokens, (computed_share, question.precision), 1);
        let mut needs = |layer: usize, list: &mut Vec<StoreId>| drawn.next(layer, list);
        let done = rehearsal
            .run(HostCacheOptions { bytes, ..options }, &mut needs)
            .map_err(|e| Error::Memory(format!("a cache of {} cannot be rehearsed: {e}", human_bytes(bytes))))?;
        points.push(DiskPoint {
            bytes: bytes as f64,
            miss: done.missing / done.needed.max(1.0),
            reads: done.reads,
            read_bytes: done.bytes,
            choose_s: done.seconds,
        });
    }
    points.push(DiskPoint { bytes: (all - resident) as f64, ..DiskPoint::default() });
    let footprint = Footprint::of_model(model, context, kv);
    let ffn_bytes = ffn_bytes(model) as f64;
    Ok(RamAnswer {
        machine: DiskMachine {
            bytes_s: question.bytes_s,
            read_s: costs.read_us / 1e6,
            ask_s: (ask_us + UNSEEN_US) / 1e6,
            disk_bytes_s: costs.gb_s * 1e9,
        },
        model: DiskModel {
            rest_bytes: (footprint.attention_bytes + footprint.head_bytes + predictor_bytes) as f64,
            ffn_bytes,
            activated: computed_share,
            resident_bytes: resident as f64,
            ahead,
            points,
        },
        least_bytes: resident + least,
        all_bytes: all,
        disk: disk.name(),
    })
}
