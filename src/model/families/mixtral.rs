//! Mixtral, and TurboSparse-Mixtral, whose experts are dReLU: Mistral with a mixture of experts in the place of each FFN. Its GGUFs say that they are of the
//! architecture `llama`.

use super::json::Routing;
use super::names::{ExpertNames, LLAMA, Names};
use super::{Activated, Family, llama};
use crate::model::role::Role;

pub(super) const FAMILY: Family = Family {
    name: "mixtral",
    known_as: "mixtral",
    config_json: |c| c.mixture("mixtral", Activated::SILU, KEYS, Routing::SOFTMAX),
    gguf: None,
    tensors: |_, tensors| match tensors.iter().any(|t| t.info.name.ends_with("layers.0.mlp.gate.weight")) {
        // Written by transformers 5 as it has them in memory.
        true => LLAMA,
        false => PUBLISHED,
    },
    ..llama::FAMILY
};

pub(super) const TURBOSPARSE: Family = Family {
    name: "turbosparsemixtral",
    known_as: "turbosparsemixtral (TurboSparse-Mixtral)",
    config_json: |c| c.mixture("turbosparsemixtral", Activated::DRELU, KEYS, Routing::SOFTMAX),
    ..FAMILY
};

const KEYS: [&str; 3] = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
const EXPERT: &str = "block_sparse_moe.experts.";
const PUBLISHED: Names = Names {
    experts: ExpertNames { each: [[EXPERT, ".w1"], [EXPERT, ".w3"], [EXPERT, ".w2"]], ..LLAMA.experts },
    ..LLAMA.with(Role::Router, "block_sparse_moe.gate")
};
