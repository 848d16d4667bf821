//! A layer as plain data, whatever family it is of. The engine reads `norms` from it; what else differs between the families that there
//! are, it reads from [`ModelConfig`].
//!
//! [`LayerForm`] is what a packed model's header holds beside the sizes of [`ModelConfig`]; [`ModelConfig::layer`] puts both
//! together for one layer.

use super::config::{Activation, Ffn, ModelConfig, Positions};
pub use super::form::{
    Experts, Groups, LayerForm, LinearAttention, Norms, OwnFfn, OwnForm, RouterInput, Scoring, SharedForm, StateRule,
};

/// One layer of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerData<'a> {
    /// Where the norms stand, and whether attention and FFN follow each other.
    pub norms: Norms,
    /// What attention and FFN add to the residual is multiplied by this; 1 for most models, and once a store is open, because it is worked
    /// into other numbers then.
    pub residual_scale: f32,
    /// The part that reads other positions.
    pub mixer: Mixer<'a>,
    /// The part that treats each position by itself.
    pub ffn: FeedForward,
}

/// The part of a layer that reads other positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mixer<'a> {
    /// Softmax attention.
    Attention(Attention<'a>),
    /// A short convolution over the last positions.
    Convolution(Convolution),
    /// Linear attention with a state of a fixed size.
    Linear(LinearAttention),
}

/// The short convolution of LFM2. Three projections of a token's input, b, c and x, `[hidden]` each, give u = b * x; for each number of it
/// y = c * sum of `taps[i] * u` of the token that is `taps - 1 - i` positions before; then comes an output projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution {
    /// Numbers of the residual.
    pub hidden: usize,
    /// Positions that it reads, the token's own among them.
    pub taps: usize,
}

impl Convolution {
    /// Numbers that a layer keeps of a sequence: u of the last positions, `[taps - 1, hidden]`.
    pub const fn kept(&self) -> usize {
        (self.taps - 1) * self.hidden
    }
}

impl<'a> Mixer<'a> {
    /// Its attention, if it is one.
    pub fn attention(self) -> Option<Attention<'a>> {
        if let Mixer::Attention(attention) = self { Some(attention) } else { None }
    }

    /// Its convolution, if it is one.
    pub fn convolution(self) -> Option<Convolution> {
        if let Mixer::Convolution(convolution) = self { Some(convolution) } else { None }
    }

    /// Its linear attention, if it is that.
    pub fn linear(self) -> Option<LinearAttention> {
        if let Mixer::Linear(linear) = self { Some(linear) } else { None }
    }

    /// Its attention, if a device can compute that over keys and values in its own memory.
    pub fn on_device(self) -> Option<Attention<'a>> {
        let of_host = |a: &Attention<'_>| a.gated || a.values_from_keys || a.keys_of.is_some() || a.lends;
        self.attention().filter(|a| !of_host(a))
    }

    /// What it is called.
    pub fn noun(self) -> &'static str {
        match self {
            Mixer::Attention(_) => "attention",
            Mixer::Convolution(_) => "a short convolution",
            Mixer::Linear(linear) if linear.is_mamba() => "a state space (Mamba-2)",
            Mixer::Linear(_) => "linear attention (a gated delta net)",
        }
    }

    /// The matrices of its input, each with the name that a store has for it and its rows. Of a convolution b, c and x are one, of linear
    /// attention q, k and v.
    pub fn inputs(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let all = match self {
            Mixer::Attention(a) => [("q", a.q_dim()), ("g", a.gate_dim()), ("k", a.key_rows()), ("v", a.value_rows())],
            Mixer::Convolution(convolution) => [("q", 3 * convolution.hidden), ("", 0), ("", 0), ("", 0)],
            Mixer::Linear(l) => [("q", l.channels()), ("z", l.values()), ("b", l.betas()), ("a", l.value_heads)],
        };
        all.into_iter().filter(|&(_, rows)| rows > 0)
    }

    /// Rows of its input matrices together.
    pub fn rows(&self) -> usize {
        self.inputs().map(|(_, rows)| rows).sum()
    }

    /// What its output matrix reads.
    pub fn cols(&self) -> usize {
        match self {
            Mixer::Attention(attention) => attention.q_dim(),
            Mixer::Convolution(convolution) => convolution.hidden,
            Mixer::Linear(linear) => linear.values(),
        }
    }

    /// Numbers of the taps of its convolution: one for each position of each number that it reads.
    pub fn taps(&self) -> [usize; 2] {
        match self {
            Mixer::Attention(_) => [0, 0],
            Mixer::Convolution(convolution) => [convolution.taps, convolution.hidden],
            Mixer::Linear(linear) => [linear.taps, linear.channels()],
        }
    }

    /// Numbers that it keeps of a sequence in the place of keys and values; 0 of attention.
    pub fn kept(&self) -> usize {
        match self {
            Mixer::Attention(_) => 0,
            Mixer::Convolution(convolution) => convolution.kept(),
            Mixer::Linear(linear) => linear.kept(),
        }
    }

    /// Weights of its matrices in a model of `hidden` numbers.
    pub fn weights(&self, hidden: usize) -> usize {
        hidden * (self.rows() + self.cols())
    }
}

/// Softmax attention over earlier positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention<'a> {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Numbers of a head; even.
    pub head_dim: usize,
    /// How many positions back it sees, its own among them; `None` for all.
    pub window: Option<usize>,
    /// Radians per position of the pair (i, i + head_dim / 2), `[head_dim / 2]`, scaling included, 0 where a pair is not rotated;
    /// empty where nothing is.
    pub rotary: &'a [f32],
    /// Rotated queries and keys are multiplied by this.
    pub rotary_scale: f32,
    /// Queries and keys of each head are normed before they are rotated.
    pub qk_norm: bool,
    /// The norm of queries is multiplied by this.
    pub query_scale: f32,
    /// Values of each head are normed, without weights.
    pub value_norm: bool,
    /// Values are the products of the keys' matrix, before keys are normed and rotated.
    pub values_from_keys: bool,
    /// Keys and values are those of this earlier layer; `None` where the layer has its own.
    pub keys_of: Option<usize>,
    /// Later layers read its keys and values, too.
    pub lends: bool,
    /// Each head has a learned score that takes part in its softmax and stands for no position.
    pub sinks: bool,
    /// What the heads make is multiplied by the sigmoid of a gate.
    pub gated: bool,
    /// q, k and v have biases.
    pub bias: bool,
    /// The output projection has a bias.
    pub output_bias: bool,
}

/// The part of a layer that treats each position by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    /// One FFN, whose neurons can be computed or left out one by one.
    Neurons {
        /// Whether it has a gate, and what passes through the activation.
        kind: Ffn,
        /// The activation function.
        activation: Activation,
        /// How many neurons it has.
        width: usize,
        /// Up and down have biases.
        bias: bool,
    },
    /// A mixture of experts, each of them an FFN.
    Experts {
        /// How many there are, and how they are chosen.
        experts: Experts,
        /// Whether an expert has a gate, and what passes through the activation.
        kind: Ffn,
        /// The activation function.
        activation: Activation,
        /// How many neurons an expert has.
        width: usize,
    },
}

impl Attention<'_> {
    /// Numbers of all query heads together.
    pub const fn q_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of all key heads together, and of all value heads.
    pub const fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Rows of the matrix of keys; 0 where they are another layer's.
    pub const fn key_rows(&self) -> usize {
        if self.keys_of.is_some() { 0 } else { self.kv_dim() }
    }

    /// Rows of the matrix of values; 0 where they are the keys' products, too.
    pub const fn value_rows(&self) -> usize {
        if self.values_from_keys { 0 } else { self.key_rows() }
    }

    /// Numbers of the gate; 0 where there is none.
    pub const fn gate_dim(&self) -> usize {
        if self.gated { self.q_dim() } else { 0 }
    }

    /// Rows of q, of the gate, of k and v together.
    pub const fn qkv_dim(&self) -> usize {
        self.q_dim() + self.gate_dim() + self.key_rows() + self.value_rows()
    }

    /// Query heads that share the keys and values of a head.
    pub const fn sharing(&self) -> usize {
        self.heads / self.kv_heads
    }
}

impl ModelConfig {
    /// What layer number `layer` reads other positions with.
    pub fn mixer(&self, layer: usize) -> Mixer<'_> {
        self.layer(layer).mixer
    }

    /// The same of each layer.
    pub fn mixers(&self) -> impl Iterator<Item = Mixer<'_>> {
        (0..self.layers).map(|layer| self.mixer(layer))
    }

    /// The attention of layer number `layer`, if it has any.
    pub fn attention(&self, layer: usize) -> Option<Attention<'_>> {
        self.mixer(layer).attention()
    }

    /// The attention of each layer that has any.
    pub fn attentions(&self) -> impl Iterator<Item = Attention<'_>> {
        self.mixers().filter_map(Mixer::attention)
    }

    /// The most that the mixer of any layer has of something: what memory for all of them is made for.
    pub fn most_of_mixers(&self, of: impl Fn(&Mixer<'_>) -> usize) -> usize {
        self.mixers().map(|mixer| of(&mixer)).max().unwrap_or(0)
    }

    /// Whether some layer keeps a state that a text cannot be cut back in.
    pub fn recurs(&self) -> bool {
        self.mixers().any(|mixer| mixer.kept() > 0)
    }

    /// The rotations that layers have, each once.
    pub fn rotations(&self) -> Vec<&[f32]> {
        let mut all: Vec<&[f32]> = Vec::new();
        for rotary in self.attentions().map(|attention| attention.rotary).filter(|rotary| !rotary.is_empty()) {
            if !all.contains(&rotary) {
                all.push(rotary);
            }
        }
        all
    }

    /// The most that the attention of any layer has of something: what memory for all of them is made for.
    pub fn most_of_attention(&self, of: impl Fn(&Attention<'_>) -> usize) -> usize {
        self.attentions().map(|attention| of(&attention)).max().unwrap_or(0)
    }

    /// What layer number `layer` is; the number is below [`ModelConfig::layers`].
    pub fn layer(&self, layer: usize) -> LayerData<'_> {
        let of = |layers: &[bool]| layers.get(layer).copied().unwrap_or(true);
        let own = self.own(layer);
        let rotary: &[f32] = match &self.positions {
            Positions::Rope { frequencies } if of(&self.form.rotated) => {
                own.and_then(|own| own.frequencies.as_ref()).unwrap_or(frequencies)
            }
            _ => &[],
        };
        let ffn = match self.experts(layer) {
            Some(experts) => FeedForward::Experts {
                experts,
                kind: self.ffn_kind,
                activation: self.activation,
                width: self.width(layer),
            },
            None => FeedForward::Neurons {
                kind: self.ffn_kind,
                activation: self.activation,
                width: self.width(layer),
                bias: self.ffn_bias,
            },
        };
        let attention = || {
            let head_dim = own.and_then(|own| own.head_dim).unwrap_or(self.head_dim);
            let undivided = if self.form.unscaled { (head_dim as f32).sqrt() } else { 1.0 };
            Mixer::Attention(Attention {
                heads: own.and_then(|own| own.heads).unwrap_or(self.heads),
                kv_heads: own.and_then(|own| own.kv_heads).unwrap_or(self.kv_heads),
                head_dim,
                window: self.window.filter(|_| of(&self.form.windowed)),
                rotary,
                rotary_scale: self.form.rotary_scale,
                qk_norm: self.form.qk_norm,
                query_scale: self.form.query_scale * undivided,
                value_norm: self.form.value_norm,
                values_from_keys: own.is_some_and(|own| own.values_from_keys && own.keys_of.is_none()),
                keys_of: own.and_then(|own| own.keys_of),
                lends: self.form.own.iter().any(|own| own.keys_of == Some(layer)),
                sinks: self.form.sinks,
                gated: self.form.gated,
                bias: self.attention_bias,
                output_bias: self.output_bias,
            })
        };
        let mixer = match own.map(|own| (own.convolution, own.linear)) {
            Some((Some(taps), _)) => Mixer::Convolution(Convolution { hidden: self.hidden, taps }),
            Some((None, Some(linear))) => Mixer::Linear(linear),
            _ => attention(),
        };
        LayerData { norms: self.form.norms, residual_scale: self.form.residual_scale, mixer, ffn }
    }

    /// The group that a layer is of, if it differs from the model's others.
    fn own(&self, layer: usize) -> Option<&OwnForm> {
        self.form.own.iter().find(|own| own.has(layer))
    }

    /// The experts of a layer of a mixture; `None` of other models. A layer without a router has none to choose from, and its one FFN is a
    /// shared expert of weight 1.
    pub fn experts(&self, layer: usize) -> Option<Experts> {
        let experts = self.form.experts?;
        Some(match self.own(layer).and_then(|own| own.ffn) {
            None => experts,
            Some(OwnFfn::Dense(width)) => {
                Experts { count: 0, shared: Some(SharedForm { width, weighted: false, normed: false }), ..experts }
            }
            Some(OwnFfn::Absent) => Experts { count: 0, shared: None, ..experts },
        })
    }

    /// Whether tokens pass through something beside the experts that a router chooses, in some layer of a mixture.
    pub fn has_shared(&self) -> bool {
        let dense = |own: &OwnForm| matches!(own.ffn, Some(OwnFfn::Dense(_)));
        self.form.experts.is_some_and(|experts| experts.shared.is_some()) || self.form.own.iter().any(dense)
    }

    /// Whether layer number `layer` has an FFN.
    pub fn has_ffn(&self, layer: usize) -> bool {
        self.own(layer).and_then(|own| own.ffn) != Some(OwnFfn::Absent)
    }

    /// Whether such a thing has norms of its own.
    pub fn has_normed_shared(&self) -> bool {
        self.form.experts.and_then(|experts| experts.shared).is_some_and(|shared| shared.normed)
    }

    /// The layer whose FFN says what that of layer number `layer` would be: itself, or the first that has one.
    pub fn ffn_like(&self, layer: usize) -> usize {
        let first = || (0..self.layers).find(|&layer| self.has_ffn(layer)).expect("some layer has an FFN");
        if self.has_ffn(layer) { layer } else { first() }
    }

    /// [`ModelConfig::movable`] of layer number `layer`: none of one without an FFN, or without a router in a mixture.
    pub fn movable_of(&self, layer: usize) -> usize {
        match self.has_ffn(layer) && self.experts(layer).is_none_or(|experts| experts.count > 0) {
            true => self.movable(),
            false => 0,
        }
    }

    /// Layers that have something movable.
    pub fn movable_layers(&self) -> usize {
        (0..self.layers).filter(|&layer| self.movable_of(layer) > 0).count()
    }

    /// Parts of a layer's FFN that are chosen, moved and counted by themselves: its neurons, or the experts of a mixture.
    pub fn clusters(&self) -> usize {
        self.form.experts.map_or(self.ffn, |experts| experts.count)
    }

    /// Neurons of a layer's FFN; of a mixture those of all its experts, one expert after the other.
    pub fn neurons(&self) -> usize {
        self.ffn * self.form.experts.map_or(1, |experts| experts.count)
    }

    /// Parts of a layer's FFN that lie on a device or not by themselves: its neurons, also those of experts that are packed by neuron, or
    /// the experts of another mixture.
    pub fn movable(&self) -> usize {
        if self.neurons_inside() { self.neurons() } else { self.clusters() }
    }

    /// Whether it is a mixture whose experts are packed by neuron: neurons inside them can be left out and moved one by one.
    pub fn neurons_inside(&self) -> bool {
        self.form.experts.is_some_and(|experts| experts.by_neuron)
    }

    /// Whether most clusters of a layer add exactly nothing for a token: those of an activation with zeros, or experts that are not chosen.
    pub fn has_zeros(&self) -> bool {
        self.form.experts.is_some() || self.activation.is_sparse()
    }

    /// Neurons of an FFN of layer `layer`, or of one of its experts; 0 where a layer of a model without experts has no FFN.
    pub fn width(&self, layer: usize) -> usize {
        match self.form.experts.is_some() || self.has_ffn(layer) {
            true => self.form.widths.get(layer).copied().unwrap_or(self.ffn),
            false => 0,
        }
    }
}
