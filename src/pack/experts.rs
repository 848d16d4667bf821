//! The experts of a mixture whose activation has zeros, packed by neuron: gate, up and down of each expert with a row for every neuron, so
//! that up and down of a neuron that does not fire are not read.

use super::job::{Job, NEURONS_PER_TASK, check_range, convert_row, gather_columns, vector};
use super::types::{Types, own};
use crate::error::{Error, Result};
use crate::formats::neuron_store::{Content, Writer};
use crate::formats::rows::{self, Quant};
use crate::model::config::Ffn;
use crate::model::layer::{RouterInput, SharedForm};
use crate::model::source::{ExpertMatrix, Role, Source};
use rayon::prelude::*;

/// Refuses a mixture that gains nothing by being packed, and types that its experts cannot have.
pub(super) fn check(source: &Source, types: Types) -> Result<()> {
    let c = &source.config;
    if !c.activation.is_sparse() {
        return Err(Error::Usage(format!(
            "the experts of this mixture have {}, which no neuron is off by: nothing is gained by packing it, so it is read where it \
             lies; give its directory or GGUF as it is",
            c.activation
        )));
    }
    if c.has_normed_shared() || c.mixtures().any(|e| e.scaled || e.reads == RouterInput::Own) {
        let why = "this mixture has norms or scales of its own for experts, which no store holds: it is read where it lies; give its \
                   directory or GGUF as it is";
        return Err(Error::Usage(why.into()));
    }
    if types == Types::Clusters {
        let why = "--quant clusters: a mixture's experts are clusters already; leave it out";
        return Err(Error::Usage(why.into()));
    }
    for layer in 0..c.layers().len() {
        let Some(SharedForm { width, .. }) = c.experts(layer).and_then(|experts| experts.shared) else { continue };
        let quant = types.of(source, source.shared_roles(layer).1, layer)?;
        if !width.is_multiple_of(quant.unit()) {
            let (name, unit) = (quant.name(), quant.unit());
            let why =
                format!("{name} needs rows of a multiple of {unit} numbers, and a shared expert has {width} neurons");
            return Err(Error::Usage(format!("{why}; pack it with --quant f16")));
        }
    }
    let with_experts = |layer: &usize| c.movable_of(*layer) > 0;
    (0..c.layers().len()).filter(with_experts).try_for_each(|layer| content(source, types, layer).map(drop))
}

/// What the section of a layer's experts holds.
///
/// # Errors
/// [`Error::BadFile`] where the source lacks a tensor, [`Error::Usage`] for types whose blocks do not fit the rows.
pub(super) fn content(source: &Source, types: Types, layer: usize) -> Result<Content> {
    let c = &source.config;
    let quant = |role| -> Result<Quant> {
        let of_source = Quant::of_source(source.expert(role, layer, 0)?.view.info.dtype);
        let quant = match types {
            Types::One(quant) => quant,
            Types::Mix(mix) => mix.of(c, role, layer),
            Types::Own { down } if role == Role::Down => down,
            Types::Own { .. } | Types::Clusters => own(of_source),
        };
        match c.hidden.is_multiple_of(quant.unit()) {
            true => Ok(quant),
            false => {
                let (name, unit) = (quant.name(), quant.unit());
                let why = format!("{name} needs rows of a multiple of {unit} numbers, and this model has {}", c.hidden);
                Err(Error::Usage(format!("{why}; pack it with --quant q8_0 or f16")))
            }
        }
    };
    let experts = c.experts(layer).map_or(0, |experts| experts.count);
    let gate = (c.ffn_kind != Ffn::Plain).then(|| quant(Role::Gate)).transpose()?;
    let [up, down] = [quant(Role::Up)?, quant(Role::Down)?];
    Ok(Content::Experts { gate, up, down, experts, neurons: c.width(layer), cols: c.hidden })
}

/// Bytes of a layer's experts, its router and its shared expert.
pub(super) fn packed_bytes(source: &Source, types: Types, layer: usize) -> Result<u64> {
    let (hidden, (inputs, output)) = (source.config.hidden, source.shared_roles(layer));
    let shared = match source.config.experts(layer).and_then(|experts| experts.shared) {
        Some(SharedForm { width, .. }) => {
            let bytes = |role, rows: usize, cols| Ok((rows * types.of(source, role, layer)?.row_bytes(cols)) as u64);
            let inputs = inputs.iter().map(|&role| bytes(role, width, hidden)).sum::<Result<u64>>()?;
            inputs + bytes(output, hidden, width)?
        }
        None => 0,
    };
    if source.config.movable_of(layer) == 0 {
        return Ok(shared);
    }
    let content = content(source, types, layer)?;
    let Content::Experts { experts, cols, .. } = content else { unreachable!("it is one of experts") };
    Ok(shared + experts as u64 * (content.cluster_bytes().unwrap_or(0) + Quant::F32.row_bytes(cols) as u64))
}

impl Job<'_> {
    /// Writes a layer's router and experts, and the expert that every token has.
    pub(super) fn experts(&self, writer: &mut Writer, layer: usize) -> Result<()> {
        let (c, name) = (&self.source.config, |part: &str| format!("layer.{layer}.{part}"));
        let (cols, form) = (c.hidden, c.experts(layer).expect("a mixture"));
        if let Some(SharedForm { width, weighted, .. }) = form.shared {
            let (inputs, down) = self.source.shared_roles(layer);
            for (&role, part) in inputs.iter().rev().zip(["shared_up", "shared_gate"]) {
                self.rows(writer, &name(part), cols, &[(role, layer)])?;
            }
            self.rows(writer, &name("shared_down"), width, &[(down, layer)])?;
            if weighted {
                let router = self.source.weight(Role::SharedRouter, layer)?;
                vector(writer, &name("shared_router"), &self.source.vector(router)?)?;
            }
        }
        if form.count == 0 {
            return Ok(());
        }
        self.rows(writer, &name("router"), cols, &[(Role::Router, layer)])?;
        if form.selection_bias {
            vector(writer, &name("selection_bias"), &self.source.bias(Role::SelectionBias, layer)?)?;
        }
        let content = content(self.source, self.types, layer)?;
        let Content::Experts { gate, up, down, experts, neurons, .. } = content else {
            unreachable!("it is one of experts")
        };
        let bytes = content.cluster_bytes().expect("the source's matrices fit in memory");
        let section = writer.add(&name("ffn"), content, bytes * experts as u64);
        writer.add_checksums(section, &content.cluster_parts().expect("the source's matrices fit in memory"));
        let pieces = neurons.div_ceil(NEURONS_PER_TASK);
        (0..experts * pieces).into_par_iter().try_for_each(|task| {
            let (expert, first) = (task / pieces, task % pieces * NEURONS_PER_TASK);
            let range = first..neurons.min(first + NEURONS_PER_TASK);
            let mut at = bytes * expert as u64;
            for (role, quant) in [(Role::Gate, gate), (Role::Up, Some(up)), (Role::Down, Some(down))] {
                let Some(quant) = quant else { continue };
                let row_bytes = quant.row_bytes(cols);
                let matrix = self.source.expert(role, layer, expert)?;
                let mut out = vec![0; range.len() * row_bytes];
                match role {
                    Role::Down => self.down_rows(matrix, range.clone(), quant, &mut out)?,
                    _ => self.input_rows(matrix, range.start, (quant, self.columns(role, layer)), &mut out)?,
                }
                writer.write(section, at + (range.start * row_bytes) as u64, &out)?;
                at += (neurons * row_bytes) as u64;
                self.advance(out.len() as u64)?;
            }
            Ok(())
        })
    }

    /// Rows of gate or up from `first` on.
    fn input_rows(
        &self,
        matrix: ExpertMatrix<'_>,
        first: usize,
        to: (Quant, Option<&[f32]>),
        out: &mut [u8],
    ) -> Result<()> {
        let cols = matrix.shape[1];
        // Rows of the whole tensor, whose offset a message names.
        let before = matrix.data.as_ptr().addr() - matrix.view.data.as_ptr().addr();
        let first = before / matrix.view.info.dtype.row_bytes(cols) + first;
        let mut values = vec![0.0; cols];
        out.chunks_exact_mut(to.0.row_bytes(cols))
            .enumerate()
            .try_for_each(|(i, out)| convert_row(matrix.view, first + i, to, &mut values, out))
    }

    /// What the neurons of this range add, a row for each.
    fn down_rows(
        &self,
        matrix: ExpertMatrix<'_>,
        range: std::ops::Range<usize>,
        quant: Quant,
        out: &mut [u8],
    ) -> Result<()> {
        let hidden = matrix.shape[0];
        let columns = gather_columns(matrix.view, matrix.data, matrix.shape, range)?;
        let rows = columns.chunks_exact(hidden).zip(out.chunks_exact_mut(quant.row_bytes(hidden)));
        for (values, out) in rows {
            rows::encode(quant, values, out);
            self.compare(quant, values, out);
            check_range(values, quant, matrix.view)?;
        }
        Ok(())
    }
}
