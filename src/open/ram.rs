//! How much of a model is kept in host memory: all of it, or what `--ram` or the machine allow, with the rest of its neurons on disk.

use super::listener::Listener;
use super::options::{EngineOptions, Need, RamOptions};
use super::planned::Exchange;
use super::{artifacts, sparsity};
use crate::disk::{self, Disk, DiskCosts, OpenedDisk};
use crate::engine::session::CHUNK;
use crate::engine::{Engine, Foresight, Split, pinned_bytes, unread};
use crate::error::{Error, Result, human_bytes};
use crate::formats;
use crate::host_cache::{HostCache, HostCacheOptions, LayerBlocks, MAX_AHEAD, ReadFault, Run, least_bytes};
use crate::model::layer::FfnParts;
use crate::model::{ExpertWeights, FfnMatrices, KvCache, Matrix, Model};
use crate::placement::footprint::working_bytes;
use crate::placement::prompt_chunk;
use crate::predictor::{Predictor, Router};
use crate::scheduler::Policy;
use std::fs::File;
use std::sync::Arc;

/// One part in so many of the free memory is left to others by default.
const LEFT_TO_OTHERS: u64 = 20;

/// Memory for a model of which a part stays on disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Limit {
    /// For everything, bytes.
    Bytes(u64),
    /// [`RamOptions::share`].
    Share(f64),
}

/// The files of a model of which a part stays on disk.
pub(super) struct OnDisk {
    limit: Limit,
    blocks: Vec<LayerBlocks>,
    opened: OpenedDisk,
}

impl OnDisk {
    /// Opens them, to keep to a limit.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(model: &Model, limit: Limit) -> Result<OnDisk> {
        let (blocks, opened) = open_disk(model)?;
        Ok(OnDisk { limit, blocks, opened })
    }

    /// The fewest bytes that frames and landing take.
    fn least_bytes(&self, model: &Model) -> u64 {
        least_bytes(&self.blocks, model.config.clusters(), self.opened.disk.align())
    }
}

/// Whether what has to be in memory of the model's files fits into the memory that is free.
pub(super) fn fits(model: &Model) -> bool {
    crate::config::available_memory().is_none_or(|free| model.memory_bytes() < free)
}

/// Bytes of the files of an engine's predictors.
fn predictor_files_bytes(engine: &Engine) -> u64 {
    engine.files().iter().skip(engine.model.files().len()).map(|file| file.bytes().len() as u64).sum()
}

/// The host memory that a model takes beside its neurons, with prompts in chunks of [`CHUNK`] tokens.
fn resident_bytes(engine: &Engine, need: Need, exchange: Exchange) -> u64 {
    resident_with(&engine.model, need, predictor_files_bytes(engine)) + exchange.bytes
}

/// As [`resident_bytes`], with predictors of so many bytes and without a device.
pub(super) fn resident_with(model: &Model, need: Need, predictors: u64) -> u64 {
    always_bytes(model, need, predictors) + working_bytes(&model.config, CHUNK)
}

/// Of them, what does not depend on how long chunks are.
fn always_bytes(model: &Model, need: Need, predictors: u64) -> u64 {
    model.file_bytes() - cached_bytes(model) + keys(model, need) + predictors
}

/// Host memory for a device's plan ([`Request::host`](crate::placement::memory_plan::Request::host)). Where all of a model is in memory it is what
/// is left beside the weights, and the shortest chunks have theirs in any case.
pub(super) fn room(engine: &Engine, need: Need, part: Option<&OnDisk>) -> Option<u64> {
    let model = &engine.model;
    match part.map(|part| (part.limit, part)) {
        Some((Limit::Bytes(bytes), part)) => {
            let always = always_bytes(model, need, predictor_files_bytes(engine));
            Some(bytes.saturating_sub(always + part.least_bytes(model)))
        }
        Some((Limit::Share(_), _)) => None,
        None => {
            let shortest = working_bytes(&model.config, CHUNK) + pinned_bytes(&model.config, CHUNK, true);
            let memory = need.ram.or_else(crate::config::available_memory)?;
            Some(memory.saturating_sub(all_bytes(model, need)).saturating_add(shortest))
        }
    }
}

/// Tokens of a chunk of a mixture's prompts where frames would have so many bytes ([`prompt_chunk::longest`]), and how many bytes more that is
/// than [`CHUNK`] tokens take. Of other models arithmetic hides what a chunk reads. With a device whose plan has chosen `planned` tokens the host
/// follows, as far as frames have the bytes at all.
pub(super) fn chunk(model: &Model, planned: Option<usize>, frames_bytes: u64) -> (usize, u64) {
    let beyond = |tokens| for_chunks(model, tokens);
    match planned {
        Some(planned) => {
            prompt_chunk::within(|tokens| if tokens > planned { u64::MAX } else { beyond(tokens) }, frames_bytes)
        }
        None if gains(model) => prompt_chunk::longest(beyond, frames_bytes, u64::MAX),
        None => (CHUNK, 0),
    }
}

/// Tokens of a chunk where all of a model is kept in memory: of a mixture the most for which there is room beside it.
pub(super) fn chunk_of_all(model: &Model, options: &EngineOptions) -> usize {
    let room = options.ram.or_else(crate::config::available_memory);
    let left = room.map_or(u64::MAX, |room| room.saturating_sub(all_bytes(model, options.need(model))));
    if gains(model) { prompt_chunk::within(|tokens| for_chunks(model, tokens), left).0 } else { CHUNK }
}

/// Whether longer chunks are faster on the processor alone: those of a mixture, each of which reads nearly all experts.
fn gains(model: &Model) -> bool {
    model.config.is_routed()
}

/// Bytes that chunks of so many tokens take beyond those of [`CHUNK`].
pub(super) fn for_chunks(model: &Model, tokens: usize) -> u64 {
    working_bytes(&model.config, tokens) - working_bytes(&model.config, CHUNK)
}

/// Bytes of all neurons or experts.
pub(super) fn cached_bytes(model: &Model) -> u64 {
    let of = |experts: &ExpertWeights| experts.experts.iter().map(FfnMatrices::bytes).sum();
    model.layers.iter().map(|layer| layer.ffn.experts().map_or(layer.ffn.bytes(), of)).sum()
}

/// What of a model can be left on disk, in the plural; `None` if it is read in place as a whole.
pub(super) fn parts(model: &Model) -> Option<&'static str> {
    match model.config.parts() {
        FfnParts::Experts => Some("experts"),
        FfnParts::Clusters => Some("clusters"),
        FfnParts::Neurons => model.has_neurons().then_some("neurons"),
    }
}

/// Bytes of the keys and values of all sequences, and of texts that have none.
pub(super) fn keys(model: &Model, need: Need) -> u64 {
    let each = KvCache::bytes_for(&model.config, need.context, need.kv);
    each.saturating_mul(need.sequences as u64).saturating_add(need.prompt_bytes)
}

/// The memory that a model takes when all of it is kept there.
pub(super) fn all_bytes(model: &Model, need: Need) -> u64 {
    model.memory_bytes().saturating_add(keys(model, need))
}

/// The default policy of what stays in memory.
pub(super) fn usual_policy(model: &Model) -> Policy {
    match model.config.parts() {
        // Each of them is needed for every token: whatever came in would be gone again before its next use.
        FfnParts::Clusters => Policy::Static,
        FfnParts::Experts => Policy::TwoQueues,
        FfnParts::Neurons => Policy::Full,
    }
}

/// Whether not all of a model fits that would have to be in memory as a whole, read in place.
pub(super) fn too_large(model: &Model, options: &EngineOptions) -> bool {
    let whole = options.device.is_none() && parts(model).is_none();
    let limited =
        options.neurons.share.is_some() || options.ram.is_some_and(|ram| ram < all_bytes(model, options.need(model)));
    whole && (limited || options.ram.is_none() && !fits(model))
}

/// Whether a part of a model can be on disk while a device computes another: neurons, and experts as wholes. Of the neurons inside experts
/// the CPU reads single rows, which are in no frame.
fn has_three_tiers(model: &Model) -> bool {
    model.has_neurons() || model.config.is_routed() && model.config.has_whole_experts()
}

/// Memory for a model of which a part stays on disk; `None` if all of it is kept in memory, or it has nothing to leave there.
/// `device` says whether one computes a part.
pub(super) fn limit(model: &Model, options: &EngineOptions, device: bool) -> Option<Limit> {
    let all = all_bytes(model, options.need(model));
    let has_parts = parts(model).is_some() && (!device || has_three_tiers(model));
    match options.ram {
        _ if !has_parts => None,
        _ if options.neurons.share.is_some() => options.neurons.share.map(Limit::Share),
        Some(ram) => (ram < all).then_some(Limit::Bytes(ram)),
        None if fits(model) => None,
        None => crate::config::available_memory().map(|free| Limit::Bytes(free - free / LEFT_TO_OTHERS)),
    }
}

/// That a model does not run with so much memory; `given` is what there is: `--ram 1.00 GiB is`.
pub fn too_little(given: &str, least: u64) -> Error {
    Error::Memory(format!(
        "{given} below the {} that this model takes with all of its FFNs on disk: attention, head, keys and values, and room for \
         reads; give --ram {}MiB or more, take a smaller --ctx-size, or take the model in a smaller type (pack --quant q4_0)",
        human_bytes(least),
        least.div_ceil(1 << 20)
    ))
}

/// Checks that the limit has room for everything beside the neurons and for reading them; says how many bytes neurons get.
fn share(engine: &Engine, need: Need, part: &OnDisk, exchange: Exchange) -> Result<u64> {
    let (resident, neurons) = (resident_bytes(engine, need, exchange), engine.model.config.clusters());
    let least = resident + part.least_bytes(&engine.model);
    let limit = match part.limit {
        Limit::Bytes(bytes) => bytes,
        Limit::Share(share) => {
            let align = part.opened.disk.align();
            let frames = |layer: &LayerBlocks| layer.frame_bytes(neurons, align) * neurons;
            least + (share * part.blocks.iter().map(frames).sum::<usize>() as f64) as u64
        }
    };
    if limit < least {
        let given = match need.ram {
            Some(ram) => format!("--ram {} is", human_bytes(ram)),
            None => format!("{} of memory are free,", human_bytes(limit)),
        };
        let all = all_bytes(&engine.model, need);
        if all < least {
            // Of a small model the rooms for reads are more than all of its neurons.
            return Err(Error::Memory(format!(
                "{given} below the {} that all of this model takes (with its FFNs on disk it would take {}, for reads); give --ram {}MiB or more",
                human_bytes(all),
                human_bytes(least),
                all.div_ceil(1 << 20)
            )));
        }
        return Err(match (too_little(&given, least), exchange.chunk > CHUNK) {
            (Error::Memory(why), true) => {
                Error::Memory(format!("{why}; or a shorter --prompt-chunk than {}", exchange.chunk))
            }
            (refused, _) => refused,
        });
    }
    Ok(limit - resident)
}

/// Lets an engine read from disk what is beyond `limit` bytes. Its sparsity is set, and it has its device.
///
/// # Errors
/// [`Error::Memory`] where the limit is below the least that it works with, or the system gives less; [`Error::Io`] if the file cannot be
/// opened again.
pub(super) fn keep_a_part(
    engine: &mut Engine,
    need: Need,
    part: OnDisk,
    options: &EngineOptions,
    told: &dyn Listener,
) -> Result<()> {
    let exchange = Exchange::of(engine.split.as_ref());
    let (bytes, least) = (share(engine, need, &part, exchange)?, part.least_bytes(&engine.model));
    let OnDisk { limit, blocks, opened: OpenedDisk { mut disk, notice } } = part;
    let RamOptions { policy, together, overlap, keep, .. } = options.neurons;
    let foresight = foresight(engine, options)?;
    let neurons = engine.model.config.clusters();
    let costs = costs(&mut *disk, &blocks[0], neurons);
    let ahead = foresight.as_ref().map_or(0, Foresight::ahead);
    let policy = policy.unwrap_or_else(|| usual_policy(&engine.model));
    let how = HostCacheOptions { policy, together, overlap, ahead, costs, ..HostCacheOptions::new(0) };
    let (chunk, for_chunks) = match limit {
        Limit::Bytes(_) => chunk(&engine.model, engine.split.as_ref().map(Split::chunk), bytes - least),
        Limit::Share(_) => (CHUNK, 0),
    };
    let bytes = if keep { bytes - for_chunks } else { least };
    let what = parts(&engine.model).unwrap_or_default();
    let cache = HostCache::new(disk, &blocks, neurons, HostCacheOptions { bytes, ..how });
    let mut cache =
        cache.map_err(|e| Error::Memory(format!("there is no memory for {} of {what}: {e}", human_bytes(bytes))))?;
    let (frames, all) = cache.frames();
    notice.iter().for_each(|notice| told.note(notice));
    let placed = if keep { place(&mut cache, engine, told)? } else { false };
    told.note(&format!(
        "{} of memory: room for {:.0} % of the {what}{}, the others are read from disk when they are needed ({}, {:.1} GB/s and {:.0} us a read){}",
        human_bytes(bytes + for_chunks + resident_bytes(engine, need, exchange)),
        100.0 * frames as f64 / all as f64,
        if placed { " (at first for those of its profile)" } else { "" },
        cache.disk_name(),
        costs.gb_s,
        costs.read_us,
        if options.ram.is_none() { "; --ram sets how much" } else { "" }
    ));
    load_the_rest(&engine.model);
    let beside = resident_bytes(engine, need, exchange);
    engine.set_host_cache(cache, foresight);
    engine.set_chunk(chunk);
    engine.cached.as_mut().expect("it was set").beside = beside + for_chunks;
    Ok(())
}

/// Fills the frames by the model's profile, with what is not on the device; `false` if it has none.
fn place(cache: &mut HostCache, engine: &Engine, told: &dyn Listener) -> Result<bool> {
    let model = &engine.model;
    let Some((_, profile)) = artifacts::profile_if_good(model, told) else { return Ok(false) };
    let tokens = profile.texts.iter().map(|t| t.info.tokens as u64).sum();
    for (layer, weights) in model.layers.iter().enumerate() {
        let mut counts = weights.order.into_store(profile.counts(layer));
        if let Some(split) = &engine.split {
            let slots = split.cache.layers[layer].table.slots();
            slots.iter().filter_map(|slot| slot.resident()).for_each(|neuron| counts[neuron.index()] = 0);
        }
        let unread = |fault: ReadFault| unread(model, &fault);
        cache.place(layer, &counts, tokens).map_err(unread)?;
    }
    Ok(true)
}

/// What says which neurons later layers will need; `None` for nothing. A look-ahead of one gives reads the time of a layer, and is as good
/// as the choice of the layer itself nearly always. Where a device predicts neurons, the host would have to do it once more.
///
/// # Errors
/// [`Error::Usage`] for a look-ahead that the predictor was not made for.
fn foresight(engine: &Engine, options: &EngineOptions) -> Result<Option<Foresight>> {
    let RamOptions { prefetch, lookahead, .. } = options.neurons;
    let layers = engine.model.config.layers().len();
    let predictor = match Router::of(&engine.model) {
        _ if !prefetch => return Ok(None),
        Some(router) => Some(Arc::new(router) as Arc<dyn Predictor>),
        None if engine.sparsity().is_dense() || engine.split.is_some() => return Ok(None),
        None => sparsity::ahead(engine, &options.sparsity)?,
    };
    let looks = |ahead: usize| {
        let predictor = predictor.as_ref().filter(|_| (1..layers.min(MAX_AHEAD + 1)).contains(&ahead))?;
        (ahead..layers).all(|l| predictor.calibration(l, ahead).is_some()).then(|| predictor.clone())
    };
    match lookahead {
        Some(ahead) => match looks(ahead) {
            Some(predictor) => Ok(Some(Foresight::new(predictor, ahead))),
            None => Err(Error::Usage(format!(
                "this model's predictor was not made to look {ahead} layers ahead; train-predictor and calibrate make one that does"
            ))),
        },
        None => Ok((1..=MAX_AHEAD).find_map(|ahead| Some(Foresight::new(looks(ahead)?, ahead)))),
    }
}

/// Where a model's neurons or experts lie in its files, layer by layer, and the checksums that a store has of them.
///
/// # Errors
/// [`Error::BadFile`] where a layer's section is missing, or its checksums are damaged.
///
/// # Panics
/// If the model has neither.
pub fn layer_blocks(model: &Model) -> Result<Vec<LayerBlocks>> {
    // A layer without experts in a mixture, or without an FFN, stands with those of another, and is never asked for.
    let some = model.layers.iter().find_map(|layer| layer.ffn.experts().filter(|experts| !experts.experts.is_empty()));
    let blocks = model.layers.iter().enumerate().map(|(l, layer)| {
        let name = format!("layer.{l}.ffn");
        let blocks = match (layer.ffn.experts(), model.store()) {
            (Some(experts), _) if experts.experts.is_empty() => {
                return Ok(expert_blocks(model, some.expect("some layer has experts")).idle());
            }
            (Some(experts), _) => expert_blocks(model, experts),
            (None, Some(store)) => {
                let described = model.config.ffn_like(l);
                let name = format!("layer.{described}.ffn");
                let missing = || Error::bad(model.path(), &name, "the section is missing");
                let offset = store.section(&name).ok_or_else(missing)?.offset;
                let blocks = LayerBlocks::of_neurons(offset, layer.block().bytes());
                if described != l {
                    return Ok(blocks.idle());
                }
                blocks
            }
            (None, None) => panic!("a model with neurons is packed"),
        };
        let Some(store) = model.store() else { return Ok(blocks) };
        let checksums = store.block_checksums(&name, model.config.clusters() * blocks.runs().len())?;
        Ok(blocks.with_checksums(checksums.unwrap_or_default()))
    });
    blocks.collect()
}

/// Where a layer's experts lie in the model's files.
fn expert_blocks(model: &Model, ExpertWeights { experts, .. }: &ExpertWeights) -> LayerBlocks {
    let place = |matrix: &Matrix| {
        let at = matrix.row_ptr(0).addr();
        let mut files = model.files().iter().map(|file| file.bytes().as_ptr_range()).enumerate();
        let inside = files.find(|(_, bytes)| (bytes.start.addr()..bytes.end.addr()).contains(&at));
        let (number, bytes) = inside.expect("a mixture is read in place");
        disk::place(number, (at - bytes.start.addr()) as u64)
    };
    let run = |(m, matrix): (usize, &Matrix)| {
        let of = |expert: &FfnMatrices| place(expert.parts().nth(m).expect("experts are alike"));
        Run::new(experts.iter().map(of).collect(), matrix.bytes() as usize)
    };
    let blocks = LayerBlocks::of_experts(experts[0].parts().enumerate().map(run).collect());
    match model.store() {
        Some(_) => blocks,
        None => blocks.with_types(experts[0].parts().filter_map(|matrix| matrix.quant.source()).collect()),
    }
}

/// What reads of a layer's neurons or experts cost.
pub(super) fn costs(disk: &mut dyn Disk, blocks: &LayerBlocks, neurons: usize) -> DiskCosts {
    let bytes = if blocks.runs().len() > 1 { blocks.runs()[0].bytes() } else { DiskCosts::OF_NEURONS };
    DiskCosts::measure(disk, blocks.offset(), span(blocks, neurons), bytes).unwrap_or(DiskCosts::USUAL)
}

/// Bytes of a file in which some of a layer's neurons or experts lie.
pub(super) fn span(blocks: &LayerBlocks, neurons: usize) -> u64 {
    let run = &blocks.runs()[0];
    run.bytes() as u64 * neurons as u64
}

pub(super) fn open_disk(model: &Model) -> Result<(Vec<LayerBlocks>, OpenedDisk)> {
    let blocks = layer_blocks(model)?;
    let files: Vec<&File> = model.files().iter().map(|file| file.file()).collect();
    let opened = disk::open(&files).map_err(Error::io("open", model.path()))?;
    Ok((blocks, opened))
}

/// Reads everything but neurons or experts into memory.
fn load_the_rest(model: &Model) {
    if let Some(store) = model.store() {
        let rest = store.header.sections.iter().filter(|section| !section.name.ends_with(".ffn"));
        return rest.for_each(|section| formats::load(store.bytes(section)));
    }
    let experts = model.layers.iter().filter_map(|layer| layer.ffn.experts()).flat_map(|layer| &layer.experts);
    let mut left: Vec<&[u8]> = experts.flat_map(FfnMatrices::parts).map(Matrix::all).collect();
    left.sort_by_key(|bytes| bytes.as_ptr());
    for file in model.files() {
        let (all, mut from) = (file.bytes(), 0);
        let at = |byte: *const u8| byte.addr() - all.as_ptr().addr();
        for bytes in
            left.iter().map(|bytes| bytes.as_ptr_range()).filter(|bytes| all.as_ptr_range().contains(&bytes.start))
        {
            // Between two experts there is nothing, and pages that are looked at bring their neighbours.
            if from < at(bytes.start) {
                formats::load(&all[from..at(bytes.start)]);
            }
            from = at(bytes.end);
        }
        formats::load(&all[from..]);
    }
}

/// Whether an engine can be opened within the limit, with what host and device will exchange, without taking its memory.
///
/// # Errors
/// As [`keep_a_part`].
pub(super) fn check(engine: &Engine, need: Need, part: &OnDisk, exchange: Exchange) -> Result<()> {
    share(engine, need, part, exchange).map(drop)
}
