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

    /// Whether attention and FFN read a norm of the residual; otherwise they read the residual itself.
    pub fn before(self) -> bool {
        self != Norms::After
    }

    /// Whether the outputs of attention and FFN are normed before they are added to the residual.
    pub fn after(self) -> bool {
        matches!(self, Norms::After | Norms::Around)
    }
}

/// A mixture of experts: several FFNs of [`super::Description::ffn`] neurons, of which a router chooses a few for each token. The FFN's
/// output is the sum of theirs, each times its weight. An FFN that is stored in clusters is one, too, without a router ([`Scoring::All`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// How many experts a layer has.
    pub count: usize,
    /// How many of them are computed for a token: those with the largest scores.
    pub used: usize,
    /// What makes a score of a product with a row of the router.
    pub scoring: Scoring,
    /// The scores of a token's experts are divided by their sum to be weights.
    pub normalised: bool,
    /// The groups of which a token uses a few; `None` where it may have any experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Groups>,
    /// The weights are multiplied by this at last.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub scale: f32,
    /// Each expert's weight is multiplied by a number of its own, too.
    #[serde(default, skip_serializing_if = "is_false")]
    pub scaled: bool,
    /// A number for each expert is added to its score for choosing only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub selection_bias: bool,
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

/// Experts that a layer may have: more than any published model.
const MAX_EXPERTS: usize = 1 << 12;
/// Groups that they may make: a bit each in a word, and more than any published model has.
const MAX_GROUPS: usize = 64;

fn is_false(flag: &bool) -> bool {
    !flag
}

pub(super) fn one() -> f32 {
    1.0
}

fn is_none(numbers: &usize) -> bool {
    *numbers == 0
}

pub(super) fn is_zero(number: &f32) -> bool {
    *number == 0.0
}

pub(super) fn is_one(scale: &f32) -> bool {
    *scale == 1.0
}

/// Groups of neighbouring experts, as in DeepSeek V3: a token may have experts of the best groups only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Groups {
    /// How many groups a layer's experts make, all of one size.
    pub count: usize,
    /// How many of them a token may have experts of.
    pub used: usize,
    /// A group's score is the sum of so many of its best experts' scores: 2, or 1 as in DeepSeek V2.
    #[serde(default = "two", skip_serializing_if = "is_two")]
    pub best: usize,
}

fn two() -> usize {
    2
}

fn is_two(best: &usize) -> bool {
    *best == 2
}

/// The shared expert of a mixture: an FFN like the others, but of a width of its own and for every token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedForm {
    /// Its neurons.
    pub width: usize,
    /// A router row of its own gives its output a weight, sigmoid(row . normed input); otherwise the weight is 1.
    pub weighted: bool,
    /// It reads the residual by a norm of its own, and what it makes and what the others make are normed before they are added (Gemma 4).
    #[serde(default, skip_serializing_if = "is_false")]
    pub normed: bool,
}

/// How the products of a router, one for each expert, become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Each by itself: 1 / (1 + exp(-product)).
    Sigmoid,
    /// The products are the scores, and the weights are the softmax of those that were chosen.
    SoftmaxOfChosen,
    /// There is no router: all experts are computed for every token, with weight 1. They are the clusters of neighbouring neurons that one
    /// FFN was cut into.
    All,
}

impl Experts {
    /// The clusters of an FFN, all of which are computed for every token.
    pub const fn all(count: usize) -> Experts {
        Experts {
            count,
            used: count,
            scoring: Scoring::All,
            normalised: false,
            groups: None,
            scale: 1.0,
            scaled: false,
            selection_bias: false,
            reads: RouterInput::FfnNorm,
            shared: None,
            biases: false,
            by_neuron: false,
        }
    }

    /// Checks the counts, and what must hold between them.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Experts { count, used, scale, .. } = *self;
        if !(1..=MAX_EXPERTS).contains(&count) {
            return Err(format!("{count} experts; there must be 1 to {MAX_EXPERTS}"));
        }
        if used == 0 || used > count {
            return Err(format!("{used} experts for a token, of {count} that there are"));
        }
        if !self.routed() && *self != Experts::all(count) {
            return Err("clusters are all computed, so nothing may say how a router chooses them".into());
        }
        if !(1e-3..=1e3).contains(&scale) {
            return Err(format!("the scale of the experts' weights is {scale}; it must be 0.001 to 1000"));
        }
        let Some(groups) = self.groups else { return Ok(()) };
        let each = count / groups.count.max(1);
        if !(1..=MAX_GROUPS).contains(&groups.count) || groups.count * each != count || each < 2 {
            let groups = groups.count;
            return Err(format!(
                "{groups} groups of {count} experts; there must be 1 to {MAX_GROUPS} of 2 or more each"
            ));
        }
        if groups.used == 0 || groups.used > groups.count {
            return Err(format!("{} groups for a token, of {} that there are", groups.used, groups.count));
        }
        if !(1..=2).contains(&groups.best) {
            return Err(format!("a group's score is that of its best {} experts; it must be 1 or 2", groups.best));
        }
        if used > groups.used * each {
            return Err(format!("{used} experts for a token, of {} in its groups", groups.used * each));
        }
        Ok(())
    }

    /// Whether a router chooses among them; otherwise they are the clusters of one FFN.
    pub fn routed(&self) -> bool {
        self.scoring != Scoring::All
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
    /// The residual behind attention by a norm of the router's own (Gemma 4).
    Own,
}

/// How layers are built, beside the sizes in [`super::Description`]. The default is Llama's layer, which is not written into a store's
/// header.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CommonForm {
    /// Where the norms stand, and whether attention and FFN follow each other.
    pub norms: Norms,
    /// What attention and FFN add to the residual is multiplied by this.
    pub residual_scale: f32,
    /// Queries and keys of each head are normed before they are rotated.
    pub qk_norm: bool,
    /// Queries of all heads are normed together, and so are keys, as in OLMo 2.
    #[serde(skip_serializing_if = "is_false")]
    pub qk_norm_joined: bool,
    /// Each head has a learned score that takes part in its softmax and stands for no position.
    pub sinks: bool,
    /// What the heads of attention make is multiplied by the sigmoid of a gate, a projection of the layer's input, before the output matrix.
    #[serde(skip_serializing_if = "is_false")]
    pub gated: bool,
    /// Neurons of each layer, `[layers]`; empty where all layers have [`super::Description::ffn`].
    pub widths: Vec<usize>,
    /// The experts that each FFN consists of; `None` where it is one.
    pub experts: Option<Experts>,
    /// Rotated queries and keys are multiplied by this ([`super::config::RopeScaling::of_rotated`]).
    #[serde(skip_serializing_if = "is_one")]
    pub rotary_scale: f32,
    /// Which layers rotate queries and keys, `[layers]`; empty where all do. The others know no positions.
    pub rotated: Vec<bool>,
    /// Which layers see [`super::Description::window`] positions back and no more, `[layers]`; empty where all do.
    pub windowed: Vec<bool>,
    /// Queries are multiplied by this beside 1 / sqrt(head_dim). It is part of the queries' norm once a model is open.
    #[serde(skip_serializing_if = "is_one")]
    pub query_scale: f32,
    /// Queries are not divided by the root of a head's size: they are multiplied by it, as part of their norm, before attention divides.
    #[serde(skip_serializing_if = "is_false")]
    pub unscaled: bool,
    /// Values of each head are normed, without weights.
    #[serde(skip_serializing_if = "is_false")]
    pub value_norm: bool,
    /// The residual behind a layer is multiplied by a number of the layer's own.
    #[serde(skip_serializing_if = "is_false")]
    pub output_scales: bool,
    /// Numbers that each layer gets of a token beside the residual ([`super::per_layer`]); 0 where there are none.
    #[serde(skip_serializing_if = "is_none")]
    pub per_layer: usize,
    /// Layers that differ from the others, in groups.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub own: Vec<OwnForm>,
}

/// What a group of layers has otherwise than the model's others; `None` where it is the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OwnForm {
    /// Numbers of the layers, ascending.
    pub layers: Vec<usize>,
    /// Query heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Heads of keys and values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Numbers of a head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Radians per position of each pair, `[head_dim / 2]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequencies: Option<Vec<f32>>,
    /// Values are the products of the keys' matrix, before keys are normed and rotated.
    #[serde(skip_serializing_if = "is_false")]
    pub values_from_keys: bool,
    /// Keys and values are those of this earlier layer, whose heads and window are the same: the layer makes queries alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys_of: Option<usize>,
    /// A short convolution over so many positions stands in the place of attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub convolution: Option<usize>,
    /// Linear attention stands in the place of softmax attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear: Option<LinearAttention>,
    /// Keys and values are made of a latent that all heads share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latent: Option<Latent>,
    /// What stands in the place of the experts, in a mixture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ffn: Option<OwnFfn>,
}

/// Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): a token's keys and values of all heads are made of one latent c,
/// `[rank]`, and its rotated part k, `[rope]`, which are all that is kept of it. With K and V of a head, `[plain, rank]` and `[values, rank]`, and
/// its query `[plain + rope]` of the parts q and r, the score is K^T q . c + r . k and the output V times the weighted sum of c. Neighbouring
/// numbers are the pairs that are rotated. The layer has no norms of heads, gate or sinks, whatever the model's others have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latent {
    /// Numbers of the latent that queries are made of; 0 where they are made of the layer's input.
    pub queries: usize,
    /// Numbers of c.
    pub rank: usize,
    /// Numbers of a head's query that are not rotated.
    pub plain: usize,
    /// Those that are rotated; even.
    pub rope: usize,
    /// Numbers of a head's value.
    pub values: usize,
    /// Scores are multiplied by this beside 1 / sqrt(plain + rope).
    pub scale: f32,
}

impl Latent {
    /// Numbers of a query, or of a size of the latents: more than any published model's.
    pub const MAX: usize = 1 << 12;

    /// Numbers of a head's query.
    pub const fn query(&self) -> usize {
        self.plain + self.rope
    }

    /// Numbers that are kept of a position.
    pub const fn kept(&self) -> usize {
        self.rank + self.rope
    }

    /// Weights of the matrices between latents and heads.
    pub const fn weights(&self, heads: usize) -> usize {
        heads * (self.queries * self.query() + (self.plain + self.values) * self.rank)
    }

    /// Checks the sizes, and what must hold between them.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Latent { queries, rank, plain, rope, values, scale } = *self;
        let sizes = [
            ("latent", rank),
            ("part of a query that is not rotated", plain),
            ("part of a query that is rotated", rope),
            ("value", values),
            ("latent with the rotated part", self.kept()),
            ("query", self.query()),
            ("latent of queries", queries.max(1)),
        ];
        if let Some((what, value)) = sizes.into_iter().find(|(_, value)| !(1..=Self::MAX).contains(value)) {
            return Err(format!("the {what} of latent attention has {value} numbers; it must be 1 to {}", Self::MAX));
        }
        if !rope.is_multiple_of(2) || !self.kept().is_multiple_of(2) {
            return Err(format!("latent attention keeps {rank} and {rope} numbers of a position; both must be even"));
        }
        if !(0.01..=100.0).contains(&scale) {
            return Err(format!("the scale of latent attention is {scale}; it must be 0.01 to 100"));
        }
        Ok(())
    }
}

/// Linear attention: the state of a head of values is a matrix S `[head_dim, key_dim]`, which each token's query q, key k and value v replace by S' as
/// [`StateRule`] says; the head's output is S' q. q, k and v are projections of the layer's input behind a short convolution and SiLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttention {
    /// How the state goes on, and what becomes of the heads' outputs.
    pub rule: StateRule,
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values, each with a state; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Numbers of a head of queries or keys; a multiple of [`LinearAttention::KEYS`].
    pub key_dim: usize,
    /// Numbers of a head of values; a multiple of [`LinearAttention::LANES`].
    pub head_dim: usize,
    /// Positions that the convolution reads, the token's own among them.
    pub taps: usize,
    /// Head h of values belongs to head h modulo `key_heads` of keys, as in GGUFs of Qwen3.5; otherwise neighbouring heads of values share one.
    #[serde(default, skip_serializing_if = "is_false")]
    pub tiled: bool,
}

/// What a token does to the state S of a head of linear attention. e^g is its decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateRule {
    /// A gated delta net (Yang et al. 2024, "Gated Delta Networks", eq. 10): S' = e^g S + beta (v - e^g S k) k^T. q and k are divided by their
    /// length, q by the root of its numbers as well. Outputs are normed by head, then multiplied by SiLU of the gate z.
    Delta,
    /// Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", section 2 and 7): S' = e^g S + dt v k^T, where g = A dt, q is C, k is B and v is x. The
    /// convolution has biases. D v is added to the output of a head; outputs are multiplied by SiLU of the gate z, then normed over all heads
    /// that share a head of keys.
    Mamba2,
}

impl LinearAttention {
    /// Numbers of values that a kernel computes side by side, whatever the instruction set.
    pub const LANES: usize = 16;
    /// Numbers of a key that a kernel reads at a time at most.
    pub const KEYS: usize = 4;

    /// Numbers that pass through the convolution: queries, keys and values.
    pub const fn channels(&self) -> usize {
        self.keys() * 2 + self.values()
    }

    /// Numbers of all heads of keys.
    pub const fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Numbers of all heads of values.
    pub const fn values(&self) -> usize {
        self.value_heads * self.head_dim
    }

    /// Rows of beta's matrix.
    pub const fn betas(&self) -> usize {
        if self.is_mamba() { 0 } else { self.value_heads }
    }

    /// Whether it goes on by [`StateRule::Mamba2`].
    pub const fn is_mamba(&self) -> bool {
        matches!(self.rule, StateRule::Mamba2)
    }

    /// Numbers of the outputs that are normed together.
    pub const fn normed(&self) -> usize {
        if self.is_mamba() { self.values() / self.key_heads } else { self.head_dim }
    }

    /// Weights of their norm.
    pub const fn norm_weights(&self) -> usize {
        if self.is_mamba() { self.values() } else { self.head_dim }
    }

    /// Rows of its input matrices: q, k, v, z, beta and alpha.
    pub const fn rows(&self) -> usize {
        self.channels() + self.values() + self.betas() + self.value_heads
    }

    /// The head of keys that a head of values belongs to.
    pub const fn key_head(&self, value_head: usize) -> usize {
        if self.tiled { value_head % self.key_heads } else { value_head / (self.value_heads / self.key_heads) }
    }

    /// Numbers that a layer keeps of a sequence: what the convolution reads of the last positions, `[taps - 1, channels]`, then the state of each
    /// head of values in tiles of [`LinearAttention::LANES`] values, `[value_heads, head_dim / LANES, key_dim, LANES]`.
    pub const fn kept(&self) -> usize {
        self.columns() + self.value_heads * self.key_dim * self.head_dim
    }

    /// Those of them that the convolution reads.
    pub const fn columns(&self) -> usize {
        (self.taps - 1) * self.channels()
    }

    /// Checks the sizes, and what must hold between them.
    pub(crate) fn check(&self) -> Result<(), String> {
        let LinearAttention { key_heads, value_heads, key_dim, head_dim, taps, .. } = *self;
        let sizes = [
            ("head count of keys", key_heads),
            ("head count of values", value_heads),
            ("head size of keys", key_dim),
            ("head size", head_dim),
        ];
        if let Some((what, value)) = sizes.into_iter().find(|(_, value)| !(1..=1 << 10).contains(value)) {
            return Err(format!("the {what} of linear attention is {value}; it must be 1 to 1024"));
        }
        if !value_heads.is_multiple_of(key_heads) {
            return Err(format!("{value_heads} value heads of linear attention cannot share {key_heads} key heads"));
        }
        for (what, value, unit) in [("of keys ", key_dim, Self::KEYS), ("", head_dim, Self::LANES)] {
            if !value.is_multiple_of(unit) {
                return Err(format!(
                    "the head size {what}of linear attention is {value}; it must be a multiple of {unit}"
                ));
            }
        }
        check_taps(taps)
    }
}

/// Positions that a short convolution may read: more than any published model's.
const MAX_TAPS: usize = 1 << 6;

/// Checks the number of positions that a convolution reads.
pub(super) fn check_taps(taps: usize) -> Result<(), String> {
    match taps {
        2..=MAX_TAPS => Ok(()),
        _ => Err(format!("a convolution reads {taps} positions; it must be 2 to {MAX_TAPS}")),
    }
}

/// The FFN of layers without a router in a model whose others have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwnFfn {
    /// One FFN of so many neurons, which every token passes through.
    Dense(usize),
    /// None at all.
    Absent,
}

impl OwnForm {
    /// Whether layer number `layer` is one of the group.
    pub fn has(&self, layer: usize) -> bool {
        self.layers.binary_search(&layer).is_ok()
    }
}

impl Default for CommonForm {
    fn default() -> CommonForm {
        CommonForm {
            norms: Norms::Before,
            residual_scale: 1.0,
            qk_norm: false,
            qk_norm_joined: false,
            sinks: false,
            gated: false,
            widths: Vec::new(),
            experts: None,
            rotary_scale: 1.0,
            rotated: Vec::new(),
            windowed: Vec::new(),
            query_scale: 1.0,
            unscaled: false,
            value_norm: false,
            output_scales: false,
            per_layer: 0,
            own: Vec::new(),
        }
    }
}

impl CommonForm {
    /// Whether the layers are Llama's.
    pub fn is_default(&self) -> bool {
        *self == CommonForm::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTED: Experts = Experts { used: 2, scoring: Scoring::Softmax, normalised: true, ..Experts::all(8) };

    #[test]
    fn a_header_has_groups_scale_and_selection_bias_only_where_they_say_something() {
        let plain = r#"{"count":8,"used":2,"scoring":"softmax","normalised":true,"reads":"ffn_norm"}"#;
        assert_eq!(serde_json::to_string(&ROUTED).unwrap(), plain);
        let groups = Some(Groups { count: 4, used: 2, best: 1 });
        let other = Experts { scoring: Scoring::SoftmaxOfChosen, groups, scale: 2.5, selection_bias: true, ..ROUTED };
        for experts in [ROUTED, other] {
            let text = serde_json::to_string(&experts).unwrap();
            assert_eq!(serde_json::from_str::<Experts>(&text).unwrap(), experts, "{text}");
        }
    }

    #[test]
    fn counts_that_do_not_fit_each_other_are_refused_by_name() {
        let groups = |count, used| Experts { groups: Some(Groups { count, used, best: 2 }), ..ROUTED };
        assert_eq!(groups(4, 1).check(), Ok(()));
        for (experts, why) in [
            (Experts { used: 9, ..ROUTED }, "9 experts for a token, of 8 that there are"),
            (Experts { used: 2, ..Experts::all(8) }, "clusters are all computed, so nothing may say how"),
            (Experts { scale: 0.0, ..ROUTED }, "the scale of the experts' weights is 0; it must be 0.001 to 1000"),
            (Experts { scale: f32::NAN, ..ROUTED }, "the scale of the experts' weights is NaN"),
            (groups(0, 0), "0 groups of 8 experts; there must be 1 to 64 of 2 or more each"),
            (groups(3, 1), "3 groups of 8 experts"),
            (groups(8, 1), "8 groups of 8 experts"),
            (Experts { count: 256, ..groups(128, 1) }, "128 groups of 256 experts"),
            (groups(4, 0), "0 groups for a token, of 4 that there are"),
            (groups(4, 5), "5 groups for a token, of 4 that there are"),
            (Experts { used: 3, ..groups(4, 1) }, "3 experts for a token, of 2 in its groups"),
            (
                Experts { groups: Some(Groups { count: 4, used: 1, best: 3 }), ..ROUTED },
                "a group's score is that of its best 3 experts; it must be 1 or 2",
            ),
        ] {
            let said = experts.check().unwrap_err();
            assert!(said.contains(why), "{why} is not in: {said}");
        }
    }
}
