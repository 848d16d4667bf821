//! Packs a published model into a neuron store.
//!
//! Norms and biases become f32. Attention and FFN rows get the store's type, embeddings and head at least q8_0; or types differ by tensor,
//! as in the source or as a mix says ([`Types`]). The experts of a mixture are packed by neuron, too. Rows whose type and groups stay the
//! same are copied bit for bit; everything else goes through f32. `down` is stored by output in both file formats and needed by neuron: its
//! columns are gathered and, for quantised types, coded along the hidden dimension.

use crate::error::{Error, Result, printable};
use crate::formats::neuron_store::{Header, Writer};
use crate::formats::rows::{self, GROUP, Quant};
use crate::formats::{DType, TensorView, blocks};
use crate::ids::{Permutation, PublishedId};
use crate::model::config::{Ffn, ModelConfig, Norm, Positions};
use crate::model::layer::Norms;
use crate::model::source::{Role, Source, finite};
use crate::profile::Importance;
use bytemuck::TransparentWrapper;
use rayon::prelude::*;
use std::path::Path;

pub use clusters::{can_be_cut, can_be_cut_for_device};
pub use types::{DOWN, Types, layout};

mod clusters;
mod experts;
pub mod mix;
mod types;

/// Rows converted by one task: a few MB, with enough tasks to keep every core busy.
const ROWS_PER_TASK: usize = 256;
/// Neurons converted by one task; a multiple of every block length, so that `down` is cut between blocks.
const NEURONS_PER_TASK: usize = 256;

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
    for layer in 0..c.layers {
        let a = c.attention(layer);
        for (role, rows) in [(Role::Q, a.q_dim()), (Role::K, a.kv_dim()), (Role::V, a.kv_dim())] {
            sum += bytes(role, layer, rows, c.hidden)?;
        }
        sum += bytes(Role::O, layer, c.hidden, a.q_dim())?;
        sum += match types {
            _ if c.form.experts.is_some() => experts::packed_bytes(source, types, layer)?,
            Types::Clusters => clusters::packed_bytes(source, layer)?,
            _ => (c.ffn * layout(source, types, layer)?.bytes()) as u64,
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
    let c = &source.config;
    let types = options.types;
    let mixture = c.form.experts.is_some();
    if mixture {
        experts::check(source, types)?;
    }
    let stored = match types {
        Types::Clusters => clusters::config(source)?,
        _ => c.clone(),
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
    if matches!(c.positions, Positions::Learned { .. }) {
        job.rows(&mut writer, "positions", c.hidden, &[(Role::Positions, 0)])?;
    }
    job.norm(&mut writer, "out_norm", Role::OutNorm, 0)?;
    for layer in 0..c.layers {
        let name = |part: &str| format!("layer.{layer}.{part}");
        job.norm(&mut writer, &name("attn_norm"), Role::AttnNorm, layer)?;
        let qkv = [(Role::Q, layer), (Role::K, layer), (Role::V, layer)];
        if job.have_one_type(&qkv)? {
            job.rows(&mut writer, &name("qkv"), c.hidden, &qkv)?;
        } else {
            for (part, role) in ["q", "k", "v"].into_iter().zip(qkv) {
                job.rows(&mut writer, &name(part), c.hidden, &[role])?;
            }
        }
        let a = c.attention(layer);
        if a.bias {
            let biases = [Role::Q, Role::K, Role::V].map(|role| source.bias(role, layer));
            let biases = biases.into_iter().collect::<Result<Vec<_>>>()?;
            vector(&mut writer, &name("qkv_bias"), &biases.concat())?;
        }
        if a.qk_norm {
            for (part, role) in [("q_norm", Role::QNorm), ("k_norm", Role::KNorm)] {
                vector(&mut writer, &name(part), &source.vector(source.weight(role, layer)?)?)?;
            }
        }
        job.rows(&mut writer, &name("o"), a.q_dim(), &[(Role::O, layer)])?;
        if a.output_bias {
            vector(&mut writer, &name("o_bias"), &source.bias(Role::O, layer)?)?;
        }
        if c.form.norms != Norms::ParallelShared {
            job.norm(&mut writer, &name("ffn_norm"), Role::FfnNorm, layer)?;
        }
        let order = options.orders.as_ref().map_or(&as_published, |orders| &orders[layer]);
        match types {
            _ if mixture => job.experts(&mut writer, layer)?,
            Types::Clusters => job.clusters(&mut writer, &name("ffn"), layer)?,
            _ => job.neurons(&mut writer, &name("ffn"), layer, order)?,
        }
        if c.ffn_bias {
            vector(&mut writer, &name("up_bias"), &order.into_store(source.bias(Role::Up, layer)?))?;
            vector(&mut writer, &name("down_bias"), &source.bias(Role::Down, layer)?)?;
        }
        if let Some(published) = order.table() {
            numbers(&mut writer, &name("order"), PublishedId::peel_slice(published))?;
        }
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
    if c.form.sinks {
        let why = "this model's attention has sinks, which no store holds: it is read where it lies; give its GGUF";
        return Err(Error::Usage(why.into()));
    }
    let rows = [Role::Embed, Role::Q, Role::K, Role::V, Role::Up, Role::Down].map(|role| (role, c.hidden));
    // Rows of clusters are the source's, which lie in it as they are; experts have been looked at.
    let not_here = |role: Role| match role {
        Role::Up => c.form.experts.is_some(),
        Role::Down => c.form.experts.is_some() || types == Types::Clusters,
        _ => false,
    };
    let rows = rows.into_iter().filter(|(role, _)| !not_here(*role));
    for (role, cols) in rows.chain(c.attentions().map(|a| (Role::O, a.q_dim()))) {
        let quant = types.of(source, role, 0)?;
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
    let (layers, ffn) = (c.layers, c.ffn);
    if c.form.experts.is_some() {
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
    let shape = [c.layers, c.hidden, c.most_of_attention(|a| a.q_dim())];
    if importance.shape != shape {
        let its = importance.shape;
        let why = format!("layers, hidden size and heads' numbers are {its:?}, the model's {shape:?}; {remedy}");
        return Err(Error::bad(file, "inputs", why));
    }
    Ok(ours)
}

struct Job<'a> {
    source: &'a Source,
    types: Types,
    importance: Option<&'a Importance>,
    progress: &'a (dyn Fn(u64, u64) -> Result<()> + Sync),
    total: u64,
    done: std::sync::atomic::AtomicU64,
    /// Sums of squared differences and squares of `down`.
    down: std::sync::Mutex<(f64, f64)>,
}

impl Job<'_> {
    fn advance(&self, bytes: u64) -> Result<()> {
        let done = self.done.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed) + bytes;
        (self.progress)(done, self.total.max(done))
    }

    /// The source's fingerprint, as a part of the work.
    fn fingerprint(&self) -> Result<String> {
        self.source.fingerprint_by(&|bytes| self.advance(bytes))
    }

    /// How much errors count by the column of a role's matrix; `None` if all alike.
    fn columns(&self, role: Role, layer: usize) -> Option<&[f32]> {
        let importance = self.importance?;
        match role {
            Role::Q | Role::K | Role::V => Some(importance.qkv(layer)),
            Role::O => Some(importance.output(layer)),
            Role::Gate | Role::Up => Some(importance.ffn(layer)),
            _ => None,
        }
    }

    fn have_one_type(&self, parts: &[(Role, usize)]) -> Result<bool> {
        let quant = |&(role, layer): &(Role, usize)| self.types.of(self.source, role, layer);
        let quants = parts.iter().map(quant).collect::<Result<Vec<_>>>()?;
        Ok(quants.iter().all(|quant| *quant == quants[0]))
    }

    /// Writes one section with the rows of several tensors of one type, one after the other.
    fn rows(&self, writer: &mut Writer, name: &str, cols: usize, parts: &[(Role, usize)]) -> Result<()> {
        let quant = self.types.of(self.source, parts[0].0, parts[0].1)?;
        // What is stacked reads one input.
        let importance = self.columns(parts[0].0, parts[0].1);
        let parts: Vec<_> = parts.iter().map(|&(role, layer)| self.source.rows(role, layer)).collect::<Result<_>>()?;
        let rows = parts.iter().map(|part| part.rows).sum();
        let section = writer.add_rows(name, quant, rows, cols);
        let row_bytes = quant.row_bytes(cols);
        let mut first = 0;
        for part in &parts {
            let here = part.rows;
            (0..here.div_ceil(ROWS_PER_TASK)).into_par_iter().try_for_each(|task| {
                let range = task * ROWS_PER_TASK..here.min((task + 1) * ROWS_PER_TASK);
                let mut out = vec![0; range.len() * row_bytes];
                let mut values = vec![0.0; cols];
                for (row, out) in range.clone().zip(out.chunks_exact_mut(row_bytes)) {
                    convert_row(part.view, part.file_row(row), (quant, importance), &mut values, out)?;
                }
                writer.write(section, ((first + range.start) * row_bytes) as u64, &out)?;
                self.advance(out.len() as u64)
            })?;
            first += here;
        }
        Ok(())
    }

    /// Writes the FFN of a layer in clusters.
    fn clusters(&self, writer: &mut Writer, name: &str, layer: usize) -> Result<()> {
        let cut = clusters::of(self.source, layer)?;
        cut.check()?;
        let content = cut.content();
        let bytes = content.cluster_bytes().expect("the source's matrices fit in memory");
        let section = writer.add(name, content, bytes * cut.count as u64);
        writer.add_checksums(section, &content.cluster_parts().expect("the source's matrices fit in memory"));
        (0..cut.count).into_par_iter().try_for_each(|number| {
            let cluster = cut.cluster(number);
            writer.write(section, number as u64 * bytes, &cluster)?;
            self.advance(bytes)
        })
    }

    /// Writes the neuron blocks of a layer.
    fn neurons(&self, writer: &mut Writer, name: &str, layer: usize, order: &Permutation) -> Result<()> {
        let c = &self.source.config;
        let gate = match c.ffn_kind {
            Ffn::Plain => None,
            _ => Some(self.source.weight(Role::Gate, layer)?),
        };
        let up = self.source.weight(Role::Up, layer)?;
        let down = self.source.weight(Role::Down, layer)?;
        let by_neuron = self.source.down_by_neuron(layer);
        let importance = self.columns(Role::Up, layer);
        let cols = c.hidden;
        let layout = layout(self.source, self.types, layer)?;
        let block_bytes = layout.bytes();
        let section =
            writer.add_neurons(name, &layout.parts().iter().map(|part| part.quant).collect::<Vec<_>>(), c.ffn, cols);
        writer.add_checksums(section, &[block_bytes as u64]);
        let published: Vec<PublishedId> = (0..c.ffn).map(PublishedId::new).collect();
        let positions = order.positions(&published);
        (0..c.ffn.div_ceil(NEURONS_PER_TASK)).into_par_iter().try_for_each(|task| {
            let range = task * NEURONS_PER_TASK..c.ffn.min((task + 1) * NEURONS_PER_TASK);
            let columns =
                if by_neuron { Vec::new() } else { gather_columns(down, down.data, [cols, c.ffn], range.clone())? };
            let mut blocks = vec![0; range.len() * block_bytes];
            let mut values = vec![0.0; cols];
            for (neuron, block) in range.clone().zip(blocks.chunks_exact_mut(block_bytes)) {
                for (view, part) in gate.into_iter().chain([up]).zip(layout.parts()) {
                    convert_row(view, neuron, (part.quant, importance), &mut values, part.of_mut(block))?;
                }
                let part = layout.down();
                if by_neuron {
                    convert_row(down, neuron, (part.quant, None), &mut values, part.of_mut(block))?;
                } else {
                    let at = (neuron - range.start) * cols;
                    rows::encode(part.quant, &columns[at..at + cols], part.of_mut(block));
                    self.compare(part.quant, &columns[at..at + cols], part.of(block));
                    check_range(&columns[at..at + cols], part.quant, down)?;
                }
            }
            if order.table().is_none() {
                writer.write(section, (range.start * block_bytes) as u64, &blocks)?;
            } else {
                for (neuron, block) in range.clone().zip(blocks.chunks_exact(block_bytes)) {
                    writer.write(section, (positions[neuron].index() * block_bytes) as u64, block)?;
                }
            }
            self.advance(blocks.len() as u64)
        })
    }

    /// Counts how far a row of `down` that was coded again is off, where every tensor keeps its own type but this one.
    fn compare(&self, quant: Quant, values: &[f32], row: &[u8]) {
        if !matches!(self.types, Types::Own { .. }) {
            return;
        }
        let mut again = vec![0.0; values.len()];
        rows::decode(quant, row, &mut again);
        let pairs = values.iter().zip(&again).map(|(&a, &b)| (f64::from(a), f64::from(b)));
        let (off, size) = pairs.fold((0.0, 0.0), |(off, size), (a, b)| (off + (a - b).powi(2), size + a * a));
        let mut down = self.down.lock().unwrap_or_else(|e| e.into_inner());
        *down = (down.0 + off, down.1 + size);
    }

    fn norm(&self, writer: &mut Writer, name: &str, role: Role, layer: usize) -> Result<()> {
        vector(writer, name, &self.source.vector(self.source.weight(role, layer)?)?)?;
        if matches!(self.source.config.norm, Norm::Layer(_)) {
            vector(writer, &format!("{name}_bias"), &self.source.bias(role, layer)?)?;
        }
        Ok(())
    }
}

/// Converts row `from` of a matrix into the store's form: a type, and how much errors count by column.
fn convert_row(
    view: TensorView<'_>,
    from: usize,
    (quant, importance): (Quant, Option<&[f32]>),
    values: &mut [f32],
    out: &mut [u8],
) -> Result<()> {
    let (dtype, cols) = (view.info.dtype, values.len());
    let bytes = dtype.row_bytes(cols);
    let src = &view.data[from * bytes..(from + 1) * bytes];
    match (dtype, quant) {
        (DType::Q8_0, Quant::Q8) => {
            rows::from_gguf_q8_0(src, cols, out);
            check_scales(quant, out, cols, view)?;
        }
        (DType::Q4_0, Quant::Q4) => {
            rows::from_gguf_q4_0(src, cols, out);
            check_scales(quant, out, cols, view)?;
        }
        (DType::Block(kind), Quant::Block(same)) if kind == same => {
            out[..src.len()].copy_from_slice(src);
            out[src.len()..].fill(0);
            if let Some((block, scale)) = kind.first_fault(src) {
                let at = view.info.offset + (from * bytes + block * dtype.block_bytes()) as u64;
                let why = format!("holds a scale of {scale} at byte {at}: the model is damaged");
                return Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why));
            }
        }
        _ => {
            blocks::dequantize(dtype, src, values);
            finite(values, view)?;
            rows::encode_weighted(quant, values, importance, out);
            check_range(values, quant, view)?;
        }
    }
    Ok(())
}

/// In a row that was copied unchanged, only the scales can be invalid numbers.
fn check_scales(quant: Quant, row: &[u8], cols: usize, view: TensorView<'_>) -> Result<()> {
    match rows::scales(quant, row, cols).iter().find(|scale| !scale.is_finite()) {
        None => Ok(()),
        Some(scale) => {
            let why = format!("holds a scale of {scale}: the model is damaged");
            Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why))
        }
    }
}

/// Refuses values above 65504, the largest f16, which would become infinite.
fn check_range(values: &[f32], quant: Quant, view: TensorView<'_>) -> Result<()> {
    let top = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    if quant == Quant::F32 || top <= 65504.0 {
        return Ok(());
    }
    let why = format!("holds {top}, which f16 cannot; pack it with --quant f32");
    Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why))
}

/// Columns `neurons` of `data` (`[hidden, ffn]`), which is `down` or an expert's part of it, as rows: `[neurons, hidden]`.
fn gather_columns(
    down: TensorView<'_>,
    data: &[u8],
    [hidden, ffn]: [usize; 2],
    neurons: std::ops::Range<usize>,
) -> Result<Vec<f32>> {
    let dtype = down.info.dtype;
    let row_bytes = dtype.row_bytes(ffn);
    let cut = dtype.row_bytes(neurons.start)..dtype.row_bytes(neurons.end.next_multiple_of(dtype.block_len()).min(ffn));
    let mut part = vec![0.0; (cut.len()) / dtype.block_bytes() * dtype.block_len()];
    let mut columns = vec![0.0; neurons.len() * hidden];
    for h in 0..hidden {
        blocks::dequantize(dtype, &data[h * row_bytes..][cut.clone()], &mut part);
        finite(&part, down)?;
        for (n, value) in part.iter().enumerate().take(neurons.len()) {
            columns[n * hidden + h] = *value;
        }
    }
    Ok(columns)
}

pub(super) fn vector(writer: &mut Writer, name: &str, values: &[f32]) -> Result<()> {
    let section = writer.add_rows(name, Quant::F32, 1, values.len());
    let mut row = vec![0; Quant::F32.row_bytes(values.len())];
    rows::encode(Quant::F32, values, &mut row);
    writer.write(section, 0, &row)
}

fn numbers(writer: &mut Writer, name: &str, values: &[u32]) -> Result<()> {
    let raw: &[u8] = bytemuck::cast_slice(values);
    let section = writer.add(name, crate::formats::neuron_store::Content::Numbers, raw.len() as u64);
    writer.write(section, 0, raw)
}

pub(super) fn bytes(writer: &mut Writer, name: &str, raw: &[u8]) -> Result<()> {
    let section = writer.add(name, crate::formats::neuron_store::Content::Bytes, raw.len() as u64);
    writer.write(section, 0, raw)
}
