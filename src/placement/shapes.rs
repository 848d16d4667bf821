//! Models that are known by name and can be planned and simulated without their files.

use super::memory_plan::{Bits, Footprint};
use crate::error::{Error, Result, excerpt};
use crate::formats::rows::Quant;
use crate::model::config::{Activation, Ffn, ModelConfig, Norm, Positions, RopeScaling, rope_frequencies};
use crate::model::layer::{CommonForm, Experts, LinearAttention, OwnForm, Scoring, SharedForm, StateRule};
use crate::model::{Description, KvType};

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
    hybrid: Option<Hybrid>,
}

/// What Qwen3.5 has beside attention and the experts that a router chooses.
struct Hybrid {
    /// One layer of so many has attention, the others have a delta net.
    every: usize,
    delta: LinearAttention,
    /// Neurons of the expert that every token has.
    shared: usize,
}

/// A Q4_K_M takes 4.85 bits a weight over all, its head Q6_K.
const Q4_K_M: Bits = Bits { experts: 4.85, others: 4.85, edges: 6.5625 };
/// As gpt-oss was published: experts in MXFP4; the rest in q8_0, as its GGUF has it.
const MXFP4: Bits = Bits { experts: 4.25, others: 8.5, edges: 8.5 };

const MIXTURES: [Mixture; 6] = [
    mixture("qwen3-30b-a3b", [2048, 48, 768, 32, 4, 128, 151_936], (128, 8), ("Q4_K_M", Q4_K_M)),
    Mixture {
        hybrid: Some(Hybrid {
            every: 4,
            delta: LinearAttention {
                rule: StateRule::Delta,
                key_heads: 16,
                value_heads: 32,
                key_dim: 128,
                head_dim: 128,
                taps: 4,
                tiled: true,
            },
            shared: 512,
        }),
        ..mixture("qwen3.5-35b-a3b", [2048, 40, 512, 16, 2, 256, 248_320], (256, 8), ("Q4_K_M", Q4_K_M))
    },
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
    Mixture { name, sizes, experts, quant, bits, hybrid: None }
}

/// Sizes of a model like Llama. Its heads divide the hidden size.
pub struct Sizes {
    /// Hidden size.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Neurons per layer, or per expert.
    pub ffn: usize,
    /// Query heads per layer.
    pub heads: usize,
    /// Key and value heads per layer.
    pub kv_heads: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Token positions that the model has.
    pub context: usize,
}

/// Of the norms.
pub const EPSILON: f32 = 1e-5;
/// Base of the rotated positions.
pub const THETA: f64 = 10_000.0;

impl Sizes {
    /// What a file of a model of these sizes says, a mixture if it has experts.
    pub fn described(&self, name: String, activation: Activation, experts: Option<Experts>) -> Description {
        let head_dim = self.hidden / self.heads;
        Description {
            family: "llama".into(),
            name,
            hidden: self.hidden,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim,
            ffn: self.ffn,
            vocab: self.vocab,
            context: self.context,
            window: None,
            norm: Norm::Rms(EPSILON),
            activation,
            ffn_kind: Ffn::Gated,
            positions: Positions::Rope { frequencies: rope_frequencies(head_dim, THETA, &RopeScaling::None) },
            attention_bias: false,
            output_bias: false,
            ffn_bias: false,
            tied: false,
            form: CommonForm { experts, ..CommonForm::default() },
            embedding_scale: 1.0,
            logit_scale: 1.0,
            logit_cap: 0.0,
        }
    }
}

/// Mixtral's routing, which every reader of its GGUFs knows: so many experts in a layer, so many of them for a token.
pub fn mixtral(count: usize, used: usize) -> Experts {
    Experts { used, scoring: Scoring::Softmax, normalised: true, ..Experts::all(count) }
}

/// Configuration of a model that is known by name and can be planned without its files. Of mixtures it has what decides about bytes:
/// biases are left out.
///
/// # Errors
/// [`Error::Usage`] for another name.
pub fn shape(name: &str) -> Result<ModelConfig> {
    let context = 4096;
    if let Some((_, [hidden, layers, ffn, heads, kv_heads])) = DENSE.into_iter().find(|(n, _)| *n == name) {
        let sizes = Sizes { hidden, layers, ffn, heads, kv_heads, vocab: 32000, context };
        return resolved(&sizes.described(name.into(), Activation::Relu, None));
    }
    let Some(m) = MIXTURES.iter().find(|m| m.name == name) else {
        let names: Vec<&str> = DENSE.iter().map(|(n, _)| *n).chain(MIXTURES.iter().map(|m| m.name)).collect();
        return Err(Error::Usage(format!("--shape {}: known are {}", excerpt(name), names.join(", "))));
    };
    let [hidden, layers, ffn, heads, kv_heads, head_dim, vocab] = m.sizes;
    let sizes = Sizes { hidden, layers, ffn, heads, kv_heads, vocab, context };
    let frequencies = rope_frequencies(head_dim, 1e6, &RopeScaling::None);
    let mut config = Description {
        head_dim,
        positions: Positions::Rope { frequencies },
        ..sizes.described(name.into(), Activation::Silu, Some(mixtral(m.experts.0, m.experts.1)))
    };
    if let Some(Hybrid { every, delta, shared }) = &m.hybrid {
        let recurs = (0..layers).filter(|layer| !(layer + 1).is_multiple_of(*every)).collect();
        config.form.gated = true;
        config.form.own = vec![OwnForm { layers: recurs, linear: Some(*delta), ..OwnForm::default() }];
        let shared = Some(SharedForm { width: *shared, weighted: true, normed: false });
        config.form.experts.iter_mut().for_each(|experts| experts.shared = shared);
    }
    resolved(&config)
}

fn resolved(config: &Description) -> Result<ModelConfig> {
    config.resolve().map_err(Error::Usage)
}

/// The sizes of a model that is known by name, and its type in words: `quant`, else what most people have: a mixture's own 4-bit type, f16 of
/// the others.
///
/// # Errors
/// [`Error::Usage`] for a name that is not known.
pub fn footprint(name: &str, quant: Option<Quant>, context: usize, kv: KvType) -> Result<(Footprint, String)> {
    let config = shape(name)?;
    let of_quant = |quant| Footprint::of_shape(&config, quant, context, kv);
    let Some(m) = MIXTURES.iter().find(|m| m.name == name) else {
        let quant = quant.unwrap_or(Quant::F16);
        return Ok((of_quant(quant), quant.name().into()));
    };
    Ok(match quant {
        None => (Footprint::of_bits(&config, m.bits, context, kv), m.quant.into()),
        Some(quant) => (of_quant(quant), quant.name().into()),
    })
}
