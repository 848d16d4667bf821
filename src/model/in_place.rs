//! A model read in place: its matrices where they lie in the published files, without packing.
//!
//! They store `down` by output, so an FFN is whole matrices and no neuron can be left out or moved. That is all that a dense model needs,
//! and a mixture of experts, which leaves out whole experts.

use super::config::Norm;
use super::ffn_weights::{ExpertBiases, ExpertWeights, FfnMatrices, FfnWeights, SharedExpert, SharedNorms};
use super::latent::{LatentHeads, LatentWeights};
use super::layer::{Norms, RouterInput, SharedForm};
use super::matrix::Matrix;
use super::per_layer::{LayerInput, LayerInputs};
use super::source::{ExpertMatrix, Role, Source};
use super::stacked::Stacked;
use super::weights::{Files, Layer, Model, NormWeights};
use crate::error::{Error, Result};
use crate::formats::rows::Quant;
use crate::formats::{TensorView, blocks};
use std::collections::HashSet;
use std::sync::Arc;

impl Model {
    /// The model of published files that are read in place.
    ///
    /// # Errors
    /// [`Error::BadFile`] for what only packing can read: `down` stored by neuron, and dense models in safetensors files.
    pub fn in_place(source: Source) -> Result<Model> {
        if let Some(why) = not_in_place(&source) {
            return Err(Error::bad(
                &source.path,
                "",
                format!("cannot run without being packed: {why}; pack it: dynamicinfer pack MODEL -o m.neurons"),
            ));
        }
        let mut config = source.config.clone().in_residual_units();
        let logit_scale = std::mem::replace(&mut config.logit_scale, 1.0);
        let c = &config;
        let embed = matrix(source.weight(Role::Embed, 0)?);
        let head = if c.tied { embed } else { matrix(source.weight(Role::Head, 0)?) };
        let positions = c.learned_positions.map(|_| source.weight(Role::Positions, 0).map(matrix)).transpose()?;
        let per_layer = (c.per_layer > 0).then(|| layer_inputs(&source)).transpose()?;
        let out_norm = norm(&source, Role::OutNorm, 0)?.scaled(logit_scale);
        let layers: Vec<Layer> = (0..c.layers().len()).map(|l| layer(&source, l)).collect::<Result<_>>()?;
        // Of a mixture the experts' type, which are most of it.
        let routed = layers.iter().find(|layer| layer.ffn.experts().is_none_or(|experts| !experts.experts.is_empty()));
        let quant = routed.unwrap_or(&layers[0]).ffn.input_quants()[1];
        let files = Files::Source(Box::new(source), Default::default());
        Ok(Model { quant, embed, head, positions, per_layer, out_norm, layers, config, files, packed_from: None })
    }

    /// What a published model says of itself before it is packed: its shape, its tokenizer, its fingerprint. It has no layers, so nothing can be
    /// computed with it.
    ///
    /// # Errors
    /// [`Error::BadFile`] where the embedding or the last norm is missing.
    pub fn outline(source: Source) -> Result<Model> {
        let config = source.config.clone().in_residual_units();
        let embed = matrix(source.weight(Role::Embed, 0)?);
        let head = if config.tied { embed } else { matrix(source.weight(Role::Head, 0)?) };
        let out_norm = norm(&source, Role::OutNorm, 0)?;
        let files = Files::Source(Box::new(source), Default::default());
        Ok(Model {
            quant: embed.quant,
            embed,
            head,
            positions: None,
            per_layer: None,
            out_norm,
            layers: Vec::new(),
            config,
            files,
            packed_from: None,
        })
    }

    /// The published files of a model that is read in place, or of an outline; `None` of a packed one.
    pub fn into_source(self) -> Option<Source> {
        match self.files {
            Files::Store(_) => None,
            Files::Source(source, _) => Some(*source),
        }
    }

    /// Checks that every number of a model that is read in place is finite: of quantised blocks, their scales. Reads the whole file, or all
    /// but the experts, which are most of it. Of a packed model, packing has checked it.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the file, the tensor and the offset of the first number that is not.
    pub fn check_numbers(&self, but_experts: bool) -> Result<()> {
        use rayon::prelude::*;
        let Files::Source(source, _) = &self.files else { return Ok(()) };
        let mixtures = self.layers.iter().filter_map(|layer| layer.ffn.experts()).filter(|_| but_experts);
        let matrices = mixtures.flat_map(|layer| &layer.experts).flat_map(FfnMatrices::parts);
        let experts: HashSet<usize> = matrices.map(|matrix| matrix.row_ptr(0).addr()).collect();
        let rest = source.tensors().filter(|view| !experts.contains(&view.data.as_ptr().addr()));
        rest.par_bridge().try_for_each(check_tensor)
    }
}

/// Why this model can only run packed; `None` if it can be read in place.
pub fn not_in_place(source: &Source) -> Option<&'static str> {
    if source.config.only_in_place().is_some() {
        None
    } else if source.path.is_dir() {
        Some("it is not a GGUF file")
    } else if source.down_by_neuron(0) {
        Some("it stores ffn_down by neuron")
    } else {
        None
    }
}

/// Checks that every number of a tensor, of quantised blocks every scale, is finite.
///
/// # Errors
/// [`Error::BadFile`] with the file, the tensor and the offset of the first that is not.
pub fn check_tensor(view: TensorView<'_>) -> Result<()> {
    use rayon::prelude::*;
    let dtype = view.info.dtype;
    // Pieces of whole blocks, so that a large matrix is checked by all threads.
    let piece = (4 << 20) / dtype.block_bytes() * dtype.block_bytes();
    view.data.par_chunks(piece).enumerate().try_for_each(|(i, bytes)| match blocks::first_fault(dtype, bytes) {
        None => Ok(()),
        Some((block, number)) => {
            let at = view.info.offset + (i * piece + block * dtype.block_bytes()) as u64;
            let what = if dtype.block_len() > 1 { "a scale of " } else { "" };
            let why = format!("holds {what}{number} at byte {at}: the model is damaged");
            Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why))
        }
    })
}

fn matrix(view: TensorView<'_>) -> Matrix {
    let [rows, cols] = [view.info.shape[0], view.info.shape[1]];
    // SAFETY: the bytes are the map's, which the model keeps open with its source; the reader has checked their length.
    unsafe { Matrix::unpadded(view.data, Quant::of_source(view.info.dtype), rows, cols) }
}

fn expert_matrix(source: &Source, role: Role, layer: usize, expert: usize) -> Result<Matrix> {
    let ExpertMatrix { view, data, shape: [rows, cols] } = source.expert(role, layer, expert)?;
    // SAFETY: as above.
    Ok(unsafe { Matrix::unpadded(data, Quant::of_source(view.info.dtype), rows, cols) })
}

fn shared_expert(source: &Source, layer: usize, form: SharedForm) -> Result<SharedExpert> {
    let weight = |role| source.weight(role, layer).map(matrix);
    let (inputs, down) = source.shared_roles(layer);
    let input = Stacked::new(inputs.iter().map(|&role| weight(role)).collect::<Result<_>>()?);
    let ffn = FfnMatrices { input, down: weight(down)?, down_by_neuron: false };
    let router = match form.weighted {
        true => source.vector(source.weight(Role::SharedRouter, layer)?)?,
        false => Vec::new(),
    };
    let norms = match form.normed {
        true => Some(Box::new(SharedNorms {
            input: norm(source, Role::SharedNorm, layer)?,
            output: norm(source, Role::SharedPostNorm, layer)?,
            experts: norm(source, Role::ExpertsPostNorm, layer)?,
        })),
        false => None,
    };
    Ok(SharedExpert { ffn, router, norms })
}

/// Matrices of no neurons, of the types that the first layer with an FFN has.
fn no_ffn(source: &Source, layer: usize) -> Result<FfnMatrices> {
    let c = &source.config;
    let layer = c.ffn_like(layer);
    let none = |role: Role, rows: usize, cols: usize| -> Result<Matrix> {
        let view = source.weight(role, layer)?;
        // SAFETY: nothing is read.
        Ok(unsafe { Matrix::unpadded(&view.data[..0], Quant::of_source(view.info.dtype), rows, cols) })
    };
    let input =
        Role::gate_and_up(source.config.ffn_kind).iter().map(|&role| none(role, 0, c.hidden)).collect::<Result<_>>()?;
    Ok(FfnMatrices { input: Stacked::new(input), down: none(Role::Down, c.hidden, 0)?, down_by_neuron: false })
}

fn ffn(source: &Source, layer: usize) -> Result<FfnWeights> {
    let weight = |role| source.weight(role, layer).map(matrix);
    let Some(form) = source.config.experts(layer) else {
        if !source.config.has_ffn(layer) {
            return Ok(FfnWeights::Matrices(no_ffn(source, layer)?));
        }
        let input = Stacked::new(
            Role::gate_and_up(source.config.ffn_kind).iter().map(|&role| weight(role)).collect::<Result<_>>()?,
        );
        return Ok(FfnWeights::Matrices(FfnMatrices { input, down: weight(Role::Down)?, down_by_neuron: false }));
    };
    let expert = |expert| -> Result<FfnMatrices> {
        let of = |role| expert_matrix(source, role, layer, expert);
        let input = Stacked::new(
            Role::gate_and_up(source.config.ffn_kind).iter().map(|&role| of(role)).collect::<Result<_>>()?,
        );
        Ok(FfnMatrices { input, down: of(Role::Down)?, down_by_neuron: false })
    };
    let shared = form.shared.map(|form| shared_expert(source, layer, form)).transpose()?;
    let experts: Vec<FfnMatrices> = (0..form.count).map(expert).collect::<Result<_>>()?;
    let types = |e: &FfnMatrices| (e.input_quants(), e.down.quant);
    if let Some(other) = experts.iter().position(|expert| types(expert) != types(&experts[0])) {
        let view = source.expert(Role::Gate, layer, other)?.view;
        let why = format!("the experts of layer {layer} have different types: number {other} is unlike number 0");
        return Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why));
    }
    if form.count == 0 {
        return Ok(FfnWeights::Experts(ExpertWeights { shared, ..ExpertWeights::default() }));
    }
    // A router that is no number would choose the same experts for every token.
    let router = source.weight(Role::Router, layer)?;
    check_tensor(router)?;
    let selection_bias = match form.selection_bias {
        true => source.bias(Role::SelectionBias, layer)?,
        false => Vec::new(),
    };
    let biases = form.biases.then(|| expert_biases(source, layer).map(Arc::new)).transpose()?;
    let vector = |role| source.vector(source.weight(role, layer)?);
    let router_norm = match form.reads {
        RouterInput::Own => NormWeights { weight: vector(Role::RouterScale)?, bias: Vec::new() },
        _ => NormWeights::NONE,
    };
    // The products are of a unit vector.
    let router_norm = router_norm.scaled(1.0 / (source.config.hidden as f32).sqrt());
    let scales = if form.scaled { vector(Role::ExpertScales)? } else { Vec::new() };
    let router = Some(matrix(router));
    let weights = ExpertWeights { router, router_norm, scales, selection_bias, experts, biases, shared };
    Ok(FfnWeights::Experts(weights))
}

fn layer_inputs(source: &Source) -> Result<LayerInputs> {
    let weight = |role| source.weight(role, 0).map(matrix);
    let norm = norm(source, Role::PerLayerNorm, 0)?;
    Ok(LayerInputs::new(weight(Role::PerLayerTable)?, weight(Role::PerLayerProjection)?, norm))
}

fn expert_biases(source: &Source, layer: usize) -> Result<ExpertBiases> {
    let of = |role| source.expert_biases(role, layer);
    let (gates, ups, width) = (of(Role::Gate)?, of(Role::Up)?, source.config.width(layer));
    let each = gates.chunks_exact(width).zip(ups.chunks_exact(width));
    let input = each.flat_map(|(gates, ups)| [gates, ups]).flatten().copied().collect();
    Ok(ExpertBiases { router: source.bias(Role::Router, layer)?, input, down: of(Role::Down)? })
}

fn norm(source: &Source, role: Role, layer: usize) -> Result<NormWeights> {
    let weight = source.norm(role, layer)?;
    let bias = match source.config.norm {
        Norm::Layer(_) => source.bias(role, layer)?,
        Norm::Rms(_) => Vec::new(),
    };
    Ok(NormWeights { weight, bias })
}

fn layer(source: &Source, layer: usize) -> Result<Layer> {
    let c = &source.config;
    let weight = |role| source.weight(role, layer).map(matrix);
    let (attention, (roles, output)) = (c.attention(layer), Role::of_mixer(c.mixer(layer)));
    let biases = |there: bool, roles: &[Role]| -> Result<Vec<f32>> {
        let roles = if there { roles } else { &[] };
        Ok(roles.iter().map(|&role| source.bias(role, layer)).collect::<Result<Vec<_>>>()?.concat())
    };
    let head_norm =
        |role| -> Result<NormWeights> { Ok(NormWeights { weight: source.norm(role, layer)?, bias: Vec::new() }) };
    let norm_if = |role| match source.norms(layer).any(|norm| norm == role) {
        true => norm(source, role, layer),
        false => Ok(NormWeights::NONE),
    };
    let attn_norm = norm_if(Role::AttnNorm)?;
    let ffn_norm = match c.layer(layer).norms {
        Norms::ParallelShared => attn_norm.clone(),
        _ if !c.has_ffn(layer) => NormWeights::zeros(c),
        _ => norm_if(Role::FfnNorm)?,
    };
    let post_norms = match c.layer(layer).norms.after() {
        true if !c.has_ffn(layer) => Some([norm_if(Role::AttnPostNorm)?, NormWeights::zeros(c)]),
        true => Some([norm_if(Role::AttnPostNorm)?, norm_if(Role::FfnPostNorm)?]),
        false => None,
    };
    Ok(Layer {
        attn_norm,
        qkv: inputs(source, layer)?,
        qkv_bias: biases(attention.is_some_and(|a| a.bias), roles)?,
        qk_norm: match attention.filter(|a| a.qk_norm) {
            Some(a) => {
                let k = if a.keys_of.is_none() { head_norm(Role::KNorm)? } else { NormWeights::NONE };
                Some([head_norm(Role::QNorm)?.scaled(a.query_scale), k])
            }
            None => None,
        },
        o: weight(output)?,
        o_bias: biases(attention.is_some_and(|a| a.output_bias), &[output])?,
        recurrence: source.recurrence(layer)?,
        latent: attention.is_some_and(|a| a.latent.is_some()).then(|| latent(source, layer)).transpose()?,
        sinks: match attention.is_some_and(|a| a.sinks) {
            true => source.vector(source.weight(Role::Sinks, layer)?)?,
            false => Vec::new(),
        },
        ffn_norm,
        post_norms,
        output_scale: match c.layer(layer).output_scale {
            true => source.vector(source.weight(Role::OutputScale, layer)?)?[0],
            false => 1.0,
        },
        width: c.width(layer),
        ffn: ffn(source, layer)?,
        per_layer: match c.per_layer {
            0 => None,
            _ => Some(LayerInput {
                gate: weight(Role::PerLayerGate)?,
                out: weight(Role::PerLayerOut)?,
                norm: norm(source, Role::PerLayerPostNorm, layer)?,
            }),
        },
        up_bias: biases(c.ffn_bias && c.has_ffn(layer), &[Role::Up])?,
        down_bias: biases(c.ffn_bias && c.has_ffn(layer), &[Role::Down])?,
        order: crate::ids::Permutation::identity(),
    })
}

/// What stands between a layer's latents and its heads.
fn latent(source: &Source, layer: usize) -> Result<LatentWeights> {
    let norm =
        |role| -> Result<NormWeights> { Ok(NormWeights { weight: source.norm(role, layer)?, bias: Vec::new() }) };
    let [norms, matrices] = source.latent_roles(layer);
    let weight = |role| source.weight(role, layer).map(rows_of_heads);
    let queries = match norms.contains(&Role::QueryLatentNorm) {
        true => Some((norm(Role::QueryLatentNorm)?, weight(Role::QueryUp)?)),
        false => None,
    };
    let heads = match matrices.contains(&Role::KeysAndValues) {
        true => LatentHeads::Joined(weight(Role::KeysAndValues)?),
        false => LatentHeads::Apart([weight(Role::KeysTurned)?, weight(Role::Values)?]),
    };
    Ok(LatentWeights { queries, norm: norm(Role::LatentNorm)?, heads })
}

/// A matrix, or the matrices of all heads one below the other.
fn rows_of_heads(view: TensorView<'_>) -> Matrix {
    let (cols, rows) = view.info.shape.split_last().expect("its shape was checked");
    // SAFETY: as of `matrix`.
    unsafe { Matrix::unpadded(view.data, Quant::of_source(view.info.dtype), rows.iter().product(), *cols) }
}

/// The matrices of the mixer's input as the file has them, and where the engine's rows stand in them.
fn inputs(source: &Source, layer: usize) -> Result<Stacked> {
    let (mut parts, mut order) = (Vec::<TensorView<'_>>::new(), Vec::new());
    for &role in Role::of_mixer(source.config.mixer(layer)).0 {
        let rows = source.rows(role, layer)?;
        // Several roles may share a tensor.
        let known = parts.iter().position(|part| part.info.name == rows.view.info.name).unwrap_or(parts.len());
        let first: usize = parts[..known].iter().map(|part| part.info.shape[0]).sum();
        order.extend((0..rows.rows).map(|row| (first + rows.file_row(row)) as u32));
        if known == parts.len() {
            parts.push(rows.view);
        }
    }
    let stacked = Stacked::new(parts.into_iter().map(matrix).collect());
    let as_it_is = order.iter().enumerate().all(|(i, &from)| i == from as usize);
    Ok(if as_it_is { stacked } else { stacked.in_order(order) })
}
