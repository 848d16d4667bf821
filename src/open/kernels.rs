//! Which kind of kernels an engine takes for each type: the one for the maker of the processor, unless another is clearly faster here.

use super::options::EngineOptions;
use crate::cpu::{Isa, Kernels};
use crate::engine::Engine;
use crate::formats::rows::Quant;
use crate::machine::kernel_choice::Trial;
use crate::model::block::BlockLayout;
use crate::model::{FfnWeights, Model};

/// Types are measured of which a model's layers have at least so many bytes. Smaller models lie in caches, and are read before a
/// measurement has paid for itself.
const MIN_BYTES: u64 = 128 << 20;
/// Most types that are measured, those with most bytes; a type takes some ten milliseconds.
const MAX_TYPES: usize = 3;

/// Measures and takes. Nothing is measured where an instruction set was asked for, or has kernels of one kind.
pub(super) fn choose(engine: &mut Engine, options: &EngineOptions) {
    let kinds = Kernels::kinds(engine.kernels.isa);
    let forced = options.isa.is_some() || Isa::asked_for() != Ok(None);
    if forced || kinds.len() < 2 {
        return;
    }
    let types = types(&engine.model, engine.sparsity().is_dense());
    if types.is_empty() {
        return;
    }
    let (mut kernels, hidden) = (engine.kernels, engine.model.config.hidden);
    // Where there is no memory to measure in, the maker's kernels do.
    let Ok(mut trial) = Trial::new(engine.tools().pool, hidden) else { return };
    for (quant, bytes) in types {
        let choice = trial.choose(&kinds, quant, bytes);
        tracing::info!("kernels for {}: {}", quant.name(), choice.describe(&kinds));
        choice.apply(&mut kernels, &kinds);
    }
    engine.kernels = kernels;
}

/// The types that are measured, with the bytes of their rows in matrices and in neuron blocks. Blocks that are chosen lie apart, where all
/// kinds ask for the next one alike: they do not count.
fn types(model: &Model, dense: bool) -> Vec<(Quant, [u64; 2])> {
    let in_blocks = |quant: Quant| {
        let layouts = model.layers.iter().filter_map(|layer| match &layer.ffn {
            FfnWeights::Neurons(blocks) if blocks.layout.down().quant == quant => Some((blocks.layout, blocks.count)),
            _ => None,
        });
        let bytes = |(layout, count): (BlockLayout, usize)| -> usize {
            layout.parts().iter().filter(|part| part.quant == quant).map(|part| count * part.bytes).sum()
        };
        layouts.map(bytes).sum::<usize>() as u64
    };
    let by_use = |(quant, bytes): (Quant, u64)| {
        let in_blocks = in_blocks(quant);
        (quant, [bytes - in_blocks, if dense { in_blocks } else { 0 }])
    };
    let all = model.bytes_by_type().into_iter().map(by_use);
    all.filter(|(_, bytes)| bytes.iter().sum::<u64>() >= MIN_BYTES).take(MAX_TYPES).collect()
}
