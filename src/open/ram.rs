//! How much of a model is kept in host memory: all of it, or what `--ram` or the machine allow, with the rest of its neurons on disk.

use super::device::Need;
use super::{EngineOptions, Listener, artifacts, fits, sparsity};
use crate::disk::{self, DiskCosts, OpenedDisk};
use crate::engine::{Engine, Foresight};
use crate::error::{Error, Result, human_bytes};
use crate::formats;
use crate::formats::neuron_store::Section;
use crate::host_cache::{HostCache, HostCacheOptions, LayerBlocks, MOST_AHEAD, ReadFault, least_bytes};
use crate::model::{KvCache, Model};
use crate::scheduler::Policy;

/// What a process takes beside weights, keys and values: activations of a prompt's chunk, tables of the cache, the program itself. Measured
/// 45 to 60 MiB for models of 1 B.
const WORKING_BYTES: u64 = 64 << 20;
/// Of the memory that is free, one part in so many is left to others where nobody has said how much to take.
const LEFT_TO_OTHERS: u64 = 20;

/// How neurons are kept in memory that do not all fit: values of one way of working, for comparisons.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RamOptions {
    /// Who stays.
    pub policy: Policy,
    /// Whether neighbours are read together where that pays.
    pub together: bool,
    /// Whether what is there is computed while the rest is read.
    pub overlap: bool,
    /// Whether anything stays at all.
    pub keep: bool,
    /// Whether what later layers will need is asked for before their turn.
    pub prefetch: bool,
    /// Number of layers that are looked ahead; `None` is the least that the predictor was made for.
    pub lookahead: Option<usize>,
}

impl RamOptions {
    /// The most layers that are looked ahead.
    pub const MOST_AHEAD: usize = MOST_AHEAD;
}

impl Default for RamOptions {
    fn default() -> RamOptions {
        let HostCacheOptions { policy, together, overlap, .. } = HostCacheOptions::new(0);
        RamOptions { policy, together, overlap, keep: true, prefetch: true, lookahead: None }
    }
}

/// The host memory that a model takes beside its neurons.
fn resident_bytes(engine: &Engine, need: Need) -> u64 {
    let (files, model) = (engine.files(), &engine.model);
    let predictors: u64 = files.iter().skip(model.files().len()).map(|file| file.bytes().len() as u64).sum();
    resident_with(model, need, predictors)
}

/// As [`resident_bytes`], with predictors of so many bytes.
pub(super) fn resident_with(model: &Model, need: Need, predictors: u64) -> u64 {
    model.file_bytes() - ffn_bytes(model) + keys(model, need) + predictors + WORKING_BYTES
}

pub(super) fn ffn_bytes(model: &Model) -> u64 {
    model.layers.iter().map(|layer| layer.ffn.bytes()).sum()
}

fn keys(model: &Model, need: Need) -> u64 {
    KvCache::bytes_for(&model.config, need.context, need.kv).saturating_mul(need.sequences as u64)
}

/// The memory that a model takes when all of it is kept there.
pub(super) fn all_bytes(model: &Model, need: Need) -> u64 {
    model.file_bytes().saturating_add(keys(model, need))
}

/// Memory for a model of which a part stays on disk; `None` if all of it is kept in memory, or it has no neurons to leave there.
pub(super) fn limit(model: &Model, options: &EngineOptions) -> Option<u64> {
    let all = all_bytes(model, options.need(model));
    let neurons = options.device.is_none() && model.has_neurons();
    match options.ram {
        _ if !neurons => None,
        Some(ram) => (ram < all).then_some(ram),
        None if fits(model) => None,
        None => crate::config::available_memory().map(|free| free - free / LEFT_TO_OTHERS),
    }
}

/// The FFN sections of a packed model, layer by layer.
fn sections(model: &Model) -> Result<Vec<&Section>> {
    let store = model.store().expect("only packed models have neurons");
    let section = |layer: usize| {
        let name = format!("layer.{layer}.ffn");
        store.section(&name).ok_or_else(|| Error::bad(model.path(), name, "the section is missing"))
    };
    (0..model.layers.len()).map(section).collect()
}

/// That a model does not run with so much memory; `given` is what there is: `--ram 1.00 GiB is`.
pub fn too_little(given: &str, least: u64) -> Error {
    Error::Memory(format!(
        "{given} below the {} that this model takes with all its neurons on disk: attention, head, keys and values, and room for reads; give \
         --ram {}MiB or more, take a smaller --ctx-size, or pack the model in a smaller type (--quant q4_0)",
        human_bytes(least),
        least.div_ceil(1 << 20)
    ))
}

/// Checks that the limit has room for everything beside the neurons and for reading them; says how many bytes neurons get.
fn share(
    engine: &Engine,
    need: Need,
    limit: u64,
    blocks: &[LayerBlocks],
    align: usize,
    options: &HostCacheOptions,
) -> Result<u64> {
    let resident = resident_bytes(engine, need);
    let least = resident + least_bytes(blocks, engine.model.config.ffn, align, options);
    if limit < least {
        let given = match need.ram {
            Some(ram) => format!("--ram {} is", human_bytes(ram)),
            None => format!("{} of memory are free,", human_bytes(limit)),
        };
        return Err(too_little(&given, least));
    }
    Ok(limit - resident)
}

/// Lets an engine read from disk what is beyond `limit` bytes. Its sparsity is set.
///
/// # Errors
/// [`Error::Memory`] where the limit is below the least that it works with, or the system gives less; [`Error::Io`] if the file cannot be
/// opened again.
pub(super) fn keep_a_part(
    engine: &mut Engine,
    need: Need,
    limit: u64,
    options: &EngineOptions,
    told: &dyn Listener,
) -> Result<()> {
    let (blocks, OpenedDisk { mut disk, notice }) = open_disk(&engine.model)?;
    let RamOptions { policy, together, overlap, keep, .. } = options.neurons;
    let foresight = foresight(engine, options)?;
    let span = blocks[0].block_bytes as u64 * engine.model.config.ffn as u64;
    let costs = DiskCosts::measure(&mut *disk, blocks[0].offset, span).unwrap_or(DiskCosts::USUAL);
    let ahead = foresight.as_ref().map_or(0, Foresight::ahead);
    let how = HostCacheOptions { policy, together, overlap, ahead, costs, ..HostCacheOptions::new(0) };
    let bytes = share(engine, need, limit, &blocks, disk.align(), &how)?;
    let bytes = if keep { bytes } else { least_bytes(&blocks, engine.model.config.ffn, disk.align(), &how) };
    let neurons = engine.model.config.ffn;
    let cache = HostCache::new(disk, &blocks, neurons, HostCacheOptions { bytes, ..how });
    let mut cache =
        cache.map_err(|e| Error::Memory(format!("there is no memory for {} of neurons: {e}", human_bytes(bytes))))?;
    let (frames, all) = cache.frames();
    notice.iter().for_each(|notice| told.note(notice));
    let placed = if keep { place(&mut cache, &engine.model)? } else { false };
    told.note(&format!(
        "{} of memory: room for {:.0} % of the neurons{}, the others are read from disk when they are needed ({}, {:.1} GB/s and {:.0} us a read){}",
        human_bytes(limit),
        100.0 * frames as f64 / all as f64,
        if placed { " (at first for those of its profile)" } else { "" },
        cache.disk_name(),
        costs.gb_s,
        costs.read_us,
        if options.ram.is_none() { "; --ram sets how much" } else { "" }
    ));
    load_the_rest(&engine.model);
    let beside = resident_bytes(engine, need);
    engine.set_host_cache(cache, foresight);
    engine.cached.as_mut().expect("it was set").beside = beside;
    Ok(())
}

/// Fills the frames by the model's profile; `false` if it has none.
fn place(cache: &mut HostCache, model: &Model) -> Result<bool> {
    let Some((_, profile)) = artifacts::profile(model)? else { return Ok(false) };
    let tokens = profile.texts.iter().map(|t| t.info.tokens as u64).sum();
    for (layer, weights) in model.layers.iter().enumerate() {
        let counts = weights.order.into_store(profile.counts(layer));
        let unread = |fault: ReadFault| Error::bad_at(model.path(), "", fault.offset, fault.to_string());
        cache.place(layer, &counts, tokens).map_err(unread)?;
    }
    Ok(true)
}

/// Who says what later layers will need; `None` if nobody does. A look-ahead of one gives reads the time of a layer, and is as good as the
/// choice of the layer itself nearly always.
///
/// # Errors
/// [`Error::Usage`] for a look-ahead that the predictor was not made for.
fn foresight(engine: &Engine, options: &EngineOptions) -> Result<Option<Foresight>> {
    let RamOptions { prefetch, lookahead, .. } = options.neurons;
    if !prefetch || engine.sparsity().is_dense() {
        return Ok(None);
    }
    let layers = engine.model.config.layers;
    let predictor = sparsity::ahead(engine, &options.sparsity)?;
    let looks = |ahead: usize| {
        let predictor = predictor.as_ref().filter(|_| (1..layers.min(MOST_AHEAD + 1)).contains(&ahead))?;
        (ahead..layers).all(|l| predictor.calibration(l, ahead).is_some()).then(|| predictor.clone())
    };
    match lookahead {
        Some(ahead) => match looks(ahead) {
            Some(predictor) => Ok(Some(Foresight::new(predictor, ahead))),
            None => Err(Error::Usage(format!(
                "this model's predictor was not made to look {ahead} layers ahead; train-predictor and calibrate make one that does"
            ))),
        },
        None => Ok((1..=MOST_AHEAD).find_map(|ahead| Some(Foresight::new(looks(ahead)?, ahead)))),
    }
}

/// Where the neurons of a packed model lie in its file, layer by layer.
///
/// # Errors
/// A layer's section is missing.
///
/// # Panics
/// If the model is not a packed one.
pub fn layer_blocks(model: &Model) -> Result<Vec<LayerBlocks>> {
    let blocks = sections(model)?.into_iter().zip(&model.layers);
    Ok(blocks.map(|(section, l)| LayerBlocks { offset: section.offset, block_bytes: l.block().bytes() }).collect())
}

pub(super) fn open_disk(model: &Model) -> Result<(Vec<LayerBlocks>, OpenedDisk)> {
    let blocks = layer_blocks(model)?;
    let file = model.store().expect("only packed models have neurons").file();
    let opened = disk::open(file.file()).map_err(Error::io("open", model.path()))?;
    Ok((blocks, opened))
}

/// Reads everything but the neurons into memory.
fn load_the_rest(model: &Model) {
    let Some(store) = model.store() else { return };
    for section in store.header.sections.iter().filter(|section| !section.name.ends_with(".ffn")) {
        formats::load(store.bytes(section));
    }
}

/// Whether an engine can be opened within the limit, without taking its memory.
///
/// # Errors
/// As [`keep_a_part`].
pub(super) fn check(engine: &Engine, need: Need, limit: u64, options: &EngineOptions) -> Result<()> {
    let (blocks, opened) = open_disk(&engine.model)?;
    let how = HostCacheOptions { together: options.neurons.together, ..HostCacheOptions::new(0) };
    share(engine, need, limit, &blocks, opened.disk.align(), &how).map(drop)
}
