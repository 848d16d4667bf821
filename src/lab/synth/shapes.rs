//! Models that are known by name and can be planned and simulated without their files.

use super::Shape;
use crate::error::{Error, Result, excerpt};
use crate::formats::rows::Quant;
use crate::model::KvType;
use crate::model::config::{Activation, ModelConfig, Positions, RopeScaling, rope_frequencies};
use crate::model::layer::{Experts, LayerForm, RouterInput, Scoring};
use crate::placement::memory_plan::{Bits, Footprint};

/// ReLU LLaMAs: name, hidden, layers, FFN, heads, kv heads.
const DENSE: [(&str, [usize; 5]); 3] = [
    ("llama-7b", [4096, 32, 11008, 32, 32]),
    ("llama-13b", [5120, 40, 13824, 40, 40]),
    ("llama-70b", [8192, 80, 28672, 64, 8]),
];

/// A mixture of experts as it was published, and the 4-bit type in which most people have it.
struct Mixture {
    name: &'static str,
    /// Hidden, layers, neurons of an expert, heads, kv heads, dimension of a head, vocabulary.
    sizes: [usize; 7],
    /// Experts of a layer, and of a token.
    experts: (usize, usize),
    quant: &'static str,
    bits: Bits,
}

/// A Q4_K_M takes 4.85 bits a weight over all, its head Q6_K.
const Q4_K_M: Bits = Bits { experts: 4.85, others: 4.85, edges: 6.5625 };
/// As gpt-oss was published: experts in MXFP4; the rest in q8_0, as its GGUF has it.
const MXFP4: Bits = Bits { experts: 4.25, others: 8.5, edges: 8.5 };

const MIXTURES: [Mixture; 5] = [
    mixture("qwen3-30b-a3b", [2048, 48, 768, 32, 4, 128, 151_936], (128, 8), ("Q4_K_M", Q4_K_M)),
    mixture("gpt-oss-20b", [2880, 24, 2880, 64, 8, 64, 201_088], (32, 4), ("MXFP4", MXFP4)),
    mixture("gpt-oss-120b", [2880, 36, 2880, 64, 8, 64, 201_088], (128, 4), ("MXFP4", MXFP4)),
    mixture("mixtral-8x7b", [4096, 32, 14_336, 32, 8, 128, 32_000], (8, 2), ("Q4_K_M", Q4_K_M)),
    mixture("smallthinker-21b", [2560, 52, 768, 28, 4, 128, 151_936], (64, 6), ("Q4_K_M", Q4_K_M)),
];

const fn mixture(
    name: &'static str,
    sizes: [usize; 7],
    experts: (usize, usize),
    (quant, bits): (&'static str, Bits),
) -> Mixture {
    Mixture { name, sizes, experts, quant, bits }
}

/// Configuration of a model that is known by name and can be planned without its files. Of mixtures it has what decides about bytes:
/// biases are left out.
///
/// # Errors
/// [`Error::Usage`] for another name.
pub fn shape(name: &str) -> Result<ModelConfig> {
    let (activation, context) = (Activation::Relu, 4096);
    if let Some((_, [hidden, layers, ffn, heads, kv_heads])) = DENSE.into_iter().find(|(n, _)| *n == name) {
        let (vocab, active, experts) = (32000, None, None);
        let shape = Shape {
            hidden,
            layers,
            ffn,
            heads,
            kv_heads,
            vocab,
            context,
            activation,
            seed: 0,
            active,
            outliers: 0,
            experts,
        };
        return Ok(ModelConfig { name: name.into(), ..shape.config()? });
    }
    let Some(m) = MIXTURES.iter().find(|m| m.name == name) else {
        let names: Vec<&str> = DENSE.iter().map(|(n, _)| *n).chain(MIXTURES.iter().map(|m| m.name)).collect();
        return Err(Error::Usage(format!("--shape {}: known are {}", excerpt(name), names.join(", "))));
    };
    let [hidden, layers, ffn, heads, kv_heads, head_dim, vocab] = m.sizes;
    let (activation, active, experts) = (Activation::Silu, None, Some(m.experts));
    // Its heads as if they divided the residual; what they are is set below.
    let shape = Shape {
        hidden,
        layers,
        ffn,
        heads: 1,
        kv_heads: 1,
        vocab,
        context,
        activation,
        seed: 0,
        active,
        outliers: 0,
        experts,
    };
    let (count, used) = m.experts;
    let experts = Experts { count, used, scoring: Scoring::Softmax, normalised: true, reads: RouterInput::FfnNorm };
    let frequencies = rope_frequencies(head_dim, 1e6, &RopeScaling::None);
    Ok(ModelConfig {
        name: name.into(),
        heads,
        kv_heads,
        head_dim,
        positions: Positions::Rope { frequencies },
        form: LayerForm { experts: Some(experts), ..LayerForm::default() },
        ..shape.config()?
    })
}

/// The sizes of a model that is known by name, and its type in words: `quant`, else what most people have: a mixture's own 4-bit type, f16 of
/// the others.
///
/// # Errors
/// [`Error::Usage`] for a name that is not known.
pub fn footprint(name: &str, quant: Option<Quant>, context: usize, kv: KvType) -> Result<(Footprint, String)> {
    let config = shape(name)?;
    match (quant, MIXTURES.iter().find(|m| m.name == name)) {
        (None, Some(m)) => Ok((Footprint::of_bits(&config, m.bits, context, kv), m.quant.into())),
        (quant, _) => {
            let quant = quant.unwrap_or(Quant::F16);
            Ok((Footprint::of_shape(&config, quant, context, kv), quant.name().into()))
        }
    }
}
