//! An FFN cut into clusters of neighbouring neurons, whose bytes are the source's.
//!
//! GGUF codes `down` along the neurons, in blocks of up to 256 numbers, so no neuron's column can be taken out without coding it again. A
//! cluster is as many neurons as whole blocks hold: its rows of gate and up are a run of the file, and its part of `down` is some blocks of
//! each row. An activation leaves out hardly any whole cluster, so all of them are computed for every token.

use crate::error::{Error, Result};
use crate::formats::TensorView;
use crate::formats::neuron_store::Content;
use crate::formats::rows::Quant;
use crate::model::Description;
use crate::model::config::Ffn;
use crate::model::in_place::check_tensor;
use crate::model::layer::Experts;
use crate::model::source::{Role, Source};

/// Neurons of a cluster, the first that an FFN can be cut into.
const NEURONS: [usize; 4] = [256, 128, 64, 32];

/// A layer's FFN that is cut into clusters.
pub struct Cut<'a> {
    gate: TensorView<'a>,
    up: TensorView<'a>,
    down: TensorView<'a>,
    /// How many clusters there are.
    pub count: usize,
    /// Neurons of each.
    neurons: usize,
    hidden: usize,
}

/// What the store says of the model: the FFN is a mixture of clusters that are all computed.
///
/// # Errors
/// [`Error::Usage`] for a model whose FFNs cannot be cut so.
pub fn described(source: &Source) -> Result<Description> {
    let why_not = |why: String| Error::Usage(format!("{why}; pack it by neuron: leave out --quant clusters"));
    if source.config.ffn_kind == Ffn::Plain || source.down_by_neuron(0) {
        return Err(why_not("clusters are cut from gate, up and a down that is stored by output".into()));
    }
    let neurons = neurons(source)?;
    let mut described = source.described.clone();
    described.form.experts = Some(Experts::all(described.ffn / neurons));
    described.ffn = neurons;
    described.check().map_err(why_not)?;
    Ok(described)
}

/// Whether a model's FFNs can be cut into clusters.
pub fn can_be_cut(source: &Source) -> bool {
    source.config.only_in_place().is_none() && described(source).is_ok()
}

/// Whether they can be, and a device can compute with the clusters' types: gate and up of each layer take inputs of one form.
pub fn can_be_cut_for_device(source: &Source) -> bool {
    let input = |role, layer| source.weight(role, layer).ok().map(|view| Quant::of_source(view.info.dtype).input());
    let alike = |layer| input(Role::Gate, layer) == input(Role::Up, layer);
    can_be_cut(source) && source.config.hidden.is_multiple_of(8) && (0..source.config.layers().len()).all(alike)
}

/// Neurons of a cluster: the same for all layers, and whole blocks of each layer's `down`.
fn neurons(source: &Source) -> Result<usize> {
    let c = &source.config;
    let units = (0..c.layers().len()).map(|layer| Ok(source.weight(Role::Down, layer)?.info.dtype.block_len()));
    let units = units.collect::<Result<Vec<_>>>()?;
    let fits = |&neurons: &usize| {
        c.widest_ffn().is_multiple_of(neurons) && units.iter().all(|unit| neurons.is_multiple_of(*unit))
    };
    NEURONS.into_iter().find(fits).ok_or_else(|| {
        let ffn = c.widest_ffn();
        Error::Usage(format!(
            "an FFN of {ffn} neurons cannot be cut into clusters of whole blocks of down; pack it by neuron: leave out --quant clusters"
        ))
    })
}

/// Bytes of a layer's clusters.
///
/// # Errors
/// [`Error::BadFile`] where the source lacks a tensor, [`Error::Usage`] as [`described`].
pub fn packed_bytes(source: &Source, layer: usize) -> Result<u64> {
    let cut = of(source, layer)?;
    Ok(cut.content().cluster_bytes().unwrap_or(0) * cut.count as u64)
}

/// A layer's clusters.
///
/// # Errors
/// As [`packed_bytes`].
pub fn of(source: &Source, layer: usize) -> Result<Cut<'_>> {
    let [gate, up, down] = [Role::Gate, Role::Up, Role::Down].map(|role| source.weight(role, layer));
    let (neurons, c) = (neurons(source)?, &source.config);
    Ok(Cut { gate: gate?, up: up?, down: down?, count: c.widest_ffn() / neurons, neurons, hidden: c.hidden })
}

impl Cut<'_> {
    /// What the store's section holds.
    pub fn content(&self) -> Content {
        let [gate, up, down] = [self.gate, self.up, self.down].map(|view| Quant::of_source(view.info.dtype));
        Content::Clusters { gate, up, down, clusters: self.count, neurons: self.neurons, cols: self.hidden }
    }

    /// Checks that every scale or number of the layer's matrices is finite.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the file, the tensor and the offset of the first that is not.
    pub fn check(&self) -> Result<()> {
        [self.gate, self.up, self.down].into_iter().try_for_each(check_tensor)
    }

    /// The bytes of cluster `number` as the store has them.
    pub fn cluster(&self, number: usize) -> Vec<u8> {
        let whole = self.content().cluster_bytes().unwrap_or(0) as usize;
        let mut bytes = Vec::with_capacity(whole);
        for view in [self.gate, self.up] {
            let row = view.info.dtype.row_bytes(self.hidden);
            bytes.extend_from_slice(&view.data[number * self.neurons * row..][..self.neurons * row]);
        }
        let dtype = self.down.info.dtype;
        let (part, row) = (dtype.row_bytes(self.neurons), dtype.row_bytes(self.neurons * self.count));
        for output in self.down.data.chunks_exact(row) {
            bytes.extend_from_slice(&output[number * part..][..part]);
        }
        bytes.resize(whole, 0);
        bytes
    }
}
