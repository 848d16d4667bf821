//! SmallThinker: a mixture of ReGLU experts whose router reads the layer's input. Some of its layers know no positions, the others have a
//! window.

use super::json::{Fields, Routing, in_layers};
use super::keys::Keys;
use super::names::{ExpertNames, GGUF, LLAMA, Names};
use super::{Activated, Family};
use crate::error::Result;
use crate::model::Description;
use crate::model::config::Activation;
use crate::model::layer::{CommonForm, RouterInput, Scoring};
use crate::model::role::Role;
use serde_json::Value;

pub(super) const FAMILY: Family = Family {
    name: "smallthinker",
    known_as: "smallthinker",
    config_json,
    gguf: Some(gguf),
    tensors: |_, _| NAMES,
    gguf_tensors: |_| GGUF,
};

/// Neither its config.json nor its GGUFs name the activation.
const REGLU: Activated = Activated { unsaid: Activation::Relu, gated: true, both: false };

const EXPERT: &str = "block_sparse_moe.experts.";
const NAMES: Names = Names {
    experts: ExpertNames { each: [[EXPERT, ".gate"], [EXPERT, ".up"], [EXPERT, ".down"]], ..LLAMA.experts },
    ..LLAMA.with(Role::Router, "block_sparse_moe.primary_router")
};

/// A softmax over the experts that were chosen, or sigmoids by their sum, whatever `norm_topk_prob` says: its own code does not read that.
fn routing(softmax: bool) -> Routing {
    let scoring = if softmax { Scoring::Softmax } else { Scoring::Sigmoid };
    Routing { scoring, normalised: true, reads: RouterInput::Layer }
}

fn config_json(c: &Fields) -> Result<Description> {
    c.refuse_unless_default("moe_enable_early_router", &Value::Bool(true))?;
    c.refuse_unless_default("moe_enable_secondary_experts", &Value::Bool(false))?;
    let keys = ["moe_num_primary_experts", "moe_num_active_primary_experts", "moe_ffn_hidden_size"];
    let rule = routing(c.flag("moe_primary_router_apply_softmax")?.unwrap_or(false));
    let given = c.given.or(c.named_activation("hidden_act")?).or(Some(Activation::Relu.into()));
    let config = Fields { given, ..*c }.mixture("smallthinker", REGLU, keys, rule)?;
    let of_layers = |key: &str| -> Result<Vec<bool>> {
        let Value::Array(layers) = &c.json[key] else { return Ok(vec![true; config.layers]) };
        let flags = layers.iter().map(|layer| layer.as_u64().filter(|&flag| flag <= 1).map(|flag| flag == 1));
        flags.collect::<Option<_>>().ok_or_else(|| c.bad(key, "is not a list of 0 and 1"))
    };
    if of_layers("moe_layer_layout")?.contains(&false) {
        return Err(c.bad("moe_layer_layout", "has layers without experts, which is not supported"));
    }
    let size = c.optional_size("sliding_window_size")?;
    let layout = if size.is_some() { of_layers("sliding_window_layout")? } else { Vec::new() };
    let (window, windowed) = in_layers(size, layout);
    let rotated = of_layers("rope_layout")?;
    let rotated = if rotated.contains(&false) { rotated } else { Vec::new() };
    Ok(Description { window, form: CommonForm { windowed, rotated, ..config.form }, ..config })
}

/// Its files do not say which layers are which: where there is a window, the first of every four layers has neither window nor positions.
fn gguf(k: &Keys) -> Result<Description> {
    let key = "expert_gating_func";
    let softmax = match k.size(key)? {
        None | Some(1) => true,
        Some(2) => false,
        Some(other) => return Err(k.bad(key, format!("is {other}; known are 1 (softmax) and 2 (sigmoid)"))),
    };
    let config = k.mixture(None, REGLU, routing(softmax))?;
    if config.window.is_none() {
        return Ok(config);
    }
    let others: Vec<bool> = (0..config.layers).map(|layer| layer % 4 != 0).collect();
    let (window, windowed) = in_layers(config.window, others.clone());
    Ok(Description { window, form: CommonForm { rotated: others, windowed, ..config.form }, ..config })
}
