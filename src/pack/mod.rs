//! Packs a published model into a neuron store.
//!
//! Norms and biases become f32. Attention and FFN rows get the store's type, embeddings and head at least q8_0; or types differ by tensor,
//! as in the source or as a mix says ([`Types`]). The experts of a mixture are packed by neuron, too. Rows whose type and groups stay the
//! same are copied bit for bit; everything else goes through f32. `down` is stored by output in both file formats and needed by neuron: its
//! columns are gathered and, for quantised types, coded along the hidden dimension.

use crate::error::{Error, Result, printable};
use crate::formats::neuron_store::{Header, Writer};
use crate::formats::rows::GROUP;
use crate::ids::{Permutation, PublishedId};
use crate::model::config::ModelConfig;
use crate::model::source::{Role, Source};
use crate::profile::Importance;
use bytemuck::TransparentWrapper;
use job::{Job, numbers};
use std::path::Path;

pub use clusters::{can_be_cut, can_be_cut_for_device};
pub(crate) use job::{bytes, vector};
pub use types::{DOWN, Types, layout};

mod clusters;
mod experts;
mod job;
pub mod mix;
mod types;

/// How to pack a model.
pub struct PackOptions {
    /// The types of the store's rows.
    pub types: Types,
    /// The order in which the neurons of each layer are stored, `[layers]`; `None` keeps the model's order.
    pub orders: Option<Vec<Permutation>>,
}

/// Bytes that a store of this source will have, up to a page per section and the checksums of its blocks.
///
/// # Errors
/// [`Error::BadFile`] where the source lacks a tensor.
pub fn packed_bytes(source: &Source, types: Types) -> Result<u64> {
    let c = &source.config;
    let bytes =
        |role, layer, rows: usize, cols| Ok(rows as u64 * types.of(source, role, layer)?.row_bytes(cols) as u64);
    let mut sum = bytes(Role::Embed, 0, c.vocab, c.hidden)?;
    if !c.tied {
        sum += bytes(Role::Head, 0, c.vocab, c.hidden)?;
    }
    for layer in 0..c.layers().len() {
        let (inputs, output) = Role::of_mixer(c.mixer(layer));
        for (&role, (_, rows)) in inputs.iter().zip(c.mixer(layer).inputs()) {
            sum += bytes(role, layer, rows, c.hidden)?;
        }
        sum += bytes(output, layer, c.hidden, c.mixer(layer).cols())?;
        sum += match types {
            _ if c.is_mixture() => experts::packed_bytes(source, types, layer)?,
            _ if !c.has_ffn(layer) => 0,
            Types::Clusters => clusters::packed_bytes(source, layer)?,
            _ => (c.width(layer) * layout(source, types, layer)?.bytes()) as u64,
        };
    }
    Ok(sum)
}

/// Packs `source` into a neuron store at `path`. `progress(done, total)` is called from several threads, with bytes of the store and
/// those that are read once more for the fingerprint; an error it returns (Ctrl-C) ends the work and removes what was written.
///
/// # Errors
/// [`Error::Usage`] for a type or an order that this model cannot have, [`Error::BadFile`] for damaged weights, [`Error::Io`] where the
/// store cannot be written.
pub fn pack(
    source: &Source,
    path: &Path,
    options: &PackOptions,
    progress: &(dyn Fn(u64, u64) -> Result<()> + Sync),
) -> Result<Packed> {
    pack_weighted(source, path, options, None, progress)
}

/// As [`pack`], with the least sum of squared errors each times the importance of its column, where a type is not the source's own. `weights`
/// are the importance and the file that it comes from.
///
/// # Errors
/// As [`pack`], and [`Error::BadFile`] for the importance of another model.
pub fn pack_weighted(
    source: &Source,
    path: &Path,
    options: &PackOptions,
    weights: Option<(&Path, &Importance)>,
    progress: &(dyn Fn(u64, u64) -> Result<()> + Sync),
) -> Result<Packed> {
    let (c, types) = (&source.config, options.types);
    if c.per_layer > 0 {
        let why = "this model has embeddings for each layer, which no store holds: it is read where it lies; give its \
                   directory or GGUF as it is";
        return Err(Error::Usage(why.into()));
    }
    if c.is_mixture() {
        experts::check(source, types)?;
    }
    let stored = match types {
        Types::Clusters => clusters::described(source)?,
        _ => source.described.clone(),
    };
    check_rows(source, types)?;
    check_orders(options, c)?;
    let as_published = Permutation::identity();
    let total = packed_bytes(source, types)? + source.tensor_bytes();
    let importance = weights.map(|(_, importance)| importance);
    let job = Job { source, types, importance, progress, total, done: Default::default(), down: Default::default() };
    // Known first only where something is compared with it: it takes reading the whole source.
    let known = weights.map(|(file, importance)| check_importance(&job, file, importance)).transpose()?;
    let mut writer = Writer::create(path)?;

    job.rows(&mut writer, "embed", c.hidden, &[(Role::Embed, 0)])?;
    if !c.tied {
        job.rows(&mut writer, "head", c.hidden, &[(Role::Head, 0)])?;
    }
    if c.learned_positions.is_some() {
        job.rows(&mut writer, "positions", c.hidden, &[(Role::Positions, 0)])?;
    }
    job.norm(&mut writer, "out_norm", Role::OutNorm, 0)?;
    for layer in 0..c.layers().len() {
        let order = options.orders.as_ref().map_or(&as_published, |orders| &orders[layer]);
        job.layer(&mut writer, layer, order)?;
    }
    if let Some(tokenizer) = &source.tokenizer {
        bytes(&mut writer, "tokenizer", &serde_json::to_vec(tokenizer).expect("its description is plain data"))?;
    }
    let config = serde_json::to_value(stored).expect("a configuration is plain data");
    let fingerprint = known.map_or_else(|| job.fingerprint(), Ok)?;
    let sources = source.files().to_vec();
    // If the source changed meanwhile, the store would mix two models under one fingerprint.
    source.check_same()?;
    let quant = types::of_up(source, types)?;
    writer.finish(Header { fingerprint, sources, quant, config, sections: Vec::new() })?;
    let (off, size) = job.down.into_inner().unwrap_or_else(|e| e.into_inner());
    Ok(Packed { down_error: (off > 0.0).then(|| (off / size).sqrt()) })
}

/// What a store calls a layer's norm.
fn part_of(norm: Role) -> &'static str {
    match norm {
        Role::AttnNorm => "attn_norm",
        Role::FfnNorm => "ffn_norm",
        Role::AttnPostNorm => "attn_post_norm",
        _ => "ffn_post_norm",
    }
}

impl Job<'_> {
    /// All sections of a layer.
    fn layer(&self, writer: &mut Writer, layer: usize, order: &Permutation) -> Result<()> {
        let (c, name) = (&self.source.config, |part: &str| format!("layer.{layer}.{part}"));
        let (first, others): (Vec<Role>, Vec<Role>) =
            self.source.norms(layer).partition(|role| *role == Role::AttnNorm);
        for role in first {
            self.norm(writer, &name(part_of(role)), role, layer)?;
        }
        self.mixer(writer, layer)?;
        for role in others {
            self.norm(writer, &name(part_of(role)), role, layer)?;
        }
        if c.layer(layer).output_scale {
            let scale = self.source.vector(self.source.weight(Role::OutputScale, layer)?)?;
            vector(writer, &name("output_scale"), &scale)?;
        }
        match self.types {
            _ if c.is_mixture() => self.experts(writer, layer)?,
            _ if !c.has_ffn(layer) => return Ok(()),
            Types::Clusters => self.clusters(writer, &name("ffn"), layer)?,
            _ => self.neurons(writer, &name("ffn"), layer, order)?,
        }
        if c.ffn_bias {
            vector(writer, &name("up_bias"), &order.into_store(self.source.bias(Role::Up, layer)?))?;
            vector(writer, &name("down_bias"), &self.source.bias(Role::Down, layer)?)?;
        }
        if let Some(published) = order.table() {
            numbers(writer, &name("order"), PublishedId::peel_slice(published))?;
        }
        Ok(())
    }

    /// The sections of a layer's mixer, but for its norms.
    fn mixer(&self, writer: &mut Writer, layer: usize) -> Result<()> {
        let (c, name) = (&self.source.config, |part: &str| format!("layer.{layer}.{part}"));
        let (inputs, output) = Role::of_mixer(self.source.config.mixer(layer));
        let qkv: Vec<(Role, usize)> = inputs.iter().map(|&role| (role, layer)).collect();
        if self.have_one_type(&qkv)? {
            self.rows(writer, &name("qkv"), c.hidden, &qkv)?;
        } else {
            for ((part, _), role) in c.mixer(layer).inputs().zip(qkv) {
                self.rows(writer, &name(part), c.hidden, &[role])?;
            }
        }
        let a = c.attention(layer);
        if a.is_some_and(|a| a.bias) {
            let biases = inputs.iter().map(|&role| self.source.bias(role, layer)).collect::<Result<Vec<_>>>()?;
            vector(writer, &name("qkv_bias"), &biases.concat())?;
        }
        for (part, numbers) in self.source.recurrence(layer)?.sections().into_iter().filter(|(_, of)| !of.is_empty()) {
            vector(writer, &name(part), numbers)?;
        }
        if a.is_some_and(|a| a.qk_norm) {
            let norms = [("q_norm", Role::QNorm), ("k_norm", Role::KNorm)];
            let own = if a.is_some_and(|a| a.keys_of.is_some()) { 1 } else { 2 };
            for (part, role) in norms.into_iter().take(own) {
                vector(writer, &name(part), &self.source.norm(role, layer)?)?;
            }
        }
        self.rows(writer, &name("o"), c.mixer(layer).cols(), &[(output, layer)])?;
        if a.is_some_and(|a| a.output_bias) {
            vector(writer, &name("o_bias"), &self.source.bias(Role::O, layer)?)?;
        }
        Ok(())
    }
}

/// What packing has changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Packed {
    /// How far `down` is off, which GGUF and a store code in different directions: the root of the squared differences by that of the
    /// squares; `None` where it is not off at all, and where types were asked for.
    pub down_error: Option<f64>,
}

impl Packed {
    /// The error as a sentence; `None` where there is none.
    pub fn text(self, types: Types) -> Option<String> {
        let Types::Own { down } = types else { return None };
        let percent = 100.0 * self.down_error?;
        let name = down.name();
        Some(format!(
            "down is stored by neuron, so it was coded again, as {name}: off by {percent:.2} % (--down q8_0 takes more bytes)"
        ))
    }
}

/// Refuses types whose blocks do not fit the rows.
fn check_rows(source: &Source, types: Types) -> Result<()> {
    let c = &source.config;
    if c.attentions().any(|attention| attention.sinks) {
        let why = "this model's attention has sinks, which no store holds: it is read where it lies; give its GGUF";
        return Err(Error::Usage(why.into()));
    }
    if c.attentions().any(|attention| attention.latent.is_some()) {
        let why = "this model's attention is over latents, which no store holds: it is read where it lies";
        return Err(Error::Usage(why.into()));
    }
    let mixers: Vec<(&[Role], Role)> = c.mixers().map(Role::of_mixer).collect();
    let inputs =
        mixers.iter().enumerate().flat_map(|(layer, (inputs, _))| inputs.iter().map(move |&role| (role, layer)));
    let outputs = mixers.iter().enumerate().map(|(layer, &(_, output))| (output, layer, c.mixer(layer).cols()));
    // Rows of clusters are the source's, which lie in it as they are; experts have been looked at.
    let not_here = |role: Role| match role {
        Role::Up => c.is_mixture(),
        Role::Down => c.is_mixture() || types == Types::Clusters,
        _ => false,
    };
    let first = c.ffn_like(0);
    let others =
        [Role::Embed, Role::Up, Role::Down].into_iter().filter(|role| !not_here(*role)).map(|role| (role, first));
    let rows = others.chain(inputs).map(|(role, layer)| (role, layer, c.hidden));
    for (role, layer, cols) in rows.chain(outputs) {
        let quant = types.of(source, role, layer)?;
        if !cols.is_multiple_of(quant.unit()) {
            return Err(Error::Usage(format!(
                "{} needs rows of a multiple of {} numbers, and this model has {} and {}; pack it with --quant {}",
                quant.name(),
                quant.unit(),
                c.hidden,
                cols,
                if cols.is_multiple_of(GROUP) { "q8_0" } else { "f16" }
            )));
        }
    }
    Ok(())
}

/// Refuses orders that are not the model's.
fn check_orders(options: &PackOptions, c: &ModelConfig) -> Result<()> {
    let Some(orders) = &options.orders else { return Ok(()) };
    let (layers, ffn) = (c.layers().len(), c.widest_ffn());
    if c.is_mixture() {
        return Err(Error::Usage("--order: neurons of an expert stay where the model has them; leave it out".into()));
    }
    if options.types == Types::Clusters {
        return Err(Error::Usage("--order: neurons of a cluster stay where the model has them; leave it out".into()));
    }
    if orders.len() != layers {
        return Err(Error::Usage(format!("the order names {} layers, the model has {layers}", orders.len())));
    }
    let other = |order: &Permutation| order.table().is_some_and(|table| table.len() != ffn);
    match orders.iter().position(other) {
        Some(layer) => Err(Error::Usage(format!("layer {layer}'s order does not name each of its {ffn} neurons once"))),
        None => Ok(()),
    }
}

/// Refuses the importance of another model; returns this one's fingerprint.
fn check_importance(job: &Job, file: &Path, importance: &Importance) -> Result<String> {
    let (ours, c) = (job.fingerprint()?, &job.source.config);
    let remedy = "make one with `dynamicinfer profile MODEL --text FILE -o NEW`";
    if importance.fingerprint != ours {
        let (its, owner) = (printable(&importance.fingerprint), printable(&importance.model));
        let why = format!("is {its}, the model's is {ours}: this profile belongs to another model ({owner}); {remedy}");
        return Err(Error::bad(file, "fingerprint", why));
    }
    let shape = [c.layers().len(), c.hidden, c.most_of_mixers(|m| m.cols())];
    if importance.shape != shape {
        let its = importance.shape;
        let why = format!("layers, hidden size and heads' numbers are {its:?}, the model's {shape:?}; {remedy}");
        return Err(Error::bad(file, "inputs", why));
    }
    Ok(ours)
}
