//! What a plan for a model larger than memory is made of: this machine's disk, and what a cache of each size would read.

use super::options::Need;
use super::ram::{all_bytes, cached_bytes, chunk, costs, open_disk, parts, resident_with, span, usual_policy};
use crate::disk::{Disk, DiskCosts};
use crate::error::{Error, Result, human_bytes};
use crate::formats::trace_file::{TraceFile, TraceSection};
use crate::host_cache::{BEFORE, COUNTED, HostCacheOptions, LayerBlocks, Rehearsal, STRIP_READ, least_bytes};
use crate::ids::{PublishedId, StoreId};
use crate::model::{KvType, Model};
use crate::placement::disk_plan::{DiskMachine, DiskModel, DiskPoint};
use crate::placement::drawn::Drawn;
use crate::placement::memory_plan::Footprint;
use crate::scheduler::Policy;

/// Shares of the way from the least memory to all of it, at which a cache is rehearsed.
const SHARES: [f64; 8] = [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9];

/// How often the disk is measured for a plan: its rate changes from one moment to the next, and a plan is for all of them.
const MEASUREMENTS: usize = 9;

/// Microseconds of the threads' time that a read takes beside what asking for it costs the thread that asks: interrupts, waking, and copying
/// the neuron to its frame. The same in f16 and q4_0 with half of the neurons in memory, on two threads (runs/2026-11-23-plans-of-memory).
const UNSEEN_US: f64 = 4.0;

/// What is planned for.
pub struct RamQuestion<'a> {
    /// A packed model, or a mixture of experts.
    pub model: &'a Model,
    /// How often each neuron was active, in the published order, or each expert was chosen, `[layers][ffn]`.
    pub counts: Vec<Vec<u64>>,
    /// In how many tokens they were counted; 0 where they were not, and the counts mean nothing.
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
    /// Bytes a second of the model's weights that 1, 2 and more threads compute with.
    pub bytes_s: Vec<f64>,
    /// Which neurons stay in memory; `None` is the default policy.
    pub policy: Option<Policy>,
    /// What was recorded of this model on a text. `None` draws tokens by how often each neuron was counted.
    pub trace: Option<&'a TraceFile>,
}

/// The neurons that recorded tokens have computed, one token after the other, and the first again after the last.
struct Recorded<'a> {
    trace: &'a TraceFile,
    model: &'a Model,
    /// The probability from which on neurons are computed, as the trace has them, `[layers]`.
    thresholds: Vec<f32>,
    /// Tokens that were begun.
    begun: usize,
    /// Memory for probabilities that the trace has as bits.
    unpacked: Vec<u8>,
}

impl<'a> Recorded<'a> {
    fn new(trace: &'a TraceFile, model: &'a Model) -> Recorded<'a> {
        Recorded { trace, model, thresholds: trace.header().thresholds(None), begun: 0, unpacked: Vec::new() }
    }

    /// The neurons of a layer that this token has computed, ascending; with layer 0 a token begins.
    fn next(&mut self, layer: usize, list: &mut Vec<StoreId>) {
        self.begun += usize::from(layer == 0);
        let token = (self.begun - 1) % self.trace.header().tokens();
        let row = self.trace.probabilities(TraceSection::Own, layer, token, &mut self.unpacked);
        let computed = |&n: &usize| f32::from(row[n]) / 255.0 >= self.thresholds[layer];
        let computed: Vec<PublishedId> = (0..row.len()).filter(computed).map(PublishedId::new).collect();
        *list = self.model.layers[layer].order.positions(&computed);
        list.sort_unstable();
    }
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
    if parts(model).is_none() {
        return Err(Error::Usage(
            "only a mixture of experts, or a packed model with neurons of its own, is kept in part on disk; pack it: dynamicinfer pack MODEL"
                .into(),
        ));
    }
    let need = Need { context, kv, sequences, prompt_bytes: 0, ram: None, resident: false, host: None };
    let (blocks, mut opened) = open_disk(model)?;
    let disk = &mut *opened.disk;
    let (first, span) = (blocks[0].offset(), span(&blocks[0], model.config.clusters()));
    let costs = typical_costs(disk, &blocks[0], model.config.clusters());
    let ask_us = DiskCosts::measure_asking(disk, first, span).unwrap_or(0.0);
    let policy = question.policy.unwrap_or_else(|| usual_policy(model));
    let options = HostCacheOptions { policy, costs, ahead: usize::from(ahead), ..HostCacheOptions::new(0) };
    let least = least_bytes(&blocks, model.config.clusters(), disk.align());
    let (resident, all) = (resident_with(model, need, question.predictor_file_bytes), all_bytes(model, need));
    if resident + least >= all {
        return Err(Error::Usage(format!(
            "this model takes {} with all of it in memory, less than the least of a plan with a part on disk ({}): nothing is to be planned; \
             run it whole, without --ram and --min-speed",
            human_bytes(all),
            human_bytes(resident + least)
        )));
    }
    let room = (least, all - resident);
    let mut activated = computed_share;
    let mut points = match computed_share < 1.0 {
        true => {
            let (points, needed) = rehearsed(&question, &blocks, disk.align(), options, room)?;
            if question.trace.is_some() {
                activated = needed;
            }
            points
        }
        false => streamed(cached_bytes(model), room),
    };
    // Longer chunks of prompts take what they may of the memory that frames would have.
    for point in &mut points {
        point.bytes =
            (point.bytes + chunk(model, None, point.bytes as u64 - least).1 as f64).min((all - resident) as f64);
    }
    points.push(DiskPoint { bytes: (all - resident) as f64, ..DiskPoint::default() });
    let footprint = Footprint::of_model(model, context, kv);
    let ffn_bytes = cached_bytes(model) as f64;
    Ok(RamAnswer {
        machine: DiskMachine {
            bytes_s: question.bytes_s,
            read_s: costs.read_us / 1e6,
            ask_s: (ask_us + UNSEEN_US) / 1e6,
            disk_bytes_s: costs.gb_s * 1e9,
        },
        model: DiskModel {
            layers: model.config.layers().len(),
            attention_bytes: (footprint.attention_bytes + footprint.host_shared_bytes + predictor_bytes) as f64,
            head_bytes: footprint.head_bytes as f64,
            ffn_bytes,
            activated,
            resident_bytes: resident as f64,
            points,
        },
        least_bytes: resident + least,
        all_bytes: all,
        disk: disk.name(),
    })
}

/// Points by running caches of several sizes, from the least `room` on towards that which has all; and the share of the neurons that a token
/// needs.
fn rehearsed(
    question: &RamQuestion<'_>,
    layers: &[LayerBlocks],
    align: usize,
    options: HostCacheOptions,
    (least, all): (u64, u64),
) -> Result<(Vec<DiskPoint>, f64)> {
    let RamQuestion { model, tokens, computed_share, precision, .. } = *question;
    let published = question.counts.iter().zip(&model.layers);
    let counts: Vec<Vec<u64>> = match tokens {
        0 => vec![vec![0; model.config.clusters()]; layers.len()],
        _ => published.map(|(counts, layer)| layer.order.into_store(counts.clone())).collect(),
    };
    // A recorded text is run to its end, since it changes on the way.
    let counted = question.trace.map_or(COUNTED, |trace| trace.header().tokens().saturating_sub(BEFORE).max(COUNTED));
    let rehearsal = Rehearsal { layers, align, counts: &counts, tokens, runs: [BEFORE, counted] };
    let mut needed = 0.0;
    let point = |share: f64| {
        let bytes = least + ((all - least) as f64 * share) as u64;
        // For every size the same tokens.
        let mut drawn = Drawn::new(&counts, tokens, (computed_share, precision), 1);
        let mut recorded = question.trace.map(|trace| Recorded::new(trace, model));
        let mut needs = |layer: usize, list: &mut Vec<StoreId>| match &mut recorded {
            Some(recorded) => recorded.next(layer, list),
            None => drawn.next(layer, list),
        };
        let done = rehearsal
            .run(HostCacheOptions { bytes, ..options }, &mut needs)
            .map_err(|e| Error::Memory(format!("a cache of {} cannot be rehearsed: {e}", human_bytes(bytes))))?;
        needed = done.needed / (model.config.movable_layers() * model.config.clusters()) as f64;
        Ok(DiskPoint {
            bytes: bytes as f64,
            miss: done.missing / done.needed.max(1.0),
            early: done.early / done.missing.max(1.0),
            reads: done.reads,
            read_bytes: done.bytes,
            choose_s: done.seconds,
        })
    };
    let points = SHARES.into_iter().map(point).collect::<Result<_>>()?;
    Ok((points, needed))
}

/// Points of a model that leaves no neuron out: whatever the memory, all of them come from disk for each token, one after the other.
fn streamed(ffn_bytes: u64, (least, all): (u64, u64)) -> Vec<DiskPoint> {
    let reads = ffn_bytes.div_ceil(STRIP_READ as u64) as f64;
    let read_bytes = ffn_bytes as f64;
    let point = |bytes: u64| DiskPoint { bytes: bytes as f64, miss: 1.0, reads, read_bytes, ..DiskPoint::default() };
    vec![point(least), point(all - 1)]
}

/// What reads cost in the middle of some measurements, by the time of one neuron or expert.
fn typical_costs(disk: &mut dyn Disk, blocks: &LayerBlocks, neurons: usize) -> DiskCosts {
    let mut measured: Vec<DiskCosts> = (0..MEASUREMENTS).map(|_| costs(disk, blocks, neurons)).collect();
    let bytes = blocks.block_bytes();
    measured.sort_by(|a, b| a.us(bytes).total_cmp(&b.us(bytes)));
    measured[MEASUREMENTS / 2]
}
