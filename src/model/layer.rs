//! A layer as plain data, whatever family it is of: [`super::ModelConfig`] has one of each, and a phase of a pass reads its own layer's.

pub use super::form::{
    CommonForm, Experts, Groups, Latent, LinearAttention, Norms, OwnFfn, OwnForm, RouterInput, Scoring, SharedForm,
    StateRule,
};

/// One layer of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerForm {
    /// Where the norms stand, and whether attention and FFN follow each other.
    pub norms: Norms,
    /// The residual behind the layer is multiplied by a number of the layer's own.
    pub output_scale: bool,
    /// The part that reads other positions.
    pub mixer: Mixer,
    /// The part that treats each position by itself.
    pub ffn: FeedForward,
}

/// What the FFNs of a model consist of: what is chosen, moved and counted by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FfnParts {
    /// Neurons of one FFN a layer.
    Neurons,
    /// Clusters of neurons, all of which are computed for every token.
    Clusters,
    /// Experts, of which a router chooses a few for each token; layers without a router among them have one FFN or none.
    Experts,
}

impl FfnParts {
    /// What one of them is called.
    pub const fn noun(self) -> &'static str {
        match self {
            FfnParts::Neurons => "neuron",
            FfnParts::Clusters => "cluster",
            FfnParts::Experts => "expert",
        }
    }
}

/// The part of a layer that reads other positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
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

impl Mixer {
    /// Its attention, if it is one.
    pub fn attention(self) -> Option<Attention> {
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
    pub fn on_device(self) -> Option<Attention> {
        let of_host =
            |a: &Attention| a.gated || a.values_from_keys || a.keys_of.is_some() || a.lends || a.qk_norm_joined;
        // Of latents the values are the keys'.
        self.attention().filter(|a| !of_host(a))
    }

    /// What it is called.
    pub fn noun(self) -> &'static str {
        match self {
            Mixer::Attention(a) if a.latent.is_some() => "latent attention",
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
            Mixer::Attention(a) => {
                [("q", a.query_rows()), ("g", a.gate_dim()), ("k", a.key_rows()), ("v", a.value_rows())]
            }
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
            Mixer::Attention(attention) => attention.output_dim(),
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
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Numbers of a head; even. With latents those that are kept of a position.
    pub head_dim: usize,
    /// Keys and values are a latent that all heads share; `None` where they are made by head.
    pub latent: Option<Latent>,
    /// How many positions back it sees, its own among them; `None` for all.
    pub window: Option<usize>,
    /// Which of the model's rotations it has ([`super::ModelConfig::rotary`]); `None` where nothing is rotated.
    pub rotation: Option<usize>,
    /// Rotated queries and keys are multiplied by this.
    pub rotary_scale: f32,
    /// Queries and keys of each head are normed before they are rotated.
    pub qk_norm: bool,
    /// Queries of all heads are normed together, and so are keys.
    pub qk_norm_joined: bool,
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
        /// How many neurons it has.
        width: usize,
    },
    /// A mixture of experts, each of them an FFN. A layer of a mixture that has no router has no experts to choose from, and its one FFN, if it
    /// has any, is a shared expert of weight 1.
    Experts {
        /// How many there are, and how they are chosen.
        experts: Experts,
        /// How many neurons an expert has.
        width: usize,
    },
    /// None, in a model of neurons.
    Absent,
}

impl FeedForward {
    /// The experts, where it consists of them.
    pub const fn experts(self) -> Option<Experts> {
        if let FeedForward::Experts { experts, .. } = self { Some(experts) } else { None }
    }

    /// Neurons of the FFN, or of an expert; 0 where there is none.
    pub const fn width(self) -> usize {
        match self {
            FeedForward::Neurons { width } | FeedForward::Experts { width, .. } => width,
            FeedForward::Absent => 0,
        }
    }

    /// Whether it adds anything.
    pub const fn is_there(self) -> bool {
        match self {
            FeedForward::Neurons { .. } => true,
            FeedForward::Experts { experts, .. } => experts.count > 0 || experts.shared.is_some(),
            FeedForward::Absent => false,
        }
    }

    /// Parts that are chosen and counted by themselves: its neurons, or its experts.
    pub const fn clusters(self) -> usize {
        match self {
            FeedForward::Neurons { width } => width,
            FeedForward::Experts { experts, .. } => experts.count,
            FeedForward::Absent => 0,
        }
    }

    /// Its neurons, or those of all its experts but the shared one.
    pub const fn neurons(self) -> usize {
        match self {
            FeedForward::Experts { experts, width } => experts.count * width,
            _ => self.width(),
        }
    }

    /// Parts that lie on a device or not by themselves: its neurons, also those of experts that are packed by neuron, or other experts.
    pub const fn movable(self) -> usize {
        match self {
            FeedForward::Experts { experts, .. } if !experts.by_neuron => experts.count,
            _ => self.neurons(),
        }
    }
}

impl Attention {
    /// The same heads over a latent.
    pub(super) fn with_latent(self, latent: Latent) -> Attention {
        Attention {
            kv_heads: 1,
            head_dim: latent.kept(),
            qk_norm: false,
            qk_norm_joined: false,
            query_scale: 1.0,
            value_norm: false,
            values_from_keys: true,
            sinks: false,
            gated: false,
            latent: Some(latent),
            ..self
        }
    }
}

impl Attention {
    /// Numbers of all query heads together.
    pub const fn q_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rows of the matrix of queries, or of that of their latent.
    pub const fn query_rows(&self) -> usize {
        match self.latent {
            Some(Latent { queries, .. }) if queries > 0 => queries,
            Some(latent) => self.heads * latent.query(),
            None => self.q_dim(),
        }
    }

    /// What the output matrix reads.
    pub const fn output_dim(&self) -> usize {
        match self.latent {
            Some(latent) => self.heads * latent.values,
            None => self.q_dim(),
        }
    }

    /// Numbers of a value that are mixed.
    pub const fn mixed_dim(&self) -> usize {
        match self.latent {
            Some(latent) => latent.rank,
            None => self.head_dim,
        }
    }

    /// Weights between latents and heads.
    pub const fn latent_weights(&self) -> usize {
        match self.latent {
            Some(latent) => latent.weights(self.heads),
            None => 0,
        }
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
        self.query_rows() + self.gate_dim() + self.key_rows() + self.value_rows()
    }

    /// Numbers of queries that are normed together, and of keys: those of a head, or all.
    pub const fn normed_dims(&self) -> [usize; 2] {
        if self.qk_norm_joined { [self.q_dim(), self.kv_dim()] } else { [self.head_dim; 2] }
    }

    /// Query heads that share the keys and values of a head.
    pub const fn sharing(&self) -> usize {
        self.heads / self.kv_heads
    }
}
