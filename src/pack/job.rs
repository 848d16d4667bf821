//! The work of packing: sections of a store from a source's tensors, row by row.

use super::clusters;
use super::types::{Types, layout};
use crate::error::{Error, Result};
use crate::formats::neuron_store::Writer;
use crate::formats::rows::{self, Quant};
use crate::formats::{DType, TensorView, blocks};
use crate::ids::{Permutation, PublishedId};
use crate::model::config::{Ffn, Norm};
use crate::model::source::{Role, Source};
use crate::model::source_vectors::finite;
use crate::profile::Importance;
use rayon::prelude::*;

/// Rows converted by one task: a few MB, with enough tasks to keep every core busy.
const ROWS_PER_TASK: usize = 256;
/// Neurons converted by one task; a multiple of every block length, so that `down` is cut between blocks.
pub(super) const NEURONS_PER_TASK: usize = 256;

/// The state of packing one model.
pub(super) struct Job<'a> {
    pub source: &'a Source,
    pub types: Types,
    pub importance: Option<&'a Importance>,
    pub progress: &'a (dyn Fn(u64, u64) -> Result<()> + Sync),
    pub total: u64,
    pub done: std::sync::atomic::AtomicU64,
    /// Sums of squared differences and squares of `down`.
    pub down: std::sync::Mutex<(f64, f64)>,
}

impl Job<'_> {
    pub fn advance(&self, bytes: u64) -> Result<()> {
        let done = self.done.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed) + bytes;
        (self.progress)(done, self.total.max(done))
    }

    /// The source's fingerprint, as a part of the work.
    pub fn fingerprint(&self) -> Result<String> {
        self.source.fingerprint_by(&|bytes| self.advance(bytes))
    }

    /// How much errors count by the column of a role's matrix; `None` if all alike.
    pub fn columns(&self, role: Role, layer: usize) -> Option<&[f32]> {
        let importance = self.importance?;
        match role {
            Role::Q | Role::K | Role::V | Role::AttnGate => Some(importance.qkv(layer)),
            Role::MixerIn | Role::DeltaGate | Role::DeltaBeta | Role::DeltaAlpha => Some(importance.qkv(layer)),
            Role::O | Role::MixerOut => Some(&importance.output(layer)[..self.source.config.mixer(layer).cols()]),
            Role::Gate | Role::Up => Some(importance.ffn(layer)),
            _ => None,
        }
    }

    pub fn have_one_type(&self, parts: &[(Role, usize)]) -> Result<bool> {
        let quant = |&(role, layer): &(Role, usize)| self.types.of(self.source, role, layer);
        let quants = parts.iter().map(quant).collect::<Result<Vec<_>>>()?;
        Ok(quants.iter().all(|quant| *quant == quants[0]))
    }

    /// Writes one section with the rows of several tensors of one type, one after the other.
    pub fn rows(&self, writer: &mut Writer, name: &str, cols: usize, parts: &[(Role, usize)]) -> Result<()> {
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
    pub fn clusters(&self, writer: &mut Writer, name: &str, layer: usize) -> Result<()> {
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
    pub fn neurons(&self, writer: &mut Writer, name: &str, layer: usize, order: &Permutation) -> Result<()> {
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
        let section = writer.add_neurons(
            name,
            &layout.parts().iter().map(|part| part.quant).collect::<Vec<_>>(),
            c.width(layer),
            cols,
        );
        writer.add_checksums(section, &[block_bytes as u64]);
        let published: Vec<PublishedId> = (0..c.width(layer)).map(PublishedId::new).collect();
        let positions = order.positions(&published);
        (0..c.width(layer).div_ceil(NEURONS_PER_TASK)).into_par_iter().try_for_each(|task| {
            let range = task * NEURONS_PER_TASK..c.width(layer).min((task + 1) * NEURONS_PER_TASK);
            let columns = if by_neuron {
                Vec::new()
            } else {
                gather_columns(down, down.data, [cols, c.width(layer)], range.clone())?
            };
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
    pub fn compare(&self, quant: Quant, values: &[f32], row: &[u8]) {
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

    pub fn norm(&self, writer: &mut Writer, name: &str, role: Role, layer: usize) -> Result<()> {
        vector(writer, name, &self.source.norm(role, layer)?)?;
        if matches!(self.source.config.norm, Norm::Layer(_)) {
            vector(writer, &format!("{name}_bias"), &self.source.bias(role, layer)?)?;
        }
        Ok(())
    }
}

/// Converts row `from` of a matrix into the store's form: a type, and how much errors count by column.
pub(super) fn convert_row(
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
pub(super) fn check_range(values: &[f32], quant: Quant, view: TensorView<'_>) -> Result<()> {
    let top = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    if quant == Quant::F32 || top <= 65504.0 {
        return Ok(());
    }
    let why = format!("holds {top}, which f16 cannot; pack it with --quant f32");
    Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why))
}

/// Columns `neurons` of `data` (`[hidden, ffn]`), which is `down` or an expert's part of it, as rows: `[neurons, hidden]`.
pub(super) fn gather_columns(
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

pub(crate) fn vector(writer: &mut Writer, name: &str, values: &[f32]) -> Result<()> {
    let section = writer.add_rows(name, Quant::F32, 1, values.len());
    let mut row = vec![0; Quant::F32.row_bytes(values.len())];
    rows::encode(Quant::F32, values, &mut row);
    writer.write(section, 0, &row)
}

pub(super) fn numbers(writer: &mut Writer, name: &str, values: &[u32]) -> Result<()> {
    let raw: &[u8] = bytemuck::cast_slice(values);
    let section = writer.add(name, crate::formats::neuron_store::Content::Numbers, raw.len() as u64);
    writer.write(section, 0, raw)
}

pub(crate) fn bytes(writer: &mut Writer, name: &str, raw: &[u8]) -> Result<()> {
    let section = writer.add(name, crate::formats::neuron_store::Content::Bytes, raw.len() as u64);
    writer.write(section, 0, raw)
}
