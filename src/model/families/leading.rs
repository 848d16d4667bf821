//! Mixtures of DeepSeek's kind: the first layers have one FFN, the others experts in groups with shared ones beside them.

use super::Activated;
use super::json::{Fields, Routing};
use super::keys::Keys;
use crate::error::Result;
use crate::model::Description;
use crate::model::config::{Positions, RopeScaling, rope_frequencies};
use crate::model::described::check_layers;
use crate::model::layer::{CommonForm, Experts, Groups, OwnFfn, OwnForm, RouterInput, Scoring, SharedForm};
use serde_json::Value;

/// What a mixture has beside the experts that a router chooses.
pub(super) struct Beside {
    /// How many groups of experts there are, and how many a token may have experts of; fewer than two are none.
    pub groups: [usize; 2],
    /// The experts' weights are multiplied by this.
    pub scale: f32,
    /// Neurons of the shared expert; 0 where there is none.
    pub shared: usize,
    /// Layers with one FFN, the first ones.
    pub leading: usize,
    /// Its neurons.
    pub width: usize,
}

/// How a family's router makes weights where its files do not say it.
#[derive(Clone, Copy)]
pub(super) struct Router {
    scoring: Scoring,
    normalised: bool,
}

impl Router {
    /// Scores of this kind, and weights that are divided by their sum.
    pub const fn usually(scoring: Scoring) -> Router {
        Router { scoring, normalised: true }
    }

    /// Scores of this kind, which are the weights.
    pub const fn plainly(scoring: Scoring) -> Router {
        Router { scoring, normalised: false }
    }
}

/// What directories of this kind call a shared expert's gate, up and down.
pub(super) const SHARED: [&str; 4] =
    ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj", ""];

/// A GGUF's mixture, with these positions (`None` for RoPE over whole heads by the file's keys).
pub(super) fn gguf(k: &Keys, usual: Router, positions: Option<Positions>) -> Result<Description> {
    for key in ["interleave_moe_layer_step", "moe_layer_freq", "moe_every_n_layers"] {
        if let Some(other) = k.size(key)?.filter(|&step| step > 1) {
            return Err(k.bad(key, format!("is {other}; only mixtures in every layer behind the first are supported")));
        }
    }
    let scoring = match k.size("expert_gating_func")? {
        // The first files lack the key.
        None | Some(0) => usual.scoring,
        Some(1) => Scoring::Softmax,
        Some(2) => Scoring::Sigmoid,
        Some(other) => {
            return Err(k.bad("expert_gating_func", format!("is {other}; known are 1 (softmax) and 2 (sigmoid)")));
        }
    };
    let normalised = k.flag("expert_weights_norm")?.unwrap_or(usual.normalised);
    let config = k.routed(positions, Activated::SILU, Routing { scoring, normalised, reads: RouterInput::FfnNorm })?;
    let layers = k.layer_count()?;
    // Blocks that predict later tokens stand behind the others.
    let more = k.size("nextn_predict_layers")?.unwrap_or(0);
    let layers = check_layers(layers.saturating_sub(more)).map_err(|why| k.bad("nextn_predict_layers", why))?;
    let shared = k.size("expert_shared_count")?.unwrap_or(0);
    let shared = match k.size("expert_shared_feed_forward_length")? {
        Some(width) => width,
        None => shared.saturating_mul(config.ffn),
    };
    let beside = Beside {
        groups: [k.size("expert_group_count")?.unwrap_or(0), k.size("expert_group_used_count")?.unwrap_or(0)],
        scale: k.number("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
        shared,
        leading: k.size("leading_dense_block_count")?.unwrap_or(0),
        width: k.required("feed_forward_length")?,
    };
    Ok(beside.of(Description { layers, ..config }))
}

/// A directory's mixture.
pub(super) fn config_json(c: &Fields, family: &str, usual: Router) -> Result<Description> {
    c.refuse_unless_default("moe_layer_freq", &Value::from(1))?;
    let (scoring, normalised) = (usual.scoring, c.flag("norm_topk_prob")?.unwrap_or(usual.normalised));
    let keys = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];
    let config =
        c.mixture(family, Activated::SILU, keys, Routing { scoring, normalised, reads: RouterInput::FfnNorm })?;
    let beside = Beside {
        groups: [c.optional_size("n_group")?.unwrap_or(0), c.optional_size("topk_group")?.unwrap_or(0)],
        scale: c.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        shared: c.optional_size("n_shared_experts")?.unwrap_or(0).saturating_mul(config.ffn),
        leading: c.optional_size("first_k_dense_replace")?.unwrap_or(0),
        width: c.size("intermediate_size")?,
    };
    Ok(beside.of(config))
}

impl Beside {
    /// The mixture with all of it.
    pub fn of(self, config: Description) -> Description {
        let [count, used] = self.groups;
        let groups = (count > 1).then_some(Groups { count, used, best: 2 });
        let shared = (self.shared > 0).then_some(SharedForm { width: self.shared, weighted: false, normed: false });
        let with = |experts| Experts { groups, shared, scale: self.scale, ..experts };
        let layers: Vec<usize> = (0..self.leading.min(config.layers)).collect();
        let own = match layers.is_empty() {
            true => Vec::new(),
            false => vec![OwnForm { layers, ffn: Some(OwnFfn::Dense(self.width)), ..OwnForm::default() }],
        };
        Description { form: CommonForm { experts: config.form.experts.map(with), own, ..config.form }, ..config }
    }
}

/// Rotation of the first numbers of a head, in halves, as many as `rope.dimension_count` says; the others have frequency 0.
pub(super) fn partial_rotary(k: &Keys) -> Result<Positions> {
    let heads = k.required("attention.head_count")?.max(1);
    let head_dim = k.whole_head_dim(k.required("embedding_length")? / heads)?;
    let rotated = k.size("rope.dimension_count")?.unwrap_or(head_dim);
    let kind = "rope.scaling.type";
    if k.gguf.metadata.str(&format!("{}.{kind}", k.arch))?.is_some_and(|kind| kind != "none")
        || k.rope_factors.is_some()
    {
        return Err(k.bad(kind, format!("scaling is not supported for {}", k.arch)));
    }
    rotation(head_dim, rotated, k.rope_base()?).map_err(|why| k.bad("rope.dimension_count", why))
}

/// Rotation of the first `rotated` numbers of a head of `head_dim`; the others have frequency 0.
pub(super) fn rotation(head_dim: usize, rotated: usize, theta: f64) -> std::result::Result<Positions, String> {
    if rotated > head_dim || !rotated.is_multiple_of(2) || rotated == 0 {
        return Err(format!("is {rotated}; it must be even, above 0 and at most the head dimension {head_dim}"));
    }
    let mut frequencies = rope_frequencies(rotated.min(1 << 12), theta, &RopeScaling::None);
    frequencies.resize(head_dim.min(1 << 12) / 2, 0.0);
    Ok(Positions::Rope { frequencies })
}
