//! The trained predictor (PowerInfer 5.1, Deja Vu): a network with one hidden layer of low rank per layer and look-ahead.
//!
//! ```text
//! x = residual / rms(residual)          [hidden]
//! h = relu(inner x + inner_bias)        [rank]
//! score = outer h + outer_bias          [neurons], a logit
//! ```
//!
//! The neurons of a mixture are those of all experts, one expert after the other: one `inner` says what all of them need to know of a token,
//! and `outer` is computed for the experts that the token has.
//!
//! It reads the residual before ffn_norm and leaves that norm out: its weights are learned with everything else. In the
//! file `inner` and `outer` are q8_0 rows, the biases f32, neurons in the numbering of the published model. Rank 0 has the
//! bias alone: layers whose few active neurons are always the same need no more.

use super::calibration::Calibration;
pub use super::interface::normalise;
use super::interface::{EPSILON, Form, Kind, NetworkWeights, Predictor, Tools};
use crate::cpu::sign::BitLine;
use crate::error::{Error, Result};
use crate::formats::MappedFile;
use crate::formats::predictor_file::{Header, PredictorFile, Table};
use crate::formats::rows::{self, GROUP, Quant};
use crate::formats::sections::{Content, Header as _, Section, Writer};
use crate::model::{Matrix, Model};
use crate::ops::linear::products;
use crate::ops::math;
use rayon::prelude::*;
use std::collections::HashMap;
use std::path::Path;

/// Ranks are multiples of this, because rows of q8_0 come in such groups.
pub const RANK_STEP: usize = GROUP;
/// The type of `inner` and `outer` in a file.
const QUANT: Quant = Quant::Q8;

/// The network of one layer and look-ahead, trained or synthetic.
#[derive(Clone, Debug)]
pub struct Network {
    /// The layer whose neurons it scores.
    pub layer: usize,
    /// It reads the residual of layer `layer - ahead`.
    pub ahead: usize,
    /// `[rank, hidden]`
    pub inner: Vec<f32>,
    /// `[rank]`
    pub inner_bias: Vec<f32>,
    /// `[neurons, rank]`, in the published numbering.
    pub outer: Vec<f32>,
    /// `[neurons]`
    pub outer_bias: Vec<f32>,
    /// Turns its scores into probabilities.
    pub calibration: Calibration,
    /// How good it was found to be.
    pub measured: Measured,
}

/// Quality of a predictor at the file's threshold, on text that it was not made from.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Of the active neurons, the share that was predicted.
    pub recall: f32,
    /// Of the predicted neurons, the share that was active.
    pub precision: f32,
    /// Of all neurons, the share that was predicted.
    pub computed_share: f32,
}

impl Network {
    /// Numbers in its hidden layer; 0 if the bias is all there is.
    pub fn rank(&self) -> usize {
        self.inner_bias.len()
    }

    /// The network with a larger rank and the same scores: further inner rows repeat the first ones, and nothing reads them.
    pub fn widened(self, rank: usize) -> Network {
        let had = self.rank();
        if had == 0 || rank <= had {
            return self;
        }
        let hidden = self.inner.len() / had;
        let row = |row: &[f32]| row.iter().copied().chain(std::iter::repeat_n(0.0, rank - had)).collect::<Vec<f32>>();
        Network {
            inner: self.inner.iter().copied().cycle().take(rank * hidden).collect(),
            inner_bias: self.inner_bias.iter().copied().cycle().take(rank).collect(),
            outer: self.outer.chunks_exact(had).flat_map(row).collect(),
            ..self
        }
    }
}

/// Bytes of a network's table and sections in the file's header, about: a hundred numbers and three lines.
const HEADER_BYTES: u64 = 3 << 10;

/// Bytes of a network in a file, with the gaps between its sections and its part of the header.
pub fn file_bytes(hidden: usize, neurons: usize, rank: usize) -> u64 {
    let page = |bytes: usize| (bytes as u64).next_multiple_of(crate::formats::sections::SECTION_ALIGN);
    let weights = if rank == 0 {
        0
    } else {
        page(rank * QUANT.row_bytes(hidden)) + page(neurons * QUANT.row_bytes(rank)) + page(Quant::F32.row_bytes(rank))
    };
    weights + page(Quant::F32.row_bytes(neurons)) + HEADER_BYTES
}

fn section_name(layer: usize, ahead: usize, part: &str) -> String {
    format!("layer.{layer}.ahead.{ahead}.{part}")
}

/// A network's sections: name, type, rows, cols.
fn parts(layer: usize, ahead: usize, hidden: usize, neurons: usize, rank: usize) -> Vec<(String, Quant, usize, usize)> {
    let name = |part| section_name(layer, ahead, part);
    let mut parts = vec![(name("outer_bias"), Quant::F32, 1, neurons)];
    if rank > 0 {
        parts.push((name("inner"), QUANT, rank, hidden));
        parts.push((name("inner_bias"), Quant::F32, 1, rank));
        parts.push((name("outer"), QUANT, neurons, rank));
    }
    parts
}

/// Writes a predictor file network by network, so that those of a large model need not be in memory together.
pub struct NetworkWriter {
    writer: Writer,
    hidden: usize,
    /// Of a layer.
    neurons: usize,
    tables: Vec<Table>,
}

impl NetworkWriter {
    /// Begins a file for a model with so many numbers in its residual and neurons in each layer.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(path: &Path, hidden: usize, neurons: usize) -> Result<NetworkWriter> {
        Ok(NetworkWriter { writer: Writer::create(path)?, hidden, neurons, tables: Vec::new() })
    }

    /// Writes a network. Panics if its sizes are not the model's, or its rank is not a multiple of [`RANK_STEP`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn add(&mut self, network: &Network) -> Result<()> {
        let (n, rank) = (network, network.rank());
        assert!(rank.is_multiple_of(RANK_STEP));
        for (name, quant, rows, cols) in parts(n.layer, n.ahead, self.hidden, self.neurons, rank) {
            let values = match name.rsplit('.').next() {
                Some("inner") => &n.inner,
                Some("inner_bias") => &n.inner_bias,
                Some("outer") => &n.outer,
                _ => &n.outer_bias,
            };
            assert_eq!(values.len(), rows * cols, "{name}");
            let mut bytes = vec![0; rows * quant.row_bytes(cols)];
            for (values, row) in values.chunks_exact(cols).zip(bytes.chunks_exact_mut(quant.row_bytes(cols))) {
                rows::encode(quant, values, row);
            }
            let section = self.writer.add_rows(&name, quant, rows, cols);
            self.writer.write(section, 0, &bytes)?;
        }
        let (scores, probabilities) = n.calibration.points();
        self.tables.push(Table {
            layer: n.layer,
            ahead: n.ahead,
            rank,
            scores: scores.to_vec(),
            probabilities: probabilities.to_vec(),
            threshold: None,
            recall: n.measured.recall,
            precision: n.measured.precision,
            computed_share: n.measured.computed_share,
        });
        Ok(())
    }

    /// Copies a network of another file; `table` replaces what that file says about it.
    ///
    /// # Errors
    /// [`Error::BadFile`] if `file` lacks a section of it; [`Error::Io`].
    pub fn copy(&mut self, file: &PredictorFile, table: Table) -> Result<()> {
        for (name, quant, rows, cols) in parts(table.layer, table.ahead, self.hidden, self.neurons, table.rank) {
            let section = find(file, &name, quant, rows, cols)?;
            let to = self.writer.add_rows(&name, quant, rows, cols);
            self.writer.write(to, 0, file.bytes(section))?;
        }
        self.tables.push(table);
        Ok(())
    }

    /// Writes the header and ends the file. Kind, tables and sections of `header` are filled in; the rest is taken from it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(self, header: Header) -> Result<()> {
        let tables = self.tables;
        self.writer.finish(Header { kind: Kind::Mlp.name().into(), tables, ..header })
    }
}

/// Writes a predictor file of these networks; `header` as in [`NetworkWriter::finish`].
///
/// # Errors
/// [`Error::Io`].
pub fn write(path: &Path, header: Header, networks: &[Network]) -> Result<()> {
    let mut writer = NetworkWriter::create(path, header.hidden, header.neurons())?;
    networks.iter().try_for_each(|n| writer.add(n))?;
    writer.finish(header)
}

/// The section of this name, type and shape.
fn find<'f>(file: &'f PredictorFile, name: &str, quant: Quant, rows: usize, cols: usize) -> Result<&'f Section> {
    let bad = |why: String| Error::bad(file.path(), name, format!("{why}; {}", Header::REMEDY));
    let section = file.section(name).ok_or_else(|| bad("the section is missing".into()))?;
    if section.content != (Content::Rows { quant, rows, cols }) {
        let why = format!("is {:?}, not {rows} rows of {cols} numbers in {}", section.content, quant.name());
        return Err(bad(why));
    }
    Ok(section)
}

/// A network ready to run.
struct Ready {
    /// None for rank 0.
    matrices: Option<(Matrix, Matrix)>,
    inner_bias: Vec<f32>,
    /// In the store's order.
    outer_bias: Vec<f32>,
    calibration: Calibration,
    threshold: Option<f32>,
    /// `outer` in the store's order, if that is not the published one; `Ready::matrices` points into it.
    _permuted: Vec<BitLine>,
}

/// The networks of a predictor file.
pub struct Mlp {
    /// By layer and look-ahead.
    networks: HashMap<(usize, usize), Ready>,
    /// The file's threshold, for networks without their own.
    threshold: f32,
    /// Of how many of the model's experts a token reads the scores: those that it has, and all; 1 and 1 without experts.
    read_of: (u64, u64),
    /// The matrices point into its memory map.
    file: PredictorFile,
}

impl Mlp {
    /// Takes a file whose header was checked and that belongs to `model` ([`super::open`]).
    pub(super) fn new(file: PredictorFile, model: &Model) -> Result<Mlp> {
        let ready = |table: &Table| Ok(((table.layer, table.ahead), Ready::new(&file, table, model)?));
        let networks = file.header.tables.par_iter().map(ready).collect::<Result<_>>()?;
        let read_of = match model.config.is_mixture() {
            true => (model.config.most_used_experts() as u64, model.config.clusters() as u64),
            false => (1, 1),
        };
        Ok(Mlp { networks, threshold: file.header.threshold, read_of, file })
    }
}

impl Ready {
    fn weights(&self) -> NetworkWeights<'_> {
        let matrices = self.matrices.as_ref().map(|(inner, outer)| (inner, outer));
        NetworkWeights { matrices, inner_bias: &self.inner_bias, bias: &self.outer_bias }
    }

    fn new(file: &PredictorFile, table: &Table, model: &Model) -> Result<Ready> {
        let (hidden, neurons, rank) = (model.config.hidden, model.config.neurons(), table.rank);
        let name = |part: &str| section_name(table.layer, table.ahead, part);
        let bad = |part: &str, why: String| Error::bad(file.path(), name(part), format!("{why}; {}", Header::REMEDY));
        // No table has a rank of 2^20: the sections' lengths are checked against products of it.
        if !rank.is_multiple_of(RANK_STEP) || rank > 1 << 20 {
            return Err(bad("inner", format!("rank {rank} is not a multiple of {RANK_STEP} below 2^20")));
        }
        let section = |part: &str, quant: Quant, rows: usize, cols: usize| {
            find(file, &name(part), quant, rows, cols).map(|section| file.bytes(section))
        };
        let vector = |part: &str, len: usize| -> Result<Vec<f32>> {
            let values: Vec<f32> = bytemuck::cast_slice(&section(part, Quant::F32, 1, len)?[..len * 4]).to_vec();
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                return Err(bad(part, format!("number {at} is {}", values[at])));
            }
            Ok(values)
        };
        let matrix = |part: &str, rows: usize, cols: usize| -> Result<&[u8]> {
            let bytes = section(part, QUANT, rows, cols)?;
            let row_bytes = QUANT.row_bytes(cols);
            let finite = |row: &[u8]| rows::scales(QUANT, row, cols).iter().all(|scale| scale.is_finite());
            match bytes.chunks_exact(row_bytes).position(|row| !finite(row)) {
                Some(r) => Err(bad(part, format!("a scale of row {r} is not a number"))),
                None => Ok(bytes),
            }
        };
        let order = &model.layers[table.layer].order;
        let outer_bias = order.into_store(vector("outer_bias", neurons)?);
        let calibration = Calibration::new(table.scores.clone(), table.probabilities.clone());
        let (mut permuted, threshold) = (Vec::new(), table.threshold);
        if rank == 0 {
            let inner_bias = Vec::new();
            return Ok(Ready { matrices: None, inner_bias, outer_bias, calibration, threshold, _permuted: permuted });
        }
        let inner_bias = vector("inner_bias", rank)?;
        let (inner, mut outer) = (matrix("inner", rank, hidden)?, matrix("outer", neurons, rank)?);
        if let Some(order) = order.table() {
            let row_bytes = QUANT.row_bytes(rank);
            permuted = vec![BitLine::default(); outer.len().div_ceil(size_of::<BitLine>())];
            let copy: &mut [u8] = bytemuck::cast_slice_mut(&mut permuted);
            for (to, neuron) in copy.chunks_exact_mut(row_bytes).zip(order) {
                to.copy_from_slice(&outer[neuron.index() * row_bytes..][..row_bytes]);
            }
            outer = bytemuck::cast_slice(&permuted);
        }
        // SAFETY: sections begin at multiples of 4096 in a map that `Mlp` keeps, copies at a cache line in a vector that
        // `Ready` keeps and never changes: its buffer does not move with it.
        let matrices = unsafe { (Matrix::over(inner, QUANT, rank, hidden), Matrix::over(outer, QUANT, neurons, rank)) };
        Ok(Ready { matrices: Some(matrices), inner_bias, outer_bias, calibration, threshold, _permuted: permuted })
    }
}

impl Predictor for Mlp {
    fn kind(&self) -> Kind {
        Kind::Mlp
    }

    fn threshold(&self, layer: usize, ahead: usize) -> f32 {
        self.networks.get(&(layer, ahead)).and_then(|n| n.threshold).unwrap_or(self.threshold)
    }

    fn calibration(&self, layer: usize, ahead: usize) -> Option<&Calibration> {
        self.networks.get(&(layer, ahead)).map(|n| &n.calibration)
    }

    fn score(&self, tools: &mut Tools<'_>, layer: usize, ahead: usize, residual: &[f32], n: usize, scores: &mut [f32]) {
        let (h, neurons) = (tools.model.config.hidden, tools.model.config.neurons());
        assert_eq!((residual.len(), scores.len()), (n * h, n * neurons));
        let network = self.networks[&(layer, ahead)].weights();
        let Some(outer) = network.outer() else {
            scores.chunks_exact_mut(neurons).for_each(|scores| scores.copy_from_slice(network.bias));
            return;
        };
        let mut values = std::mem::take(&mut tools.scratch.inner);
        network.hidden_values(tools, residual, n, &mut values);
        let Tools { pool, kernels, scratch, .. } = tools;
        scratch.columns.set_for(&values, n, [outer.quant]);
        products(pool, kernels, std::slice::from_ref(outer), &scratch.columns, scores);
        scores.chunks_exact_mut(neurons).for_each(|scores| math::add(scores, network.bias));
        scratch.inner = values;
    }

    fn network(&self, layer: usize, ahead: usize) -> Option<NetworkWeights<'_>> {
        self.networks.get(&(layer, ahead)).map(Ready::weights)
    }

    /// `None` if the bias is all there is: a device would only read it back.
    fn form(&self, layer: usize, ahead: usize) -> Option<Form<'_>> {
        let network = self.networks.get(&(layer, ahead))?;
        let (inner, outer) = network.matrices.as_ref()?;
        let (inner, outer) = ((inner, &network.inner_bias[..]), (outer, &network.outer_bias[..]));
        Some(Form::Mlp { inner, outer, epsilon: EPSILON })
    }

    fn file(&self) -> Option<&MappedFile> {
        Some(self.file.file())
    }

    fn weight_bytes(&self, layer: usize, ahead: usize) -> u64 {
        self.networks.get(&(layer, ahead)).map_or(0, |n| {
            let read = |bytes: u64| bytes * self.read_of.0 / self.read_of.1;
            let matrices = n.matrices.as_ref().map_or(0, |(inner, outer)| inner.bytes() + read(outer.bytes()));
            matrices + size_of_val(&*n.inner_bias) as u64 + read(size_of_val(&*n.outer_bias) as u64)
        })
    }
}
