//! The shape of a model: plain data, the same whatever file it came from, made of what the file says ([`super::Description`]).

use super::layer::{Attention, Experts, FfnParts, LayerForm, Mixer};
pub use super::rope::{RopeScaling, rope_frequencies};
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

/// The shape of a model and what each of its layers is, whatever file it came from ([`super::described::Description`]). What stands here is the
/// same for all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family by its usual name, as `model::families` has it.
    pub family: String,
    /// The model's own name, for people.
    pub name: String,
    /// Numbers of the residual per token.
    pub hidden: usize,
    /// Rows of the embedding: at least one for each token.
    pub vocab: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// The kind of all its norms, and their epsilon.
    pub norm: Norm,
    /// The activation function of all FFNs.
    pub activation: Activation,
    /// Whether FFNs have gates, and what passes through the activation.
    pub ffn_kind: Ffn,
    /// The up and down of FFNs have biases.
    pub ffn_bias: bool,
    /// Rows of the table of learned positions that stand before that of position 0; `None` where no position has a vector.
    pub learned_positions: Option<usize>,
    /// Numbers that each layer gets of a token beside the residual ([`super::per_layer`]); 0 where there are none.
    pub per_layer: usize,
    /// The head is the embedding matrix.
    pub tied: bool,
    /// A token's embedding is multiplied by this.
    pub embedding_scale: f32,
    /// What attention and FFN add to the residual is multiplied by this; 1 for most models, and once a store is open, because it is worked
    /// into other numbers then.
    pub residual_scale: f32,
    /// Logits are multiplied by this.
    pub logit_scale: f32,
    /// Logits x become cap * tanh(x / cap); 0 where they stay as they are.
    pub logit_cap: f32,
    /// Radians per position of each pair that is rotated, scaling included, by the number that attention has for them.
    pub(super) rotations: Vec<Vec<f32>>,
    pub(super) layers: Vec<LayerForm>,
    pub(super) facts: Facts,
}

/// What holds of all layers together, looked at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Facts {
    parts: FfnParts,
    widest_ffn: usize,
    clusters: usize,
    neurons: usize,
    movable: usize,
    movable_layers: usize,
    used: usize,
    neurons_inside: bool,
    shared: bool,
    normed_shared: bool,
    norms_outputs: bool,
}

impl Facts {
    pub(super) fn of(layers: &[LayerForm]) -> Facts {
        let most = |of: fn(&LayerForm) -> usize| layers.iter().map(of).max().unwrap_or(0);
        let mixtures = || layers.iter().filter_map(|layer| layer.ffn.experts());
        let shared = || mixtures().filter_map(|experts| experts.shared);
        Facts {
            parts: match mixtures().next() {
                None => FfnParts::Neurons,
                Some(experts) if experts.routed() => FfnParts::Experts,
                Some(_) => FfnParts::Clusters,
            },
            widest_ffn: most(|layer| layer.ffn.width()),
            clusters: most(|layer| layer.ffn.clusters()),
            neurons: most(|layer| layer.ffn.neurons()),
            movable: most(|layer| layer.ffn.movable()),
            movable_layers: layers.iter().filter(|layer| layer.ffn.movable() > 0).count(),
            used: mixtures().filter(|experts| experts.count > 0).map(|experts| experts.used).max().unwrap_or(0),
            neurons_inside: mixtures().any(|experts| experts.by_neuron),
            shared: shared().next().is_some(),
            normed_shared: shared().any(|shared| shared.normed),
            norms_outputs: layers.iter().any(|layer| layer.norms.after()),
        }
    }
}

impl ModelConfig {
    /// What each layer is, in their order.
    #[inline]
    pub fn layers(&self) -> &[LayerForm] {
        &self.layers
    }

    /// What layer number `layer` is.
    ///
    /// # Panics
    /// If there is no such layer.
    #[inline]
    pub fn layer(&self, layer: usize) -> &LayerForm {
        &self.layers[layer]
    }

    /// Changes layers; their number stays.
    pub fn change_layers(&mut self, mut change: impl FnMut(usize, &mut LayerForm)) {
        self.layers.iter_mut().enumerate().for_each(|(number, layer)| change(number, layer));
        self.facts = Facts::of(&self.layers);
    }

    /// What layer number `layer` reads other positions with.
    pub fn mixer(&self, layer: usize) -> Mixer {
        self.layers[layer].mixer
    }

    /// The same of each layer.
    pub fn mixers(&self) -> impl Iterator<Item = Mixer> {
        self.layers.iter().map(|layer| layer.mixer)
    }

    /// The attention of layer number `layer`, if it has any.
    pub fn attention(&self, layer: usize) -> Option<Attention> {
        self.mixer(layer).attention()
    }

    /// The attention of each layer that has any.
    pub fn attentions(&self) -> impl Iterator<Item = Attention> {
        self.mixers().filter_map(Mixer::attention)
    }

    /// The most that the mixer of any layer has of something: what memory for all of them is made for.
    pub fn most_of_mixers(&self, of: impl Fn(&Mixer) -> usize) -> usize {
        self.mixers().map(|mixer| of(&mixer)).max().unwrap_or(0)
    }

    /// Whether some layer keeps a state that a text cannot be cut back in.
    pub fn recurs(&self) -> bool {
        self.mixers().any(|mixer| mixer.kept() > 0)
    }

    /// Radians per position of the pair (i, i + head_dim / 2), `[head_dim / 2]`, scaling included, 0 where a pair is not rotated;
    /// empty where nothing is. With latents those of the pair (2i, 2i + 1) of the rotated part.
    pub fn rotary(&self, attention: &Attention) -> &[f32] {
        let Some(all) = attention.rotation.map(|number| &self.rotations[number]) else { return &[] };
        &all[..attention.latent.map_or(all.len(), |latent| latent.rope / 2)]
    }

    /// The rotations that layers without latents have, and what rotated numbers are multiplied by; each once.
    pub fn rotations(&self) -> Vec<(&[f32], f32)> {
        let mut all = Vec::new();
        for a in self.attentions().filter(|a| a.latent.is_none() && a.rotation.is_some()) {
            let rotation = (self.rotary(&a), a.rotary_scale);
            if !all.contains(&rotation) {
                all.push(rotation);
            }
        }
        all
    }

    /// The most that the attention of any layer has of something: what memory for all of them is made for.
    pub fn most_of_attention(&self, of: impl Fn(&Attention) -> usize) -> usize {
        self.attentions().map(|attention| of(&attention)).max().unwrap_or(0)
    }

    /// The experts of a layer of a mixture; `None` of other models.
    #[inline]
    pub fn experts(&self, layer: usize) -> Option<Experts> {
        self.layers[layer].ffn.experts()
    }

    /// Whether layer number `layer` has an FFN.
    pub fn has_ffn(&self, layer: usize) -> bool {
        self.layers[layer].ffn.is_there()
    }

    /// Neurons of the FFN of layer `layer`, or of one of its experts; 0 where a layer of a model without experts has no FFN.
    #[inline]
    pub fn width(&self, layer: usize) -> usize {
        self.layers[layer].ffn.width()
    }

    /// The layer whose FFN says what that of layer number `layer` would be: itself, or the first that has one.
    pub fn ffn_like(&self, layer: usize) -> usize {
        let first = || self.layers.iter().position(|layer| layer.ffn.is_there()).expect("some layer has an FFN");
        if self.has_ffn(layer) { layer } else { first() }
    }

    /// Parts of layer number `layer` that lie on a device or not by themselves: none of one without an FFN, or without a router in a mixture.
    pub fn movable_of(&self, layer: usize) -> usize {
        self.layers[layer].ffn.movable()
    }

    /// Whether an output of attention or of an FFN is normed before it is added, in some layer.
    pub fn norms_outputs(&self) -> bool {
        self.facts.norms_outputs
    }
}

/// What holds of all layers together.
impl ModelConfig {
    /// What FFNs consist of.
    pub fn parts(&self) -> FfnParts {
        self.facts.parts
    }

    /// Whether FFNs consist of experts or clusters.
    pub fn is_mixture(&self) -> bool {
        self.facts.parts != FfnParts::Neurons
    }

    /// Whether routers choose among experts.
    pub fn is_routed(&self) -> bool {
        self.facts.parts == FfnParts::Experts
    }

    /// Whether FFNs were cut into clusters.
    pub fn has_clusters(&self) -> bool {
        self.facts.parts == FfnParts::Clusters
    }

    /// Whether experts or clusters are moved as a whole.
    pub fn has_whole_experts(&self) -> bool {
        self.is_mixture() && !self.neurons_inside()
    }

    /// Whether it is a mixture whose experts are packed by neuron: neurons inside them can be left out and moved one by one.
    pub fn neurons_inside(&self) -> bool {
        self.facts.neurons_inside
    }

    /// Whether tokens pass through something beside the experts that a router chooses, in some layer of a mixture.
    pub fn has_shared(&self) -> bool {
        self.facts.shared
    }

    /// Whether such a thing has norms of its own.
    pub fn has_normed_shared(&self) -> bool {
        self.facts.normed_shared
    }

    /// Whether most clusters of a layer add exactly nothing for a token: those of an activation with zeros, or experts that are not chosen.
    pub fn has_zeros(&self) -> bool {
        self.is_mixture() || self.activation.is_sparse()
    }

    /// Neurons of the widest FFN, or of the widest expert.
    #[inline]
    pub fn widest_ffn(&self) -> usize {
        self.facts.widest_ffn
    }

    /// Parts of an FFN that are chosen and counted by themselves, of the layer that has the most: its neurons, or the experts of a mixture.
    pub fn clusters(&self) -> usize {
        self.facts.clusters
    }

    /// Neurons of the layer that has the most; of a mixture those of all its experts, one expert after the other.
    pub fn neurons(&self) -> usize {
        self.facts.neurons
    }

    /// Parts of an FFN that lie on a device or not by themselves, of the layer that has the most: its neurons, also those of experts that are
    /// packed by neuron, or the experts of another mixture.
    pub fn movable(&self) -> usize {
        self.facts.movable
    }

    /// Layers that have something movable.
    pub fn movable_layers(&self) -> usize {
        self.facts.movable_layers
    }

    /// Experts that a token has of a layer at most.
    pub fn most_used_experts(&self) -> usize {
        self.facts.used
    }

    /// Experts of each layer that has some to choose from, or clusters that its FFN was cut into.
    pub fn mixtures(&self) -> impl Iterator<Item = Experts> {
        self.layers.iter().filter_map(|layer| layer.ffn.experts()).filter(|experts| experts.count > 0)
    }

    /// The most that the experts of any layer have of something; 0 of other models.
    pub fn most_of_experts(&self, of: impl Fn(&Experts) -> usize) -> usize {
        self.mixtures().map(|experts| of(&experts)).max().unwrap_or(0)
    }

    /// Share of all experts that a token has.
    pub fn used_share(&self) -> f64 {
        let sum = |of: fn(&Experts) -> usize| self.mixtures().map(|experts| of(&experts)).sum::<usize>() as f64;
        sum(|experts| experts.used) / sum(|experts| experts.count)
    }

    /// Why it is read in place and never packed; `None` where it can be packed.
    pub fn only_in_place(&self) -> Option<&'static str> {
        match (self.is_routed(), self.per_layer > 0) {
            (true, _) => Some("a mixture of experts"),
            (_, true) => Some("a model with embeddings for each layer"),
            _ if self.attentions().any(|attention| attention.latent.is_some()) => Some("a model with latent attention"),
            _ => None,
        }
    }

    /// Weights of attention, FFNs, embedding and head, without norms, biases and learned positions; a tied head is counted once.
    pub fn parameters(&self) -> u64 {
        let h = self.hidden as u64;
        let attention: u64 = self.mixers().map(|mixer| mixer.weights(self.hidden) as u64).sum();
        let of_latents: u64 = self.attentions().map(|attention| attention.latent_weights() as u64).sum();
        let neurons = |layer: &LayerForm| {
            let shared = layer.ffn.experts().and_then(|experts| experts.shared);
            (layer.ffn.neurons() + shared.map_or(0, |shared| shared.width)) as u64
        };
        let ffn = self.ffn_kind.rows() as u64 * h * self.layers.iter().map(neurons).sum::<u64>();
        let embeddings = h * self.vocab as u64 * if self.tied { 1 } else { 2 };
        let of_layers = (self.layers.len() * self.per_layer) as u64 * (self.vocab as u64 + 3 * h);
        attention + of_latents + ffn + embeddings + of_layers
    }

    /// The same model with its residual divided by the residual scale, so that attention and FFN add to it unscaled. A norm's result
    /// stays the same once its epsilon is divided by the square of the scale; embeddings get it into their own scale.
    pub fn in_residual_units(mut self) -> ModelConfig {
        let scale = std::mem::replace(&mut self.residual_scale, 1.0);
        if scale == 1.0 {
            return self;
        }
        let (Norm::Rms(epsilon) | Norm::Layer(epsilon)) = &mut self.norm;
        *epsilon /= scale * scale;
        self.embedding_scale /= scale;
        self
    }
}
