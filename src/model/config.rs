//! The shape of a model: plain data, the same whatever file it came from, stored in the neuron store's header.

use super::form::{Experts, LayerForm, OwnFfn, OwnForm, RouterInput, check_taps, is_one, is_zero, one};
use crate::error::excerpt;
use crate::exp::silu;
use serde::{Deserialize, Serialize};

/// The function between gate and product (or between up and down where there is no gate).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// x where x > threshold, else 0 (ProSparse).
    Fatrelu(f32),
    /// max(x, 0) squared
    Relu2,
    /// x * sigmoid(x)
    Silu,
    /// x * Phi(x), with the error function
    Gelu,
    /// the tanh form of gelu
    GeluTanh,
    /// c * sigmoid(1.702 c) with c = min(x, 7), of gpt-oss
    ClampedSwish,
}

/// What the gate is at most where it passes through [`Activation::ClampedSwish`], and up on both sides of 0 in [`Ffn::GatedClamped`].
const CLAMP: f32 = 7.0;
/// The sigmoid's gain there.
const CLAMPED_GAIN: f32 = 1.702;

/// An activation as a config.json, a GGUF or a user names it: a function, and what passes through it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedActivation {
    /// What the gate's products pass through, or up's where there is no gate.
    pub function: Activation,
    /// Up as well as the gate: `drelu`, relu(gate) * relu(up).
    pub both: bool,
}

impl NamedActivation {
    /// The activation of this name, such as `relu`, `drelu` or `fatrelu(0.01)`. `parameter` is the threshold of a fatrelu whose name
    /// does not hold it. The error says which name or number is wrong.
    pub fn by_name(name: &str, parameter: Option<f32>) -> Result<NamedActivation, String> {
        let both = name.eq_ignore_ascii_case("drelu");
        let function = if both { Activation::Relu } else { Activation::by_name(name, parameter)? };
        Ok(NamedActivation { function, both })
    }
}

impl std::fmt::Display for NamedActivation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.both { write!(f, "drelu") } else { self.function.fmt(f) }
    }
}

impl From<Activation> for NamedActivation {
    fn from(function: Activation) -> NamedActivation {
        NamedActivation { function, both: false }
    }
}

impl Activation {
    fn by_name(name: &str, parameter: Option<f32>) -> Result<Activation, String> {
        let (name, parameter) = match name.split_once('(') {
            Some((name, rest)) => {
                let number = rest.trim_end_matches(')').trim();
                let value = number.parse().map_err(|_| format!("'{number}' is not a number"))?;
                (name, Some(value))
            }
            None => (name, parameter),
        };
        Ok(match &*name.to_ascii_lowercase() {
            "relu" => Activation::Relu,
            "fatrelu" => match parameter {
                Some(t) if t.is_finite() && t >= 0.0 => Activation::Fatrelu(t),
                Some(t) => return Err(format!("fatrelu with threshold {t}; it must be finite and not negative")),
                None => return Err("fatrelu without its threshold; write fatrelu(0.01), say".into()),
            },
            "relu2" | "relu_squared" | "squared_relu" => Activation::Relu2,
            "silu" | "swish" => Activation::Silu,
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_tanh" | "gelu_fast" => Activation::GeluTanh,
            _ => {
                return Err(format!(
                    "activation '{}' is not known; known are relu, fatrelu(t), relu2, drelu, silu, gelu, gelu_pytorch_tanh",
                    excerpt(name)
                ));
            }
        })
    }

    /// The function at `x`.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Relu => x.max(0.0),
            Activation::Fatrelu(t) => {
                if x > t {
                    x
                } else {
                    0.0
                }
            }
            Activation::Relu2 => x.max(0.0) * x.max(0.0),
            Activation::Silu => silu(x),
            Activation::Gelu => 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)),
            Activation::GeluTanh => {
                // sqrt(2 / pi)
                0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044715 * x * x * x)).tanh())
            }
            Activation::ClampedSwish => {
                // Not `min`, which would make a number of what is none.
                let clamped = if x > CLAMP { CLAMP } else { x };
                silu(CLAMPED_GAIN * clamped) * (1.0 / CLAMPED_GAIN)
            }
        }
    }

    /// Whether inputs give exactly zero over a whole range, so that inactive neurons need not be computed.
    pub fn is_sparse(self) -> bool {
        matches!(self, Activation::Relu | Activation::Fatrelu(_) | Activation::Relu2)
    }
}

impl std::fmt::Display for Activation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Activation::Relu => write!(f, "relu"),
            Activation::Fatrelu(t) => write!(f, "fatrelu({t})"),
            Activation::Relu2 => write!(f, "relu2"),
            Activation::Silu => write!(f, "silu"),
            Activation::Gelu => write!(f, "gelu"),
            Activation::GeluTanh => write!(f, "gelu_tanh"),
            Activation::ClampedSwish => write!(f, "clamped_swish"),
        }
    }
}

/// Error function to about 1.2e-7 (a Chebyshev fit of erfc, Numerical Recipes 6.2), evaluated in f64.
fn erf(x: f32) -> f32 {
    let z = (x as f64).abs();
    let t = 1.0 / (1.0 + 0.5 * z);
    const C: [f64; 10] = [
        -1.26551223,
        1.00002368,
        0.37409196,
        0.09678418,
        -0.18628806,
        0.27886807,
        -1.13520398,
        1.48851587,
        -0.82215223,
        0.17087277,
    ];
    let fit = C.iter().rev().fold(0.0, |sum, c| sum * t + c);
    let erfc = t * (-z * z + fit).exp();
    (if x >= 0.0 { 1.0 - erfc } else { erfc - 1.0 }) as f32
}

/// How a neuron makes its activation from its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ffn {
    /// act(gate x) * up x
    Gated,
    /// act(gate x) * act(up x): dReLU, of Bamboo and TurboSparse
    GatedBoth,
    /// act(gate x) * (1 + up x, where that is clamped to -7 to 7): gpt-oss
    GatedClamped,
    /// act(up x): no gate
    Plain,
}

impl Ffn {
    /// Rows of a neuron block: gate, up, down or up, down.
    pub fn rows(self) -> usize {
        if self == Ffn::Plain { 2 } else { 3 }
    }

    /// A neuron's activation from its products, biases included; `gate` is not looked at where there is none.
    #[inline]
    pub fn activation(self, act: Activation, gate: f32, up: f32) -> f32 {
        match self {
            Ffn::Gated => {
                let g = act.apply(gate);
                if g == 0.0 { 0.0 } else { g * up }
            }
            Ffn::GatedBoth => act.apply(gate) * act.apply(up),
            Ffn::GatedClamped => act.apply(gate) * (1.0 + up.clamp(-CLAMP, CLAMP)),
            Ffn::Plain => act.apply(up),
        }
    }

    /// The same of an expert's neuron, whose up stands in the place of the gate where there is none.
    #[inline]
    pub fn of_expert(self, act: Activation, gate: f32, up: f32) -> f32 {
        if self == Ffn::Plain { act.apply(gate) } else { self.activation(act, gate, up) }
    }
}

/// The norm that the model's layers and its head have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// x / rms(x) * weight; the number is epsilon
    Rms(f32),
    /// (x - mean) / deviation * weight + bias; the number is epsilon
    Layer(f32),
}

/// How a model knows a token's position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// Rotary, in the rotate-half order: the pair (i, i + head_dim / 2) is turned by `frequencies[i]` radians per position, scaling
    /// included. GGUF's interleaved order is undone when weights are read.
    Rope {
        /// `[head_dim / 2]` radians per position.
        frequencies: Vec<f32>,
    },
    /// A learned vector per position, at row position + offset.
    Learned {
        /// Rows of the table that stand before that of position 0.
        offset: usize,
    },
}

/// Layers that a model may have: more than any published one.
const MAX_LAYERS: usize = 1 << 12;
/// Neurons that an FFN may have: more than any published model's.
const MAX_WIDTH: usize = 1 << 20;

/// The shape of a model and what its layers are, whatever file it came from. [`ModelConfig::check`] says what must hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Family by its usual name, as `model::families` has it.
    pub family: String,
    /// The model's own name, for people.
    pub name: String,
    /// Numbers of the residual per token.
    pub hidden: usize,
    /// How many layers it has.
    pub layers: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    /// Numbers of a head; even.
    pub head_dim: usize,
    /// Neurons of an FFN, or of one expert of a mixture; the most of a layer where they differ ([`LayerForm::widths`]).
    pub ffn: usize,
    /// Rows of the embedding: at least one for each token.
    pub vocab: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Attention sees this many positions back, where the model has such a limit.
    pub window: Option<usize>,
    /// The kind of all its norms, and their epsilon.
    pub norm: Norm,
    /// The FFN's activation function.
    pub activation: Activation,
    /// Whether the FFN has a gate, and what passes through the activation.
    pub ffn_kind: Ffn,
    /// How positions are told apart.
    pub positions: Positions,
    /// Queries, keys and values have biases.
    pub attention_bias: bool,
    /// Attention's output projection has a bias.
    pub output_bias: bool,
    /// The FFN's up and down have biases.
    pub ffn_bias: bool,
    /// The head is the embedding matrix.
    pub tied: bool,
    /// How its layers differ from Llama's. It is left out of headers and fingerprints where they do not.
    #[serde(default, skip_serializing_if = "LayerForm::is_default")]
    pub form: LayerForm,
    /// A token's embedding is multiplied by this.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub embedding_scale: f32,
    /// Logits are multiplied by this.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub logit_scale: f32,
    /// Logits x become cap * tanh(x / cap); 0 where they stay as they are.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub logit_cap: f32,
}

impl ModelConfig {
    /// Weights of attention, FFNs, embedding and head, without norms, biases and learned positions; a tied head is counted once.
    pub fn parameters(&self) -> u64 {
        let h = self.hidden as u64;
        let attention: u64 = self.mixers().map(|mixer| mixer.weights(self.hidden) as u64).sum();
        let neurons = |layer: usize| match self.experts(layer) {
            Some(experts) => self.ffn * experts.count + experts.shared.map_or(0, |shared| shared.width),
            None => self.width(layer),
        };
        let ffn = self.ffn_kind.rows() as u64 * h * (0..self.layers).map(|layer| neurons(layer) as u64).sum::<u64>();
        let embeddings = h * self.vocab as u64 * if self.tied { 1 } else { 2 };
        let of_layers = (self.layers * self.form.per_layer) as u64 * (self.vocab as u64 + 3 * h);
        attention + ffn + embeddings + of_layers
    }

    /// Checks the numbers and what must hold between them; the error is a message that names the field. The limits keep products
    /// inside 64 bits and refuse shapes that no real model has: they come from damaged files.
    pub fn check(&self) -> Result<(), String> {
        let bounds = [
            ("hidden size", self.hidden, 1 << 17),
            ("layer count", self.layers, MAX_LAYERS),
            ("FFN size", self.ffn, MAX_WIDTH),
            ("vocabulary size", self.vocab, 1 << 22),
            ("context length", self.context, 1 << 24),
        ];
        for (what, value, top) in bounds {
            if value == 0 || value > top {
                return Err(format!("{what} is {value}; it must be 1 to {top}"));
            }
        }
        check_heads(self.heads, self.kv_heads, self.head_dim)?;
        let (Norm::Rms(eps) | Norm::Layer(eps)) = self.norm;
        if !(eps > 0.0 && eps < 0.1) {
            return Err(format!("norm epsilon {eps} is not between 0 and 0.1"));
        }
        if self.window == Some(0) {
            return Err("the attention window is 0".into());
        }
        self.check_form()?;
        match &self.positions {
            Positions::Rope { frequencies } => check_frequencies(frequencies, self.head_dim),
            Positions::Learned { offset } if *offset > 1 << 12 => {
                Err(format!("{offset} positions before the first; it must be 0 to 4096"))
            }
            _ => Ok(()),
        }
    }
}

impl ModelConfig {
    fn check_form(&self) -> Result<(), String> {
        let scales = [
            ("embedding scale", self.embedding_scale),
            ("residual scale", self.form.residual_scale),
            ("logit scale", self.logit_scale),
        ];
        if let Some((what, scale)) = scales.into_iter().find(|(_, scale)| !(1e-3..=1e3).contains(scale)) {
            return Err(format!("{what} {scale} is not between 0.001 and 1000"));
        }
        if !(0.1..=10.0).contains(&self.form.rotary_scale) {
            return Err(format!(
                "rotated queries and keys are multiplied by {}; it must be 0.1 to 10",
                self.form.rotary_scale
            ));
        }
        let is_biased = self.form.experts.is_some_and(|experts| experts.biases);
        let is_clamped = self.ffn_kind == Ffn::GatedClamped || self.activation == Activation::ClampedSwish;
        if is_clamped && !is_biased {
            return Err("a clamped SwiGLU is supported for experts with biases only".into());
        }
        if self.form.residual_scale != 1.0 && matches!(self.positions, Positions::Learned { .. }) {
            return Err("a residual scale beside learned positions is not supported".into());
        }
        let widths = &self.form.widths;
        if !widths.is_empty() && widths.len() != self.layers {
            return Err(format!("{} FFN sizes for {} layers", widths.len(), self.layers));
        }
        if let (Some(least), Some(most), 0) = (widths.iter().min(), widths.iter().max(), self.form.per_layer) {
            return Err(format!(
                "its layers have FFNs of {least} to {most} neurons; only one size for all is supported"
            ));
        }
        for (what, list) in [("rotated", &self.form.rotated), ("windowed", &self.form.windowed)] {
            if !list.is_empty() && list.len() != self.layers {
                return Err(format!("{} numbers say which of {} layers are {what}", list.len(), self.layers));
            }
        }
        if let Some(experts @ Experts { shared, biases, reads, .. }) = self.form.experts {
            experts.check()?;
            if let Some(width) = shared.map(|shared| shared.width).filter(|width| !(1..=MAX_WIDTH).contains(width)) {
                return Err(format!("the shared expert's size is {width}; it must be 1 to {MAX_WIDTH}"));
            }
            if self.ffn_bias || biases && self.ffn_kind == Ffn::Plain {
                return Err("biases of neurons in a mixture, or of experts without gates, are not supported".into());
            }
            if self.form.norms.parallel() || self.form.residual_scale != 1.0 {
                return Err("experts beside parallel attention or with a residual scale are not supported".into());
            }
            if biases && (shared.is_some() || reads != RouterInput::FfnNorm) {
                return Err(
                    "biases of experts beside shared ones or a router that reads another input are not supported"
                        .into(),
                );
            }
        }
        if self.form.qk_norm && matches!(self.norm, Norm::Layer(_)) {
            return Err("LayerNorms of queries and keys are not supported".into());
        }
        if self.form.norms.after() && (self.form.residual_scale != 1.0 || matches!(self.norm, Norm::Layer(_))) {
            return Err("norms behind attention and FFN beside LayerNorm or a residual scale are not supported".into());
        }
        if self.form.query_scale != 1.0 && !(self.form.qk_norm && (0.01..=100.0).contains(&self.form.query_scale)) {
            return Err(format!(
                "queries are multiplied by {}; it must be 0.01 to 100, and the queries must be normed",
                self.form.query_scale
            ));
        }
        self.check_parts()?;
        let mut grouped = vec![false; self.layers];
        for &layer in self.form.own.iter().flat_map(|own| &own.layers) {
            match grouped.get_mut(layer) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(format!("layer {layer} is in two groups of layers")),
                None => return Err(format!("a group of layers names layer {layer} of {}", self.layers)),
            }
        }
        self.form.own.iter().try_for_each(|own| self.check_own(own))?;
        if self.attentions().next().is_none() {
            return Err("no layer has attention".into());
        }
        if self.movable_layers() == 0 {
            let what = if self.form.experts.is_some() { "of a mixture has experts" } else { "has an FFN" };
            return Err(format!("no layer {what}"));
        }
        Ok(())
    }

    /// Checks what a group of layers has of its own.
    fn check_own(&self, own: &OwnForm) -> Result<(), String> {
        let Some(&first) = own.layers.first() else { return Err("a group of layers has no layers".into()) };
        if !own.layers.is_sorted_by(|a, b| a < b) {
            return Err("the layers of a group are not in ascending order".into());
        }
        match own.ffn {
            Some(OwnFfn::Absent)
                if self.form.experts.is_none()
                    && (self.form.norms.parallel() || self.form.output_scales || self.form.per_layer > 0) =>
            {
                let beside = "parallel attention, scales of layers or embeddings for each layer";
                return Err(format!("layers without an FFN beside {beside} are not supported"));
            }
            Some(own) if self.form.experts.map_or(own != OwnFfn::Absent, |experts| experts.biases) => {
                let only = "which is supported in a mixture without biases only";
                return Err(format!("a group of layers has an FFN of its own, {only}"));
            }
            Some(OwnFfn::Dense(width)) if !(1..=MAX_WIDTH).contains(&width) => {
                return Err(format!("the FFN of layer {first} has {width} neurons; it must have 1 to {MAX_WIDTH}"));
            }
            _ => {}
        }
        own.convolution.map_or(Ok(()), check_taps)?;
        own.linear.map_or(Ok(()), |linear| linear.check())?;
        if own.convolution.is_some() && own.linear.is_some() {
            return Err(format!("layer {first} has both a convolution and linear attention in the place of attention"));
        }
        let Some(a) = self.attention(first) else { return Ok(()) };
        check_heads(a.heads, a.kv_heads, a.head_dim)?;
        match &own.frequencies {
            Some(frequencies) => check_frequencies(frequencies, a.head_dim),
            None if own.head_dim.is_some_and(|dim| dim != self.head_dim) && !a.rotary.is_empty() => {
                Err(format!("layers with heads of {} numbers have no RoPE frequencies of their own", a.head_dim))
            }
            None => Ok(()),
        }
    }

    /// The same model with its residual divided by the residual scale, so that attention and FFN add to it unscaled. A norm's result
    /// stays the same once its epsilon is divided by the square of the scale; embeddings get it into their own scale.
    pub fn in_residual_units(mut self) -> ModelConfig {
        let scale = std::mem::replace(&mut self.form.residual_scale, 1.0);
        if scale == 1.0 {
            return self;
        }
        let (Norm::Rms(epsilon) | Norm::Layer(epsilon)) = &mut self.norm;
        *epsilon /= scale * scale;
        self.embedding_scale /= scale;
        self
    }
}

/// Checks the heads of an attention.
fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) -> Result<(), String> {
    let sizes = [("head count", heads), ("key/value head count", kv_heads), ("head dimension", head_dim)];
    if let Some((what, value)) = sizes.into_iter().find(|(_, value)| !(1..=1 << 12).contains(value)) {
        return Err(format!("{what} is {value}; it must be 1 to 4096"));
    }
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!("{heads} heads cannot share {kv_heads} key/value heads"));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(format!("head dimension {head_dim} is odd"));
    }
    Ok(())
}

/// Checks the radians per position of an attention with heads of `head_dim` numbers.
fn check_frequencies(frequencies: &[f32], head_dim: usize) -> Result<(), String> {
    if frequencies.len() != head_dim / 2 {
        return Err(format!("{} RoPE frequencies for head dimension {head_dim}", frequencies.len()));
    }
    match frequencies.iter().all(|f| f.is_finite() && *f >= 0.0) {
        true => Ok(()),
        false => Err("a RoPE frequency is not a finite positive number".into()),
    }
}

/// Checks a number of layers before a list of as many is made.
///
/// # Errors
/// A message with the number that it must be.
pub fn check_layers(layers: usize) -> Result<usize, String> {
    match layers {
        1..=MAX_LAYERS => Ok(layers),
        _ => Err(format!("the layer count is {layers}; it must be 1 to {MAX_LAYERS}")),
    }
}

/// RoPE scaling, as the model files describe it.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies stay as they are.
    None,
    /// Positions divided by the factor.
    Linear(f64),
    /// Llama 3.1: low frequencies divided by the factor, high ones kept, a ramp between.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Wavelengths above `original / low` positions are scaled by the whole factor.
        low: f64,
        /// Wavelengths below `original / high` positions are kept.
        high: f64,
        /// Positions that the model was trained for before it was scaled.
        original: f64,
    },
    /// A divisor per frequency, given by the file (GGUF `rope_freqs.weight`).
    Factors(Vec<f32>),
    /// YaRN: pairs that turn more than `fast` times within `original` positions are kept, those that turn less than `slow` times are divided
    /// by the factor, with a ramp by number of the pair between. The bounds are not rounded to whole pairs, as gpt-oss has them.
    Yarn {
        /// What low frequencies are divided by.
        factor: f64,
        /// Turns above which a pair is kept.
        fast: f64,
        /// Turns below which a pair is scaled by the whole factor.
        slow: f64,
        /// Positions that the model was trained for before it was scaled.
        original: f64,
    },
}

impl RopeScaling {
    /// What rotated queries and keys are multiplied by: of YaRN, 0.1 ln(factor) + 1.
    pub fn of_rotated(&self) -> f32 {
        match self {
            RopeScaling::Yarn { factor, .. } if *factor > 1.0 => (0.1 * factor.ln() + 1.0) as f32,
            _ => 1.0,
        }
    }
}

/// Radians per position for each rotated pair: theta^(-2i / head_dim), scaled.
pub fn rope_frequencies(head_dim: usize, theta: f64, scaling: &RopeScaling) -> Vec<f32> {
    (0..head_dim / 2)
        .map(|i| {
            let base = theta.powf(-2.0 * i as f64 / head_dim as f64);
            let scaled = match scaling {
                RopeScaling::None => base,
                RopeScaling::Linear(factor) => base / factor,
                RopeScaling::Factors(factors) => base / factors.get(i).copied().unwrap_or(1.0) as f64,
                RopeScaling::Llama3 { factor, low, high, original } => {
                    let wavelength = std::f64::consts::TAU / base;
                    if wavelength < original / high {
                        base
                    } else if wavelength > original / low {
                        base / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * base / factor + smooth * base
                    }
                }
                RopeScaling::Yarn { factor, fast, slow, original } => {
                    let pair = |turns: f64| {
                        head_dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
                    };
                    let (low, high) = (pair(*fast).max(0.0), pair(*slow).min(head_dim as f64 - 1.0));
                    let scaled = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    scaled * base / factor + (1.0 - scaled) * base
                }
            };
            scaled as f32
        })
        .collect()
}
