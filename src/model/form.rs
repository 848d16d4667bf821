//! What a packed model's header says about its layers beside their sizes.

use serde::{Deserialize, Serialize};

/// Where a layer's norms stand and how attention and FFN are joined. In the formulas x is the residual, `[hidden]`; `norm` and `norm'`
/// are norms with weights of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Norms {
    /// x += attention(norm(x)), then x += ffn(norm'(x)): Llama and most others.
    #[default]
    Before,
    /// x += norm(attention(x)), then x += norm'(ffn(x)), as in OLMo 2.
    After,
    /// A norm before and one after attention, and the same for the FFN, as in Gemma 2.
    Around,
    /// x += attention(norm(x)) + ffn(norm'(x)), as in Falcon 40B.
    Parallel,
    /// x += attention(norm(x)) + ffn(norm(x)), one norm for both, as in Falcon 7B.
    ParallelShared,
}

impl Norms {
    /// Whether attention and FFN read the same residual, so that neither waits for the other. Predictors and observers of the FFN then
    /// see that residual, not the one with attention's output.
    pub fn parallel(self) -> bool {
        matches!(self, Norms::Parallel | Norms::ParallelShared)
    }
}

/// A mixture of experts: several FFNs of [`super::ModelConfig::ffn`] neurons, of which a router chooses a few for each token. The FFN's
/// output is the sum of theirs, each times its weight. An FFN that is stored in clusters is one, too, without a router ([`Scoring::All`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// How many experts a layer has.
    pub count: usize,
    /// How many of them are computed for a token: those with the largest products with the router's rows.
    pub used: usize,
    /// What makes a weight of such a product.
    pub scoring: Scoring,
    /// The weights of a token's experts are divided by their sum.
    pub normalised: bool,
    /// What the router reads.
    pub reads: RouterInput,
    /// The FFN beside them that every token passes through; `None` where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedForm>,
    /// Gate, up and down of each expert have biases, and so has the router.
    #[serde(default, skip_serializing_if = "is_false")]
    pub biases: bool,
    /// They are packed by neuron: each neuron can be left out and moved by itself. Of a store that has been opened; no store says it of itself.
    #[serde(skip)]
    pub by_neuron: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

pub(super) fn is_one(scale: &f32) -> bool {
    *scale == 1.0
}

/// The shared expert of a mixture: an FFN like the others, but of a width of its own and for every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedForm {
    /// Its neurons.
    pub width: usize,
    /// A router row of its own gives its output a weight, sigmoid(row . normed input); otherwise the weight is 1.
    pub weighted: bool,
}

/// How the products of a router, one for each expert, become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Each by itself: 1 / (1 + exp(-product)).
    Sigmoid,
    /// There is no router: all experts are computed for every token, with weight 1. They are the clusters of neighbouring neurons that one
    /// FFN was cut into.
    All,
}

impl Experts {
    /// The clusters of an FFN, all of which are computed for every token.
    pub fn all(count: usize) -> Experts {
        Experts {
            count,
            used: count,
            scoring: Scoring::All,
            normalised: false,
            reads: RouterInput::FfnNorm,
            shared: None,
            biases: false,
            by_neuron: false,
        }
    }

    /// Whether a router chooses among them; otherwise they are the clusters of one FFN.
    pub fn routed(&self) -> bool {
        self.scoring != Scoring::All
    }

    /// What one of them is called.
    pub fn noun(&self) -> &'static str {
        if self.routed() { "expert" } else { "cluster" }
    }
}

/// What a router reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterInput {
    /// What the experts read: the residual behind attention, normed.
    FfnNorm,
    /// The residual before attention, as it comes from the layer before (SmallThinker), so that a layer's experts are known an attention
    /// earlier.
    Layer,
}

/// How layers are built, beside the sizes in [`super::ModelConfig`]. The default is Llama's layer, which is not written into a store's
/// header.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerForm {
    /// Where the norms stand, and whether attention and FFN follow each other.
    pub norms: Norms,
    /// What attention and FFN add to the residual is multiplied by this.
    pub residual_scale: f32,
    /// Queries and keys of each head are normed before they are rotated.
    pub qk_norm: bool,
    /// Each head has a learned score that takes part in its softmax and stands for no position.
    pub sinks: bool,
    /// Neurons of each layer, `[layers]`; empty where all layers have [`super::ModelConfig::ffn`].
    pub widths: Vec<usize>,
    /// The experts that each FFN consists of; `None` where it is one.
    pub experts: Option<Experts>,
    /// Rotated queries and keys are multiplied by this ([`super::config::RopeScaling::of_rotated`]).
    #[serde(skip_serializing_if = "is_one")]
    pub rotary_scale: f32,
    /// Which layers rotate queries and keys, `[layers]`; empty where all do. The others know no positions.
    pub rotated: Vec<bool>,
    /// Which layers see [`super::ModelConfig::window`] positions back and no more, `[layers]`; empty where all do.
    pub windowed: Vec<bool>,
}

impl Default for LayerForm {
    fn default() -> LayerForm {
        LayerForm {
            norms: Norms::Before,
            residual_scale: 1.0,
            qk_norm: false,
            sinks: false,
            widths: Vec::new(),
            experts: None,
            rotary_scale: 1.0,
            rotated: Vec::new(),
            windowed: Vec::new(),
        }
    }
}

impl LayerForm {
    /// Whether the layers are Llama's.
    pub fn is_default(&self) -> bool {
        *self == LayerForm::default()
    }
}
